"""From the trace of a Python rule to the lines of a step."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from rulec.language.compose import free_name
from rulec.language.names import BASE_NAMES, CONSTANTS, ascii_spelling, name_problem
from rulec.language.node import Kind, Node, Op, name, rewrite, walk
from rulec.language.rule import Assign, Statement
from rulec.language.trace import Trace

#: A value without a name gets one where its text in full has more nodes than `_HUGE`, or more than `_LARGE` and it is
#: used in several places, or where it is deeper than `_DEEP`.
_LARGE, _HUGE, _DEEP = 12, 500, 60


class Lines:
    """Turns a trace into the lines of a step: named values get lines, and old values of states are kept for later."""

    def __init__(self, trace: Trace) -> None:
        self.trace = trace
        self.taken = {*trace.state, *trace.hyper, *trace.inputs, *BASE_NAMES, *CONSTANTS, "s", "lr", "direction"}
        self.taken |= {trace.wraps} - {""}
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
