"""What a class offers: its keywords, and which rule their values mean.

A class of torch.optim may mean several rules (`amsgrad`, `nesterov`, `centered`); the `interop` sections of the
library say which, and what the rules' hyper-parameters and states are called there (rules/README.md).
"""

from __future__ import annotations

import functools
import inspect
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer
from torch.optim.optimizer import ParamsT

from rulec.compiler.scalars import resolve_hyper
from rulec.errors import HyperError, RuleError
from rulec.language.library import load
from rulec.language.node import Node
from rulec.language.rule import Rule
from rulec.language.source import did_you_mean
from rulec.torch.lean import without_compiler

#: Keywords of torch.optim that say how to run, not what to compute.
HINTS = ("foreach", "fused", "capturable", "differentiable")

#: Keywords of every class here: of the whole optimizer, not of a group.
OWN = ("state_dtype", "backend")

#: Where a hyper-parameter's value is: a keyword, and the place in it where that is a tuple.
Place = tuple[str, int | None]


@dataclass(frozen=True)
class Choice:
    """The rule that a group's flags mean: a flavour of the class, what `weight_decay` stands for, and the direction."""

    flavour: Flavour
    decay: str
    maximize: bool

    @property
    def rule(self) -> Rule:
        """The rule to run."""
        return self.flavour.composed(self.decay)

    def hyper(self, values: Mapping[str, Any]) -> dict[str, float]:
        """The rule's hyper-parameters from a group's keywords."""
        found = {name: self._number(name, values) for name in self.rule.hyper}
        given = {name: value for name, value in found.items() if value is not None}
        if len(given) == len(found):
            return given
        return resolve_hyper(self.rule.hyper, given, torch.finfo(torch.float32).eps, self.rule.name)

    def _number(self, name: str, values: Mapping[str, Any]) -> float | None:
        """The value given; None where the rule's default is an expression of others and nothing else was given."""
        keyword, position = self.flavour.places.get(name, (name, None))
        given = values[keyword]
        try:
            value = given if position is None else given[position]
            if value is None and isinstance(self.rule.hyper[name].default, Node):
                return None
            return float(value)
        except (TypeError, ValueError, IndexError, KeyError, RuntimeError):
            count = sum(k == keyword for k, _ in self.flavour.places.values())
            wanted = "a number" if position is None else f"{count} numbers"
            raise HyperError(f"{keyword}={given!r} of {self.rule.name} must be {wanted}") from None


@dataclass(frozen=True, eq=False)
class Flavour:
    """One rule that a class may mean.

    `when` are the keywords' values that choose it (`nonzero` is any number but 0), `places` where its hyper-parameters
    are among the keywords, `states` what its states are called outside, `decays` the transform that `weight_decay`
    stands for by the flag that chooses it (`default` where none does), `counted` whether a step count is kept outside.
    """

    owner: str
    rule: Rule
    when: Mapping[str, Any] = field(default_factory=dict)
    places: Mapping[str, Place] = field(default_factory=dict)
    states: Mapping[str, str] = field(default_factory=dict)
    decays: Mapping[str, str] = field(default_factory=dict)
    counted: bool = True

    @property
    def keywords(self) -> set[str]:
        """Every keyword that means something to this rule."""
        found = {self.places.get(name, (name, None))[0] for name in self.rule.standalone().hyper}
        return found | set(self.when) | ({"weight_decay"} | self.decays.keys() - {"default"} if self.decays else set())

    def matches(self, values: Mapping[str, Any]) -> bool:
        """Whether these keywords mean this rule."""
        return all(bool(values[k]) if v == "nonzero" else values[k] == v for k, v in self.when.items())

    def decay(self, values: Mapping[str, Any]) -> str:
        """The transform that `weight_decay` stands for; empty where the rule has its own."""
        for flag, transform in self.decays.items():
            if flag != "default" and values.get(flag):
                return transform
        return self.decays.get("default", "")

    def outside(self, state: str) -> str:
        """What a state is called outside."""
        return self.states.get(state, state)

    @functools.cached_property
    def _composed(self) -> dict[str, Rule]:
        return {}

    def composed(self, decay: str) -> Rule:
        """The rule with weight decay by that transform, under the class's name; always the same object."""
        if decay not in self._composed:
            transform = load(decay) if decay else None
            whole = self.rule
            if transform is not None:
                whole = transform >> whole if decay == "l2" else whole + transform
            self._composed[decay] = whole.standalone().renamed(self.owner, self.rule.summary)
        return self._composed[decay]


@dataclass(frozen=True)
class Interface:
    """A class's keywords (without `params`) and the rules they may mean.

    `fixed` are entries of a group that are no keyword; `full_at_once` says that states exist before the first step.
    """

    name: str
    signature: inspect.Signature
    flavours: Sequence[Flavour]
    fixed: Mapping[str, Any] = field(default_factory=dict)
    full_at_once: bool = False
    source: str = ""

    @functools.cached_property
    def group_keywords(self) -> tuple[str, ...]:
        """The entries of a group that matter to what is computed."""
        known = {k for flavour in self.flavours for k in flavour.keywords} | {"maximize"}
        return tuple(k for k in (*self.signature.parameters, *self.fixed) if k in known)

    @functools.cached_property
    def flag_keywords(self) -> tuple[str, ...]:
        """The entries of a group that decide which rule it means."""
        flags = {k for f in self.flavours for k in (*f.when, *f.decays)} | {"maximize"}
        if any(flavour.decays for flavour in self.flavours):
            flags.add("weight_decay")
        return tuple(k for k in self.group_keywords if k in flags)

    def bind(self, args: Sequence[Any], keywords: Mapping[str, Any]) -> dict[str, Any]:
        """Every keyword's value, given or by default; HyperError for a keyword that there is not."""
        known = self.signature.parameters
        for key in keywords:
            if key not in known:
                raise HyperError(f"{self.name} has no keyword {key!r}{self.suggestion(key)}")
        try:
            bound = self.signature.bind(None, *args, **keywords)
        except TypeError as error:
            raise HyperError(f"{self.name}: {error}") from None
        bound.apply_defaults()
        del bound.arguments["params"]
        self._check_unnamed(bound.arguments)
        return dict(bound.arguments)

    def _check_unnamed(self, values: Mapping[str, Any]) -> None:
        """A keyword that torch has and no rule knows may only keep its default: it could mean anything."""
        known = {*self.group_keywords, *HINTS, *OWN}
        for key, value in values.items():
            default = self.signature.parameters[key].default
            if key not in known and value != default:
                raise HyperError(f"{self.name} does not support {key}={value!r}: leave it at {default!r}")

    def suggestion(self, key: str) -> str:
        """A hint at the keyword that was meant; empty where there is none."""
        for flavour in self.flavours:
            keyword, position = flavour.places.get(key, ("", None))
            if position is not None:
                names = [name for name, (k, _) in flavour.places.items() if k == keyword]
                return f": give {keyword}=({', '.join(names)})"
        return did_you_mean(key, self.signature.parameters)

    def choose(self, values: Mapping[str, Any]) -> Choice:
        """The rule that a group's keywords mean. HyperError where they mean none."""
        if values.get("differentiable"):
            raise HyperError(
                f"{self.name} cannot be differentiable=True: autograd does not record what a fused kernel computes"
            )
        for key in values:
            if key not in self.signature.parameters and any(key in f.places for f in self.flavours):
                raise HyperError(f"a group of {self.name} has {key!r}, which is no keyword{self.suggestion(key)}")
        for flavour in self.flavours:
            if flavour.matches(values):
                return Choice(flavour, flavour.decay(values), bool(values.get("maximize")))
        flags = {k: values[k] for flavour in self.flavours for k in flavour.when}
        raise HyperError(f"{self.name} has no rule for {', '.join(f'{k}={v!r}' for k, v in flags.items())}")

    def state_names(self) -> set[str]:
        """Every name a state may be called by, ours and theirs."""
        found = {state for flavour in self.flavours for state in flavour.rule.state}
        return found | {flavour.outside(state) for flavour in self.flavours for state in flavour.rule.state}


@functools.cache
def library_index() -> tuple[dict[str, str], dict[str, list[str]]]:
    """The library's file for each rule's name, and for each class of torch.optim the files that have a part in it.

    Read from the text: parsing every rule would cost a quarter of a second.
    """
    from rulec.language.library import library_folder, rules

    names: dict[str, str] = {}
    classes: dict[str, list[str]] = {}
    for file in rules():
        if file.startswith("transforms/"):
            continue
        text = (library_folder() / f"{file}.yaml").read_text(encoding="utf-8")
        title = re.search(r"^name: *(\w+)", text, re.MULTILINE)
        if title:
            names[title[1]] = file
        for kind in dict.fromkeys(re.findall(r"\bclass: *(\w+)", text)):
            classes.setdefault(kind, []).append(file)
    return names, classes


def torch_entries(rule: Rule) -> list[Mapping[str, Any]]:
    """The entries of a rule's interop section for torch."""
    section = rule.interop.get("torch", [])
    return list(section) if isinstance(section, list) else [section]


def torch_interface(kind: str) -> Interface:
    """The interface of a class of torch.optim, as the torch installed has it."""
    theirs = getattr(torch.optim, kind)
    flavours = []
    for file in library_index()[1][kind]:
        rule = load(file)
        flavours += [_flavour(kind, rule, entry) for entry in torch_entries(rule) if entry["class"] == kind]
    flavours.sort(key=lambda flavour: flavour.rule.name != kind)
    parameters = [*list(inspect.signature(theirs).parameters.values()), *_own_parameters()]
    signature = inspect.Signature(sorted(parameters, key=lambda p: p.kind), return_annotation=None)
    example = _example(theirs)
    fixed = {k: v for k, v in example.defaults.items() if k not in signature.parameters}
    return Interface(kind, signature, flavours, fixed, full_at_once=bool(example.state))


def _example(theirs: Any) -> Optimizer:
    """An optimizer of torch's, over one number."""
    body = {"add_param_group": without_compiler(Optimizer.add_param_group)}
    made: Optimizer = type(theirs.__name__, (theirs,), body)([torch.zeros(1, device="cpu")])
    return made


def rule_interface(rule: Rule, source: str = "") -> Interface:
    """The interface of one rule by itself: its own hyper-parameters, betas in one tuple, and no flags."""
    entries = torch_entries(rule)
    whole = rule.standalone()
    for state, kept in rule.state.items():
        if kept.per in ("group", "model"):
            raise RuleError(
                f"{rule.name} keeps {state} per {kept.per}, which a torch checkpoint has no place for yet: keep it per "
                f"tensor, or use rulec.array"
            )
    places = _places(whole, entries[0].get("args", {}) if entries else _betas(whole))
    states = entries[0].get("state", {}) if entries else {}
    flavour = Flavour(rule.name, rule, places=places, states=states)
    keywords: dict[str, Any] = {}
    for name in sorted(whole.hyper, key=lambda name: name != "lr"):
        keyword, position = places.get(name, (name, None))
        default = whole.hyper[name].default
        default = None if isinstance(default, Node) else default
        keywords[keyword] = default if position is None else (*keywords.get(keyword, ()), default)
    kind = inspect.Parameter.POSITIONAL_OR_KEYWORD
    parameters = [inspect.Parameter("params", kind, annotation=ParamsT)]
    parameters += [inspect.Parameter(k, kind, default=v, annotation=_type(k, v)) for k, v in keywords.items()]
    parameters.append(inspect.Parameter("maximize", inspect.Parameter.KEYWORD_ONLY, default=False, annotation=bool))
    return Interface(rule.name, inspect.Signature([*parameters, *_own_parameters()]), [flavour], source=source)


def _type(keyword: str, default: Any) -> Any:
    if isinstance(default, tuple):
        return tuple[tuple([_type("", x) for x in default])]  # type: ignore[misc]
    if default is None:
        return float | None
    return float | Tensor if keyword == "lr" else float


#: The type of `state_dtype`: for all states, or by name, ours or torch's.
StateDtype = torch.dtype | str | Mapping[str, torch.dtype | str] | None


def _own_parameters() -> list[inspect.Parameter]:
    types = {"state_dtype": StateDtype, "backend": str | None}
    kind = inspect.Parameter.KEYWORD_ONLY
    return [inspect.Parameter(name, kind, default=None, annotation=types[name]) for name in OWN]


def _flavour(kind: str, rule: Rule, entry: Mapping[str, Any]) -> Flavour:
    decays = entry.get("weight_decay", {})
    return Flavour(
        kind, rule, entry.get("when", {}), _places(rule.standalone(), entry.get("args", {})), entry.get("state", {}),
        {"default": decays} if isinstance(decays, str) else decays, entry.get("step") != "absent",
    )  # fmt: skip


def _places(rule: Rule, args: Mapping[str, Any]) -> dict[str, Place]:
    places: dict[str, Place] = {}
    for keyword, ours in args.items():
        for position, name in enumerate(ours if isinstance(ours, list) else [ours]):
            if name not in rule.hyper:
                raise RuleError(f"the interop section of {rule.name} names {name!r}, which is no hyper-parameter")
            places[name] = (keyword, position if isinstance(ours, list) else None)
    return places


def _betas(rule: Rule) -> dict[str, list[str]]:
    """torch's custom for rules that torch does not have: beta1, beta2, ... are one tuple, betas."""
    found = [name for name in rule.hyper if re.fullmatch(r"beta\d+", name)]
    betas = [f"beta{i}" for i in range(1, 1 + len(found))]
    return {"betas": betas} if len(betas) > 1 and sorted(found) == betas and "betas" not in rule.hyper else {}
