"""The noise of each family as a whole array, in float64: the living definition, which every other way agrees with."""

from __future__ import annotations

from typing import Any

import numpy as np

from rulec.es import streams
from rulec.es.perturbation import Perturbation
from rulec.es.streams import Stream

Floats = np.ndarray[Any, np.dtype[np.float64]]


def noise(perturbation: Perturbation, shape: tuple[int, ...], layer: int, step: int, direction: int) -> Floats:
    """The noise of one direction of one layer, before `sigma`: of mean 0 and variance 1 in every element.

    Of dropout: what inputs are multiplied by, less 1. Arrays of fewer than two dimensions have independent noise (of
    dropout: none).
    """
    stream = Stream(perturbation.seed_or_0, layer, step)
    if len(shape) < 2:
        return np.zeros(shape) if perturbation.family == "dropout" else _plain(perturbation, stream, shape, direction)
    return _FAMILIES[perturbation.family](perturbation, stream, shape, direction)


def estimate(
    perturbation: Perturbation, weight: Floats, layer: int, step: int, weights: Floats
) -> Floats:  # fmt: skip
    """The estimate of a layer's gradient from the weights of all directions, term by term."""
    shape = weight.shape
    each = [noise(perturbation, shape, layer, step, direction) for direction in range(perturbation.directions)]
    total = np.sum([a * e for a, e in zip(weights, each, strict=True)], axis=0)
    if perturbation.family != "dropout" or len(shape) < 2:
        return np.asarray(total)
    return _of_gains(perturbation, weight, total)


def _of_gains(perturbation: Perturbation, weight: Floats, total: Floats) -> Floats:
    """The gradient's part along the gains of inputs: dropout sees no other part of it."""
    columns = weight.shape[1]
    variance = columns / perturbation.kept_of(columns) - 1.0
    others = tuple(axis for axis in range(weight.ndim) if axis != 1)
    squares = np.sum(weight**2, axis=others, keepdims=True)
    scale = np.divide(1.0, variance * squares, out=np.zeros_like(squares), where=squares > 0)
    return np.asarray(total * weight * scale)


def _plain(perturbation: Perturbation, stream: Stream, shape: tuple[int, ...], direction: int) -> Floats:
    count = int(np.prod(shape, dtype=np.int64))
    return np.asarray(stream.of(direction).values(perturbation.values, count).reshape(shape))


def _sparse(perturbation: Perturbation, stream: Stream, shape: tuple[int, ...], direction: int) -> Floats:
    rows, columns, rest = shape[0], shape[1], shape[2:]
    count = perturbation.lines_of(rows, columns)[1]
    chosen = stream.of(direction, streams.COLUMNS).permutation(columns)[:count]
    noise = np.zeros(shape)
    there = _plain(perturbation, stream, (rows, count, *rest), direction)
    noise[:, chosen] = there * perturbation.scale_of(rows, columns)
    return noise


def _permuted(perturbation: Perturbation, stream: Stream, shape: tuple[int, ...], direction: int) -> Floats:
    rows, columns, rest = shape[0], shape[1], shape[2:]
    high, wide = perturbation.lines_of(rows, columns)
    there = _plain(perturbation, stream, (high, wide, *rest), streams.SHARED)
    whole = np.zeros(shape)
    whole[:high, :wide] = there * perturbation.scale_of(rows, columns)
    by_rows, by_columns = perturbation.sides_of(rows, columns)
    if by_rows:
        whole = whole[stream.of(direction, streams.ROWS).permutation(rows)]
    if by_columns:
        whole = whole[:, stream.of(direction, streams.COLUMNS).permutation(columns)]
    # What all orders have in common is else the same in all members, whose mean takes it away.
    sign = stream.of(streams.SHARED, streams.SIGNS).signs(perturbation.directions)[direction]
    return whole if perturbation.antithetic else whole * sign


def _signflip(perturbation: Perturbation, stream: Stream, shape: tuple[int, ...], direction: int) -> Floats:
    rows, columns = shape[0], shape[1]
    noise = _plain(perturbation, stream, shape, streams.SHARED)
    by_rows, by_columns = perturbation.sides_of(rows, columns)
    ones = (1,) * (len(shape) - 2)
    if by_rows:
        noise = noise * stream.of(direction, streams.ROWS).signs(rows).reshape(rows, 1, *ones)
    if by_columns:
        noise = noise * stream.of(direction, streams.COLUMNS).signs(columns).reshape(1, columns, *ones)
    return noise


def _lowrank(perturbation: Perturbation, stream: Stream, shape: tuple[int, ...], direction: int) -> Floats:
    rank, rows = perturbation.rank, shape[0]
    columns = int(np.prod(shape[1:], dtype=np.int64))
    left = stream.of(direction, streams.ROWS).values(perturbation.values, rank * rows).reshape(rank, rows)
    right = stream.of(direction, streams.COLUMNS).values(perturbation.values, rank * columns).reshape(rank, columns)
    return np.asarray(left.T @ right / np.sqrt(rank)).reshape(shape)


def _dropout(perturbation: Perturbation, stream: Stream, shape: tuple[int, ...], direction: int) -> Floats:
    columns = shape[1]
    kept = window(perturbation, stream, columns, direction)
    gains = np.full(columns, -1.0)
    gains[kept] += columns / kept.size
    return np.broadcast_to(gains.reshape(1, columns, *(1,) * (len(shape) - 2)), shape).copy()


def window(perturbation: Perturbation, stream: Stream, columns: int, direction: int) -> streams.Numbers:
    """The inputs that a direction keeps: a window of a ring of all inputs, in an order of this step's own."""
    kept = perturbation.kept_of(columns)
    ring = stream.of(streams.SHARED, streams.DROPPED).permutation(columns)
    start = direction * columns // perturbation.directions
    return np.asarray(ring[(start + np.arange(kept)) % columns])


_FAMILIES = {
    "independent": _plain, "spsa": _plain, "sparse": _sparse, "permuted": _permuted, "signflip": _signflip,
    "lowrank": _lowrank, "dropout": _dropout,
}  # fmt: skip
