"""The classes of `rulec.torch`, such as `AdamW`: made at first use, with interfaces and docstrings from their rules.

A rule's interface is torch's where torch has the rule. Otherwise it is made from the rule itself.
"""

from __future__ import annotations

import functools
import inspect
import re
import textwrap
from collections.abc import Iterator, Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer
from torch.optim.optimizer import ParamsT

from rulec.errors import RuleError
from rulec.language.expr.node import Node
from rulec.language.expr.text import expression_text
from rulec.language.hyper import Hyper
from rulec.language.library.load import interop_entries, interop_index, load, parse, titles
from rulec.language.rule import Rule
from rulec.language.sizes import lists_of
from rulec.torch.distributed.cross_process import reaches_across
from rulec.torch.groups.entries import Entry, Place, list_places, reads_tags, shared_states
from rulec.torch.groups.interface import HINTS, OWN, TAKEN, Interface, StateDtype
from rulec.torch.optimizer import EvaluatedOptimizer, RuleOptimizer
from rulec.torch.tensors.fake import without_compiler


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
    "lr_at_start": "learning rate at the start, which second learning rates and defaults follow: the group's first lr, "
    "or 0 for second rates that stay as they are",
    "seed": "of its random numbers, if any, from 0 to 2**32 - 1, the same in all groups",
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


def torch_classes() -> Mapping[str, Sequence[str]]:
    """Class of torch.optim -> the files of the rules that it may mean."""
    return interop_index("torch", "class")


def torch_interface(kind: str) -> Interface:
    """The interface of a class of torch.optim, as the torch installed has it."""
    theirs = getattr(torch.optim, kind)
    entries = []
    for file in torch_classes()[kind]:
        rule = load(file)
        entries += [_entry(kind, rule, fields) for fields in interop_entries(rule, "torch") if fields["class"] == kind]
    entries.sort(key=lambda entry: entry.rule.name != kind)
    parameters = [*list(inspect.signature(theirs).parameters.values())]
    known = {p.name for p in parameters}
    routed = [p for entry in entries for p in _routed_parameters(entry) if p.name not in known]
    asking = [] if "capturable" in known else [_flag("capturable")]
    parameters = sorted([*parameters, *routed, *asking, *_own_parameters(entries)], key=lambda p: p.kind)
    signature = inspect.Signature(parameters, return_annotation=None)
    example = _example(theirs)
    fixed = {k: v for k, v in example.defaults.items() if k not in signature.parameters} | _fixed(entries)
    full = bool(example.state)
    return Interface(kind, signature, entries, fixed, full, refuses=bool(routed), asks_once=bool(asking))


def _example(theirs: Any) -> Optimizer:
    """An optimizer of torch's, over one matrix of one number, which every rule of torch's takes."""
    body = {"add_param_group": without_compiler(Optimizer.add_param_group)}
    example: Optimizer = type(theirs.__name__, (theirs,), body)([torch.zeros(1, 1, device="cpu")])
    return example


def rule_interface(rule: Rule, source: str = "") -> Interface:
    """The interface of one rule by itself: its own hyper-parameters, betas in one tuple, and no flags."""
    settings = rule.settings
    fields = next(iter(interop_entries(rule, "torch")), None)
    args = _betas(settings) if fields is None else fields.get("args", {})
    states = {} if fields is None else fields.get("state", {})
    rows = fields is not None and bool(fields.get("rows"))
    places = _places(rule, settings, args) | list_places(rule)
    entry = Entry(rule.name, rule, places=places, states=states, takes_rows=rows)
    _check_free(entry, settings)
    parameters = [inspect.Parameter("params", inspect.Parameter.POSITIONAL_OR_KEYWORD, annotation=ParamsT)]
    parameters += _keyword_parameters(entry, settings, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    parameters += [_flag("maximize"), _flag("capturable")]
    parameters += _own_parameters([entry])
    signature = inspect.Signature(parameters)
    return Interface(rule.name, signature, [entry], _fixed([entry]), source=source, asks_once=True)


def _check_free(entry: Entry, settings: Mapping[str, Hyper]) -> None:
    """RuleError where a keyword or state of the rule has a name that means something else in torch."""
    rule, meaning = entry.rule, "which torch's optimizers have for something else"
    for name in settings:
        if entry.place(name)[0] in TAKEN:
            raise RuleError(
                f"{rule.name} has a hyper-parameter {name!r}, {meaning}: call it otherwise, as {name}_, in the rule or "
                f"by bind({name}={name + '_'!r})"
            )
    keywords = {entry.place(name)[0] for name in settings}
    for name in sorted(shared_states(entry.rules).keys() & {*keywords, *TAKEN}):
        raise RuleError(f"{rule.name} has a state {name!r}, {meaning}: call it otherwise, as {name}_")
    called = ["step", *map(entry.outside, rule.state)]
    for name in called:
        if called.count(name) > 1:
            raise RuleError(f"the interop section of {rule.name} calls a state {name!r}, as another value is called")


def _fixed(entries: Sequence[Entry]) -> dict[str, Any]:
    """The entries of a group that are no keyword, and how they begin."""
    rules = [rule for entry in entries for rule in entry.rules]
    fixed: dict[str, Any] = {"tags": None} if reads_tags(rules) else {}
    return fixed | ({"train_mode": True} if any(rule.evaluate is not None for rule in rules) else {})


def _flag(name: str) -> inspect.Parameter:
    """A keyword that is False unless it is given."""
    return inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=False, annotation=bool)


def _routed_parameters(entry: Entry) -> list[inspect.Parameter]:
    """Keywords for the hyper-parameters of the rules that an entry of torch's class routes tensors to."""
    main = entry.rules[0].hyper
    others = {name: hyper for name, hyper in entry.settings("").items() if name not in main}
    return _keyword_parameters(entry, others, inspect.Parameter.KEYWORD_ONLY)


def _keyword_parameters(entry: Entry, settings: Mapping[str, Hyper], kind: Any) -> list[inspect.Parameter]:
    keywords: dict[str, Any] = {}
    for name in sorted(settings, key=lambda name: name != "lr"):
        keyword, position = entry.place(name)
        default = settings[name].default
        default = None if isinstance(default, Node) else default
        keywords[keyword] = default if position is None else (*keywords.get(keyword, ()), default)
    lists = lists_of(entry.rule)
    types = {k: Sequence[float] if k in lists else _type(k, v) for k, v in keywords.items()}
    return [inspect.Parameter(k, kind, default=v, annotation=types[k]) for k, v in keywords.items()]


def _type(keyword: str, default: Any) -> Any:
    if isinstance(default, tuple):
        return tuple[tuple([_type("", x) for x in default])]  # type: ignore[misc]
    if default is None:
        return float | None
    return float | Tensor if keyword == "lr" else float


def _own_parameters(entries: Sequence[Entry]) -> list[inspect.Parameter]:
    types = {"state_dtype": StateDtype, "weights": str | None, "backend": str | None, "reduce_over": Any}
    kind, rules = inspect.Parameter.KEYWORD_ONLY, [rule for entry in entries for rule in entry.rules]
    names = [name for name in OWN if name != "reduce_over" or reaches_across(rules)]
    parameters = [inspect.Parameter(name, kind, default=None, annotation=types[name]) for name in names]
    return [*parameters, inspect.Parameter("seed", kind, default=0, annotation=int)]


def _entry(kind: str, rule: Rule, fields: Mapping[str, Any]) -> Entry:
    decays = fields.get("weight_decay", {})
    settings = rule.settings
    args = fields.get("args", {})
    others = {name: hyper for name, hyper in settings.items() if name not in rule.standalone().hyper}
    places = _places(rule, settings, args | _betas(others)) | list_places(rule)
    return Entry(
        kind, rule, fields.get("when", {}), places, fields.get("state", {}),
        {"default": decays} if isinstance(decays, str) else decays, fields.get("step") != "absent",
        bool(fields.get("rows")),
    )  # fmt: skip


def _places(rule: Rule, settings: Mapping[str, Hyper], args: Mapping[str, Any]) -> dict[str, Place]:
    places: dict[str, Place] = {}
    for keyword, ours in args.items():
        for position, name in enumerate(ours if isinstance(ours, list) else [ours]):
            if name not in settings:
                raise RuleError(f"the interop section of {rule.name} names {name!r}, which is no hyper-parameter")
            places[name] = (keyword, position if isinstance(ours, list) else None)
    return places


def _betas(settings: Mapping[str, Hyper]) -> dict[str, list[str]]:
    """torch's custom for rules that torch does not have: beta1, beta2, ... are one tuple, betas."""
    names = [name for name in settings if re.fullmatch(r"beta\d+", name)]
    betas = [f"beta{i}" for i in range(1, 1 + len(names))]
    return {"betas": betas} if len(betas) > 1 and sorted(names) == betas and "betas" not in settings else {}
