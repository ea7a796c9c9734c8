"""Docstrings made from rules: the mathematics, where it is from, and every keyword with its range."""

from __future__ import annotations

import textwrap
from collections.abc import Iterator
from itertools import pairwise
from typing import Any

from rulec.language.rule import Hyper, Rule
from rulec.language.text import expression_text
from rulec.torch.entries import Entry
from rulec.torch.interface import HINTS, Interface

_MEANINGS = {
    "params": "parameters, named parameters or parameter groups to optimize",
    "maximize": "whether to go up the gradient instead of down",
    "state_dtype": "storage dtype of states, for all or by name; by default each parameter's own",
    "backend": "name of the backend to run on; by default the device's own",
    "reduce_over": "process group over which values of groups and of the model are taken, where every process has its "
    "own part of the parameters",
    "seed": "of its random numbers, from 0 to 2**32 - 1, the same in all groups",
    "differentiable": "may only be False: autograd does not record what a fused kernel computes",
}  # fmt: skip


def class_doc(interface: Interface) -> str:
    """The docstring of a class."""
    first = interface.entries[0]
    parts = [first.rule.summary or f"The rule {first.rule.name}."]
    for entry in interface.entries:
        parts.append(_mathematics(entry, alone=len(interface.entries) == 1))
    parts += [_decay_text(interface), _routed_text(interface), _shared_text(interface), _evaluation_text(interface)]
    parts.append("Args:\n" + "\n".join(_argument(interface, p) for p in interface.signature.parameters.values()))
    return "\n\n".join(part for part in parts if part) + "\n"


def _mathematics(entry: Entry, alone: bool) -> str:
    rule = entry.rule.standalone()
    heading = "Each step computes" if alone else f"{rule.name}{_condition(entry)} computes"
    return f"{heading}::\n\n{textwrap.indent(rule.step_text().strip(), '    ')}{_paper(rule)}"


def _condition(entry: Entry) -> str:
    words = [f"{k} is not 0" if v == "nonzero" else f"{k}={v!r}" for k, v in entry.when.items()]
    return f" ({', '.join(words)})" if words else ""


def _paper(rule: Rule) -> str:
    paper = rule.paper
    if not paper:
        return ""
    about = ", ".join(str(paper[k]) for k in ("authors", "year") if k in paper)
    link = f" {paper['url']}" if "url" in paper else ""
    return f"\n\nFrom {paper.get('title', rule.name)} ({about}).{link}"


def _decay_text(interface: Interface) -> str:
    decays = {flag: transform for f in interface.entries for flag, transform in f.decays.items()}
    words = {"l2": "adds weight_decay*p to the gradient g", "decay": "adds weight_decay*p to the direction"}
    lines = [
        f"weight_decay {words[transform]}{'' if flag == 'default' else f' where {flag}'}."
        for flag, transform in decays.items()
    ]
    return "\n".join(lines)


def _routed_text(interface: Interface) -> str:
    """The rules for tensors outside the first rule's condition, and the part of tags in it."""
    parts = []
    for main, rest in pairwise(interface.rules if len(interface.entries) == 1 else []):
        condition = "" if main.applies_to is None else expression_text(main.applies_to)
        step = textwrap.indent(rest.step_text().strip(), "    ")
        parts.append(f"It is for tensors with {condition}; for others {rest.name} computes::\n\n{step}")
    if parts and "tags" in interface.fixed:
        parts.append(
            "A group's `tags` are the words of its parameters, as `rulec.torch.tagged_groups` finds them in a model."
            + (" Without tags a parameter that the rule is not for is refused." if interface.refuses else "")
        )
    return "\n\n".join(parts)


def _shared_text(interface: Interface) -> str:
    words = {"group": "of each group", "model": "of the whole model"}
    lines = [
        f"`param_groups[i][{name!r}]` is its {name}, one number {words[k]}." for name, k in interface.shared.items()
    ]
    return "\n".join(lines)


def _evaluation_text(interface: Interface) -> str:
    points = [rule.evaluate for rule in interface.rules if rule.evaluate is not None]
    if not points:
        return ""
    return (
        f"The model is to be evaluated at `{expression_text(points[0])}`: `eval()` moves the parameters there, and "
        f"`train()` back."
    )


def _argument(interface: Interface, parameter: Any) -> str:
    name = parameter.name
    default = "" if parameter.default is parameter.empty else f", {parameter.default!r} by default"
    meaning = _MEANINGS.get(name) or "; ".join(_ranges(interface, name)) or _plain_meaning(interface, name)
    return f"    {name}: {meaning}{default}"


def _ranges(interface: Interface, keyword: str) -> Iterator[str]:
    """The range of each hyper-parameter that a keyword gives, once each."""
    seen = set()
    for entry in interface.entries:
        for decay in {"", *entry.decays.values()}:
            for name, hyper in entry.settings(decay).items():
                place, position = entry.place(name)
                if place == keyword and name not in seen:
                    seen.add(name)
                    yield _range(name, hyper, position is None and name == keyword)


def _range(name: str, hyper: Hyper, alone: bool) -> str:
    words = hyper.range_text() or "any number"
    return words if alone else f"{name} {words}"


def _plain_meaning(interface: Interface, keyword: str) -> str:
    if keyword in HINTS:
        return "accepted and without effect: every step is fused"
    if any(keyword in entry.when for entry in interface.entries):
        return "chooses the rule, as above"
    if any(keyword in entry.decays for entry in interface.entries):
        return "chooses what weight_decay means"
    return "as in torch.optim; only the default is supported"
