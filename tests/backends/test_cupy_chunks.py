"""How buckets are cut for the blocks of a grid: every element once, whatever else there is."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest

from rulec.kernel.multi_tensor.cut import Cut, Lying, Whole, rows_of
from rulec_backends.cupy.plan import CHUNK, THREADS, TILE
from rulec_backends.cupy.work import CHUNKS, LARGE, Flat, Tiles, chunk_length

SIZES = (0, 1, 7, 4096, 4097, 100_003, LARGE - 1, LARGE + 1)

#: Matrices as they lie, and how their tiles are.
MATRICES = [
    (Lying(*(np.array([n]) for n in shape)), Tiles(pack, columns, apart or columns))
    for shape in (
        (1, 1, 1), (1, 1, 100_003), (1, 4096, 128), (3, 5, 7), (64, 3, 3), (2, 301, 250), (1, 100_003, 5), (0, 4, 3),
        (1, 3, 0), (1, 7, 33), (1, 256, 1024),
    )
    for pack in (2, 4, 8)
    for columns, apart in ((False, False), (False, True), (True, True))
]  # fmt: skip


def tiles(shape: tuple[int, int, int], how: Tiles) -> tuple[Cut, Whole]:
    """A tensor of so many matrices, rows and columns in tiles, and their words."""
    cut = how.cut(Lying(*(np.array([n]) for n in shape)))
    return cut, how.table(cut)


def chunks(sizes: Sequence[int], moved: int) -> tuple[Cut, Whole]:
    """Tensors of so many elements in chunks, and their words."""
    cut = Flat(moved).cut(rows_of(sizes))
    return cut, Flat(moved).table(cut)


@pytest.mark.parametrize("moved", [4, 28, 100])
def test_chunks_have_every_element_once(moved: int) -> None:
    cut, table = chunks(SIZES, moved)
    assert table.shape[1] == len(CHUNK)
    for i, size in enumerate(SIZES):
        own = table[cut.rows([i])]
        starts, stops = own[:, 1], own[:, 2]
        assert (own[:, 0] == i).all()
        assert [0, *stops.tolist()] == [*starts.tolist(), size] if size else not len(own)
        assert (stops - starts <= chunk_length(size, moved)).all()
    assert table[:, 3].tolist() == list(range(len(table)))


def test_chunks_follow_from_a_tensor_alone() -> None:
    (_, alone), (cut, table) = chunks([100_003], 28), chunks(SIZES, 28)
    assert (table[cut.rows([5])][:, 1:3] == alone[:, 1:3]).all()


def test_offsets_have_64_bits() -> None:
    size = 2**31 + 17
    last = chunks([5, size], 28)[1][-1]
    assert last[2] == size
    assert last[1] == 2**31
    _, tall = tiles((1, 2**16, 2**15 + 1), Tiles(4))
    # The last line of the last tile, times the width: where a thread begins to count.
    assert (tall[:, TILE.index("bottom")].max() - 1) * (2**15 + 1) + tall[:, TILE.index("right")].max() == 2**31 + 2**16


def test_lengths_are_whole_passes_of_a_block() -> None:
    for small, large in CHUNKS.values():
        assert large > small
        assert small % (8 * THREADS) == large % (8 * THREADS) == 0


@pytest.mark.parametrize(("matrices", "how"), MATRICES, ids=str)
def test_tiles_have_every_element_once(matrices: Lying, how: Tiles) -> None:
    cut = how.cut(matrices)
    batch, height, width = (int(n[0]) for n in (matrices.batch, matrices.height, matrices.width))
    lines = batch * height
    if lines * width > 2_000_000:
        pytest.skip("too large to count")
    seen = np.zeros((lines, width), np.int64)
    for row in how.table(cut).tolist():
        tile = dict(zip(TILE, row, strict=True))
        seen[tile["top"] : tile["bottom"], tile["left"] : tile["right"]] += 1
        assert tile["width"] == width
        lanes = tile["lanes"]
        assert 1 <= lanes <= 32
        assert lanes & (lanes - 1) == 0
        if how.columns:
            assert tile["right"] - tile["left"] <= lanes * how.pack
            assert 0 <= tile["col_slots"] < cut.deep[0] * batch * width
        if how.apart:
            assert tile["top"] // height == (tile["bottom"] - 1) // height == tile["matrix"]
        assert tile["row_slots"] == tile["left"] // cut.wide[0] * lines
    assert (seen == 1).all()


def test_slots_of_columns_are_apart() -> None:
    for matrices, how in MATRICES:
        if not how.columns:
            continue
        found = set()
        for row in how.table(how.cut(matrices)).tolist():
            tile = dict(zip(TILE, row, strict=True))
            key = tile["col_slots"] + tile["matrix"] * int(matrices.width[0]) + tile["left"]
            assert key not in found
            found.add(key)


def test_many_tiles_are_neither_too_many_nor_too_few() -> None:
    how = Tiles(4, columns=True, apart=True)
    large, table = tiles((1, 4096, 4096), how)
    assert large.deep[0] <= 256
    assert len(table) >= 1024
    embedding, _ = tiles((1, 1_000_000, 128), how)
    assert embedding.deep[0] <= 256
    assert embedding.counts[0] >= 128
