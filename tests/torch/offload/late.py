"""Links for tests: one that counts bytes, and makes each copy as late as it may be made."""

from __future__ import annotations

from collections import deque
from threading import RLock, current_thread, main_thread

import torch
from torch.autograd.graph import increment_version
from torch.utils._python_dispatch import _disable_current_modes

from rulec.torch.offload.link import Event, HostLink, Pairs
from rulec.torch.offload.ring import bytes_of


class _Copies:
    """The copies of one direction, made in their order when somebody waits for one."""

    def __init__(self) -> None:
        self.waiting: deque[tuple[Pairs, LateEvent]] = deque()
        self.lock = RLock()
        self.bytes = 0

    def add(self, pairs: Pairs) -> LateEvent:
        event = LateEvent(self)
        increment_version([into for into, _ in pairs])  # as a copy of torch does at once
        with self.lock:
            self.waiting.append((pairs, event))
        return event

    def make(self, last: LateEvent) -> None:
        """Makes all copies up to one."""
        with self.lock:
            while not last.made:
                pairs, event = self.waiting.popleft()
                with _disable_current_modes():  # a device's copies are no operations of torch when they are made
                    for into, tensor in pairs:
                        into.data.copy_(tensor.data)
                        self.bytes += bytes_of(tensor)
                event.made = True


class LateEvent:
    """The end of copies that are made when it is waited for."""

    def __init__(self, copies: _Copies) -> None:
        self.copies, self.made = copies, False

    def wait(self) -> None:
        self.copies.make(self)

    def over(self) -> bool:
        return self.made


class LateLink(HostLink):
    """A link as to a device whose copies are made while the host does something else: never before they must be.

    `takes_gradients` tells the link of gradients in a backward pass from that of the steps on the host.
    """

    takes_gradients = False

    def __init__(self, device: torch.device, pinned: bool = True) -> None:
        super().__init__(device, pinned)
        self.downs, self.ups = _Copies(), _Copies()

    def down(self, pairs: Pairs) -> Event:
        return self.downs.add(pairs)

    def up(self, pairs: Pairs, after: Event | None = None) -> Event:
        if after is not None:
            after.wait()
        return self.ups.add(pairs)

    def hold(self, event: Event) -> None:
        """Has the main thread wait: other threads give the device work in streams of their own."""
        if current_thread() is main_thread():
            event.wait()
