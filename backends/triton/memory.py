"""Memory and launches of Triton by torch: copies of tables to a device, its stream, and a kernel with fixed constants.

The compiled kernel is looked up once, not at each launch. Triton's own call reads all arguments and options to find it,
which takes longer than the launch. Here is known what it looks at: whether an argument is None, and whether an address
is a multiple of 16 bytes. Compiled kernels take addresses as whole numbers; of a tensor Triton asks the driver whether
its memory can be reached.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Hashable, Mapping, Sequence
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


_AS_IT_IS = contextlib.nullcontext()


def current(device: Any, stream: Any) -> contextlib.AbstractContextManager[Any]:
    """A context with the device, and the stream unless None, as the current ones."""
    import torch

    if device.type == "cpu":
        return np.errstate(all="ignore")
    if stream is not None:
        return torch.cuda.stream(stream)
    if torch.cuda.current_device() == device.index:
        return _AS_IT_IS
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


class Launcher:
    """A kernel on one device, with the constants and options of its compilation."""

    def __init__(self, kernel: Any, constants: Mapping[str, Any]) -> None:
        """`constants` are those of the kernel's signature, and options such as `num_warps`."""
        self.kernel, self.constants = kernel, constants
        self._compiled: dict[Hashable, tuple[Any, tuple[Any, ...]]] = {}

    def run(self, programs: int, arguments: Sequence[Any], kind: Hashable, bare: Sequence[Any] | None = None) -> None:
        """Launches so many programs. `kind` is the same for arguments that one compiled kernel takes.

        Dtypes and whole numbers are the same at each launch. `bare` are the arguments with addresses for tensors.
        """
        known = self._compiled.get(kind)
        if known is not None:
            compiled, constants = known
            compiled[programs, 1, 1](*(arguments if bare is None else bare), *constants)
            return
        compiled = self.kernel[(programs,)](*arguments, **self.constants)
        if compiled is not None and _takes_constants():  # the interpreter compiles nothing
            names = self.kernel.arg_names[len(arguments) :]
            self._compiled[kind] = compiled, tuple(self.constants[name] for name in names)

    def run_on(self, programs: int, tensors: Sequence[Any]) -> None:
        """Launches so many programs with these arguments: tensors, or None."""
        addresses = [None if x is None else x.data_ptr() for x in tensors]
        self.run(programs, tensors, tuple([x if x is None else not x & 15 for x in addresses]), addresses)


@functools.cache
def _takes_constants() -> bool:
    """Whether a compiled kernel takes all arguments of the signature, constants among them: from Triton 3.3 on."""
    import triton

    return tuple(int(number) for number in triton.__version__.split(".")[:2]) >= (3, 3)
