"""Saved weights of one kind as weights of another: the memory beside a parameter, made of that of the other kind."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from typing import Any

import numpy as np

from rulec.compiler.scalars import evaluate_once
from rulec.compiler.weights import PARTS, Part, is_part, part_value, weight
from rulec.errors import StateMismatch
from rulec.language.expr.node import Op, node

Array = np.ndarray[Any, Any]

#: The name of the memory beside a parameter -> the kind of weights.
KINDS = {part.name: kind for kind, part in PARTS.items()}


def reweighed(
    saved: Mapping[str, Any], wanted: Collection[str], parameter: Callable[[], Array], part: Callable[[Any], Array],
    owner: str,
) -> dict[str, Any]:  # fmt: skip
    """Saved states of the parameter `owner`, with the wanted part of its weight made of the part of another kind.

    `wanted` are the names of the states here. `parameter` gives the parameter's values in float32, and `part` those of
    a saved part. Where one of the two kinds has no part, the parameter alone counts. StateMismatch for a part of
    another shape.
    """
    before = [name for name in saved if is_part(name) and name not in wanted]
    after = [name for name in wanted if is_part(name) and name not in saved]
    states = {name: value for name, value in saved.items() if name not in before}
    if before and after:
        p, beside = parameter(), np.asarray(part(saved[before[0]]), np.float32)
        if p.shape != beside.shape:
            raise StateMismatch(f"{before[0]} of {owner} was saved with shape {beside.shape}, where it has {p.shape}")
        states[after[0]] = converted(KINDS[before[0]], KINDS[after[0]], p, beside)
    return states


def converted(before: str, after: str, p: Array, part: Array) -> Array:
    """The part of a weight of the kind `after`, of a parameter and its part of the kind `before`, all in float32.

    The weight is the same float32 where the kind holds it, else the nearest that the kind holds beside the parameter. A
    `master` copy counts beside its own rounded value where the parameter is another one: it may not be loaded yet.
    """
    return part_of(after, float_of(before, p, part), _beside(part, p) if before == "master" else p)


def float_of(kind: str, p: Array, part: Array) -> Array:
    """The float32 weight of a parameter and its part; of a `master` copy the copy."""
    if kind == "master":
        return part
    return np.asarray(evaluate_once(weight(kind), {}, {}, {"p": p, PARTS[kind].name: part}), np.float32)


def part_of(kind: str, value: Array, p: Array | None = None) -> Array:
    """The part of this kind of a float32 weight beside a parameter; where there is none, beside the weight rounded."""
    high = rounded(value) if p is None else p
    expression = part_value(kind, node(Op.LOAD, "value"), node(Op.LOAD, "p"))
    return _fitting(PARTS[kind], np.asarray(evaluate_once(expression, {}, {}, {"value": value, "p": high})))


def _beside(master: Array, p: Array) -> Array:
    """The bfloat16 number beside a master copy: the parameter within an ulp of it, else the copy rounded."""
    p = rounded(p)
    with np.errstate(invalid="ignore"):
        near = np.abs(p - master) <= np.abs(master) * np.float32(2.0**-7)
    return np.where(near, p, rounded(master))


def rounded(value: Array) -> Array:
    """Values of float32 rounded to bfloat16, halves to even. Infinities and NaN stay."""
    bits = np.ascontiguousarray(value, np.float32).view(np.uint32).astype(np.uint64)
    nearest = ((bits + 0x7FFF + (bits >> 16 & 1)) >> 16 << 16).astype(np.uint32).view(np.float32)
    return np.where(np.isfinite(value), nearest, value)


def _fitting(part: Part, value: Array) -> Array:
    """Values of a part in its dtype, the nearest that there are; bfloat16 in float32."""
    if not part.dtype.startswith("int"):
        return value.astype(np.float32)
    limits = np.iinfo(part.dtype)
    fitting: Array = np.clip(np.nan_to_num(value), limits.min, limits.max).astype(part.dtype)
    return fitting
