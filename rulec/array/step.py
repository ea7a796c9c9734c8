"""Steps of plain arrays: open steps layer by layer, evaluations of the model, and the engine of named arrays.

A partial step knows the updated arrays, also where it broke off. Evaluations move the arrays to the points and back.
`ArrayEngine` has the kind of the arrays, and copies of arrays in Fortran order.
"""

from __future__ import annotations

import sys
import weakref
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from rulec.array.arrays import NumpyArrays
from rulec.array.store import GradStore, copied
from rulec.backend.protocol import Backend
from rulec.errors import HyperError, PartialUpdate, RulecError, TensorError
from rulec.formats import UNBIASED
from rulec.language.rule import Rule
from rulec.language.statistics import Watch
from rulec.runtime.buckets.scalar_table import Numbers
from rulec.runtime.engine import Engine, run
from rulec.runtime.evaluations import Evaluations, move_at, written
from rulec.runtime.layers import layers_of
from rulec.runtime.statistics import StepStatistics, WatchSchedule


class PartialStep:
    """The arrays updated by a step so far, and the gradients that it still expects.

    `table` are the hyper-parameters, read once for the whole step. `uses` says of layers how many gradients they get;
    the sum updates them. If `journal`, `old` keeps the updated arrays and states as they were before.
    """

    def __init__(self, names: Sequence[str], table: Numbers, journal: bool, uses: Mapping[Any, int]) -> None:
        self.names, self.table, self.journal = names, table, journal
        self.left = {str(layer): count for layer, count in uses.items()}
        for layer, count in self.left.items():
            if not any(name == layer or name.startswith(f"{layer}/") for name in names):
                raise TensorError(f"uses has {layer}, which is no layer here: give keys or indices of the parameters")
            if type(count) is not int or count < 1:
                raise HyperError(f"uses of {layer} must be a whole number of gradients, at least 1, not {count!r}")
        self.updated: dict[str, None] = {}
        self.sums = GradStore()
        self.waiting: dict[str, tuple[dict[str, None], Mapping[str, Any]]] = {}
        self.old: dict[str, dict[str, Any]] = {}

    @property
    def pending(self) -> list[str]:
        """The arrays that were not updated."""
        return [name for name in self.names if name not in self.updated]

    def gather(self, layer: str, leaves: dict[str, Any], inputs: Mapping[str, Any]) -> dict[str, Any]:
        """The gradients for an update now: these, or the sum of several with the last; before the last, none."""
        if layer not in self.left:
            return leaves
        self.left[layer] -= 1
        if not self.left[layer] and layer not in self.waiting:
            return leaves
        self.sums.extend(leaves)
        names, _ = self.waiting.get(layer, ({}, {}))
        self.waiting[layer] = {**names, **dict.fromkeys(leaves)}, copied(inputs) if self.left[layer] else inputs
        return {} if self.left[layer] else self.take(layer)[0]

    def take(self, layer: str) -> tuple[dict[str, Any], Mapping[str, Any]]:
        """The sums of a layer's gradients, and the inputs that came with the last."""
        names, inputs = self.waiting.pop(layer)
        return {name: self.sums.pop(name) for name in names}, inputs

    def check_new(self, names: Iterable[str]) -> None:
        """TensorError where one of these was updated in this step already."""
        again = self.updated.keys() & set(names)
        if again:
            raise TensorError(f"{min(again)} is updated twice in one step: give it its whole gradient once")

    def broken(self) -> PartialUpdate:
        """The error for calls that this broken step is in the way of."""
        undo = "rollback()" if self.journal else "partial(journal=True) keeps what rollback() needs"
        return PartialUpdate(
            f"a step broke off after {_listed(self.updated)} and before {_listed(self.pending)} were updated: call "
            f"accept_partial() to go on from here, or go back to before it ({undo})",
            self.updated, self.pending,
        )  # fmt: skip


def _listed(names: Iterable[str]) -> str:
    listed = list(names)
    return ", ".join(listed[:4]) + (f" and {len(listed) - 4} more" if len(listed) > 4 else "")


class ArrayEvaluations(Evaluations[Mapping[str, Any]]):
    """The evaluations of the model in one step. `leaves` are the first gradients by name, `table` the hyper-parameters.

    Gradients of earlier points are copies.
    """

    def __init__(self, engine: ArrayEngine, table: Numbers, leaves: Mapping[str, Any]) -> None:
        super().__init__()
        self._engine, self.table, self._names = engine, table, [*leaves]
        self._start: list[Any] = []

    def next(self, leaves: Mapping[str, Any], inputs: Mapping[str, Any]) -> bool:
        """Moves the arrays to the next point, by the gradients at the last one; False, and back, after the last."""
        self.check(leaves)
        self.put_back()
        ids = tuple(self._engine.ids[name] for name in leaves)

        def gradients() -> Mapping[str, Any]:
            return {name: -array if self._engine.maximize else array.copy() for name, array in leaves.items()}

        return self.advance(
            self._engine.passes, gradients, lambda place: self._engine.wants(ids, place, self.table),
            lambda place: self._move(place, ids, leaves, inputs),
        )  # fmt: skip

    def check(self, leaves: Mapping[str, Any]) -> None:
        """RulecError where these are gradients for other arrays than at the first point."""
        if [*leaves] != self._names:
            raise RulecError("a pass has gradients for other arrays than the first of its step: give all of them again")

    def _move(self, place: int, ids: tuple[int, ...], leaves: Mapping[str, Any], inputs: Mapping[str, Any]) -> None:
        engine = self._engine
        turned = engine.copies_for(self.table)
        with engine.arrays.here(), turned.stepping(leaves):
            arguments = {**inputs, **{key: turned.in_order(kept) for key, kept in self.values.items()}}
            launches = engine.ready_part(ids, turned.in_order(leaves), self.table, move_at(place), False, arguments)
            self._start = [(array, array.copy()) for array in written(engine.tensors[i] for i in ids)]
            run(launches)

    def put_back(self) -> None:
        """Gives the arrays the values of before the step, bit for bit; does nothing where they have them."""
        if self._start:
            with self._engine.arrays.here(), self._engine.copies_for(self.table).stepping(self._names):
                for array, before in self._start:
                    array[...] = before
            self._start = []


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
        watch: Watch | None = None, schedule: WatchSchedule | None = None,
    ) -> None:  # fmt: skip
        arrays = arrays_for(params)
        super().__init__(rule, arrays, backend, state_dtype, maximize, seed, weights=weights, watch=watch)
        self.watch, self.schedule = watch, schedule
        self.params, self.tags = params, tags
        for name, array in params.items():
            arrays.check_parameter(array, name)
        arrays.claim([*params.values()], [f"parameter {name}" for name in params])
        # NumPy moves the memory of no array that has a weak reference, by resize(refcheck=False) either.
        self._in_place = [weakref.ref(array) for array in params.values()]
        words = [tags.get(name, frozenset()) for name in params]
        self.ids = {
            name: self.add(array, 0, name, tagged, layer=layer)
            for (name, array), tagged, layer in zip(params.items(), words, layers_of([*params], words), strict=True)
        }
        self._turned: Turned | None = None

    def begin(self) -> None:
        """Opens a step; it measures statistics in its turn."""
        super().begin()
        if self.schedule is not None:
            self.statistics.begin(self.schedule.due)

    def count_step(self) -> None:
        """Counts a step that was taken."""
        if self.schedule is not None:
            self.schedule.advance()

    def step_statistics(self) -> StepStatistics:
        """The statistics of the last step that measured them."""
        assert self.schedule is not None
        return self.statistics.of_step(self.schedule.last, [*self.params], lambda array: array, self.host.numbers)

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
