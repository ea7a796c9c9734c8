"""How buckets are cut for the blocks of a grid: every element once, whatever else there is."""

from __future__ import annotations

import math

import numpy as np
import pytest

from rulec_backends.cupy.chunks import CHUNKS, LARGE, Matrices, chunk_length, flat_chunks, tiles
from rulec_backends.cupy.plan import CHUNK, THREADS, TILE

SIZES = (0, 1, 7, 4096, 4097, 100_003, LARGE - 1, LARGE + 1)

MATRICES = [
    Matrices(batch, height, width, pack, columns, apart or columns)
    for batch, height, width in (
        (1, 1, 1), (1, 1, 100_003), (1, 4096, 128), (3, 5, 7), (64, 3, 3), (2, 301, 250), (1, 100_003, 5), (0, 4, 3),
        (1, 3, 0), (1, 7, 33), (1, 256, 1024),
    )
    for pack in (2, 4, 8)
    for columns, apart in ((False, False), (False, True), (True, True))
]  # fmt: skip


@pytest.mark.parametrize("moved", [4, 28, 100])
def test_chunks_have_every_element_once(moved: int) -> None:
    chunks = flat_chunks(SIZES, moved)
    assert chunks.table.shape[1] == len(CHUNK)
    for i, size in enumerate(SIZES):
        own = chunks.of([i])
        starts, stops = own[:, 1], own[:, 2]
        assert (own[:, 0] == i).all()
        assert [0, *stops.tolist()] == [*starts.tolist(), size] if size else not len(own)
        assert (stops - starts <= chunk_length(size, moved)).all()
    assert chunks.table[:, 3].tolist() == list(range(len(chunks.table)))


def test_chunks_follow_from_a_tensor_alone() -> None:
    alone = flat_chunks([100_003], 28).table[:, 1:3]
    assert (flat_chunks(SIZES, 28).of([5])[:, 1:3] == alone).all()


def test_offsets_have_64_bits() -> None:
    size = 2**31 + 17
    last = flat_chunks([5, size], 28).table[-1]
    assert last[2] == size
    assert last[1] == 2**31
    tall = tiles([Matrices(1, 2**16, 2**15 + 1, 4)]).table
    # The last line of the last tile, times the width: where a thread begins to count.
    assert (tall[:, TILE.index("bottom")].max() - 1) * (2**15 + 1) + tall[:, TILE.index("right")].max() == 2**31 + 2**16


def test_lengths_are_whole_passes_of_a_block() -> None:
    for small, large in CHUNKS.values():
        assert large > small
        assert small % (8 * THREADS) == large % (8 * THREADS) == 0


@pytest.mark.parametrize("matrices", MATRICES, ids=str)
def test_tiles_have_every_element_once(matrices: Matrices) -> None:
    found = tiles([matrices])
    lines, width = matrices.batch * matrices.height, matrices.width
    if lines * width > 2_000_000:
        pytest.skip("too large to count")
    seen = np.zeros((lines, width), np.int64)
    for row in found.table.tolist():
        tile = dict(zip(TILE, row, strict=True))
        seen[tile["top"] : tile["bottom"], tile["left"] : tile["right"]] += 1
        assert tile["width"] == width
        lanes = tile["lanes"]
        assert 1 <= lanes <= 32
        assert lanes & (lanes - 1) == 0
        if matrices.columns:
            assert tile["right"] - tile["left"] <= lanes * matrices.pack
            assert 0 <= tile["col_slots"] < matrices.pieces * matrices.batch * width
        if matrices.apart:
            assert tile["top"] // matrices.height == (tile["bottom"] - 1) // matrices.height == tile["matrix"]
        assert tile["row_slots"] == tile["left"] // matrices.across * lines
    assert (seen == 1).all()


def test_slots_of_columns_are_apart() -> None:
    for matrices in MATRICES:
        if not matrices.columns:
            continue
        found = set()
        for row in tiles([matrices]).table.tolist():
            tile = dict(zip(TILE, row, strict=True))
            key = tile["col_slots"] + tile["matrix"] * matrices.width + tile["left"]
            assert key not in found
            found.add(key)


def test_many_tiles_are_neither_too_many_nor_too_few() -> None:
    large = Matrices(1, 4096, 4096, 4, columns=True, apart=True)
    assert large.pieces <= 256
    assert len(tiles([large]).table) >= 1024
    embedding = Matrices(1, 1_000_000, 128, 4, columns=True, apart=True)
    assert embedding.pieces <= 256
    assert math.prod((embedding.blocks, embedding.pieces)) >= 128
