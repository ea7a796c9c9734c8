"""The lines of a step from the trace of a rule written in Python."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from rulec.errors import RuleError
from rulec.language.compose.combine import free_name
from rulec.language.evaluations import gradient_of
from rulec.language.expr.names import BASE_NAMES, CONSTANTS, ascii_spelling, name_problem
from rulec.language.expr.node import Kind, Node, Op, name, node, rewrite, walk
from rulec.language.rule_data import Assign, Branch, Statement
from rulec.language.tracing.trace import Arm, Fork, Trace, is_result

#: A value without a name gets one where its text in full has more nodes than `_HUGE`, or more than `_LARGE` and it is
#: used in several places, or where it is deeper than `_DEEP`.
_LARGE, _HUGE, _DEEP = 12, 500, 60

_Line = tuple[str, Node] | Fork


def _values(lines: Sequence[_Line]) -> Iterator[Node]:
    """Every value of the lines, also inside forks."""
    for line in lines:
        if isinstance(line, Fork):
            yield line.condition
            yield from _values(line.then.lines)
            yield from _values(line.otherwise.lines)
        else:
            yield line[1]


def _results(lines: Sequence[_Line]) -> Iterator[Node]:
    """The results of every fork in the lines."""
    for line in lines:
        if isinstance(line, Fork):
            yield from (name(each[0]) for each in line.then.lines if isinstance(each, tuple) and each[0][0] == "#")
            yield from _results(line.then.lines)
            yield from _results(line.otherwise.lines)


class Lines:
    """Turns a trace into the lines of a step: named values get lines, and old values of states are kept for later."""

    def __init__(self, trace: Trace) -> None:
        self.trace = trace
        self.taken = {*trace.state, *trace.hyper, *trace.inputs, *BASE_NAMES, *CONSTANTS, "s", "lr", "direction"}
        self.taken |= {*trace.wraps, *trace.passes, *map(gradient_of, trace.passes)}
        results = [*_results(trace.lines)]
        named = sorted(trace.locals, key=lambda n: not is_result(n))
        self.local = {n: self._free(trace.locals[n]) for n in named}
        for each in results:
            if each not in self.local:
                self.local[each] = self._free(f"x{len(self.local) + 1}")
        self._name_large([*_values(trace.lines)])
        #: The version of each state at the end of the lines: of the whole step, or of an arm.
        self.last: Mapping[str, int] = trace.version
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
        self._block(self.trace.lines)
        return self.out

    def _block(self, lines: Sequence[_Line]) -> None:
        for position, line in enumerate(lines):
            later = [*_values(lines[position + 1 :])]
            if isinstance(line, Fork):
                self._fork(line, later)
            else:
                self._assign(*line, later)

    def _assign(self, target: str, value: Node, later: Sequence[Node]) -> None:
        self._name_locals(value)
        state, _, version = target.partition("#")
        if not state:  # a result of a fork
            text = self.local[name(target)]
            if self.done.get(value) != text:
                self.out.append(Assign(text, self._named(value)))
            if value.op.kind is not Kind.LEAF:
                self.done.setdefault(value, text)
            return
        if version:
            lasting = value.op.kind is not Kind.LEAF and self._lasts(state, {state: int(version)})
            self._keep_old(state, later, {value} if lasting else set())
        self.out.append(Assign(state, self._named(value)))
        if version:
            self.current[state] = int(version)
            # The state's own name is now the shortest text of its value, until it is assigned again.
            self.done = {n: text for n, text in self.done.items() if text != state}
            if value.op.kind is not Kind.LEAF:
                self.done.setdefault(value, state)

    def _fork(self, fork: Fork, later: Sequence[Node]) -> None:
        """The lines of an `if`, after the values that an arm takes from the function around it."""
        inside = {*walk([*_values([fork])])}
        for value, wanted in fork.outside.items():
            if value in inside and value not in self.done and not is_result(value):
                if value not in self.local:
                    self.local[value] = self._free(wanted)
                self._name_locals(value)
                if value not in self.done:
                    self.out.append(Assign(self.local[value], self._named(value)))
                    self.done[value] = self.local[value]
        self._name_locals(fork.condition)
        changed = [state for state, version in fork.version.items() if version != self.current[state]]
        for state in changed:
            self._keep_old(state, later, set())
        condition = self._named(fork.condition)
        then, otherwise = self._arm(fork.then), self._arm(fork.otherwise)
        if then:
            self.out.append(Branch(condition, then, otherwise))
        elif otherwise:
            self.out.append(Branch(node(Op.NOT, condition), otherwise))
        self.current |= {state: fork.version[state] for state in changed}
        self.done = {n: text for n, text in self.done.items() if text not in changed}

    def _arm(self, arm: Arm) -> tuple[Statement, ...]:
        """The lines of one arm. Its names have no value after it, except for states and results."""
        outer = self.out, self.last, self.done, self.old, self.current, self.local
        self.out, self.last = [], arm.version
        self.done, self.old = dict(self.done), dict(self.old)
        self.current, self.local = dict(self.current), dict(self.local)
        for line in arm.lines:
            # A value that an arm returns has the name of the result from the beginning.
            if isinstance(line, Fork) or line[0][0] != "#" or line[1].op.kind is Kind.LEAF:
                continue
            if "." not in self.local.get(line[1], ""):
                self.local[line[1]] = self.local[name(line[0])]
        self._block(arm.lines)
        inner = tuple(self.out)
        self.out, self.last, self.done, self.old, self.current, self.local = outer
        return inner

    def _name_locals(self, value: Node) -> None:
        for part in walk([value]):
            if part in self.done or part not in self.local or is_result(part):
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
            if not state:
                return name(self.local[n])
            if int(version) != self.current[state] and n not in self.old:
                raise RuleError(
                    f"a value of {state} in one arm of cond is read outside of it: return it from both arms"
                )
            return name(state if int(version) == self.current[state] else self.old[n])

        memo = {part: name(text) for part, text in self.done.items()}
        return rewrite([value], change, memo)[0]

    def _keep_old(self, state: str, later: Sequence[Node], lasting: set[Node]) -> None:
        """Saves the value of `state` under a local name where a later line still reads it."""
        old = name(f"{state}#{self.current[state]}")
        lasting |= {n for n, text in self.done.items() if self._lasts(text, self.current)}
        if old not in self.old and any(part is old for part in walk(later, lasting)):
            self.old[old] = self._free(f"{state}_old")
            self.out.append(Assign(self.old[old], name(state)))

    def _lasts(self, text: str, current: Mapping[str, int]) -> bool:
        """Whether a name keeps its value to the end: a local, or a state that is not assigned again."""
        return text not in self.trace.version or current[text] == self.last.get(text, 0)
