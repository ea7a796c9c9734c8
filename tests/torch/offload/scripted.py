"""A scripted device: copies and computing end when a choice says so, in every order that streams allow.

Work is asked of a stream and ends later. Work of one stream ends in its order, and after all that it waits for. Before
each request and each wait of the host some work may end: a choice function takes one of the possibilities, so a test
can take them all. Work poisons its destination until its end, and reads its sources only then. It
raises Race where a source, or what is written, was written by somebody else meanwhile.

Tensors of the device are tensors on the CPU here.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from unittest import mock

import torch
from torch import Tensor
from torch.autograd.graph import increment_version

from rulec.torch.offload import link
from rulec.torch.offload.link import Link, Pairs, transfer_error

#: Takes one of so many possibilities, by its number.
Choose = Callable[[int], int]


class Race(BaseException):
    """Memory was written while a copy, or work of the device, read or wrote it. No step makes another error of it."""


def latest(count: int) -> int:
    """The choice in which work ends as late as it may."""
    return 0


@dataclass(eq=False)
class Work:
    """Work of a stream: it writes `writes` from `reads` by `do` once all work in `after` has ended.

    `do` finds the tensors in `both` as they were at its start, and writes them in place.
    """

    name: str
    reads: Sequence[Tensor]
    writes: Sequence[Tensor]
    do: Callable[[], None]
    after: tuple[Work, ...]
    ended: bool = False
    started: bool = False
    broken: bool = False
    seen: list[Tensor] | None = None
    both: Sequence[Tensor] = ()
    kept: list[Tensor] = field(default_factory=list)

    @property
    def may_start(self) -> bool:
        """Whether all that it waits for has ended."""
        return all(work.ended for work in self.after)

    def look(self) -> None:
        """Remembers its sources: nobody may write them until its end."""
        if self.seen is None:
            self.seen = [tensor.clone() for tensor in self.reads]

    def start(self) -> None:
        """Begins: what it writes is poison from now on."""
        if not self.started:
            self.started = True
            self.look()
            self.kept = [tensor.clone() for tensor in self.both]
            for tensor in (*self.writes, *self.both):
                poison(tensor)

    def end(self) -> None:
        """Ends; a broken one leaves the poison."""
        assert self.seen is not None
        for was, tensor in zip(self.seen, self.reads, strict=True):
            if not same_bits(was, tensor):
                raise Race(f"{self.name}: a source was written before it had ended")
        if not all(map(is_poison, (*self.writes, *self.both))):
            raise Race(f"{self.name}: somebody else wrote its destination before it had ended")
        for tensor, was in zip(self.both, self.kept, strict=True):
            tensor.copy_(was)
        if not self.broken:
            self.do()
        self.ended, self.seen, self.after = True, None, ()


def poison(tensor: Tensor) -> None:
    """Fills a tensor with NaN; one of whole numbers with a pattern."""
    tensor.fill_(torch.nan if tensor.is_floating_point() else 0x5A)


def is_poison(tensor: Tensor) -> bool:
    """Whether a tensor is as `poison` leaves it."""
    return bool((tensor.isnan() if tensor.is_floating_point() else tensor == 0x5A).all())


def same_bits(one: Tensor, other: Tensor) -> bool:
    """Whether two tensors have the same numbers; NaN is equal to NaN."""
    return torch.equal(one.nan_to_num(), other.nan_to_num()) and torch.equal(one.isnan(), other.isnan())


@dataclass(eq=False)
class Stream:
    """Work that ends in its order. What is asked of it later waits for `held`, too."""

    name: str
    script: Device
    queue: deque[Work] = field(default_factory=deque)
    device: str = "the device"
    last: tuple[Work, ...] = ()
    held: tuple[Work, ...] = ()

    @property
    def content(self) -> tuple[Work, ...]:
        """The work to wait for where all work of the stream so far must have ended."""
        return self.last + self.held

    # As torch's streams

    def synchronize(self) -> None:
        """Has the host wait for all that it has been given."""
        self.script.wait(self.content)

    def wait_event(self, event: CudaEvent) -> None:
        """What is asked of it later waits for an event."""
        self.held += event.works


class Device:
    """A device: a stream that computes, and others. `choose` decides what ends next."""

    def __init__(self, choose: Choose = latest) -> None:
        self.choose = choose
        self.streams: list[Stream] = []
        self.computing = self.stream("compute")
        #: The number of waits of the host so far, and those that KeyboardInterrupt ends.
        self.waits, self.interrupted_waits = 0, range(0)
        #: The number of copies so far, the one that breaks, and the one that is refused when it is asked for.
        self.copies, self.broken_copy, self.refused_copy = 0, -1, -1
        #: Whether the host may use memory of its own at any time; else copies alone use it in a step.
        self.reads_ahead = True

    def stream(self, name: str) -> Stream:
        """A new stream."""
        self.streams.append(Stream(name, self))
        return self.streams[-1]

    def ask(
        self, stream: Stream, name: str, reads: Sequence[Tensor], writes: Sequence[Tensor], do: Callable[[], None],
        after: tuple[Work, ...] = (), both: Sequence[Tensor] = (),
    ) -> Work:  # fmt: skip
        """Asks a stream for work, which waits for `after`."""
        self._go_on()
        work = Work(name, [x.data for x in reads], [x.data for x in writes], do, stream.content + after)
        work.both = [x.data for x in both]
        stream.queue.append(work)
        stream.last, stream.held = (work,), ()
        self._start()
        return work

    def copy(self, stream: Stream, pairs: Pairs, after: tuple[Work, ...] = ()) -> Work:
        """Asks the stream `down` or `up` for copies.

        The host may write nothing of the source of a copy up from now on, and read nothing of what a copy down writes.
        """
        number, self.copies = self.copies, self.copies + 1
        if number == self.refused_copy:
            raise RuntimeError("CUDA error: refused")
        alone = [(into.data, tensor.data) for into, tensor in pairs]

        def do() -> None:
            for into, tensor in alone:
                into.copy_(tensor)

        name = f"copy {number} ({stream.name})"
        work = self.ask(stream, name, [x for _, x in alone], [x for x, _ in alone], do, after)
        work.broken = number == self.broken_copy
        if not self.reads_ahead:
            pass
        elif stream.name == "up":
            work.look()
        elif not work.started:
            for into, _ in alone:
                poison(into)
        increment_version([into for into, _ in pairs])
        return work

    def compute(
        self, reads: Sequence[Tensor], writes: Sequence[Tensor], do: Callable[[], None], both: Sequence[Tensor] = ()
    ) -> Work:
        """Asks the stream that computes for work."""
        return self.ask(self.computing, "compute", reads, writes, do, both=both)

    def wait(self, works: Sequence[Work]) -> None:
        """Has the host wait for work. KeyboardInterrupt where a test asked for it, before the work has ended."""
        number, self.waits = self.waits, self.waits + 1
        if number in self.interrupted_waits:
            raise KeyboardInterrupt
        self._go_on(works)

    def drain(self) -> None:
        """Has all work end, in an order of choice."""
        self._go_on([work for stream in self.streams for work in stream.queue])

    @property
    def in_flight(self) -> list[str]:
        """The work that has not ended."""
        return [work.name for stream in self.streams for work in stream.queue]

    def _go_on(self, until: Sequence[Work] = ()) -> None:
        """Ends work by choice, at least all of `until`."""
        while True:
            ready = [stream for stream in self.streams if stream.queue and stream.queue[0].may_start]
            stops = all(work.ended for work in until)
            count = stops + len(ready)
            assert count, "a wait that never ends"
            choice = self.choose(count) if count > 1 else 0
            if stops and not choice:
                return
            stream = ready[choice - stops]
            stream.queue[0].end()
            stream.queue.popleft()
            self._start()

    def _start(self) -> None:
        for stream in self.streams:
            if stream.queue and stream.queue[0].may_start:
                stream.queue[0].start()


class ScriptedEvent:
    """The end of some work."""

    def __init__(self, device: Device, works: tuple[Work, ...]) -> None:
        self.device, self.works = device, works

    def wait(self) -> None:
        """Has the host wait for it."""
        self.device.wait(self.works)
        for work in self.works:
            if work.broken:
                raise transfer_error(work.name, "the device", RuntimeError("CUDA error: broken"))

    def over(self) -> bool:
        """Whether it has come."""
        return all(work.ended for work in self.works)


class ScriptedLink(Link):
    """The link of a scripted device: a stream for each direction beside the one that computes."""

    def __init__(self, script: Device) -> None:
        super().__init__(torch.device("cpu"))
        self.script = script
        self._down, self._up = script.stream("down"), script.stream("up")

    def host_memory(self, count: int) -> Tensor:
        return torch.empty(count, dtype=torch.uint8)

    def device_memory(self, count: int) -> Tensor:
        return torch.full((count,), 0x7F, dtype=torch.uint8)

    def down(self, pairs: Pairs) -> ScriptedEvent:
        after = self.script.computing.content
        return self._event(self._down, pairs, after)

    def up(self, pairs: Pairs, after: object = None) -> ScriptedEvent:
        works = after.works if isinstance(after, ScriptedEvent) else ()
        return self._event(self._up, pairs, works)

    def hold(self, event: object) -> None:
        if isinstance(event, ScriptedEvent):
            self.script.computing.held += event.works

    def _event(self, stream: Stream, pairs: Pairs, after: tuple[Work, ...]) -> ScriptedEvent:
        try:
            return ScriptedEvent(self.script, (self.script.copy(stream, pairs, after),))
        except RuntimeError as error:
            raise transfer_error(stream.name, "the device", error) from error


class CudaEvent:
    """An event as torch's."""

    def __init__(self, script: Device) -> None:
        self.script = script
        self.works: tuple[Work, ...] = ()

    def record(self, stream: Stream) -> None:
        """Takes what the stream has been given so far."""
        self.works = stream.content

    def synchronize(self) -> None:
        """Has the host wait for it. RuntimeError where a copy broke off."""
        self.script.wait(self.works)
        if any(work.broken for work in self.works):
            raise RuntimeError("CUDA error: broken")


class ScriptedCuda:
    """What `torch.cuda` has of streams and events, for a scripted device, in a block."""

    def __init__(self, script: Device) -> None:
        self.script = script
        self._current: Stream = script.computing
        self._names = iter(("down", "up"))

    @contextmanager
    def planted(self) -> Iterator[None]:
        """A block in which `torch.cuda` is this, and `CudaLink` copies by it."""
        with ExitStack() as stack:
            for name, value in {
                "Event": lambda blocking: CudaEvent(self.script),
                "Stream": lambda device: self.script.stream(next(self._names)),
                "stream": self._on,
                "current_stream": lambda device: self._current,
            }.items():
                stack.enter_context(mock.patch.object(torch.cuda, name, value))
            stack.enter_context(mock.patch.object(link, "_copy", self._copy))
            yield

    @contextmanager
    def _on(self, stream: Stream) -> Iterator[None]:
        before, self._current = self._current, stream
        try:
            yield
        finally:
            self._current = before

    def _copy(self, pairs: Pairs, non_blocking: bool) -> None:
        self.script.copy(self._current, pairs)


def orders(run: Callable[[Choose], None]) -> int:
    """Runs a case once for each sequence of choices, depth first; their number."""
    path: list[list[int]] = []
    count = 0
    while True:
        at = iter(range(len(path)))

        def choose(possible: int, at: Iterator[int] = at) -> int:
            place = next(at, None)
            if place is None:
                path.append([0, possible])
                return 0
            assert path[place][1] == possible, "the case is another one in each run"
            return path[place][0]

        run(choose)
        count += 1
        while path and path[-1][0] + 1 == path[-1][1]:
            path.pop()
        if not path:
            return count
        path[-1][0] += 1


@contextmanager
def chosen(device: Device, choose: Choose) -> Iterator[None]:
    """A block with these choices. All work has ended after it."""
    device.choose = choose
    try:
        yield
        device.drain()
    finally:
        device.choose = latest
