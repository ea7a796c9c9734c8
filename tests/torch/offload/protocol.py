"""The requests and waits of a step on the host, by its documentation, and the number of their orders.

It knows nothing of the code: a list of requests and waits, made of the turns of launches and the sizes of rings.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cache

#: A piece of work: its stream and its number there.
Work = tuple[str, int]

STREAMS = ("compute", "down", "up")


@dataclass
class Protocol:
    """Steps of launches with these turns, in the order of `runs`. A launch writes its weights in its last run.

    `reads` says that weights are copied down too, and `buffers` is the number of buffers of weights. A launch moves in
    `pieces` where these are above 1.
    """

    turns: Sequence[int]
    reads: bool
    buffers: int
    runs: Sequence[int]
    pieces: Sequence[int] = ()
    #: Each is a request, with the work that it waits for, or the host's wait for work.
    actions: list[tuple[str, Work, tuple[Work, ...]]] = field(default_factory=list)
    _asked: dict[str, int] = field(default_factory=lambda: dict.fromkeys(STREAMS, 0))
    #: The owner of a buffer, and the work after which another may have it; work before the first is number -1.
    _held: dict[tuple[str, int], tuple[int | None, Work | None]] = field(default_factory=dict)

    def ask(self, stream: str, after: tuple[Work, ...] = ()) -> Work:
        """Asks a stream for work."""
        work = stream, self._asked[stream]
        self._asked[stream] += 1
        self.actions.append(("ask", work, after))
        return work

    def step(self, held: tuple[Work, ...]) -> Work:
        """A step after computing, which waits for the last copy up of the step before. Returns its own last."""
        computed = self.ask("compute", held)
        begun: dict[int, Work] = {}
        last, left = computed, [*self.runs]
        while left:
            k = left.pop(0)
            if self._in_pieces(k):
                last = self._move_pieces(k, computed)
                continue
            self._begin(begun, k, computed)
            self._wait(begun.pop(k))
            if not self.reads:
                self._claim("weights", self.turns[k], k)
            following = k + 1
            if following < len(self.turns) and self._may_begin(k, following) and following in left:
                self._begin(begun, following, computed)
            up = None if k in left else self.ask("up")
            last = up or last
            self._give("gradients", self.turns[k], None, None)
            self._give("weights", self.turns[k], None, up)
        return last

    def _begin(self, begun: dict[int, Work], k: int, computed: Work) -> None:
        """Copies the tensors of a launch down, unless they are in their buffers."""
        if k not in begun or any(self._held[self._buffer(ring, self.turns[k])][0] != k for ring in self._rings):
            begun[k] = self._down(self.turns[k], k, computed)

    @property
    def _rings(self) -> tuple[str, ...]:
        return ("gradients", "weights") if self.reads else ("gradients",)

    def _in_pieces(self, k: int) -> bool:
        return bool(self.pieces) and self.pieces[k] > 1

    def _may_begin(self, k: int, following: int) -> bool:
        apart = all(self.turns[k] % count != self.turns[following] % count for count in (2, self.buffers))
        return apart and not self._in_pieces(following)

    def _move_pieces(self, launch: int, computed: Work) -> Work:
        count = self.pieces[launch]
        arriving = [self._down(0, launch, computed)]
        for k in range(count):
            if k + 1 < count:
                arriving.append(self._down(k + 1, launch, computed))
            self._wait(arriving[k])
            if not self.reads:
                self._claim("weights", k, launch)
            last = self.ask("up")
            self._give("gradients", k, None, None)
            self._give("weights", k, None, last)
        return last

    def _wait(self, work: Work | None) -> None:
        if work is not None:
            self.actions.append(("wait", work, ()))

    def _down(self, turn: int, launch: int, computed: Work) -> Work:
        for ring in self._rings:
            self._claim(ring, turn, launch)
        work = self.ask("down", (computed,))
        for ring in self._rings:
            self._give(ring, turn, launch, work)
        return work

    def _buffer(self, ring: str, turn: int) -> tuple[str, int]:
        return ring, turn % (2 if ring == "gradients" else self.buffers)

    def _claim(self, ring: str, turn: int, launch: int) -> None:
        """Takes a buffer, once the work of its last owner has ended."""
        owner, work = self._held.get(self._buffer(ring, turn), (None, None))
        if owner != launch:
            self._wait(work)
            self._give(ring, turn, launch, None)

    def _give(self, ring: str, turn: int, launch: int | None, work: Work | None) -> None:
        self._held[self._buffer(ring, turn)] = launch, work

    def orders(self, steps: int) -> int:
        """The number of orders of so many steps after two earlier ones, whose work has ended."""
        held: tuple[Work, ...] = ()
        for _ in range(2):
            held = (self.step(held),)
        first, self.actions = self._asked, []
        self._asked = dict.fromkeys(STREAMS, 0)
        self._held = {
            buffer: (owner, work and (work[0], work[1] - first[work[0]]))
            for buffer, (owner, work) in self._held.items()
        }
        held = ()
        for _ in range(steps):
            held = (self.step(held),)
        return _count(self.actions)


def _count(actions: Sequence[tuple[str, Work, tuple[Work, ...]]]) -> int:
    after = {work: needs for kind, work, needs in actions if kind == "ask"}

    def ended(work: Work, at: tuple[int, ...]) -> bool:
        return work[1] < at[STREAMS.index(work[0])]

    @cache
    def ways(done: int, asked: tuple[int, ...], at: tuple[int, ...]) -> int:
        total = int(done == len(actions) and asked == at)
        for stream, name in enumerate(STREAMS):
            if at[stream] < asked[stream] and all(ended(work, at) for work in after[name, at[stream]]):
                total += ways(done, asked, (*at[:stream], at[stream] + 1, *at[stream + 1 :]))
        if done < len(actions):
            kind, work, _ = actions[done]
            if kind == "ask":
                stream = STREAMS.index(work[0])
                total += ways(done + 1, (*asked[:stream], asked[stream] + 1, *asked[stream + 1 :]), at)
            elif ended(work, at):
                total += ways(done + 1, asked, at)
        return total

    return ways(0, (0, 0, 0), (0, 0, 0))
