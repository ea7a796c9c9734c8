"""Memory for copies of tables to a device, by torch, and the current device and stream of calls."""

from __future__ import annotations

import contextlib
from typing import Any

import numpy as np

from rulec.kernel.multi_tensor.cut import Whole
from rulec.kernel.multi_tensor.uploads import Ring, Uploads

#: Tables held ready for captured calls.
SPARE = 4


class TorchDevice:
    """The memory of a device, and pinned memory of the host, for copies of tables."""

    def __init__(self, device: Any) -> None:
        self._device = device

    def pinned(self, words: int) -> Slot:
        """Pinned memory of the host, as the source of a copy."""
        return Slot(words, self._device)

    def memory(self, words: int) -> Any:
        """A tensor of 64-bit words, as the target of a copy."""
        import torch

        return torch.empty(words, dtype=torch.int64, device=self._device)


class Slot:
    """A buffer in main memory, pinned for a GPU, and the event after the last copy from it."""

    def __init__(self, words: int, device: Any) -> None:
        import torch

        self._memory = torch.empty(words, dtype=torch.int64, device="cpu", pin_memory=device.type == "cuda")
        self.words: Whole = self._memory.numpy()
        self._event: Any = None
        self._copied: tuple[Any, int] = (None, 0)
        self._pair: tuple[Any, Any] = (None, None)

    def arrived(self) -> bool:
        """Whether the last copy has ended."""
        return self._event is None or bool(self._event.query())

    def copy(self, target: Any, count: int, stream: Any, captured: bool) -> None:
        """Begins a copy to a tensor, on the current stream of its device."""
        import torch

        last, words = self._copied
        if last is not target or words != count:
            self._copied, self._pair = (target, count), (target[:count], self._memory[:count])
        into, source = self._pair
        into.copy_(source, non_blocking=True)
        if target.is_cuda and not captured:
            self._event = self._event or torch.cuda.Event()  # type: ignore[no-untyped-call]
            self._event.record()


def uploads(device: Any, words: int, ring: Ring | None = None) -> Uploads:
    """The copies of a table of `words` words to a device."""
    return Uploads(ring or Ring(TorchDevice(device)), words, SPARE if device.type == "cuda" else 0)


def current(device: Any, stream: Any) -> contextlib.AbstractContextManager[Any]:
    """A context with the device, and the stream unless None, as the current ones."""
    import torch

    if device.type == "cpu":
        return np.errstate(all="ignore")
    if stream is not None:
        return torch.cuda.stream(stream)
    if torch.cuda.current_device() == device.index:
        return contextlib.nullcontext()
    return torch.cuda.device(device)


def is_capturing(device: Any) -> bool:
    """Whether a CUDA graph is being captured."""
    if device.type == "cpu":
        return False
    import torch

    return torch.cuda.is_current_stream_capturing()


def floats(words: Any) -> Any:
    """64-bit words as float64."""
    import torch

    return words.view(torch.float64)


def truth_bytes(truth: Any) -> Any:
    """Truths as bytes, for kernels; None for None."""
    import torch

    return None if truth is None else truth.view(torch.uint8)
