"""The data of a rule: hyper-parameters, states and the lines of one optimizer step, and traits read off its text.

The modules below `rulec.language.rule` take and give rules as this data; `Rule` has their functions as methods. Traits
say whether a rule draws random numbers, and whether it depends on a tensor's axes.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from keyword import iskeyword
from pathlib import Path
from typing import Any, Self, TypeAlias, TypeVar

from rulec.errors import RuleError
from rulec.language.expr.counts import level_text
from rulec.language.expr.node import FACTS, IN_MODEL, NUMBERS, PLACED, Kind, Node, Op, name, names_in, node, walk
from rulec.language.expr.static import ALONG, ORDERS, settings
from rulec.language.hyper import DEFAULT_LR, Hyper, well_known_range, with_start
from rulec.language.inputs import InputKind, matrices_of
from rulec.language.library.folder import library_folder
from rulec.language.source import Span

#: A class of rules: functions from rules to rules keep it.
AnyRule = TypeVar("AnyRule", bound="RuleData")

#: The learning rate of a rule that says nothing else.
RATE = name("lr")


#: The view of every tensor as one matrix, of its first dimension and the rest.
FLATTENED: Mapping[str, str] = {"flatten": "rest"}


@dataclass(frozen=True)
class State:
    """A value that a rule keeps between steps.

    `init`, its first value, is an expression of hyper-parameters and `p`. `per` is a level: one value is kept for each
    element, row, tensor and so on; `number` is that of a level with one, as in `axis(0)`. `shape` is rows and columns
    in place of the parameter's shape. `condition` is an expression of shape facts; tensors for which it is false have
    no such state. `storage` is `exact` for a state that stays float32, whatever format is chosen for the others.
    """

    init: Node
    per: str = "element"
    shape: tuple[Node, ...] | None = None
    condition: Node | None = None
    storage: str = ""
    number: Node | None = None
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
    """Every assignment of a step in order, also inside branches."""
    for line in step:
        if isinstance(line, Assign):
            yield line
        else:
            yield from assignments(line.then)
            yield from assignments(line.otherwise)


def conditions(step: tuple[Statement, ...]) -> Iterator[Branch]:
    """Every branch of a step in order, also inside branches."""
    for line in step:
        if isinstance(line, Branch):
            yield line
            yield from conditions(line.then)
            yield from conditions(line.otherwise)


@dataclass(frozen=True)
class Pass:
    """A point at which the model is evaluated again in a step, an expression; `when` has the steps, None for all.

    An expression of a point reads what a step reads: `g`, `p`, `t`, states, hyper-parameters, inputs, and gradients of
    earlier passes. `when` is known before a step.
    """

    point: Node
    when: Node | None = None
    span: Span | None = field(default=None, compare=False, repr=False)


@dataclass(frozen=True)
class Statistic:
    """A value of a step that is measured and not kept: one number for a tensor, group or model, or one a row or column.

    `value` is an expression of the names of a step, as they are at its end, except `p`, the parameter before it, and
    `update`, its change.
    """

    value: Node
    span: Span | None = field(default=None, compare=False, repr=False)


@dataclass(frozen=True)
class Routing:
    """The rule for tensors outside a rule's `applies_to`.

    `rule` is None where a wrapper leaves these tensors to the rule it wraps; `text` is then its name for this rule.
    Otherwise `text` is the rule's name in a file, such as `adamw(lr=adamw_lr)`; empty for a composed rule without one.
    """

    rule: RuleData | None
    text: str = ""


@dataclass(frozen=True)
class Move:
    """One pass of a lowered rule: a rule that moves `p` to the point, in the steps where `when` holds.

    `gradient` is the input by which later rules read the gradient of before this pass.
    """

    rule: RuleData
    when: Node | None
    gradient: str


#: The rule for other lengths: from the values of lists and of counts.
Make: TypeAlias = Callable[[Mapping[str, Any]], "RuleData"]


@dataclass(frozen=True, eq=False)
class Sizes:
    """The lengths that a rule is written out for.

    `lists` has the number of values of each list of hyper-parameters. `counts` has the value of each hyper-parameter
    that decides a length. `make` gives the rule for other lengths; None where the lengths are fixed.
    """

    lists: Mapping[str, int] = field(default_factory=dict)
    counts: Mapping[str, int] = field(default_factory=dict)
    make: Make | None = None
    _rules: dict[Any, RuleData] = field(default_factory=dict, init=False)

    def rule(self, values: Mapping[str, Any]) -> RuleData:
        """The rule for these values of lists and counts; for equal values the same object."""
        assert self.make is not None
        key = tuple(sorted((name, tuple(v) if isinstance(v, list) else v) for name, v in values.items()))
        if key not in self._rules:
            self._rules[key] = self.make(values)
        return self._rules[key]


@dataclass(frozen=True, repr=False)
class RuleData:
    """The data of one optimizer step; its words are explained where `Rule` is.

    A rule read from a file or a function, composed or lowered is always a `Rule`: see `rulec.language.rule`.
    """

    name: str
    step: tuple[Statement, ...]
    hyper: Mapping[str, Hyper] = field(default_factory=dict)
    state: Mapping[str, State] = field(default_factory=dict)
    inputs: Mapping[str, InputKind] = field(default_factory=dict)
    summary: str = ""
    paper: Mapping[str, Any] = field(default_factory=dict)
    rate: Node = RATE
    evaluate: Node | None = None
    skip: Node | None = None
    applies_to: Node | None = None
    otherwise: Routing | None = None
    view: Mapping[str, str] = field(default_factory=dict)
    wraps: tuple[str, ...] = ()
    wraps_shape: tuple[Node, ...] | None = None
    passes: Mapping[str, Pass] = field(default_factory=dict)
    moves: tuple[Move, ...] = ()
    statistics: Mapping[str, Statistic] = field(default_factory=dict)
    interop: Mapping[str, Any] = field(default_factory=dict)
    variants: Mapping[str, tuple[Any, ...]] = field(default_factory=dict, compare=False, repr=False)
    path: Path | None = field(default=None, compare=False, repr=False)
    function: Any = field(default=None, compare=False, repr=False)
    sizes: Sizes | None = field(default=None, compare=False, repr=False)

    def __repr__(self) -> str:
        hyper = ", ".join(f"{k}={v.default!r}" for k, v in self.hyper.items())
        state = f", state {', '.join(self.state)}" if self.state else ""
        return f"<Rule {self.name}({hyper}){state}>"

    def __hash__(self) -> int:
        return hash((self.name, self.step))

    def __deepcopy__(self, memo: Any) -> Self:
        return self

    def __getstate__(self) -> dict[str, Any]:
        # Its module knows the function of a Python rule by the rule's name, so that it cannot be pickled. Nor can the
        # way to other lengths.
        derived = ("names_read", "rest", "settings", "analysis")
        return {k: v for k, v in self.__dict__.items() if k not in derived} | {"function": None, "sizes": None}

    @property
    def key(self) -> str:
        """The name in lower snake case: the prefix of names in compositions, and the name of files."""
        spaced = re.sub(r"(?<=[a-z0-9])(?=[A-Z][a-z])", "_", self.name)
        key = re.sub(r"[^A-Za-z0-9]+", "_", spaced).strip("_").lower()[:40]
        return key if key.isidentifier() and not iskeyword(key) else f"rule_{key}"

    @property
    def called(self) -> str:
        """The rule's name in text: its name in the library, the name of its file, or else its key."""
        if self.path is None or self.path.suffix not in (".yaml", ".yml"):
            return self.key
        return self.path.stem if self.path.is_relative_to(library_folder()) else self.path.name

    @property
    def example(self) -> str:
        """A wrapper around rules, as it is written in text."""
        return f"{self.called}({', '.join(('adam', 'sgd', *self.wraps)[: len(self.wraps)])})"

    @property
    def assigns_parameter(self) -> bool:
        """Whether the step assigns `p` itself rather than a `direction`."""
        return any(line.target == "p" for line in assignments(self.step))

    @property
    def expressions(self) -> list[Node]:
        """Every expression of the rule: steps, conditions, initial values, defaults, evaluation point."""
        nodes = [line.value for line in assignments(self.step)]
        nodes += [branch.condition for branch in conditions(self.step)]
        for state in self.state.values():
            nodes += [state.init, *(state.shape or ()), *(x for x in (state.condition, state.number) if x is not None)]
        nodes += [x for matrix in matrices_of(self.inputs).values() for x in matrix.extents]
        nodes += [h.default for h in self.hyper.values() if isinstance(h.default, Node)]
        nodes += [x for x in (self.rate, self.evaluate, self.skip, self.applies_to) if x is not None]
        nodes += self.wraps_shape or ()
        nodes += [x for each in self.passes.values() for x in (each.point, each.when) if x is not None]
        nodes += [x for move in self.moves for x in move.rule.expressions]
        return nodes

    @cached_property
    def names_read(self) -> frozenset[str]:
        """Every name read by a line or condition of the step."""
        values = [line.value for line in assignments(self.step)]
        return frozenset(names_in([*values, *(branch.condition for branch in conditions(self.step))]))

    def reads(self, identifier: str) -> bool:
        """Whether any line of the step reads this name."""
        return identifier in self.names_read

    def assigning(self) -> Self:
        """The rule with a step that assigns `p`; RuleError for a wrapper, and a hyper-parameter without a default."""
        rule = self.check_whole()
        if not self.assigns_parameter:
            rule = replace(self, hyper=self.hyper_with_rate, step=self.whole_step)
        for key, hyper_parameter in rule.hyper.items():
            if hyper_parameter.default is None:
                raise RuleError(f"hyper-parameter {key!r} of {self.name} has no default: bind it to a number")
        return rule

    def check_whole(self) -> Self:
        """The same rule; RuleError for a wrapper around no rule."""
        if self.wraps:
            one = len(self.wraps) == 1
            count, others = ("another rule", "another rule") if one else (f"{len(self.wraps)} other rules", "others")
            raise RuleError(f"{self.name} wraps {count} and has none here: write {self.example}, or {others}")
        return self

    @property
    def hyper_with_rate(self) -> dict[str, Hyper]:
        """The hyper-parameters, with `lr` also where the rule does not declare it."""
        hyper = dict(self.hyper)
        if self.multiplies_lr and hyper.get("lr", Hyper(None)).default is None:
            hyper["lr"] = replace(hyper.get("lr", Hyper(None, **well_known_range("lr"))), default=DEFAULT_LR)
        return hyper

    @property
    def multiplies_lr(self) -> bool:
        """Whether the step ends in a line of its own with `lr` in it, `p = p - lr*direction`."""
        return not self.assigns_parameter and not self.wraps and "lr" in names_in([self.rate])

    @property
    def whole_step(self) -> tuple[Statement, ...]:
        """The lines of the step, ending in the line that assigns `p`: `p = p - lr*direction` where none does."""
        if self.assigns_parameter:
            return self.step
        return (*self.step, Assign("p", node(Op.SUB, name("p"), node(Op.MUL, self.rate, name("direction")))))

    def renamed(self, new_name: str, summary: str | None = None) -> Self:
        """The same rule under another name."""
        return replace(self, name=new_name, summary=self.summary if summary is None else summary)

    @cached_property
    def rest(self) -> Self | None:
        """The rule for the tensors that this rule leaves out; None where it has no `otherwise`.

        A hyper-parameter of both is one, with the main rule's default. A hyper-parameter under a new name, as in
        `{adamw: {lr: adamw_lr}}`, stays apart.
        """
        rest: Any = None if self.otherwise is None else self.otherwise.rule
        if rest is None:
            return None
        main, hyper = self.hyper_with_rate, rest.hyper_with_rate
        for key in [*hyper]:
            default = main[key].default if key in main else None
            if default is not None:
                hyper[key] = replace(hyper[key], default=default)
            for needed in names_in([default]) if isinstance(default, Node) else ():
                if needed in main:
                    hyper.setdefault(needed, main[needed])
        routed: Self = replace(rest, hyper=hyper)
        return routed

    @property
    def all_hyper(self) -> dict[str, Hyper]:
        """The hyper-parameters of the rule and of all rules under its `otherwise`: those a user may set."""
        rest = self.rest
        if rest is None:
            return with_start(self.hyper)
        main = self.hyper_with_rate
        return with_start(main | {key: hyper for key, hyper in rest.all_hyper.items() if key not in main})


#: The levels that depend on the choice of rows and columns among the axes.
_OF_MATRICES = ("row", "col", "matrix")


@functools.lru_cache(maxsize=256)
def draws(rule: RuleData) -> bool:
    """Whether a rule draws random numbers. They depend on the tensor's number among all tensors."""
    return any(n.op.kind is Kind.RANDOM for n in walk(rule.expressions))


@functools.lru_cache(maxsize=256)
def reads_numbers(rule: RuleData, numbers: tuple[str, ...] = NUMBERS) -> bool:
    """Whether a rule reads one of these numbers of a tensor in its group or its model, also in a statistic."""
    values = [*rule.expressions, *(statistic.value for statistic in rule.statistics.values())]
    return any(n.op in (Op.NAME, Op.FACT) and n.arg in numbers for n in walk(values))


def reads_layers(rule: RuleData) -> bool:
    """Whether a rule reads the layer of a tensor."""
    return reads_numbers(rule, IN_MODEL)


@functools.lru_cache(maxsize=256)
def reads_tags(rule: RuleData) -> bool:
    """Whether a rule asks for a tensor's tags, to know whether it applies."""
    condition = [] if rule.applies_to is None else [rule.applies_to]
    return any(n.op is Op.FACT and str(n.arg).startswith("tagged(") for n in walk(condition))


@functools.lru_cache(maxsize=256)
def sees_shape(rule: RuleData) -> bool:
    """Whether a rule depends on a tensor's dimensions, rows or columns, or on the order of its elements."""
    if placed_level(rule):
        return True
    if any(state.per in _OF_MATRICES or state.shape is not None for state in rule.state.values()):
        return True
    if matrices_of(rule.inputs):
        return True
    parts = [*walk(rule.expressions)]
    if {"ndim", "rows", "cols"} & {str(n.arg) for n in parts if n.op in (Op.NAME, Op.FACT)}:
        return True
    if any(n.op.kind in (Kind.MATRIX, Kind.RANDOM, Kind.SHAPE) for n in parts):
        return True
    return any(n.op.kind is Kind.REDUCE and n.arg in _OF_MATRICES for n in parts)


@functools.lru_cache(maxsize=256)
def orders_tensors(rule: RuleData) -> bool:
    """Whether a rule orders the elements of a whole tensor, as for their quantile."""
    return any(n.op in ORDERS and settings(n)["per"] == "tensor" for n in walk(rule.expressions))


@functools.lru_cache(maxsize=256)
def placed_level(rule: RuleData) -> str:
    """A level `axis(i)` or `block(n)` of a rule, as it is written; empty for a rule without one."""
    for state in rule.state.values():
        if state.number is not None:
            return level_text(state.per, state.number)
    for part in walk(rule.expressions):
        if part.op.kind is Kind.REDUCE and part.arg in PLACED:
            return level_text(str(part.arg), part.args[1])
    return ""


@functools.lru_cache(maxsize=256)
def counts_dimensions(rule: RuleData) -> bool:
    """Whether a rule has a level `axis(i)` or `block(n)`, `dim(i)`, `index`, or a matrix function along an axis."""
    known = (Op.DIM, Op.INDEX, *ALONG)
    return bool(placed_level(rule)) or any(n.op in known for n in walk(rule.expressions))


@functools.lru_cache(maxsize=256)
def differs_by_shape(rule: RuleData) -> bool:
    """Whether a rule has levels that mean something else for another rank, or conditions on the shape."""
    tests = [branch.condition for branch in conditions(rule.step)]
    tests += [state.condition for state in rule.state.values() if state.condition is not None]
    return counts_dimensions(rule) or any(str(n.arg) in FACTS for n in walk(tests) if n.op in (Op.NAME, Op.FACT))
