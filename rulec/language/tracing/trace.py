"""The trace of a rule written in Python: its assignments, the rules it calls, and the lines of the step from them."""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import pairwise
from types import CodeType, FrameType
from typing import Any

from rulec.errors import RuleError
from rulec.language.compose import combine
from rulec.language.compose.cases import unify_inputs
from rulec.language.dimensions import Dimensions
from rulec.language.evaluations import gradient_of
from rulec.language.expr.node import Kind, Node, Op, name, node
from rulec.language.hyper import Hyper
from rulec.language.inputs import InputKind
from rulec.language.rule_data import Assign, Pass, RuleData, Sizes, State, Statement, Statistic
from rulec.language.sizes import entries, entry
from rulec.language.source import did_you_mean
from rulec.language.tracing.author import author_error, running_frame
from rulec.language.tracing.value import Value, as_traced, check_trace, current


class CallsRouted(Exception):
    """Ends a trace at the call of a rule for some tensors only: the function is traced for each of its cases."""

    def __init__(self, rule: RuleData) -> None:
        super().__init__(rule.name)
        self.rule = rule


@dataclass(frozen=True)
class Arm:
    """The lines of one arm of a fork, and the version of each state after them."""

    lines: list[tuple[str, Node] | Fork]
    version: Mapping[str, int]


@dataclass(frozen=True)
class Fork:
    """An `if` in a trace.

    `outside` has the names of values from before the `if`: if an arm reads one, its line stands before the `if`.
    `version` has the versions of states after the arms. An arm's line for a result of the fork has the target `#1`,
    `#2` and so on.
    """

    condition: Node
    then: Arm
    otherwise: Arm
    outside: Mapping[Node, str]
    version: Mapping[str, int]


class Trace:
    """The record of one run of the function: its assignments of states so far, and the names of values.

    The state `m` is the name `m#0` until its first assignment, then `m#1`, and so on: an expression means the same
    at every place. `locals` has the names of values, from the author or from a called rule. `frame` is as in `Running`.
    """

    def __init__(
        self, rule_name: str, state: Mapping[str, State], hyper: Mapping[str, Hyper], wraps: tuple[str, ...] = (),
        code: CodeType | None = None, counted: Counted | None = None, passes: Mapping[str, Pass] | None = None,
    ) -> None:  # fmt: skip
        self.rule_name = rule_name
        self.counted = counted or Counted({}, {})
        self.wraps, self.passes = wraps, dict(passes or {})
        self.state = dict(state)
        self.hyper = dict(hyper)
        self.inputs: dict[str, InputKind] = {}
        self.view: dict[str, str] = {}
        #: A case of each rule for some tensors only, in the order of their calls, and the number of calls so far.
        self.cases: Sequence[RuleData] = ()
        self.routed = 0
        #: Whether the wrapped rule gets an input of another shape than the parameter's.
        self.shaped = False
        self.lines: list[tuple[str, Node] | Fork] = []
        self.version: dict[str, int] = dict.fromkeys(state, 0)
        #: The lines around those of the present arm, from the outermost on.
        self.around: list[list[tuple[str, Node] | Fork]] = []
        #: The newest version of each state in any arm; under "", the number of results of forks.
        self.newest: dict[str, int] = {}
        self.locals: dict[Node, str] = {}
        self.called: set[str] = set()
        #: The statistics of the rules called so far.
        self.measured: dict[str, Statistic] = {}
        self.draws = 0
        #: The numbers of dimensions of the rule's tensors.
        self.dimensions = Dimensions()
        self.code = code
        self.frame: FrameType | None = None

    def name_locals(self) -> None:
        """Adds the function's local names for traced values, as they were when it returned."""
        for value, key in self.values_now().items():
            self.locals.setdefault(value, key)
        self.frame = None

    def values_now(self) -> dict[Node, str]:
        """The function's traced values that have a local name now, and results of forks."""
        values: dict[Node, str] = {}
        for key, value in self.frame.f_locals.items() if self.frame is not None else ():
            listed = isinstance(value, list | tuple)
            for entry_name, each in zip(entries(key, len(value)), value, strict=True) if listed else [(key, value)]:
                if isinstance(each, Value) and each.trace is self and _is_made(each.node):
                    values.setdefault(each.node, entry_name)
        return values

    def read(self, state: str) -> Value:
        """The state's value now."""
        return Value(name(f"{state}#{self.version[state]}"))

    def assign(self, state: str, value: Node) -> None:
        """The state's new value."""
        self.version[state] = self._next(state)
        self.lines.append((f"{state}#{self.version[state]}", value))

    def _next(self, state: str) -> int:
        self.newest[state] = self.newest.get(state, 0) + 1
        return self.newest[state]

    def fork(
        self, condition: Node, arms: Sequence[Callable[[], Mapping[str, Node]]], outside: Mapping[Node, str]
    ) -> dict[str, Node]:
        """The values that both arms give, by their names in the arms, after an `if`."""
        lines, before = self.lines, dict(self.version)
        taken: list[Arm] = []
        values: list[Mapping[str, Node]] = []
        self.around.append(lines)
        for arm in arms:
            self.lines, self.version = [], {**dict.fromkeys(self.state, 0), **before}
            values.append(arm())
            taken.append(Arm(self.lines, self.version))
        self.lines, self.version = self.around.pop(), {**dict.fromkeys(self.state, 0), **before}
        for state, version in self.version.items():
            if any(arm.version.get(state, 0) != version for arm in taken):
                self.version[state] = self._next(state)
        both: dict[str, Node] = {}
        for key in [key for key in values[0] if key in values[1]]:
            results = [named[key] for named in values]
            both[key] = results[0] if results[0] is results[1] else name(f"#{self._next('')}")
            for each, value in zip(taken, results, strict=True) if results[0] is not results[1] else ():
                each.lines.append((str(both[key].arg), value))
        self.lines.append(Fork(condition, taken[0], taken[1], outside, dict(self.version)))
        return both

    def arm(self, function: Callable[[], Any], sizes: list[int | None]) -> dict[str, Node]:
        """The values that one arm of `cond` returns, by position; their number goes to `sizes`, None for one alone."""
        result = self.called_by(function)
        values = () if result is None else result if isinstance(result, tuple) else (result,)
        sizes.append(len(values) if result is None or isinstance(result, tuple) else None)
        return {str(position): as_traced(value) for position, value in enumerate(values)}

    def called_by(self, function: Callable[[], Any]) -> Any:
        """The result of a function of the author, with the names of its locals for their values."""
        code, frame = self.code, self.frame
        self.code, self.frame = getattr(function, "__code__", None), None
        result = function()
        self.name_locals()
        self.code, self.frame = code, frame
        return result

    def push(self, history: str, value: Node) -> None:
        """A new value of a history: every entry moves one place up, from the oldest on."""
        names = entries(history, self.counted.states[history])
        for newer, older in reversed([*pairwise(names)]):
            self.assign(older, self.read(newer).node)
        self.assign(names[0], value)

    def call(self, rule: RuleData, value: Any) -> Value:
        """The direction of `rule` for this input. Its states become states of this rule, prefixed by its key."""
        if rule.applies_to is not None:
            if self.routed == len(self.cases):
                raise CallsRouted(rule)
            rule, self.routed = self.cases[self.routed], self.routed + 1
        try:
            return self._call(rule, as_traced(value))
        except RuleError as error:
            if error.place:
                raise
            raise author_error(error.message) from None

    def _call(self, rule: RuleData, value: Node) -> Value:
        prefix, count = rule.key, 2
        while prefix in self.called:
            prefix, count = f"{rule.key}{count}", count + 1
        self.called.add(prefix)
        self.hyper = combine.unify_hyper([(self.rule_name, self.hyper), (rule.name, rule.hyper)])
        self.inputs = unify_inputs([RuleData(self.rule_name, (), inputs=self.inputs), rule])
        if rule.view and self.view not in ({}, rule.view):
            raise RuleError(
                f"{rule.name} sees tensors as other matrices than the rule called before it: their view differs"
            )
        self.view = dict(rule.view) or self.view
        inner = combine.called_states(rule, prefix)
        self.state.update(inner)
        self.version.update(dict.fromkeys(inner, 0))
        values: dict[str, Node] = {}
        self.draws, draws = self.draws + combine.count_draws(rule), self.draws
        self._inline(combine.inline(rule, prefix, value, draws), values)
        self.measured |= combine.statistics_inside(rule, prefix, value)
        return Value(values[f"{prefix}.direction"])

    def _inline(self, lines: Sequence[Statement], values: dict[str, Node]) -> dict[str, Node]:
        """Records the lines of a called rule; `values` has its local names so far, and gets the new ones."""
        for line in lines:
            known = {**{key: name(f"{key}#{version}") for key, version in self.version.items()}, **values}
            if isinstance(line, Assign):
                self._inlined(line.target, combine.replace_names(line.value, known), values)
                continue
            arms = [partial(self._inline, body, dict(values)) for body in (line.then, line.otherwise)]
            outside = {n: key for key, n in values.items() if n.op.kind is not Kind.LEAF}
            both = self.fork(combine.replace_names(line.condition, known), arms, outside)
            for key, result in both.items():
                values[key] = result
                if is_result(result):
                    self.locals.setdefault(result, key)
        return values

    def _inlined(self, target: str, value: Node, values: dict[str, Node]) -> None:
        """Records an assignment of a called rule: of a state, or of a local name."""
        if target in self.version:
            self.assign(target, value)
        else:
            values[target] = value
            if value.op.kind is not Kind.LEAF:
                self.locals.setdefault(value, target)


def is_result(value: Node) -> bool:
    """Whether the value is the result of a fork."""
    return value.op is Op.NAME and str(value.arg).startswith("#")


def _is_made(value: Node) -> bool:
    """Whether the value is made in the function: it is no argument and no number."""
    return value.op.kind is not Kind.LEAF or is_result(value)


def cond(condition: Value, then: Callable[[], Any], otherwise: Callable[[], Any]) -> Any:
    """The results of `rulec.math.cond` in a traced function."""
    trace = current.get()
    if not isinstance(trace, Trace):
        raise author_error("cond takes a traced value in the function of a rule alone")
    trace.frame = trace.frame or running_frame(trace.code)
    sizes: list[int | None] = []
    arms = [partial(trace.arm, function, sizes) for function in (then, otherwise)]
    values = trace.fork(as_traced(condition), arms, trace.values_now())
    if sizes[0] != sizes[1]:
        one, other = (_how_many(size) for size in sizes)
        raise author_error(f"the arms of cond return {one} and {other}: return as many from both")
    results = tuple(Value(value) for value in values.values())
    return results[0] if sizes[0] is None else results or None


@dataclass(frozen=True)
class _AxisPass:
    """One pass of a loop over axes: the author's function for the number of an axis and the values so far."""

    body: Callable[..., Any]
    number: int
    values: tuple[Any, ...]

    @property
    def __code__(self) -> CodeType | None:
        return getattr(self.body, "__code__", None)

    def __call__(self) -> Any:
        result = self.body(self.number, *self.values)
        results = () if result is None else result if isinstance(result, tuple) else (result,)
        if len(results) != len(self.values):
            one, other = (_how_many(len(x) if len(x) != 1 else None) for x in (self.values, results))
            raise author_error(f"over_axes gives its function {one} and gets {other} back: return as many")
        return result


def over_axes(ndim: Value, body: Callable[..., Any], values: tuple[Any, ...]) -> Any:
    """The results of `rulec.math.over_axes` in a traced function."""
    trace = current.get()
    if not isinstance(trace, Trace):
        raise author_error("over_axes takes a traced value in the function of a rule alone")
    trace.frame = trace.frame or running_frame(trace.code)
    try:
        passes = trace.dimensions.passes(0, as_traced(ndim), trace.counted.counts)
    except RuleError as error:
        raise author_error(error.message) from None
    result = _as_returned(values)
    for number, condition in passes:
        step = _AxisPass(body, number, values)
        if condition is None:
            result = trace.called_by(step)
        else:
            result = cond(Value(condition), step, partial(_as_returned, values))
        values = () if result is None else result if isinstance(result, tuple) else (result,)
    return result


def _as_returned(values: tuple[Any, ...]) -> Any:
    """Values as a function returns them: none, one, or a tuple."""
    return None if not values else values[0] if len(values) == 1 else values


def _how_many(size: int | None) -> str:
    return {None: "one value", 0: "nothing"}.get(size) or f"a tuple of {size}"


@dataclass
class Counted:
    """The lists of a traced rule.

    `lists` has the lengths of lists of hyper-parameters, `states` the lengths of lists of states, `histories` the names
    of histories. `counts` has the values of static hyper-parameters, and `counts_read` the ones in lengths, loops and
    indices.
    """

    lists: Mapping[str, int]
    counts: Mapping[str, float]
    states: dict[str, int] = field(default_factory=dict)
    histories: set[str] = field(default_factory=set)
    counts_read: set[str] = field(default_factory=set)

    @property
    def sizes(self) -> Sizes | None:
        """The lengths that the rule is written out for; None where it has none."""
        read = {key: int(self.counts[key]) for key in sorted(self.counts_read)}
        return Sizes(self.lists, read) if self.lists or read else None


class CountValue(Value):
    """A static hyper-parameter: it may be the end of a range, or an index."""

    __slots__ = ("_counted",)

    def __init__(self, node: Node, counted: Counted) -> None:
        super().__init__(node)
        self._counted = counted

    def __index__(self) -> int:
        key = str(as_traced(self).arg)
        value = self._counted.counts[key]
        if not value.is_integer():
            raise author_error(f"{key} counts something here, so it must be a whole number, not {value:g}")
        self._counted.counts_read.add(key)
        return int(value)

    __int__ = __index__


class Entries:
    """A list of states, or a history: `s.v[i]`."""

    __slots__ = ("_list", "_trace")

    def __init__(self, trace: Trace, name: str) -> None:
        self._trace, self._list = trace, name

    def __len__(self) -> int:
        return self._trace.counted.states[self._list]

    def __iter__(self) -> Iterator[Value]:
        return iter([self[index] for index in range(len(self))])

    def __getitem__(self, index: Any) -> Value:
        return self._trace.read(self._entry(index))

    def __setitem__(self, index: Any, value: Any) -> None:
        if self._list in self._trace.counted.histories:
            raise author_error(f"s.{self._list} is a history: write s.{self._list} = ... to push a value")
        self._trace.assign(self._entry(index), as_traced(value))

    def _entry(self, index: Any) -> str:
        try:
            number = operator.index(index)
        except TypeError:
            raise author_error(f"s.{self._list} has whole numbers as indices: write s.{self._list}[0]") from None
        check_trace(self._trace)
        if number not in range(len(self)):
            message = f"there is no s.{self._list}[{number}]: its entries are 0 to {len(self) - 1}"
            raise author_error(message)
        return entry(self._list, number)


class States:
    """The `s` of a traced rule: attributes are its states."""

    __slots__ = ("_trace",)

    def __init__(self, trace: Trace) -> None:
        object.__setattr__(self, "_trace", trace)

    def __getattr__(self, state: str) -> Value | Entries:
        trace = _checked(self, state)
        return Entries(trace, state) if state in trace.counted.states else trace.read(state)

    def __setattr__(self, state: str, value: Any) -> None:
        trace = _checked(self, state)
        if state not in trace.counted.states:
            trace.assign(state, as_traced(value))
        elif state in trace.counted.histories:
            trace.push(state, as_traced(value))
        else:
            raise author_error(f"s.{state} is a list: assign one entry of it, as s.{state}[0] = ...")


class Inner:
    """A wrapped rule in a traced wrapper. It is called once, and then has a parameter `p`."""

    __slots__ = ("_lines", "_name", "_trace", "called")

    def __init__(self, trace: Trace, call: str) -> None:
        self._trace = trace
        self._name = call
        self.called = False

    def __call__(self, value: Any, t: Any = None, p: Any = None) -> Value:
        """The rule's direction for this input, at its own count of updates `t` and its own parameter `p`."""
        wraps = self._name
        check_trace(self._trace)
        if self.called:
            raise author_error(f"{wraps} is called a second time, and both calls would share its states: call it once")
        self.called = True
        count, point = (
            name(key) if argument is None else as_traced(argument) for key, argument in (("t", t), ("p", p))
        )
        self._lines = self._trace.lines
        self._lines.append((wraps, node(Op.CALL, as_traced(value), count, point, wraps)))
        return Value(name(f"{wraps}.direction"))

    @property
    def p(self) -> Value:
        """The new parameter by the wrapped rule alone."""
        wraps = self._name
        check_trace(self._trace)
        if self._trace.shaped:
            raise author_error(
                f"{wraps}.p has no value: {wraps} has a shape of its own, so use the direction, {wraps}(g)"
            )
        if not self.called:
            raise author_error(f"{wraps}.p has no value here: write {wraps}(g) above this line")
        if all(lines is not self._lines for lines in (self._trace.lines, *self._trace.around)):
            raise author_error(f"{wraps}.p has no value here: write {wraps}(g) in the same arm")
        return Value(name(f"{self._name}.p"))


class At:
    """A pass in a traced rule: the gradient there is its attribute `g`."""

    __slots__ = ("g",)

    def __init__(self, key: str) -> None:
        self.g = Value(name(gradient_of(key)))


def _checked(states: States, state: str) -> Trace:
    """The trace behind `s`; RuleError where it has no state of this name."""
    trace: Trace = object.__getattribute__(states, "_trace")
    check_trace(trace)
    if state not in trace.version and state not in trace.counted.states:
        hint = did_you_mean(state, trace.version) or f": declare it as state=dict({state}=0)"
        raise author_error(f"{trace.rule_name} has no state {state!r}{hint}")
    return trace


def call_rule(rule: RuleData, value: Any) -> Any:
    """The direction of `rule` for an input traced in another rule's function."""
    trace = current.get()
    if not isinstance(trace, Trace):
        raise RuleError(
            f"{rule.name} can be called inside the function of another rule; to run it use "
            f"rulec.array.Optimizer or rulec.torch.optimizer"
        )
    return trace.call(rule, value)
