"""Launches of one Triton kernel with fixed constants: the compiled kernel is looked for once, not at each launch.

Triton's own call reads all arguments and options to find the compiled kernel, which takes longer than the launch. What
it looks at is known here: whether an argument is None, and whether an address is a multiple of 16 bytes. Compiled
kernels take addresses as whole numbers; of a tensor Triton asks the driver whether its memory can be reached.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from typing import Any


class Launcher:
    """A kernel on one device, with the constants and options of its compilation."""

    def __init__(self, kernel: Any, constants: Mapping[str, Any]) -> None:
        """`constants` are those of the kernel's signature, and options such as `num_warps`."""
        self.kernel, self.constants = kernel, constants
        self._compiled: dict[Hashable, tuple[Any, tuple[Any, ...]]] = {}

    def run(self, programs: int, tensors: Sequence[Any]) -> None:
        """Launches so many programs with these arguments: tensors, of the same dtypes at each launch, or None."""
        addresses = [None if x is None else x.data_ptr() for x in tensors]
        kind = tuple([x if x is None else not x & 15 for x in addresses])
        known = self._compiled.get(kind)
        if known is None:
            compiled = self.kernel[(programs,)](*tensors, **self.constants)
            if compiled is not None:  # the interpreter compiles nothing
                names = self.kernel.arg_names[len(tensors) :]
                self._compiled[kind] = compiled, tuple(self.constants[name] for name in names)
            return
        compiled, constants = known
        compiled[programs, 1, 1](*addresses, *constants)
