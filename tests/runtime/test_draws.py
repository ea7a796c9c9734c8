"""Random numbers of a part of a matrix are those of the whole one."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import numpy as np
import pytest

from rulec.array_api.numpy import NumpyLibrary
from rulec.array_api.slices import runs_of
from rulec.language.expr.node import Op
from rulec.runtime.stages import sources
from rulec.runtime.stages.sources import RandomMatrix

ROWS: list[Sequence[int]] = [range(9), range(2, 7), [0, 1, 4, 5, 8], [3], []]
COLS: list[Sequence[int]] = [range(11), range(3, 4), [1, 2, 7], range(0)]


@pytest.mark.parametrize("op", [Op.NORMAL, Op.UNIFORM])
@pytest.mark.parametrize("band", [1, 30, 1 << 18])
def test_a_part_of_a_draw(op: Op, band: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sources, "_BAND", band)
    position = {"seed": 5, "tensor": 2, "draw": 1, "step": 3}
    drawing = RandomMatrix(NumpyLibrary(), op, position, "float32", 1 << 20, None)
    whole = drawing.numbers(0, 99).reshape(9, 11)
    for rows, cols, least in itertools.product(ROWS, COLS, (4, 4096)):
        monkeypatch.setattr(sources, "_LEAST", least)
        part = drawing.matrix(runs_of([9], [rows]), runs_of([11], [cols]), 11)
        assert part.shape == (1, len(rows), len(cols))
        assert (part[0] == whole[np.ix_([*rows], [*cols])]).all()


def test_runs_of_joined_dimensions() -> None:
    assert runs_of([4, 3, 2], [range(1, 3), range(3), range(2)]) == ((6, 18),)
    assert runs_of([4, 3, 2], [range(4), range(1, 3), range(2)]) == ((2, 6), (8, 12), (14, 18), (20, 24))
    assert runs_of([4], [[3, 0, 1]]) == ((3, 4), (0, 2))
    assert runs_of([], []) == ((0, 1),)
    assert runs_of([4, 2], [range(4), []]) == ()
