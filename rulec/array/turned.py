"""Arrays in Fortran order whose rules need rows and columns in memory: a step is taken on copies in C order."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from rulec.runtime.engine import Engine
from rulec.runtime.rows import Numbers


class Turned:
    """Copies of those arrays, by name, which take their places in an engine; `ids` are the arrays' in there.

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
        """Inside, the copies of these arrays have their values, and afterwards they those of the copies."""
        pairs = [self._pairs[name] for name in names if name in self._pairs] if self._pairs else []
        for array, copy in pairs:
            copy[...] = array
        try:
            yield
        finally:
            for array, copy in pairs:
                array[...] = copy

    def given(self, leaves: Mapping[str, Any]) -> list[Any]:
        """What a step is given for arrays, such as their gradients, in the order of what it is taken on."""
        if not self._pairs:
            return [*leaves.values()]
        return [_in_c_order(value) if name in self._pairs else value for name, value in leaves.items()]


def _in_c_order(value: Any) -> Any:
    """The same values; what is no contiguous array stays as it is, to be refused."""
    flags = getattr(value, "flags", None)
    return value.copy(order="C") if flags is not None and flags.f_contiguous and not flags.c_contiguous else value
