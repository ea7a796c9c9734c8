"""The trace of a rule written in Python: its assignments, the rules it calls, and the lines of the step from them."""

from __future__ import annotations

import operator
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from types import CodeType, FrameType
from typing import Any

from rulec.errors import RuleError
from rulec.language import compose
from rulec.language.author import author_error
from rulec.language.cases import unify_inputs
from rulec.language.compose import free_name
from rulec.language.names import BASE_NAMES, CONSTANTS, ascii_spelling, name_problem
from rulec.language.node import Kind, Node, Op, name, node, rewrite, walk
from rulec.language.passes import gradient_of
from rulec.language.rule import Assign, Hyper, Pass, Rule, State, Statement, assignments
from rulec.language.sizes import Sizes, entries, entry
from rulec.language.source import did_you_mean
from rulec.language.value import Value, as_traced, current


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
        self.inputs: dict[str, str] = {}
        self.view: dict[str, str] = {}
        self.lines: list[tuple[str, Node]] = []
        self.version: dict[str, int] = dict.fromkeys(state, 0)
        self.locals: dict[Node, str] = {}
        self.called: set[str] = set()
        self.draws = 0
        self.code = code
        self.frame: FrameType | None = None

    def name_locals(self) -> None:
        """Adds the function's local names for traced values, as they were when it returned."""
        for key, value in self.frame.f_locals.items() if self.frame is not None else ():
            if isinstance(value, Value) and value.node.op.kind is not Kind.LEAF:
                self.locals.setdefault(value.node, key)
        self.frame = None

    def read(self, state: str) -> Value:
        """The state's value now."""
        return Value(name(f"{state}#{self.version[state]}"))

    def assign(self, state: str, value: Node) -> None:
        """The state's new value."""
        self.version[state] += 1
        self.lines.append((f"{state}#{self.version[state]}", value))

    def push(self, history: str, value: Node) -> None:
        """A new value of a history: every entry moves one place up, from the oldest on."""
        names = entries(history, self.counted.states[history])
        for newer, older in reversed([*pairwise(names)]):
            self.assign(older, self.read(newer).node)
        self.assign(names[0], value)

    def call(self, rule: Rule, value: Any) -> Value:
        """The direction of `rule` for this input. Its states become states of this rule, prefixed by its key."""
        try:
            return self._call(rule, as_traced(value))
        except RuleError as error:
            if error.place:
                raise
            raise author_error(error.message) from None

    def _call(self, rule: Rule, value: Node) -> Value:
        prefix, count = rule.key, 2
        while prefix in self.called:
            prefix, count = f"{rule.key}{count}", count + 1
        self.called.add(prefix)
        if any(state.condition is not None for state in rule.state.values()):
            raise RuleError(f"{rule.name} keeps states for some shapes only: call it in a rule file, under uses")
        self.hyper = compose.unify_hyper([(self.rule_name, self.hyper), (rule.name, rule.hyper)])
        self.inputs = unify_inputs([Rule(self.rule_name, (), inputs=self.inputs), rule])
        if rule.view and self.view not in ({}, rule.view):
            raise RuleError(
                f"{rule.name} sees tensors as other matrices than the rule called before it: their view differs"
            )
        self.view = dict(rule.view) or self.view
        inner = compose.called_states(rule, prefix)
        self.state.update(inner)
        self.version.update(dict.fromkeys(inner, 0))
        values: dict[str, Node] = {}
        self.draws, draws = self.draws + compose.count_draws(rule), self.draws
        for line in compose.inline(rule, prefix, value, draws):
            states = {key: name(f"{key}#{version}") for key, version in self.version.items()}
            known = {**states, **values}
            after = _after([line], known)
            for target in dict.fromkeys(a.target for a in assignments((line,))):
                if target in after and after[target] is not known.get(target):
                    self._inlined(target, after[target], values)
        return Value(values[f"{prefix}.direction"])

    def _inlined(self, target: str, value: Node, values: dict[str, Node]) -> None:
        """Records an assignment of a called rule: of a state, or of a local name."""
        if target in self.version:
            self.assign(target, value)
        else:
            values[target] = value
            if value.op.kind is not Kind.LEAF:
                self.locals.setdefault(value, target)


def _after(step: Sequence[Statement], known: Mapping[str, Node]) -> dict[str, Node]:
    """The value of every name after some lines, over the values `known` before them; branches become `where`."""
    values = dict(known)
    for line in step:
        if isinstance(line, Assign):
            values[line.target] = compose.replace_names(line.value, values)
            continue
        condition = compose.replace_names(line.condition, values)
        then, otherwise = _after(line.then, values), _after(line.otherwise, values)
        for key in then.keys() & otherwise.keys():
            same = then[key] is otherwise[key]
            values[key] = then[key] if same else node(Op.WHERE, condition, then[key], otherwise[key])
    return values


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
        key = str(self.node.arg)
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

    __slots__ = ("_name", "_trace", "called")

    def __init__(self, trace: Trace, call: str) -> None:
        self._trace = trace
        self._name = call
        self.called = False

    def __call__(self, value: Any, t: Any = None, p: Any = None) -> Value:
        """The rule's direction for this input, at its own count of updates `t` and its own parameter `p`."""
        wraps = self._name
        if self.called:
            raise author_error(f"{wraps} is called a second time, and both calls would share its states: call it once")
        self.called = True
        count, point = (
            name(key) if argument is None else as_traced(argument) for key, argument in (("t", t), ("p", p))
        )
        self._trace.lines.append((wraps, node(Op.CALL, as_traced(value), count, point, wraps)))
        return Value(name(f"{wraps}.direction"))

    @property
    def p(self) -> Value:
        """The new parameter by the wrapped rule alone."""
        if not self.called:
            wraps = self._name
            raise author_error(f"{wraps}.p has no value here: write {wraps}(g) above this line")
        return Value(name(f"{self._name}.p"))


class At:
    """A pass in a traced rule: the gradient there is its attribute `g`."""

    __slots__ = ("g",)

    def __init__(self, key: str) -> None:
        self.g = Value(name(gradient_of(key)))


def _checked(states: States, state: str) -> Trace:
    """The trace behind `s`; RuleError where it has no state of this name."""
    trace: Trace = object.__getattribute__(states, "_trace")
    if state not in trace.version and state not in trace.counted.states:
        hint = did_you_mean(state, trace.version) or f": declare it as state=dict({state}=0)"
        raise author_error(f"{trace.rule_name} has no state {state!r}{hint}")
    return trace


def call_rule(rule: Rule, value: Any) -> Any:
    """The direction of `rule` for an input traced in another rule's function."""
    trace = current.get()
    if not isinstance(trace, Trace):
        raise RuleError(
            f"{rule.name} can be called inside the function of another rule; to run it use "
            f"rulec.array.Optimizer or rulec.torch.optimizer"
        )
    return trace.call(rule, value)


#: A value without a name gets one where its text in full has more nodes than `_HUGE`, or more than `_LARGE` and it is
#: used in several places, or where it is deeper than `_DEEP`.
_LARGE, _HUGE, _DEEP = 12, 500, 60


class Lines:
    """Turns a trace into the lines of a step: named values get lines, and old values of states are kept for later."""

    def __init__(self, trace: Trace) -> None:
        self.trace = trace
        self.taken = {*trace.state, *trace.hyper, *trace.inputs, *BASE_NAMES, *CONSTANTS, "s", "lr", "direction"}
        self.taken |= {*trace.wraps, *trace.passes, *map(gradient_of, trace.passes)}
        self.local = {n: self._free(key) for n, key in trace.locals.items()}
        self._name_large([value for _, value in trace.lines])
        self.old: dict[Node, str] = {}
        self.done: dict[Node, str] = {}
        self.out: list[Statement] = []
        self.current = dict.fromkeys(trace.state, 0)

    def _free(self, wanted: str) -> str:
        if name_problem(wanted):
            wanted = ascii_spelling(wanted[:60]) or "x"
        free = free_name(wanted, self.taken)
        self.taken.add(free)
        return free

    def _name_large(self, roots: Sequence[Node]) -> None:
        """Gives names to values that would be written out many times, or nested too deeply to read."""
        uses: dict[Node, int] = {}
        order = list(walk(roots))
        for used in [*roots, *(arg for part in order for arg in part.args)]:
            uses[used] = uses.get(used, 0) + 1
        depth: dict[Node, int] = {}
        size: dict[Node, int] = {}
        for part in order:
            depth[part] = 1 + max((depth[a] for a in part.args), default=0)
            size[part] = 1 + sum(size[a] for a in part.args)
            large = size[part] > (_LARGE if uses[part] > 1 else _HUGE)
            if part not in self.local and (large or depth[part] > _DEEP):
                self.local[part] = self._free(f"x{len(self.local) + 1}")
            if part in self.local:
                depth[part] = size[part] = 1

    def statements(self) -> list[Statement]:
        """The lines in order; each state is assigned as often as in the function."""
        for position, (target, value) in enumerate(self.trace.lines):
            self._name_locals(value)
            state, _, version = target.partition("#")
            if version:
                self._keep_old(state, value, [v for _, v in self.trace.lines[position + 1 :]])
            self.out.append(Assign(state, self._named(value)))
            if version:
                self.current[state] = int(version)
                # The state's own name is now the shortest text of its value, until it is assigned again.
                self.done = {n: text for n, text in self.done.items() if text != state}
                if value.op.kind is not Kind.LEAF:
                    self.done.setdefault(value, state)
        return self.out

    def _name_locals(self, value: Node) -> None:
        for part in walk([value]):
            if part in self.done or part not in self.local:
                continue
            # A called rule's line keeps its prefix even where its value is the whole right side: it may mention lr.
            if part is not value or "." in self.local[part]:
                self.out.append(Assign(self.local[part], self._named(part)))
                self.done[part] = self.local[part]

    def _named(self, value: Node) -> Node:
        """`value` with locals by name, and states by name or by the name of their saved old value."""

        def change(n: Node) -> Node:
            if n.op is not Op.NAME or "#" not in str(n.arg):
                return n
            state, _, version = str(n.arg).partition("#")
            return name(state if int(version) == self.current[state] else self.old[n])

        memo = {part: name(text) for part, text in self.done.items()}
        return rewrite([value], change, memo)[0]

    def _keep_old(self, state: str, new: Node, later: Iterable[Node]) -> None:
        """Saves the value of `state` under a local name where a later line still reads it."""
        old = name(f"{state}#{self.current[state]}")
        lasting = {n for n, text in self.done.items() if self._lasts(text, self.current)}
        if new.op.kind is not Kind.LEAF and self._lasts(state, {state: self.current[state] + 1}):
            lasting.add(new)
        if any(part is old for part in walk(later, lasting)):
            self.old[old] = self._free(f"{state}_old")
            self.out.append(Assign(self.old[old], name(state)))

    def _lasts(self, text: str, current: Mapping[str, int]) -> bool:
        """Whether a name keeps its value to the end: a local, or a state that is not assigned again."""
        return text not in self.trace.version or current[text] == self.trace.version[text]
