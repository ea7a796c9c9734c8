"""The engine of an optimizer of plain arrays, which have names: their kind, and copies of those in Fortran order."""

from __future__ import annotations

import sys
import weakref
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from rulec.array.arrays import NumpyArrays
from rulec.backend.protocol import Backend
from rulec.errors import TensorError
from rulec.formats import UNBIASED
from rulec.language.rule import Rule
from rulec.runtime.buckets.scalar_table import Numbers
from rulec.runtime.engine import Engine


def arrays_for(leaves: Mapping[str, Any]) -> NumpyArrays:
    """The operations of the runtime on these arrays: CuPy's where any of them is one, else NumPy's.

    TensorError where only some are CuPy's, or they lie on several GPUs.
    """
    cupy = sys.modules.get("cupy")
    there = {name: array for name, array in leaves.items() if cupy is not None and isinstance(array, cupy.ndarray)}
    if not there:
        return NumpyArrays()
    first = next(iter(there))
    for name in leaves:
        if name not in there:
            raise TensorError(
                f"parameter {first} is a CuPy array and parameter {name} is not: give arrays of one kind to an "
                f"optimizer, the others to another"
            )
    from rulec.array.cupy import CupyArrays

    for name, array in there.items():
        if array.device.id != there[first].device.id:
            raise TensorError(
                f"parameter {first} is on GPU {there[first].device.id} and parameter {name} on GPU {array.device.id}: "
                f"give those of each GPU to an optimizer of their own"
            )
    return CupyArrays(there[first].device.id)


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


class ArrayEngine(Engine):
    """An engine over `params`, arrays by name, that have no states yet; `tags` are their words, `ids` the engine's."""

    arrays: NumpyArrays

    def __init__(
        self, rule: Rule, params: dict[str, Any], tags: dict[str, frozenset[str]], backend: str | Backend | None,
        state_dtype: Mapping[str, str] | None, maximize: bool, seed: int, weights: str = "",
    ) -> None:  # fmt: skip
        arrays = arrays_for(params)
        super().__init__(rule, arrays, backend, state_dtype, maximize, seed, weights=weights)
        self.params, self.tags = params, tags
        for name, array in params.items():
            arrays.check_parameter(array, name)
        arrays.claim([*params.values()], [f"parameter {name}" for name in params])
        # NumPy moves the memory of no array that has a weak reference, by resize(refcheck=False) either.
        self._in_place = [weakref.ref(array) for array in params.values()]
        self.ids = {n: self.add(array, 0, n, tags.get(n, frozenset())) for n, array in params.items()}
        self._turned: Turned | None = None

    def copies_for(self, table: Numbers) -> Turned:
        """Copies in C order of the arrays whose rules need them, made when they are first asked for."""
        if self._turned is None:
            self._turned = Turned(self, self.ids, table)
        return self._turned

    def states(self, name: str) -> dict[str, Any]:
        """The states of one array, as `state` has them."""
        return self.state(self.ids[name])

    def format_keys(self) -> dict[str, str]:
        """State -> the key of its format, for the states in codes, or the word of those rounded at random."""
        keys = {state: form.key for i in self.ids.values() for state, form in self.formats(i).items()}
        words = (item for i in self.ids.values() for item in self.storage(i).items())
        return {state: word for state, word in words if word == UNBIASED} | keys
