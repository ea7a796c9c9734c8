"""The fused kernel of the cpu backend in place of XLA's code for a stage: many leaves in one call.

XLA calls the kernel through its interface for foreign functions, and lends it its threads. Arrays must lie on one CPU
device: XLA can neither cut such a call for several devices nor batch it.
"""

from __future__ import annotations

import functools
import importlib
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from operator import attrgetter
from typing import Any, Protocol

import jax
import jax.numpy as jnp
import numpy as np

from rulec.array_api.reductions import REDUCTIONS
from rulec.backend import registry
from rulec.compiler.ir import Program
from rulec.compiler.layout import Layout, is_shaped
from rulec.compiler.view import MatrixView
from rulec.environment import LEVEL
from rulec.errors import HyperError, RulecError
from rulec.functional.hyper import PureRows
from rulec.functional.plan import Bucket, StepPlan
from rulec.jax.library import LIBRARY, is_traced
from rulec.jax.packing import Piece
from rulec.jax.state import State

#: Leaves in one call: what XLA does to compile a call grows with the square of its arrays.
MOST_LEAVES = 128

#: Elements that leaves with arrays of their own must have, on average, for a call to be faster than XLA's loops.
LEAST_ELEMENTS = 16384

#: From so many leaves on, and of fewer elements than `LEAST_ELEMENTS` on average, a step holds their states packed.
LEAST_LEAVES = 64


def chosen(backend: str | None, *trees: Any) -> str:
    """The `Options.backend` of a step over these arrays, from the keyword `backend` of users.

    HyperError for an unknown name, BackendUnavailable for "cpu" where it cannot run.
    """
    if backend is None:
        return "either" if all(map(_on_one_cpu, trees)) else "jax"
    if backend not in ("jax", "cpu"):
        raise HyperError(f"backend={backend!r} is neither 'jax' nor 'cpu': leave it out for whichever is faster")
    if backend == "cpu":
        registry.usable("cpu")
    return backend


def _on_one_cpu(tree: Any) -> bool:
    """Whether all leaves are arrays on one CPU device. It is asked at every step, of up to thousands of leaves."""
    leaves = _leaves(tree)
    if not leaves or len(set(map(type, leaves))) > 1 or not isinstance(leaves[0], jax.Array) or is_traced(leaves[0]):
        return False
    if set(map(type, map(attrgetter("sharding"), leaves))) != {jax.sharding.SingleDeviceSharding}:
        return False
    devices: Any = leaves[0].sharding.device_set
    return all(device.platform == "cpu" for device in devices)


def _leaves(tree: Any) -> list[Any]:
    """The leaves of a tree, in any order: a dict of arrays is not sorted, for speed."""
    if type(tree) is dict and all(issubclass(kind, jax.Array) for kind in set(map(type, tree.values()))):
        return [*tree.values()]
    if isinstance(tree, State):
        return [leaf for field in tree._asdict().values() for leaf in _leaves(field)]  # type: ignore[attr-defined]
    return jax.tree.leaves(tree)


class Run(Protocol):
    """The members of a bucket's share of a step that are read here."""

    bucket: Bucket
    states: dict[str, dict[int, Any]]
    rows: PureRows

    def arrays(self, i: int) -> dict[str, Any]:
        """The arrays of leaf i, by name."""
        ...

    def scalars(self, column: int) -> Any:
        """A column of the scalar table: for each row or, where it is late, for each leaf; or one number."""
        ...


def kernel_for(run: Run, backend: str) -> Any:
    """The kernel for a bucket; None where XLA's code is to be used. `backend` is as in `Options.backend`."""
    if backend == "jax" or (backend == "either" and not _pays(run)):
        return None
    kernel = _unlike(run) or _kernel(run.bucket.program, run.bucket.layout)
    if isinstance(kernel, str):
        _tell(f"{run.bucket.program.name} by jax alone, not by the cpu backend: {kernel}")
        return None
    return kernel


def _pays(run: Run) -> bool:
    """Whether the kernel is faster than XLA's loops for these leaves. A loop with one result is as fast."""
    sizes, first = [facts["numel"] for facts in run.bucket.facts], run.bucket.places[0]
    packed = any(isinstance(arrays.get(first), Piece) for arrays in run.states.values())
    program = run.bucket.plain
    plain = program.elementwise and len(program.stages[0].stores) == 1
    return packed or (not plain and sum(sizes) >= LEAST_ELEMENTS * len(sizes))


def are_many_and_small(arrays: Sequence[Any]) -> bool:
    """Whether leaves are so many and so small that handling their arrays takes longer than a step's arithmetic."""
    return len(arrays) >= LEAST_LEAVES and sum(map(attrgetter("size"), arrays)) < LEAST_ELEMENTS * len(arrays)


def packs(plan: StepPlan) -> bool:
    """Whether kernels take all states of a plan packed, for elementwise rules of plain states."""
    return bool(plan.arrays) and all(map(_packs, plan.buckets))


def _packs(bucket: Bucket) -> bool:
    program = bucket.program
    plain = bucket.plain.elementwise and not (bucket.formats or program.memory.weights or program.memory.unbiased)
    inputs = any(buffer.role == "input" and buffer.axes.elementwise for buffer in program.buffers)
    return plain and not inputs and not isinstance(_kernel(program, bucket.layout), str)


def _unlike(run: Run) -> str | None:
    """Why a kernel cannot take these leaves; None where it can. Users give inputs of any dtype."""
    program, layout = run.bucket.program, run.bucket.layout
    if is_shaped(program) and any(view.transposed for view in run.bucket.views):
        return "it sees rows as columns"
    inputs = [(b.name, layout.dtype(b.name)) for b in program.buffers if b.role == "input" and b.axes.elementwise]
    every = range(len(run.bucket.places)) if inputs else ()
    same = all(str(run.arrays(i)[name].dtype) == dtype for i in every for name, dtype in inputs)
    return None if same else "its inputs are of another dtype"


@functools.lru_cache(maxsize=1024)
def _kernel(program: Program, layout: Layout) -> Any:
    """The kernel, registered with XLA as a target; a string where there is none, with the reason."""
    if program.skip is not None:
        return "it may leave leaves as they are"
    try:
        registry.usable("cpu")
        kernel = importlib.import_module("rulec_backends.cpu").ffi_kernel(program, layout)
        capsule = jax.ffi.pycapsule(kernel.address)  # type: ignore[no-untyped-call]
        jax.ffi.register_ffi_target(kernel.target, capsule, platform="cpu")
    except RulecError as error:
        return str(error)
    except Exception as error:  # noqa: BLE001 - an XLA of another version refuses in its own ways
        return f"XLA does not take it: {error}"
    return kernel


def _tell(what: str) -> None:
    if LEVEL:
        print(f"rulec: {what}", file=sys.stderr)


@dataclass
class Done:
    """The results of a stage: new arrays of each leaf by name, and its reductions as `Between.reduced` has them.

    An array that was a piece is still a piece, of a new flat array.
    """

    arrays: list[dict[str, Any]] = field(default_factory=list)
    reduced: dict[str, Any] = field(default_factory=dict)


def stage(kernel: Any, run: Run, index: int) -> Done:
    """One stage of every leaf of a bucket."""
    done = Done()
    if not run.bucket.program.stages[index].roots:
        return done
    table, rows = _table(run, index)
    totals: dict[str, list[Any]] = {}
    for begin in range(0, len(rows), MOST_LEAVES):
        part = slice(begin, begin + MOST_LEAVES)
        call = _Call(kernel, index, [run.arrays(i) for i in range(len(rows))[part]], run.bucket.views[part])
        call.run(table, rows[part])
        done.arrays += call.stored()
        for name, numbers in call.totals().items():
            totals.setdefault(name, []).append(numbers)
        for name, lines in call.lines().items():
            done.reduced.setdefault(name, []).extend(lines)
    done.reduced |= {name: jnp.concatenate(parts) for name, parts in totals.items()}
    return done


def _table(run: Run, index: int) -> tuple[Any, Any]:
    """The scalars that a stage reads, float64 `(rows, columns)` with truth as 1 and 0; and each leaf's row."""
    known, leaves = len(run.bucket.table.columns), len(run.rows.row)
    scalars = {i: jnp.asarray(run.scalars(i), jnp.float64) for i in run.bucket.kernel.columns(index)}
    per_leaf = any(i >= known and column.ndim for i, column in scalars.items())
    rows = np.arange(leaves) if per_leaf else run.rows.row
    count = leaves if per_leaf else len(run.rows.kept)
    if per_leaf:
        scalars = {i: column[run.rows.row] if i < known and column.ndim else column for i, column in scalars.items()}
    columns = [scalars.get(i, jnp.float64(0)) for i in range(len(run.bucket.program.columns))]
    # The first has no columns: a rule may have no scalars, and stack wants one.
    table = [jnp.zeros((count, 0), jnp.float64), *(jnp.broadcast_to(column, (count,))[:, None] for column in columns)]
    return jnp.concatenate(table, axis=1), rows


def _result(shape: tuple[int, ...], dtype: Any) -> Any:
    return jax.ShapeDtypeStruct(shape, dtype)  # type: ignore[no-untyped-call]


class _Call:
    """One call over some leaves: its operands in order, each array once, its results, and where each leaf's arrays lie.

    Two operands come before the arrays: a plan that follows from sizes alone, and the scalar table. Two results come
    before the new arrays: scratch, and numbers for each tensor.
    """

    def __init__(
        self, kernel: Any, index: int, leaves: Sequence[Mapping[str, Any]], views: Sequence[MatrixView]
    ) -> None:
        self.kernel, self.leaves = kernel, leaves
        self.needs = kernel.stage(index, [arrays["p"].size for arrays in leaves], views)
        self.operands: list[Any] = []
        self.results = [
            _result((self.needs.scratch,), jnp.int64), _result((len(self.needs.totals), len(leaves)), jnp.float64)
        ]  # fmt: skip
        self.aliases: dict[int, int] = {}
        self._known: dict[int, int] = {}
        #: Buffer -> for each leaf the index of the result with its new array, or with its slots.
        self._result_places: dict[str, list[int]] = {}
        self._places = {name: [self._place(name, arrays) for arrays in leaves] for name in self.needs.arrays}
        for name, slots in self.needs.slots.items():
            self._result_places[name] = [self._result(_result(x.shape, jnp.float64)) for x in slots.arrays()]
            self._places[name] = [(-1 - result, 0) for result in self._result_places[name]]

    def _place(self, name: str, arrays: Mapping[str, Any]) -> tuple[int, int]:
        """The operand with an array of a leaf, or -1 - i for result i, and the byte where the array begins."""
        results = self._result_places.setdefault(name, []) if name in self.needs.stored else []
        if name not in arrays:
            results.append(self._result(_result(arrays["p"].shape, self.kernel.layout.dtype(name))))
            return -1 - results[-1], 0
        array = arrays[name]
        holder = array.flat if isinstance(array, Piece) else array
        operand = self._operand(holder)
        if name in self.needs.stored:
            results.append(self._aliased(operand))
        start = array.start * array.dtype.itemsize if isinstance(array, Piece) else 0
        return operand, start

    def _operand(self, holder: Any) -> int:
        if id(holder) not in self._known:
            self._known[id(holder)] = 2 + len(self.operands)
            self.operands.append(holder)
        return self._known[id(holder)]

    def _aliased(self, operand: int) -> int:
        """The result that takes the place of an operand."""
        if operand not in self.aliases:
            array = _array(self.operands[operand - 2])
            self.aliases[operand] = self._result(_result(array.shape, array.dtype))
        return self.aliases[operand]

    def _result(self, result: Any) -> int:
        self.results.append(result)
        return len(self.results) - 1

    def run(self, table: Any, rows: Sequence[int]) -> None:
        """The call itself."""
        plan = self.needs.plan(self._places, rows)
        call = jax.ffi.ffi_call(self.kernel.target, self.results, input_output_aliases=self.aliases)
        self.results = [*call(plan, table, *map(_array, self.operands))]

    def stored(self) -> list[dict[str, Any]]:
        """The new arrays of each leaf by name; a flat array is replaced where it is held."""
        return [{name: self._taken(name, i) for name in self.needs.stored} for i in range(len(self.leaves))]

    def _taken(self, name: str, i: int) -> Any:
        array, value = self.leaves[i].get(name), self.results[self._result_places[name][i]]
        if isinstance(array, Piece):
            array.flat.array = value
        return array if isinstance(array, Piece) else value

    def totals(self) -> dict[str, Any]:
        """The reductions that give one number for each tensor."""
        return dict(zip(self.needs.totals, self.results[1], strict=True))

    def lines(self) -> dict[str, list[Any]]:
        """The reductions that give a number for each row, column or matrix: `(batch, rows, cols)` for each leaf."""
        return {name: [*self._finished(name, slots)] for name, slots in self.needs.slots.items()}

    def _finished(self, name: str, slots: Any) -> Iterator[Any]:
        for i, shape in enumerate(slots.shapes):
            values = self.results[self._result_places[name][i]]
            if not self.leaves[i]["p"].size:
                values = jnp.full_like(values, REDUCTIONS[slots.op].nothing)
            yield LIBRARY.reduce(slots.op, values, (0,)).reshape(shape)


def _array(holder: Any) -> Any:
    return getattr(holder, "array", holder)
