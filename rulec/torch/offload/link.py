"""The link between a device and host memory: copies in both directions, beside each other and beside computing.

`down` copies from the device to the host and `up` from the host to the device. Copies of one direction end in their
order. A copy returns an `Event`: it has ended, or it can be waited for, by the host or by the device.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from contextlib import suppress
from typing import Any, Protocol, TypeAlias

import torch
from torch import Tensor

from rulec.errors import RulecError, TensorError
from rulec.torch.tensors.fake import is_fake, plain_memory
from rulec.torch.tensors.memory import bytes_in_words

#: Tensors to write and the tensors that they are copies of, of the same shapes and dtypes.
Pairs: TypeAlias = Sequence[tuple[Tensor, Tensor]]


class Event(Protocol):
    """The end of some copies."""

    def wait(self) -> None:
        """Has the host wait for it. RulecError where a copy failed."""

    def over(self) -> bool:
        """Whether it has come."""


class Link(ABC):
    """The link of one device. `pinned` asks for host memory that the device reads and writes by itself."""

    def __init__(self, device: torch.device, pinned: bool = True) -> None:
        self.device, self.pinned = device, pinned

    @abstractmethod
    def host_memory(self, count: int) -> Tensor:
        """New host memory of `count` bytes, as uint8. TensorError where there is none."""

    def device_memory(self, count: int) -> Tensor:
        """New memory of the device of `count` bytes, as uint8. TensorError where there is none."""
        try:
            with plain_memory():
                return torch.empty(count, dtype=torch.uint8, device=self.device)
        except torch.cuda.OutOfMemoryError as error:
            raise TensorError(
                f"{self.device} has no memory for a transfer buffer of {bytes_in_words(count)}: nothing was changed; "
                f"give a smaller offload_buffer"
            ) from error

    @abstractmethod
    def down(self, pairs: Pairs) -> Event:
        """Copies tensors of the device to host memory, after all that the device has been given to do so far.

        The device's current stream counts. RulecError where a copy cannot be begun: none is on its way.
        """

    @abstractmethod
    def up(self, pairs: Pairs, after: Event | None = None) -> Event:
        """Copies host memory to tensors of the device, `after` an earlier copy of this link where one is given.

        It waits for nothing else: the device must have read the old values. It has, once the host has waited for a
        later copy down. RulecError as for `down`.
        """

    @abstractmethod
    def hold(self, event: Event) -> None:
        """Has what the device is given to do from now on wait for an event; the host does not wait."""


class _Ended:
    """A copy that has ended."""

    def wait(self) -> None:
        """Does nothing."""

    def over(self) -> bool:
        """Always returns True."""
        return True


#: The end of no copy.
ENDED: Event = _Ended()


class HostLink(Link):
    """The link where parameters are in host memory themselves: a copy has ended when it returns."""

    #: The device of host memory.
    host = torch.device("cpu")

    def host_memory(self, count: int) -> Tensor:
        with plain_memory():
            return torch.empty(count, dtype=torch.uint8, device=self.host)

    def down(self, pairs: Pairs) -> Event:
        _copy(pairs)
        return ENDED

    def up(self, pairs: Pairs, after: Event | None = None) -> Event:
        _copy(pairs)
        return ENDED

    def hold(self, event: Event) -> None:
        """Does nothing: all copies have ended."""


def _copy(pairs: Pairs, non_blocking: bool = False) -> None:
    with plain_memory():
        for into, tensor in pairs:
            into.copy_(_in_order_of(into, tensor) if tensor.is_cuda else tensor, non_blocking=non_blocking)


def _in_order_of(into: Tensor, tensor: Tensor) -> Tensor:
    """A tensor of the device in the memory order of host memory; else torch would copy it by way of other memory."""
    if tensor.stride() == into.stride() or into.is_contiguous():
        return tensor
    return torch.empty_strided(into.shape, into.stride(), dtype=tensor.dtype, device=tensor.device).copy_(tensor)


class _CudaEvent:
    """An event of a stream. What is copied stays in memory until the host has waited for it, or dropped it."""

    def __init__(self, stream: Any, way: str = "", pairs: Pairs = ()) -> None:
        self._way, self._device, self._kept = way, stream.device, pairs
        self._event: Any = torch.cuda.Event(blocking=True)  # type: ignore[no-untyped-call]
        self._event.record(stream)

    def wait(self) -> None:
        """Has the host sleep until the stream has come here. RulecError where a copy failed."""
        try:
            self._event.synchronize()
        except RuntimeError as error:
            raise transfer_error(self._way, self._device, error) from error
        self._kept = ()

    def over(self) -> bool:
        """Whether the stream has come here."""
        return bool(self._event.query())

    def hold(self, stream: Any) -> None:
        """Has a stream wait until the other stream has come here."""
        stream.wait_event(self._event)


class CudaLink(Link):
    """The link of a CUDA device: a stream for each direction beside the stream that computes."""

    def __init__(self, device: torch.device, pinned: bool = True) -> None:
        super().__init__(device, pinned)
        streams: Any = torch.cuda.Stream
        self._down, self._up = streams(device), streams(device)

    def host_memory(self, count: int) -> Tensor:
        """New host memory, pinned where that is asked for."""
        try:
            with plain_memory():
                return torch.empty(count, dtype=torch.uint8, pin_memory=self.pinned)
        except RuntimeError as error:
            raise TensorError(
                f"{bytes_in_words(count)} of pinned host memory cannot be had for {self.device} ({first_line(error)}): "
                f"nothing was changed; raise the limit of locked memory (ulimit -l), give a smaller offload_buffer, "
                f"or offload_pinned=False for slower copies from pageable memory"
            ) from error

    def down(self, pairs: Pairs) -> Event:
        return self._on(self._down, "down", pairs, _CudaEvent(torch.cuda.current_stream(self.device)))

    def up(self, pairs: Pairs, after: Event | None = None) -> Event:
        return self._on(self._up, "up", pairs, after)

    def _on(self, stream: Any, way: str, pairs: Pairs, after: Event | None) -> Event:
        with torch.cuda.stream(stream):
            try:
                if isinstance(after, _CudaEvent):
                    after.hold(stream)
                _copy(pairs, non_blocking=self.pinned)
                return _CudaEvent(stream, way, pairs)
            except BaseException as error:
                with suppress(RuntimeError):
                    stream.synchronize()  # copies before the one that failed
                if isinstance(error, RuntimeError):
                    raise transfer_error(way, self.device, error) from error
                raise

    def hold(self, event: Event) -> None:
        if isinstance(event, _CudaEvent):
            event.hold(torch.cuda.current_stream(self.device))


def transfer_error(way: str, device: object, error: RuntimeError) -> RulecError:
    """The error of a copy `down` from a device or `up` to it."""
    where = f"from host memory to {device}" if way == "up" else f"from {device} to host memory"
    return RulecError(
        f"a copy {where} failed ({first_line(error)}): weights and states may not agree any more; load a checkpoint, "
        f"in a new process where the device has stopped working"
    )


def first_line(error: BaseException) -> str:
    return str(error).strip().partition("\n")[0]


class FakeLink(HostLink):
    """The link of fake parameters. Its host memory is on `meta`, so that a meter tells it from their device's."""

    host = torch.device("meta")


def host_of(tensor: Tensor) -> torch.device:
    """The device of host memory for a parameter."""
    return FakeLink.host if is_fake(tensor) else HostLink.host


def link_of(device: torch.device, pinned: bool = True) -> Link:
    """The link of a device; TensorError for a device that no kernel updates."""
    return CudaLink(device, pinned) if device.type == "cuda" else HostLink(device, pinned)
