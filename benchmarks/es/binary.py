"""Rows of `rulec bench es` about packed bits: their product against a product of floats and against bits one by one."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

from benchmarks.result import Row
from rulec.backend import registry
from rulec.es.binary import Bits, draw, pack, product
from rulec.tools.compare.measure import Times, interleaved

#: Members, and the side of the square that each multiplies; for bits one by one, which take long, (members, rows).
SIZE, QUICK_SIZE = (64, 1024), (4, 128)
ONE_BY_ONE, QUICK_ONE_BY_ONE = (1, 64), (1, 8)
ROUNDS, QUICK_ROUNDS = 7, 3

#: What the rows say.
FLOATS = "product of packed bits, times as fast as torch's of float32"
BITS = "product of packed bits, times as fast as an exclusive or of booleans in torch"
DRAWN = "drawing the members' weights, over their product"


def rows(quick: bool) -> Iterator[Row]:
    """The rows, for each backend that can run here."""
    yield from _against_floats(*(QUICK_SIZE if quick else SIZE), QUICK_ROUNDS if quick else ROUNDS)
    members, lines = QUICK_ONE_BY_ONE if quick else ONE_BY_ONE
    yield from _one_by_one(members, lines, (QUICK_SIZE if quick else SIZE)[1], QUICK_ROUNDS if quick else ROUNDS)


def _against_floats(members: int, side: int, rounds: int) -> Iterator[Row]:
    import torch

    a, b = _bits(members, side, side, 0), _bits(members, side, side, 1)
    packed = pack(a), pack(b)
    floats = [torch.from_numpy(x.astype(np.float32)) for x in (a, b)]
    theta = np.random.default_rng(0).normal(size=(side, side))
    contenders: dict[str, Callable[[], object]] = {
        "float32": lambda: torch.bmm(floats[0], floats[1].transpose(1, 2)),
        "drawn": lambda: draw(theta, Bits(seed=0, layer=0, step=0, directions=members)),
        **_products(*packed, side),
    }
    times = interleaved(contenders, rounds)
    subject = f"{members} members, {side} square"
    for backend in _backends():
        yield _row(f"{subject}, {backend}", FLOATS, times, "float32", backend)
    yield _row(subject, DRAWN, times, "drawn", _backends()[0])


def _one_by_one(members: int, lines: int, side: int, rounds: int) -> Iterator[Row]:
    import torch

    a, b = _bits(members, lines, side, 0), _bits(members, side, side, 1)
    flags = [torch.from_numpy(x) for x in (a, b)]
    contenders: dict[str, Callable[[], object]] = {
        "booleans": lambda: side - 2 * (flags[0][:, :, None] ^ flags[1][:, None]).sum(dim=-1),
        **_products(pack(a), pack(b), side),
    }
    times = interleaved(contenders, rounds)
    for backend in _backends():
        subject = f"{members} member, {lines} rows by {side} square, {backend}"
        yield _row(subject, BITS, times, "booleans", backend)


def _products(a: Any, b: Any, side: int) -> dict[str, Callable[[], object]]:
    """The product by each backend."""
    return {name: (lambda name=name: product(a, b, side, backend=name)) for name in _backends()}  # type: ignore[misc]


def _backends() -> list[str]:
    """The backends with kernels for NumPy's arrays, as far as they can run here."""
    return [name for name in ("cpu", "c") if registry.get(name).unavailable_reason() is None]


def _row(subject: str, measure: str, times: Times, above: str, below: str) -> Row:
    detail = {name: times.median(name) for name in (above, below)}
    return Row(subject, measure, times.ratio(above, below), detail={**detail, "scatter": times.quartiles(above, below)})


def _bits(members: int, lines: int, side: int, seed: int) -> np.ndarray[Any, np.dtype[np.bool_]]:
    return np.asarray(np.random.default_rng(seed).random((members, lines, side), np.float32) < 0.5)
