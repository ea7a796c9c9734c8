"""The fused kernel of the cpu backend in place of what XLA makes of an elementwise step: many leaves in one call.

XLA calls it in place, through its interface for foreign functions, and lends it its own threads. It is for arrays on
one CPU device alone: XLA can neither cut such a call for several devices nor batch it.
"""

from __future__ import annotations

import functools
import importlib
import sys
from collections.abc import Iterator, Mapping, Sequence
from operator import attrgetter
from typing import Any, Protocol

import jax
import jax.numpy as jnp

from rulec.backend import registry
from rulec.backend.layout import Layout
from rulec.compiler.ir import Program
from rulec.errors import HyperError, RulecError
from rulec.jax.matrix import is_traced
from rulec.jax.packing import Piece
from rulec.jax.plan import Bucket
from rulec.language.node import Node
from rulec.runtime.debug import LEVEL

#: Leaves in one call: what XLA does to compile a call grows with the square of its arrays.
MOST_LEAVES = 128

#: Elements that leaves with arrays of their own must have, on average, for a call to be faster than XLA's loops.
LEAST_ELEMENTS = 16384


def chosen(backend: str | None, *trees: Any) -> str:
    """What `Options.backend` is for a step over these arrays; `backend` is what users chose.

    HyperError for one that there is not, BackendUnavailable for "cpu" where it cannot run.
    """
    if backend is None:
        return "either" if all(map(_on_one_cpu, trees)) else "jax"
    if backend not in ("jax", "cpu"):
        raise HyperError(f"backend={backend!r} is neither 'jax' nor 'cpu': leave it out for whichever is faster")
    if backend == "cpu":
        registry.usable("cpu")
    return backend


def _on_one_cpu(tree: Any) -> bool:
    """Whether all leaves are arrays that lie on one CPU device; there may be thousands, at every step."""
    leaves = jax.tree.leaves(tree)
    if not leaves or len(set(map(type, leaves))) > 1 or not isinstance(leaves[0], jax.Array) or is_traced(leaves[0]):
        return False
    if set(map(type, map(attrgetter("sharding"), leaves))) != {jax.sharding.SingleDeviceSharding}:
        return False
    devices: Any = leaves[0].sharding.device_set
    return all(device.platform == "cpu" for device in devices)


class Run(Protocol):
    """A bucket's share of a step, as far as it matters here."""

    bucket: Bucket
    states: dict[str, dict[int, Any]]
    table: dict[Node, Any]
    row: Any
    kept: Any

    def arrays(self, i: int) -> dict[str, Any]:
        """The arrays of leaf i, by name."""
        ...


def kernel_for(run: Run, backend: str) -> Any:
    """The kernel for a bucket, where XLA's own code is not to be used; `backend` is one of `Options.backend`."""
    if backend == "jax" or (backend == "either" and not _pays(run)):
        return None
    found = _kernel(run.bucket.program, run.bucket.layout)
    if isinstance(found, str):
        _tell(f"{run.bucket.program.name} by jax alone, not by the cpu backend: {found}")
        return None
    return found


def _pays(run: Run) -> bool:
    """Whether the kernel is faster than XLA's loops for such leaves."""
    sizes, first = [facts["numel"] for facts in run.bucket.facts], run.bucket.places[0]
    packed = any(isinstance(arrays.get(first), Piece) for arrays in run.states.values())
    return packed or sum(sizes) >= LEAST_ELEMENTS * len(sizes)


@functools.lru_cache(maxsize=1024)
def _kernel(program: Program, layout: Layout) -> Any:
    """The kernel, known to XLA by its target; why there is none."""
    if not program.elementwise or program.skip is not None or _given(program):
        return "it is not one pass over elements"
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


def _given(program: Program) -> bool:
    """Whether a step reads arrays beside parameters, gradients and states."""
    return any(buffer.role not in ("param", "grad", "state") for buffer in program.buffers)


def _tell(what: str) -> None:
    if LEVEL:
        print(f"rulec: {what}", file=sys.stderr)


def update(kernel: Any, run: Run) -> Iterator[dict[str, Any]]:
    """New values of each leaf's buffers that the program stores; those that are pieces stay so, of a new flat array."""
    leaves, table = [run.arrays(i) for i in range(len(run.bucket.places))], _table(run)
    for begin in range(0, len(leaves), MOST_LEAVES):
        part = slice(begin, begin + MOST_LEAVES)
        yield from _Call(kernel, leaves[part]).run(table, run.row[part])


def _table(run: Run) -> Any:
    """Scalars in float64, `(rows, columns)`; truth is 1 and 0."""
    columns = [jnp.asarray(run.table[value], jnp.float64) for value in run.bucket.table.columns]
    return jnp.stack([jnp.broadcast_to(column, (len(run.kept),)) for column in columns], axis=-1)


def _result(shape: tuple[int, ...], dtype: Any) -> Any:
    return jax.ShapeDtypeStruct(shape, dtype)  # type: ignore[no-untyped-call]


class _Call:
    """One call over some leaves: its operands in order, each array once, and where in them each leaf's arrays lie."""

    def __init__(self, kernel: Any, leaves: Sequence[Mapping[str, Any]]) -> None:
        self.kernel, self.leaves = kernel, leaves
        #: Beside the arrays there are two operands: what follows from sizes alone, and the scalar table.
        self.operands: list[Any] = []
        self._known: dict[int, int] = {}
        self.lines = [[self._place(arrays[name]) for arrays in leaves] for name in kernel.lines]

    def _place(self, array: Any) -> tuple[int, int]:
        """The operand that an array lies in, and the byte where it begins."""
        holder = array.flat if isinstance(array, Piece) else array
        if id(holder) not in self._known:
            self._known[id(holder)] = len(self.operands)
            self.operands.append(holder)
        start = array.start * array.dtype.itemsize if isinstance(array, Piece) else 0
        return 2 + self._known[id(holder)], start

    def run(self, table: Any, rows: Sequence[int]) -> list[dict[str, Any]]:
        """The call, and the new arrays of each leaf by name."""
        plan = importlib.import_module("rulec_backends.cpu.ffi").plan
        words = plan([arrays["p"].size for arrays in self.leaves], self.lines, rows)
        given = [getattr(holder, "array", holder) for holder in self.operands]
        stored = sorted({self.lines[line][i][0] - 2 for line in self._stored() for i in range(len(self.leaves))})
        scratch = _result((len(self.lines) * len(self.leaves),), jnp.int64)
        shapes = [scratch, *(_result(given[k].shape, given[k].dtype) for k in stored)]
        aliases = {k + 2: number for number, k in enumerate(stored, 1)}
        call = jax.ffi.ffi_call(self.kernel.target, shapes, input_output_aliases=aliases)
        new = dict(zip(stored, call(words, table, *given)[1:], strict=True))
        return [self._taken(new, i) for i in range(len(self.leaves))]

    def _stored(self) -> list[int]:
        return [line for line, name in enumerate(self.kernel.lines) if name in self.kernel.stored]

    def _taken(self, new: Mapping[int, Any], i: int) -> dict[str, Any]:
        """What leaf i has now; a flat array is replaced where it is held."""
        found = {}
        for line in self._stored():
            name, (operand, _) = self.kernel.lines[line], self.lines[line][i]
            array, value = self.leaves[i][name], new[operand - 2]
            if isinstance(array, Piece):
                array.flat.array = value
            found[name] = array if isinstance(array, Piece) else value
        return found
