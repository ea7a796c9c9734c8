"""A backend with every capability, each by its definition in NumPy, and others with one fault each."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import ml_dtypes
import numpy as np

from rulec.array.arrays import numpy_dtype
from rulec.array_api import random as streams
from rulec.backend.capabilities import Noise, Product
from rulec.backend.protocol import Rows
from rulec.compiler.ir import Program
from rulec.compiler.layout import Layout
from rulec.errors import BackendUnsupported
from rulec.es.binary.kernels import ReferenceKernels
from rulec.language.expr.node import Op
from rulec.runtime.storage.quantized import kernel_of
from rulec.testing.capabilities import summed
from rulec_backends.numpy import NumpyBackend
from tests.testing.broken_device import OnTheDevice

Array = np.ndarray[Any, Any]


class Gradients:
    """A kernel that computes gradients from something else, and then runs the plain one."""

    def __init__(self, kernel: Any, dtype: str, factors: str = "") -> None:
        self._kernel, self._dtype, self._factors = kernel, dtype, factors

    def bind(self, params: Sequence[Array], states: Sequence[dict[str, Array]]) -> Any:
        call = self._kernel.bind(params, states)
        return lambda stage, moving, rows: call(
            stage, [self._made(x, p) for x, p in zip(moving, params, strict=True)], rows
        )

    def _made(self, source: Noise | Product, param: Array) -> Array:
        if isinstance(source, Noise):
            return summed(source, param.size, 0, self._dtype).reshape(param.shape)
        exact = source.outputs.astype(np.float64).T @ source.inputs.astype(np.float64)
        return exact.astype(numpy_dtype(self._factors)).astype(numpy_dtype(self._dtype))


class Products:
    """Products in float32, rounded once."""

    def pays(self, rows: int, cols: int) -> bool:
        return min(rows, cols) >= 64

    def stack_size(self, *_: Any) -> int:
        return 1

    def divided(self, y: Array, norms: Array, out: Any = None) -> Array:
        return self._rounded(_wide(y) / _wide(norms))

    def gram(self, y: Array, out: Any = None) -> Array:
        turned = _wide(y).transpose(0, 2, 1)
        return self._rounded(turned @ _wide(y) if y.shape[1] > y.shape[2] else _wide(y) @ turned)

    def polynomial(self, gram: Array, b: float, c: float, out: Any = None) -> Array:
        return self._rounded(b * _wide(gram) + c * _wide(gram) @ _wide(gram))

    def multiplied(self, x: Array, polynomial: Array, a: float, out: Any = None) -> Array:
        return self._rounded(a * _wide(x) + _wide(x) @ _wide(polynomial))

    def following(self, y: Array, polynomial: Array, a: float, out: Any = None) -> Array:
        pair = (y, polynomial) if y.shape[1] > y.shape[2] else (polynomial, y)
        return self._rounded(a * _wide(y) + _wide(pair[0]) @ _wide(pair[1]))

    def _rounded(self, values: Array) -> Array:
        return values.astype(ml_dtypes.bfloat16)


def _wide(x: Array) -> Array:
    return np.asarray(x.astype(np.float32))


class Complete(OnTheDevice):
    """Without a fault."""

    name, on_device = "complete", True
    narrow = True

    def build(self, program: Program, layout: Layout, source: str) -> Any:
        if not layout.formats:
            return super().build(program, layout, source)
        return kernel_of(NumpyBackend(), program, layout, lambda _, like: np.empty_like(like))[1]

    def emit(self, program: Program, layout: Layout) -> str:
        return super().emit(program, layout.decoded if layout.formats else layout)

    def decodes(self, program: Program, layout: Layout) -> bool:
        return True

    def emit_estimate(self, program: Program, layout: Layout, values: str) -> str:
        return self.emit(program, layout)

    def build_estimate(self, program: Program, layout: Layout, values: str, source: str) -> Any:
        return Gradients(self.build(program, layout, source), layout.dtype("g"))

    def assembly(self, name: str, source: str) -> str:
        return f"{name}:\n{source}"

    def fill_noise(self, out: Array, noise: Noise, offset: int = 0) -> None:
        out[...] = summed(noise, out.size, offset, out.dtype.name).reshape(out.shape)

    def fill_lines(self, out: Array, noise: Noise, pairs: Sequence[int], offset: int = 0) -> None:
        for line, pair in zip(out, pairs, strict=True):
            self.fill_noise(line, replace(noise, first=pair), offset)

    def emit_epilogue(self, program: Program, layout: Layout, factors: str) -> str:
        return self.emit(program, layout)

    def build_epilogue(self, program: Program, layout: Layout, factors: str, source: str) -> Any:
        return Gradients(self.build(program, layout, source), layout.dtype("g"), factors)

    def has_quintic(self, device: Any) -> bool:
        return True

    def emit_quintic(self, dtype: str) -> str:
        if dtype != "bfloat16":
            raise BackendUnsupported(self.name, dtype, "newton_schulz")
        return ""

    def build_quintic(self, dtype: str, source: str) -> Products:
        return Products()

    def emit_segments(self) -> str:
        return ""

    def build_segments(self, source: str) -> Any:
        return self.reduced

    def reduced(self, op: Op, values: Array, ends: Array) -> Array:
        functions: Mapping[Op, Any] = {
            Op.SUM: np.sum, Op.MIN: lambda x: x.min(initial=np.inf), Op.MAX: lambda x: x.max(initial=-np.inf),
        }  # fmt: skip
        runs = itertools.pairwise(ends)
        return np.array([functions[op](values[first:last]) for first, last in runs])

    def emit_draws(self) -> str:
        return ""

    def build_draws(self, source: str) -> Any:
        return self.drawn

    def drawn(
        self, op: Op, out: Array, ends: Array, tensors: Array, steps: Any, *, most: int, seed: int, draw: int,
        first: int = 0,
    ) -> None:  # fmt: skip
        block, before = divmod(first, 4)
        for tensor, step, (start, stop) in zip(
            tensors, np.broadcast_to(steps, tensors.shape), itertools.pairwise(ends), strict=True
        ):
            count, where = before + int(stop - start), {"seed": seed, "draw": draw, "block": block}
            where |= {"tensor": int(tensor), "step": int(step)}
            words = streams.stream(count, **where)
            numbers = streams.uniform(words) if op is Op.UNIFORM else streams.normal(count, **where)
            out[start:stop] = numbers[before:]

    def binary(self) -> ReferenceKernels:
        return ReferenceKernels()


class HalfAnEstimate(OnTheDevice):
    """Prints kernels for noise that it cannot build."""

    name = "half-an-estimate"

    def emit_estimate(self, program: Program, layout: Layout, values: str) -> str:
        return ""


class OtherNoise(Complete):
    """Begins every stream at its first element."""

    name = "fill_noise"

    def fill_noise(self, out: Array, noise: Noise, offset: int = 0) -> None:
        super().fill_noise(out, noise)


class OtherLines(Complete):
    """Fills every line with the noise of its number."""

    name = "fill_lines"

    def fill_lines(self, out: Array, noise: Noise, pairs: Sequence[int], offset: int = 0) -> None:
        super().fill_lines(out, noise, range(len(pairs)), offset)


class OtherEstimate(Complete):
    """Forgets `maximize` where the gradient is noise."""

    name = "estimate"

    def build_estimate(self, program: Program, layout: Layout, values: str, source: str) -> Any:
        plain = replace(layout, maximize=False)
        return Gradients(self.build(program, plain, self.emit(program, plain)), layout.dtype("g"))


class OtherProduct(Complete):
    """Does not round the product to the dtype of its factors."""

    name = "epilogue"

    def build_epilogue(self, program: Program, layout: Layout, factors: str, source: str) -> Any:
        return super().build_epilogue(program, layout, "float32", source)


class OtherPolynomial(Complete):
    """Rounds between the two terms."""

    name = "quintic"

    def build_quintic(self, dtype: str, source: str) -> Products:
        class Rounded(Products):
            def polynomial(self, gram: Array, b: float, c: float, out: Any = None) -> Array:
                square = _wide(self._rounded(_wide(gram) @ _wide(gram)))
                return self._rounded(b * _wide(gram) + c * square)

        return Rounded()


class OtherRuns(Complete):
    """Leaves NaN out of extremes."""

    name = "segments"

    def reduced(self, op: Op, values: Array, ends: Array) -> Array:
        return super().reduced(op, values if op is Op.SUM else np.nan_to_num(values), ends)


class OtherDraws(Complete):
    """Begins each draw with a whole block."""

    name = "draws"

    def drawn(self, *arguments: Any, first: int = 0, **position: Any) -> None:
        super().drawn(*arguments, first=first // 4 * 4, **position)


class OtherBits(Complete):
    """Gives the second sign the bits of the first."""

    name = "binary"

    def binary(self) -> ReferenceKernels:
        class Alike(ReferenceKernels):
            def draw(self, thresholds: Array, shape: Sequence[int], bits: Any) -> Array:
                words = super().draw(thresholds, shape, bits)
                words[bits.directions :] = words[: bits.directions]
                return words

        return Alike()


class OtherCodes(Complete):
    """Scales codes by the mean of a block's ends."""

    name = "decodes"

    def build(self, program: Program, layout: Layout, source: str) -> Any:
        if not layout.formats:
            return super().build(program, layout, source)
        coarse = tuple((state, replace(form, floor=not form.floor)) for state, form in layout.formats)
        return super().build(program, replace(layout, formats=coarse), source)


class NotNarrow(Complete):
    """Reads operands of `newton_schulz` as if they were in 32 bits."""

    name = "narrow"

    def build(self, program: Program, layout: Layout, source: str) -> Any:
        kernel = super().build(program, layout, source)
        bind = kernel.bind

        def bound(*arguments: Any) -> Any:
            call = bind(*arguments)

            def run(stage: int, moving: Any, rows: Rows, scratch: Any = None, **options: Any) -> Any:
                read = {n: [x.view(np.uint16).astype(x.dtype) if x.dtype == ml_dtypes.bfloat16 else x for x in xs]
                        for n, xs in (scratch or {}).items()}  # fmt: skip
                return call(stage, moving, rows, read, **options)

            return run

        if layout.results:
            kernel.bind = bound
        return kernel


class SameAssembly(Complete):
    """Has one text for all kernels."""

    name = "assembly"

    def assembly(self, name: str, source: str) -> str:
        return super().assembly("", "")


FAULTY = (
    OtherNoise, OtherLines, OtherEstimate, OtherProduct, OtherPolynomial, OtherRuns, OtherDraws, OtherBits,
    OtherCodes, NotNarrow, SameAssembly,
)  # fmt: skip
