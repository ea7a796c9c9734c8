"""The classes of `rulec.torch`, such as `AdamW`: made at first use, with interfaces and docstrings from their rules.

A rule's interface is torch's where torch has the rule. Otherwise it is made from the rule itself.
"""

from __future__ import annotations

import functools
import inspect
import textwrap
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch

from rulec.language.expr.text import expression_text
from rulec.language.hyper import Hyper
from rulec.language.library.load import load, parse, titles
from rulec.language.rule import Rule
from rulec.torch.groups.entries import Entry
from rulec.torch.groups.interface import HINTS, Interface
from rulec.torch.groups.keywords import rule_interface, torch_classes, torch_interface
from rulec.torch.optimizer import EvaluatedOptimizer, RuleOptimizer


def class_names() -> list[str]:
    """The names of all classes: torch's own for its rules, and one for every rule of the library."""
    return sorted({*titles(), *torch_classes()})


@functools.cache
def class_named(name: str) -> type[RuleOptimizer]:
    """The class of that name; KeyError where there is none."""
    torch_has_it = name in torch_classes() and hasattr(torch.optim, name)
    interface = torch_interface(name) if torch_has_it else rule_interface(load(titles()[name]))
    return _make(interface)


def optimizer(rule: Rule | str | Path) -> type[RuleOptimizer]:
    """The optimizer class of a rule, a library name (`"lion"`) or the path of a rule file.

    Its keywords are `lr` and the rule's other hyper-parameters; `beta1`, `beta2`, ... are one tuple, `betas`. Rules
    that are equal have one class. `optimizer("adamw")` is the class of torch's name, with torch's keywords.
    """
    if isinstance(rule, Rule):
        text = rule.to_yaml()
        _rules.setdefault(text, rule)
        return _of_text(text)
    loaded = load(rule)
    if loaded.name in class_names() and loaded.path == load(titles().get(loaded.name, rule)).path:
        return class_named(loaded.name)
    return optimizer(loaded)


#: The rules that classes were asked for, by their text: lines of these know the files that they are from.
_rules: dict[str, Rule] = {}


@functools.cache
def _of_text(text: str) -> type[RuleOptimizer]:
    return _make(rule_interface(_rules.get(text) or parse(text), source=text))


def _make(interface: Interface) -> type[RuleOptimizer]:
    def __init__(self: RuleOptimizer, params: Any, *args: Any, **keywords: Any) -> None:
        RuleOptimizer.__init__(self, params, *args, **keywords)

    receiver = inspect.Parameter("self", inspect.Parameter.POSITIONAL_OR_KEYWORD)
    parameters = [receiver, *interface.signature.parameters.values()]
    __init__.__signature__ = inspect.Signature(parameters, return_annotation=None)  # type: ignore[attr-defined]
    __init__.__annotations__ = {p.name: p.annotation for p in parameters[1:]} | {"return": None}
    body: dict[str, Any] = {"__init__": __init__, "__module__": "rulec.torch", "interface": interface}
    if interface.source:
        body["__reduce_ex__"] = _reduce
    base = EvaluatedOptimizer if interface.evaluates else RuleOptimizer
    kind = type(interface.name, (base,), body)
    kind.__doc__ = class_doc(interface)
    return kind


def _reduce(self: RuleOptimizer, protocol: Any) -> Any:
    """Pickles an optimizer whose class cannot be imported, by the text of its rule."""
    return _empty, (self.interface.source,), self.__getstate__()


def _empty(text: str) -> RuleOptimizer:
    kind = _of_text(text)
    return kind.__new__(kind)


_MEANINGS = {
    "params": "parameters, named parameters or parameter groups to optimize",
    "maximize": "whether to go up the gradient instead of down",
    "state_dtype": "storage of states, for all or by name: a dtype, a format or bfloat16_sr; by default the dtype "
    "of each parameter",
    "weights": "kind of parameters of 16 bits in memory: split, split24, master, kahan or stochastic; by default plain",
    "backend": "name of the backend to run on; by default the device's own",
    "reduce_over": "process group over which values of groups and of the model are taken, where every process has its "
    "own part of the parameters, or its own stage of a pipeline",
    "watch": "statistics to measure in the pass that steps: 'norms', a name that the rule declares, names, or "
    "expressions by name such as {'ratio': 'norm(update)/norm(p)'}; `statistics()` has them",
    "watch_every": "steps from one that measures the statistics to the next",
    "offload": "what lies on the host: 'step' for states and the step, 'states' for states alone, which stream through "
    "the device; by default nothing",
    "offload_buffer": "bytes of a transfer buffer of an offload",
    "offload_pinned": "whether transfer buffers are pinned host memory, from which copies are fast",
    "lr_at_start": "learning rate at the start, which second learning rates and defaults follow: the group's first lr, "
    "or 0 for second rates that stay as they are",
    "seed": "of its random numbers, if any, from 0 to 2**32 - 1, the same in all groups",
    "auto": "whether parameters without tags get some one by one: by their names, or else by all shapes",
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
    words = {
        "l2": "adds weight_decay*p to the gradient g",
        "decay": "adds weight_decay*p to the direction",
        "fixed_decay": "takes weight_decay*p from p, whatever lr is,",
        "corrected_decay": "takes lr**2/lr_at_start*weight_decay*p from p",
    }
    first = sorted(decays.items(), key=lambda item: item[0] != "default")
    lines = [f"weight_decay {words[transform]}{_where(flag)}." for flag, transform in first]
    return "\n".join(lines)


def _where(flag: str) -> str:
    """The words for a flag that is on, or for `not FLAG`, one that is off."""
    name = flag.removeprefix("not ")
    return "" if flag == "default" else f" where {name} is {name == flag}"


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
        decay = load("decay").hyper if entry.decays else {}
        for name, hyper in {**entry.settings(""), **decay}.items():
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
    for entry in interface.entries:
        if keyword in entry.transforms:
            return f"applies {entry.transforms[keyword]} of the library"
    if any(keyword in entry.flags for entry in interface.entries):
        return "chooses what weight_decay means"
    return "as in torch.optim; only the default is supported"
