"""Parts of tensors: where their elements lie in the whole, against NumPy's own slices."""

from __future__ import annotations

import numpy as np
import pytest

from rulec.array_api.bits import in_piece
from rulec.array_api.slices import piece_of
from rulec.language.expr.node import ROWS


def test_pieces_are_slices_of_whole_tensors() -> None:
    draws, kinds = np.random.default_rng(0), set()
    for _ in range(500):
        shape = tuple(int(n) for n in draws.integers(1, 6, draws.integers(0, 5)))
        first = [int(draws.integers(0, n)) for n in shape]
        cut = tuple(slice(at, int(draws.integers(at, n + 1))) for at, n in zip(first, shape, strict=True))
        whole = np.arange(np.prod(shape, dtype=int)).reshape(shape)
        piece = piece_of(shape, whole[cut].shape, first)
        kinds.add("none" if piece is None else "rows" if piece.gap else "range")
        if piece is None or not whole[cut].size:
            continue
        places = in_piece(np, np.arange(whole[cut].size), *(piece.words[word] for word in ROWS))
        assert np.array_equal(places, whole[cut].reshape(-1)), (shape, cut)
    assert kinds == {"none", "rows", "range"}


@pytest.mark.parametrize(("part", "first"), [((4, 3, 4), (0, 3, 4)), ((2, 6, 8), (1, 0, 0)), ((4, 6, 3), (0, 0, 5))])
def test_two_cuts_behind_the_first_dimension_are_no_piece(part: tuple[int, ...], first: tuple[int, ...]) -> None:
    assert (piece_of((4, 6, 8), part, first) is None) is (part == (4, 3, 4))


def test_far_numbers_are_two_words() -> None:
    piece = piece_of((2**20, 2**20), (2**20, 5), (0, 2**20 - 5))
    assert piece is not None
    assert (piece.start, piece.width, piece.gap) == (2**20 - 5, 5, 2**20 - 5)
    far = piece_of((2**20, 2**20), (1, 2**20), (2**20 - 1, 0))
    assert far is not None
    assert far.words["start_low"] + 2**24 * far.words["start_high"] == 2**40 - 2**20
    assert max(far.words.values()) < 2**24
