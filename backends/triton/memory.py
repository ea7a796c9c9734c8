"""Memory of torch's that tables go to a device through, and the device and stream that calls are made on."""

from __future__ import annotations

import contextlib
from typing import Any

import numpy as np

from rulec.kernel.bucket.cut import Whole
from rulec.kernel.bucket.uploads import Ring, Uploads

#: Tables held ready for captured calls.
SPARE = 4


class TorchDevice:
    """What tables go to a device through."""

    def __init__(self, device: Any) -> None:
        self._device = device

    def pinned(self, words: int) -> Slot:
        """Memory of the host, pinned for a GPU."""
        return Slot(words, self._device)

    def memory(self, words: int) -> Any:
        """A tensor of 64-bit words."""
        import torch

        return torch.empty(words, dtype=torch.int64, device=self._device)


class Slot:
    """A buffer in main memory, pinned for a GPU, that a copy reads from; the event is behind the last one."""

    def __init__(self, words: int, device: Any) -> None:
        import torch

        self._memory = torch.empty(words, dtype=torch.int64, device="cpu", pin_memory=device.type == "cuda")
        self.words: Whole = self._memory.numpy()
        self._event: Any = None

    def ready(self) -> Whole:
        """Its words, once no copy reads from them any more."""
        if self._event is not None:
            self._event.synchronize()
        return self.words

    def copy(self, target: Any, count: int, stream: Any, captured: bool) -> None:
        """Begins a copy to a tensor, on the current stream of its device."""
        import torch

        target[:count].copy_(self._memory[:count], non_blocking=True)
        if target.is_cuda and not captured:
            self._event = self._event or torch.cuda.Event()  # type: ignore[no-untyped-call]
            self._event.record()


def uploads(device: Any, words: int, ring: Ring | None = None) -> Uploads:
    """What brings a table of so many words to a device."""
    return Uploads(ring or Ring(TorchDevice(device)), words, SPARE if device.type == "cuda" else 0)


def current(device: Any, stream: Any) -> contextlib.AbstractContextManager[Any]:
    """The context in which a device, and the stream where one is given, are current."""
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
    """Truth as bytes, which is how kernels load it; None as it is."""
    import torch

    return None if truth is None else truth.view(torch.uint8)
