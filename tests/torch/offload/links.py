"""A link whose copies end as late as they may, and whose buffers have NaN wherever nothing may be read."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import torch
from torch import Tensor

from rulec.torch.offload import states
from rulec.torch.offload.link import HostLink, Pairs


class Stream:
    """Copies that end in their order, and none before somebody waits for it."""

    def __init__(self) -> None:
        self._copies: list[Copy] = []

    def add(self, copy: Copy) -> Copy:
        self._copies.append(copy)
        return copy

    def run(self, last: Copy) -> None:
        """Ends the copies up to one."""
        while last in self._copies:
            self._copies.pop(0).end()


class Copy:
    """A copy that is still to be made; it is an event."""

    def __init__(self, link: LateLink, stream: Stream, pairs: Pairs, upwards: bool, after: Copy | None) -> None:
        self._link, self._stream, self._pairs, self._upwards, self._after = link, stream, pairs, upwards, after

    def wait(self) -> None:
        self._stream.run(self)

    def end(self) -> None:
        if self._after is not None:
            self._after.wait()
        for into, tensor in self._pairs:
            self._link.copy(into, tensor, self._upwards)


class LateLink(HostLink):
    """The link. What the device computes is done at once, so a copy that should have been waited for is missing.

    `moved` are the bytes copied up and down, by number of copies; `memory` are the buffers in the device's memory.
    """

    def __init__(self, device: torch.device, pinned: bool = True) -> None:
        super().__init__(device, pinned)
        self.memory: list[Tensor] = []
        self.moved = {"up": 0, "down": 0}
        self._up, self._down = Stream(), Stream()

    def device_memory(self, count: int) -> Tensor:
        memory = super().device_memory(count)
        self.memory.append(memory.fill_(255))
        return memory

    def copy(self, into: Tensor, tensor: Tensor, upwards: bool) -> None:
        assert self._is_here(into) == upwards
        assert self._is_here(tensor) != upwards
        self.moved["up" if upwards else "down"] += into.numel() * into.element_size()
        into.copy_(tensor)
        if not upwards:  # nobody may read it any more
            tensor.detach().as_strided((tensor.numel(),), (1,)).view(torch.uint8).fill_(255)

    def _is_here(self, tensor: Tensor) -> bool:
        """Whether a tensor lies in a buffer of the device."""
        return any(tensor.untyped_storage().data_ptr() == m.untyped_storage().data_ptr() for m in self.memory)

    def up(self, pairs: Pairs, after: Any = None) -> Any:
        return self._up.add(Copy(self, self._up, pairs, True, after))

    def down(self, pairs: Pairs) -> Any:
        return self._down.add(Copy(self, self._down, pairs, False, None))

    def hold(self, event: Any) -> None:
        event.wait()


@contextmanager
def late_links() -> Iterator[list[LateLink]]:
    """A block in which such links are made; they are in the list."""
    links: list[LateLink] = []

    def make(device: torch.device, pinned: bool = True) -> LateLink:
        links.append(LateLink(device, pinned))
        return links[-1]

    with mock.patch.object(states, "link_of", make):
        yield links
