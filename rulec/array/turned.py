"""Arrays in Fortran order whose rules need rows and columns in memory: a step is taken on copies in C order."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from rulec.runtime.engine import Engine
from rulec.runtime.rows import Numbers


class Turned:
    """Copies of such arrays, by name, in their places in an engine; `ids` are the arrays' numbers there.

    The arrays keep their memory: values go into the copies before a step, and back after it.
    """

    def __init__(self, engine: Engine, ids: Mapping[str, int], table: Numbers) -> None:
        self._pairs: dict[str, tuple[Any, Any]] = {}
        for name, tensor_id in ids.items():
            if engine.needs_copy(tensor_id, table):
                array = engine.tensors[tensor_id].array
                self._pairs[name] = array, array.copy(order="C")
                engine.replace(tensor_id, self._pairs[name][1])

    @contextmanager
    def stepping(self, names: Iterable[str]) -> Iterator[None]:
        """Copies the values of these arrays into their copies, and afterwards back."""
        pairs = [self._pairs[name] for name in names if name in self._pairs] if self._pairs else []
        for array, copy in pairs:
            copy[...] = array
        try:
            yield
        finally:
            for array, copy in pairs:
                array[...] = copy

    def in_order(self, leaves: Mapping[str, Any]) -> list[Any]:
        """Arrays of a step, such as gradients, in the memory order of the arrays that the step runs on."""
        if not self._pairs:
            return [*leaves.values()]
        return [_in_c_order(value) if name in self._pairs else value for name, value in leaves.items()]


def _in_c_order(value: Any) -> Any:
    """The same values; what is no contiguous array stays as it is, to be refused."""
    flags = getattr(value, "flags", None)
    return value.copy(order="C") if flags is not None and flags.f_contiguous and not flags.c_contiguous else value
