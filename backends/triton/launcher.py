"""Launches of one Triton kernel with fixed constants: the compiled kernel is looked for once, not at each launch.

Triton's own call reads all arguments and options to find the compiled kernel, which takes longer than the launch. What
it looks at is known here: whether an argument is None, and whether an address is a multiple of 16 bytes. Compiled
kernels take addresses as whole numbers; of a tensor Triton asks the driver whether its memory can be reached.
"""

from __future__ import annotations

import functools
from collections.abc import Hashable, Mapping, Sequence
from typing import Any


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
