"""What a rule is: hyper-parameters, states and the lines of one optimizer step."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, TypedDict

from rulec.errors import HyperError, RuleError
from rulec.language.node import LEVELS, Node, Op, const, name, names_in, node
from rulec.language.source import Span, did_you_mean, rule_error

if TYPE_CHECKING:
    from pathlib import Path


class Limits(TypedDict, total=False):
    """The range of a hyper-parameter, as keywords of `Hyper`."""

    min: float
    max: float
    above: float
    below: float


#: Ranges of well-known hyper-parameters: (pattern of the whole name, keywords of `Hyper`).
WELL_KNOWN: tuple[tuple[str, Limits], ...] = (
    (r"lr", {"min": 0.0}),
    (r"beta\d*|momentum", {"min": 0.0, "below": 1.0}),
    (r"eps\d*", {"min": 0.0}),
    (r"weight_decay", {"min": 0.0}),
)

#: The learning rate of a rule that assigns `direction` and names none.
DEFAULT_LR = 1e-3


def well_known_range(hyper_name: str) -> Limits:
    """The range built in for a hyper-parameter of this name; empty where there is none."""
    for pattern, limits in WELL_KNOWN:
        if re.fullmatch(pattern, hyper_name):
            return limits
    return {}


@dataclass(frozen=True)
class Hyper:
    """A hyper-parameter: its default, and the range its value must lie in.

    `default` is a number, an expression of other hyper-parameters, or None where another rule must supply it.
    `min` and `max` belong to the range, `above` and `below` do not. A `static` one is known when a kernel is made.
    """

    default: float | Node | None
    min: float = -math.inf
    max: float = math.inf
    above: float = -math.inf
    below: float = math.inf
    static: bool = False
    span: Span | None = field(default=None, compare=False, repr=False)

    def range_text(self) -> str:
        """The range in words: `at least 0 and below 1`; empty where any number will do."""
        limits = (("at least", self.min), ("above", self.above), ("at most", self.max), ("below", self.below))
        return " and ".join(f"{word} {value:g}" for word, value in limits if math.isfinite(value))

    def check(self, hyper_name: str, value: float, owner: str) -> float:
        """`value` as a float where it lies in the range; HyperError where it does not, NaN included."""
        inside = self.min <= value <= self.max
        inside &= value > self.above or math.isinf(self.above)
        inside &= value < self.below or math.isinf(self.below)
        if not inside:
            raise HyperError(f"{hyper_name}={value!r} of {owner} must be {self.range_text() or 'a number'}")
        return float(value)


@dataclass(frozen=True)
class State:
    """What a rule remembers between steps.

    `init` is an expression of hyper-parameters and `p`; `per` the level one value is kept for; `shape` extents of
    its own in place of the parameter's; `condition` an expression of shape facts: where false there is no such state.
    """

    init: Node
    per: str = "element"
    shape: tuple[Node, ...] | None = None
    condition: Node | None = None
    span: Span | None = field(default=None, compare=False, repr=False)


@dataclass(frozen=True)
class Assign:
    """One line of a step: `target = value`."""

    target: str
    value: Node
    span: Span | None = field(default=None, compare=False, repr=False)


@dataclass(frozen=True)
class Branch:
    """`if condition: ... else: ...` over lines of a step."""

    condition: Node
    then: tuple[Statement, ...]
    otherwise: tuple[Statement, ...] = ()
    span: Span | None = field(default=None, compare=False, repr=False)


Statement = Assign | Branch


def assignments(step: tuple[Statement, ...]) -> Iterator[Assign]:
    """Every assignment of a step, those in branches too, in order."""
    for line in step:
        if isinstance(line, Assign):
            yield line
        else:
            yield from assignments(line.then)
            yield from assignments(line.otherwise)


def conditions(step: tuple[Statement, ...]) -> Iterator[Branch]:
    """Every branch of a step, nested ones too."""
    for line in step:
        if isinstance(line, Branch):
            yield line
            yield from conditions(line.then)
            yield from conditions(line.otherwise)


@dataclass(frozen=True)
class Routing:
    """Where tensors go that a rule does not apply to: the rule named `rule`, with its hyper-parameters bound."""

    rule: str
    bindings: Mapping[str, float | str] = field(default_factory=dict)


@dataclass(frozen=True)
class Rule:
    """One optimizer step as mathematics, composable and immutable.

    A step reads `g` (the gradient, or the input it was composed onto), `grad` (always the raw gradient), `p` (the
    parameter), `t` (this tensor's count of updates, from 1), hyper-parameters, states and inputs. It assigns
    states, locals and either `direction` (then the step ends `p = p - lr*direction`) or `p` itself.

    Rules are made by `rulec.load`, `rulec.parse`, `@rulec.rule` and by composing others: `a + b`, `a >> b`, `.bind`.
    """

    name: str
    step: tuple[Statement, ...]
    hyper: Mapping[str, Hyper] = field(default_factory=dict)
    state: Mapping[str, State] = field(default_factory=dict)
    inputs: Mapping[str, str] = field(default_factory=dict)
    summary: str = ""
    paper: Mapping[str, Any] = field(default_factory=dict)
    evaluate: Node | None = None
    skip: Node | None = None
    applies_to: Node | None = None
    otherwise: Routing | None = None
    view: Mapping[str, str] = field(default_factory=dict)
    interop: Mapping[str, Any] = field(default_factory=dict)
    path: Path | None = field(default=None, compare=False, repr=False)
    function: Any = field(default=None, compare=False, repr=False)

    @property
    def key(self) -> str:
        """The name in lower snake case: what composed names are prefixed by, and files are called."""
        spaced = re.sub(r"(?<=[a-z0-9])(?=[A-Z][a-z])", "_", self.name)
        return re.sub(r"\W+", "_", spaced).lower()

    @property
    def assigns_parameter(self) -> bool:
        """Whether the step assigns `p` itself rather than a `direction`."""
        return any(line.target == "p" for line in assignments(self.step))

    @property
    def expressions(self) -> list[Node]:
        """Every expression of the rule: steps, conditions, initial values, defaults, evaluation point."""
        found = [line.value for line in assignments(self.step)]
        found += [branch.condition for branch in conditions(self.step)]
        for state in self.state.values():
            found += [state.init, *(state.shape or ()), *([state.condition] if state.condition else [])]
        found += [h.default for h in self.hyper.values() if isinstance(h.default, Node)]
        found += [x for x in (self.evaluate, self.skip, self.applies_to) if x is not None]
        return found

    def reads(self, identifier: str) -> bool:
        """Whether any line of the step reads this name."""
        values = [line.value for line in assignments(self.step)]
        values += [branch.condition for branch in conditions(self.step)]
        return identifier in names_in(values)

    def standalone(self) -> Rule:
        """The rule as it runs by itself: `p` is assigned and the learning rate exists.

        Raises RuleError where a hyper-parameter has no default because another rule was to supply it.
        """
        rule = self
        if not self.assigns_parameter:
            hyper = dict(self.hyper)
            if "lr" not in hyper or hyper["lr"].default is None:
                hyper["lr"] = Hyper(DEFAULT_LR, **well_known_range("lr"))
            last = Assign("p", node(Op.SUB, name("p"), node(Op.MUL, name("lr"), name("direction"))))
            rule = replace(self, hyper=hyper, step=(*self.step, last))
        for key, hyper_parameter in rule.hyper.items():
            if hyper_parameter.default is None:
                near = did_you_mean(key, set(rule.hyper) - {key})
                raise RuleError(f"hyper-parameter {key!r} of {self.name} has no default{near}: bind it to a number")
        return rule

    def __add__(self, other: Rule) -> Rule:
        from rulec.language.compose import plus

        return plus([self, other])

    def __rshift__(self, other: Rule) -> Rule:
        from rulec.language.compose import chain

        return chain([self, other])

    def __call__(self, value: Any) -> Any:
        """Inside the step of a Python rule: this rule's direction for the input `value`."""
        from rulec.language.python import call_rule

        return call_rule(self, value)

    def bind(self, **bindings: float | str) -> Rule:
        """The rule with hyper-parameters bound: a number sets the default, an expression removes the parameter."""
        from rulec.language.compose import bind

        return bind(self, bindings)

    def renamed(self, new_name: str, summary: str | None = None) -> Rule:
        """The same rule under another name."""
        return replace(self, name=new_name, summary=self.summary if summary is None else summary)

    def to_yaml(self) -> str:
        """The rule as a YAML rule file; `rulec.parse` of it gives an equal rule."""
        from rulec.language.yaml import rule_to_yaml

        return rule_to_yaml(self)

    def latex(self) -> str:
        """The step as an aligned LaTeX block."""
        from rulec.language.symbolic import rule_to_latex

        return rule_to_latex(self)

    def sympy(self) -> dict[str, Any]:
        """The new value of `direction` (or `p`) and of each state as sympy expressions of the old ones."""
        from rulec.language.symbolic import rule_to_sympy

        return rule_to_sympy(self)

    def step_text(self) -> str:
        """The step in the rule language."""
        from rulec.language.step import step_text

        return step_text(self.step)


def check_rule(rule: Rule) -> Rule:
    """The same rule, where nothing about it as a whole is wrong; RuleError otherwise."""
    targets = {line.target for line in assignments(rule.step)}
    spans = [line.span for line in assignments(rule.step)]
    here = spans[0] if spans else None
    if not targets & {"direction", "p"}:
        raise rule_error(f"{rule.name} assigns neither direction nor p: end its step with direction = ...", here)
    if {"direction", "p"} <= targets:
        raise rule_error(f"{rule.name} assigns both direction and p: keep one of them", here)
    for state_name, state in rule.state.items():
        if state.per not in LEVELS:
            near = did_you_mean(state.per, LEVELS)
            raise rule_error(f"state {state_name} is kept per {state.per!r}, which is no level{near}", state.span)
        if not rule.reads(state_name) and (rule.evaluate is None or state_name not in names_in([rule.evaluate])):
            raise rule_error(f"state {state_name} is never used: read it in the step or remove it", state.span)
    for hyper_name, hyper in rule.hyper.items():
        if isinstance(hyper.default, float):
            try:
                hyper.check(hyper_name, hyper.default, rule.name)
            except HyperError as error:
                raise rule_error(f"the default is out of range: {error}", hyper.span) from None
    return rule


def check_direction_free_of_lr(rule: Rule) -> Rule:
    """RuleError where `direction` depends on `lr` through the lines of the step as authored."""
    tainted = {"lr"}
    for line in assignments(rule.step):
        if not tainted.intersection(names_in([line.value])):
            continue
        if line.target == "direction":
            raise rule_error(
                "direction depends on lr, which is applied after it (p = p - lr*direction): "
                "leave lr out, or assign p instead of direction", line.span,
            )  # fmt: skip
        if line.target not in rule.state:
            tainted.add(line.target)
    return rule


def zero() -> State:
    """The commonest state: elementwise, zero at first."""
    return State(const(0))
