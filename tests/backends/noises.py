"""Noise made by a backend, beside the definition in NumPy, and beside a gradient that was made before."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

import rulec
from rulec.array.arrays import numpy_dtype
from rulec.backend.capabilities import Noise, Values
from rulec.backend.protocol import Rows
from rulec.compiler.layout import layout_for
from rulec.es.streams import short_weights
from rulec.testing.capabilities import VALUES as VALUES
from rulec.testing.capabilities import summed as summed
from rulec.testing.cases import loaded
from rulec.testing.kinds import ArrayKind

Array = np.ndarray[Any, Any]

#: Elements at which a tensor may begin: with a block or within one, and where blocks' numbers are about to need more
#: than 32 bits, of each kind.
OFFSETS = (0, 37, 4 * 2**32 - 128, 16 * 2**32 - 128, 128 * (2**32 - 1))

SHAPES = ((1,), (33, 40), (7,), (2100,))


def noise_of(values: Values, directions: int, layer: int = 3, **position: int) -> Noise:
    """Noise of so many directions, the second of which counts for nothing."""
    drawn = np.random.default_rng(directions).standard_normal(directions)
    drawn[1:2] = 0.0
    given = {"seed": -5, "step": 2**32 - 1, "first": 2**31 - 1, "purpose": 1, **position}
    return Noise(values, layer=layer, weights=short_weights(drawn, values), **given)


def filled(backend: Any, kind: ArrayKind, noise: Noise, count: int, offset: int, dtype: str) -> Array:
    """The same as a backend fills an array with it."""
    out = kind.make(np.full(count, np.nan, numpy_dtype(dtype)))
    backend.fill_noise(out, noise, offset)
    return kind.read(out)


def worst_fills(
    backend: Any, kind: ArrayKind, dtype: str, directions: Sequence[int], count: int = 300,
    offsets: Sequence[int] = OFFSETS,
) -> float:  # fmt: skip
    """Asserts that sums of whole numbers are the same bits; the greatest error of a sum of `normal`, in units of
    the sum of the weights' sizes."""
    worst = 0.0
    for values in VALUES:
        for offset in offsets:
            for many in directions:
                noise = noise_of(values, many)
                found = filled(backend, kind, noise, count, offset, dtype)
                expected = summed(noise, count, offset, dtype)
                if values == "normal":
                    error = np.abs(found.astype(np.float64) - expected.astype(np.float64)).max()
                    worst = max(worst, float(error / np.abs(noise.weights).sum()))
                else:
                    np.testing.assert_array_equal(found, expected, f"{values} from {offset}, {many} directions")
    return worst


def fused_as_filled(
    backend: Any, kind: ArrayKind, rule: str, dtype: str, values: Values, *, grad: str | None = None,
    directions: int = 5, maximize: bool = False, skip: int = 0, tensors: Sequence[int] | None = None,
    shapes: Sequence[tuple[int, ...]] = SHAPES, **rows: Any,
) -> bool:  # fmt: skip
    """Whether an update by noise leaves the bits of one by gradients that were filled with it before, and moved."""
    program = rulec.compile(loaded(rule))
    layout = layout_for(program, dtype, grad=grad, maximize=maximize)
    estimate = backend.build_estimate(program, layout, values, backend.emit_estimate(program, layout, values))
    plain = backend.build(program, layout, backend.emit(program, layout))
    fired = range(len(shapes)) if tensors is None else tensors
    noises = [noise_of(values, directions + i % 2, layer=i) for i in fired]
    made = []
    for kernel in (estimate, plain):
        params, states = _start(kind, program, layout, shapes, skip)
        before = [kind.read(p) for p in params]
        gradients: list[Any] = noises
        if kernel is plain:
            gradients = [kind.make(np.zeros(shapes[i], numpy_dtype(layout.dtype("g")))) for i in fired]
            for out, noise in zip(gradients, noises, strict=True):
                backend.fill_noise(out, noise)
        call = kernel.bind(params, states)
        call(0, gradients, _rows(program, len(shapes), rows), **({} if tensors is None else {"tensors": tensors}))
        arrays = [*params, *(x for own in states for x in own.values())]
        made.append([kind.read(x).tobytes() for x in arrays])
        moved = [kind.read(p).tobytes() != b.tobytes() for p, b in zip(params, before, strict=True)]
        assert moved == [i in fired and not rows.get("stays") for i in range(len(shapes))]
    return made[0] == made[1]


def _start(
    kind: ArrayKind, program: Any, layout: Any, shapes: Sequence[tuple[int, ...]], skip: int
) -> tuple[list[Any], list[dict[str, Any]]]:
    """Parameters and states."""
    random = np.random.default_rng(1)

    def make(name: str, shape: tuple[int, ...]) -> Any:
        return kind.make(random.random(shape).astype(numpy_dtype(layout.dtype(name))), skip)

    states = [{b.name: make(b.name, shape) for b in program.states} for shape in shapes]
    return [make("p", shape) for shape in shapes], states


def _rows(program: Any, count: int, given: dict[str, Any]) -> Rows:
    """Scalars, the second of two rows being every tensor's."""
    table = np.random.default_rng(0).uniform(0.1, 0.9, (2, len(program.columns)))
    return Rows(table, np.ones(count, np.int64), **{name: make() for name, make in given.items()})
