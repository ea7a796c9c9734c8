"""States in codes: arrays of codes and scales, and the formats of `rulec.formats` on arrays of any library.

Every operation is of single float32 numbers, as in the definition. A library's compiler may join a product with a sum,
or treat numbers below 2**-126 as zero: then a value next to a threshold may get the neighbouring code.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np

from rulec.formats import UNBIASED, Format, reach, steps, table, tables, zero
from rulec.formats.blocks import ROUNDED
from rulec.functional.values import PureFunctions

_LARGEST = float(np.finfo(np.float32).max)


@dataclass(frozen=True, eq=False)
class Coded:
    """A state in codes: `codes` (int8 or uint8), and `scales` (float32), one for each block.

    Their shapes are as in `rulec.formats`, or as by `shapes_by_rows`.
    """

    codes: Any
    scales: Any
    format: Format

    @property
    def dtype(self) -> str:
        """The format's key, in the place of a dtype."""
        return self.format.key

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of the codes."""
        return tuple(self.codes.shape)

    def fits(self, shape: tuple[int, ...]) -> bool:
        """Whether these are codes and scales of a tensor of this shape."""
        codes, scales = shapes_by_rows(self.format, shape)
        flat = (self.format.scales(math.prod(shape)),)
        return self.shape in (codes, self.format.codes_shape(shape)) and tuple(self.scales.shape) in (scales, flat)

    def like(self, other: Coded) -> Coded:
        """The same in the shapes of another."""
        return Coded(self.codes.reshape(other.codes.shape), self.scales.reshape(other.scales.shape), self.format)


@dataclass(frozen=True, eq=False)
class Unbiased:
    """A state in bfloat16 that every step rounds up or down at random; `values` are its numbers."""

    values: Any

    @property
    def dtype(self) -> str:
        """The word of its storage, in the place of a dtype."""
        return UNBIASED

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of the state."""
        return tuple(self.values.shape)


def shapes_by_rows(form: Format, shape: tuple[int, ...]) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """The shapes of codes and scales with the axes of their tensor, so that they are sharded as it is.

    Where a block has elements of two rows they are those of `rulec.formats`.
    """
    if not shape or shape[-1] % form.block:
        return form.codes_shape(shape), (form.scales(math.prod(shape)),)
    return (*shape[:-1], shape[-1] * form.bits // 8), (*shape[:-1], shape[-1] // form.block)


def encode(form: Format, values: Any, of: PureFunctions) -> Coded:
    """Codes and scales of float32 values, as `rulec.formats.encode` defines them, in `shapes_by_rows`."""
    xp, shape = of.xp, tuple(values.shape)
    x = _filled(values, _rows(form, shape), of)
    finite = xp.all(xp.isfinite(x), axis=-1, keepdims=True)
    x = xp.where(finite if form.signed else finite & (x > 0), x, xp.zeros_like(x))
    scale = _scale(form, x, of)
    # A quotient below 2**-126 may become zero; a power of two on both sides changes no digit.
    power = xp.where(scale > _number(2.0**100, of), _number(2.0**-32, of), _number(1, of))
    code = _nearest(form, (x * power) * (_number(form.largest, of) / (scale * power)), of)
    if form.floor and zero(form) is not None:
        code = xp.where((x > 0) & (code == zero(form)), code + 1, code)
    code = xp.where(finite, code, xp.zeros_like(code)).astype(getattr(xp, form.code_dtype))
    scales = xp.where(finite, scale, _number(math.nan, of)).reshape(shapes_by_rows(form, shape)[1])
    return Coded(_packed(form, code, shape), scales, form)


def decode(coded: Coded, shape: tuple[int, ...], of: PureFunctions) -> Any:
    """float32 values of this shape."""
    xp, form, rows = of.xp, coded.format, _rows(coded.format, shape)
    codes = coded.codes
    if form.bits == 4:
        codes = xp.stack([codes >> 4, codes & 15], axis=-1)
        codes = codes.reshape(-1)[: math.prod(shape)] if _is_short(rows, shape) else codes
    unit = coded.scales * _number(np.float32(1) / np.float32(form.largest), of)
    values = _values(form, _filled(codes, rows, of), of) * unit.reshape(*rows[:-1], 1)
    return values.reshape(-1)[: math.prod(shape)].reshape(shape) if _is_short(rows, shape) else values.reshape(shape)


def _rows(form: Format, shape: tuple[int, ...]) -> tuple[int, ...]:
    """The shape of the blocks of a tensor, one in each row.

    The tensor's first axes stay apart where possible, so a tensor sharded along them remains sharded along them.
    """
    if shape and shape[-1] % form.block == 0:
        return (*shape[:-1], shape[-1] // form.block, form.block)
    return form.scales(math.prod(shape)), form.block


def _is_short(rows: tuple[int, ...], shape: tuple[int, ...]) -> bool:
    return math.prod(rows) > math.prod(shape)


def _filled(array: Any, rows: tuple[int, ...], of: PureFunctions) -> Any:
    """The elements as rows of a block each, the last filled with zeros."""
    if _is_short(rows, tuple(array.shape)):
        lacking = math.prod(rows) - math.prod(array.shape)
        array = of.xp.concatenate([array.reshape(-1), of.xp.zeros((lacking,), dtype=array.dtype)])
    return array.reshape(rows)


def _scale(form: Format, x: Any, of: PureFunctions) -> Any:
    """The scale of each row of finite values, as a column."""
    xp, none = of.xp, _number(0, of)
    scale = xp.maximum(xp.max(x, axis=-1, keepdims=True), none)
    if form.signed:
        negative = xp.maximum(-xp.min(x, axis=-1, keepdims=True), none)
        below = negative >= scale
        # A compiler would multiply by the reciprocal of a divisor that it knows.
        scale = xp.where(below, negative, scale) / xp.where(below, _number(reach(form), of), _number(1, of))
    return xp.minimum(xp.maximum(scale, _number(form.smallest_scale, of)), _number(_LARGEST, of))


def _nearest(form: Format, y: Any, of: PureFunctions) -> Any:
    """The code of each y, as an integer whose lower eight bits are the code's."""
    xp = of.xp
    if form.coding == "thresholds":
        return _stepped(form, y, of)
    if form.coding == "float8":
        return _float8(y, tables.FLOAT8[form.name], of)
    return xp.round(ROUNDED[form.coding](xp, lambda value: _number(value, of), y)).astype(xp.int32)


def _stepped(form: Format, y: Any, of: PureFunctions) -> Any:
    """The code by one look into the cells of `rulec.formats.lookup`."""
    xp, cells = of.xp, steps(form)
    bits = y.view(xp.uint32)
    cell = ((bits & 0x7FFFFFFF) >> cells.shift).astype(xp.int32)
    cell = xp.minimum(xp.maximum(cell, cells.low), cells.low + cells.cells - 1) - cells.low
    if form.signed:
        cell = cell + (bits >> 31).astype(xp.int32) * cells.cells
    above = y > of.looked_up(cells.threshold, cell)
    return of.looked_up(cells.first.astype(np.int32), cell) + above.astype(xp.int32)


def _float8(y: Any, kind: tables.Float8, of: PureFunctions) -> Any:
    """The bits of the nearest number, as `rulec.formats.tables.nearest` finds them."""
    xp, size = of.xp, of.xp.abs(y)
    bits, drop = size.view(xp.uint32), 23 - kind.mantissa
    carried = bits + ((1 << (drop - 1)) - 1) + ((bits >> drop) & 1)
    normal = (carried >> drop).astype(xp.int32) - ((127 - kind.bias) << kind.mantissa)
    power = np.float32(2.0 ** (24 - kind.bias - kind.mantissa))
    small = (size + _number(power, of)).view(xp.uint32).astype(xp.int32) - int(power.view(np.uint32))
    code = xp.where(size < _number(2.0 ** (1 - kind.bias), of), small, normal)
    return code + (y.view(xp.uint32) >> 31).astype(xp.int32) * 128


def _values(form: Format, codes: Any, of: PureFunctions) -> Any:
    """The entries of the format's table."""
    if form.coding == "number":
        return codes.astype(of.xp.float32)
    return of.looked_up(table(form), codes.astype(of.xp.uint8).astype(of.xp.int32))


def _packed(form: Format, code: Any, shape: tuple[int, ...]) -> Any:
    """Codes as they are stored."""
    count, stored = math.prod(shape), shapes_by_rows(form, shape)[0]
    if form.bits == 8:
        return code.reshape(-1)[:count].reshape(shape) if math.prod(code.shape) > count else code.reshape(shape)
    pairs = code.reshape(*stored, 2) if math.prod(code.shape) == count else code.reshape(-1, 2)[: -(-count // 2)]
    return (pairs[..., 0] << 4) | pairs[..., 1]


def _number(value: Any, of: PureFunctions) -> Any:
    """One number in float32, exactly."""
    return of.xp.asarray(float(value), of.xp.float32)
