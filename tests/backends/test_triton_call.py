"""What surrounds Triton's kernels: how tensors are cut, tables in memory, and what makes Triton compile anew."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import rulec
from rulec.compiler.layout import layout_for
from rulec.compiler.pipeline import compile
from rulec.compiler.view import matrix_view
from rulec.errors import InternalError, RulecError
from rulec.kernel.multi_tensor.cut import Cut, lying, rows_of
from rulec.kernel.multi_tensor.slots import Places, regions
from rulec_backends.triton import blocks as triton_blocks
from rulec_backends.triton.blocks import Block
from rulec_backends.triton.memory import uploads
from rulec_backends.triton.plan import FINISHED, tile_shapes
from rulec_backends.triton.work import MOST_CHUNKS, MOST_PIECES, MOST_REDUCED, Blocks, Launch, StageWork, Tiles, jobs
from tests.backends.triton_process import check_in_interpreter, in_a_process

# Chunks


@pytest.mark.parametrize("reduces", [False, True])
def test_every_element_is_in_one_chunk(reduces: bool) -> None:
    block = 1024
    sizes = [0, 1, block - 1, block, block + 1, 100 * block + 7, 2**31 + 17]
    blocks = Blocks(block, reduces)
    cut = blocks.cut(rows_of(sizes))
    known, spans = blocks.known(cut)
    assert known.tolist() == sizes
    for size, span, count in zip(sizes, spans, cut.counts, strict=True):
        assert count == -(-size // (span * block))
        assert count <= (MOST_REDUCED if reduces else MOST_CHUNKS)
    assert spans[:5].tolist() == [1] * 5
    tensors, numbers = cut.numbered([5, 3])
    assert tensors[: cut.counts[5]].tolist() == [5] * int(cut.counts[5])
    assert numbers[: cut.counts[5]].tolist() == list(range(int(cut.counts[5])))
    assert (tensors[cut.counts[5] :].tolist(), numbers[cut.counts[5] :].tolist()) == ([3], [0])


def test_chunks_of_one_huge_tensor_are_few() -> None:
    assert Blocks(1024, False).cut(rows_of([2**31 + 17])).counts[0] <= 2**16


def tiled(
    *shapes: tuple[int, ...], columns: bool = True, reduces: bool = True
) -> tuple[Cut, list[list[int]]]:  # fmt: skip
    """Tensors in chunks of tiles, and what a program is told of each."""
    tiles = Tiles(tile_shapes(1024, 4), columns, reduces)
    cut = tiles.cut(lying([matrix_view(shape) for shape in shapes], False))
    return cut, np.stack(tiles.known(cut), axis=1).tolist()


def covered(shape: tuple[int, ...], columns: bool, reduces: bool) -> np.ndarray[Any, Any]:
    """How often each element of a tensor is in a chunk, as the printed kernel reads its line of `known`."""
    cut, ((batch, height, width, lines, across, deep, tile),) = tiled(shape, columns=columns, reduces=reduces)
    matrices, rows, wide = tile_shapes(1024, 4)[tile]
    assert lines % rows == 0
    found = np.zeros((batch, height, width), np.int64)
    for number in range(int(cut.counts[0])):
        left, piece, matrix = number % across, number // across % deep, number // (across * deep)
        found[matrix * matrices :][:matrices, piece * lines :][:, :lines, left * wide :][:, :, :wide] += 1
    return found


@pytest.mark.parametrize(("columns", "reduces"), [(False, True), (True, True), (False, False)])
@pytest.mark.parametrize(
    "shape",
    [(), (7,), (5000,), (0,), (0, 4), (3, 0), (1, 130), (300, 5), (5, 300), (129, 128), (40, 3, 3), (2, 200, 7),
     (70, 9), (3, 1, 9), (2000, 129), (6, 17, 8), (6, 16, 8)],
)  # fmt: skip
def test_every_element_is_in_one_chunk_of_tiles(shape: tuple[int, ...], columns: bool, reduces: bool) -> None:
    assert (covered(shape, columns, reduces) == 1).all()


@pytest.mark.parametrize(("side", "tiles"), [(512, 1), (2048, 4), (4096, 8), (10240, 25)])
def test_programs_that_reduce_nothing_take_several_tiles_of_a_large_matrix(side: int, tiles: int) -> None:
    """What a program reads before its first tile is then little; small matrices are left to many programs."""
    _, ((*_, lines, _, _, _),) = tiled((side, side), columns=False, reduces=False)
    assert lines == 8 * tiles


def test_a_tall_matrix_leaves_few_lines_of_slots() -> None:
    cut, alone = tiled((50257, 1600))
    assert cut.deep[0] <= MOST_PIECES
    _, among = tiled((7, 7), (50257, 1600), (3,))
    assert among[1] == alone[0]


def test_rows_too_long_for_32_bits_lie_in_tiles_of_one_row() -> None:
    cut, known = tiled((3, 2**30 + 1), columns=False)
    assert known[0][-1] == 0
    assert int(cut.counts[0]) == -(-(2**30 + 1) // 1024) * int(cut.deep[0])


def test_a_bucket_of_another_way_round_is_a_defect() -> None:
    with pytest.raises(InternalError, match="not seen as its bucket's layout says"):
        lying([matrix_view((3, 4))], True)


# Slots


@pytest.mark.parametrize("shape", [(5,), (70, 9), (3, 4, 9), (2, 30000), (1, 400000), (0, 4), (3, 0), (600, 2)])
def test_jobs_join_every_slot_once(shape: tuple[int, ...]) -> None:
    """As the printed `finish` reads its lines, for a neighbour too, and for the tensor alone."""
    rule = rulec.parse("name: All\nstep: |\n  direction = g*sum(g) + sum(g*p, per='row') + sum(p, per='col')\n")
    views = [matrix_view(s) for s in ((7, 3), shape)]
    program = compile(rule, views[1].facts)
    stage = program.stages[0]
    tensors = lying(views, False)
    cut = Tiles(tile_shapes(1024, 4), True, True).cut(tensors)
    places = Places(regions(stage, layout_for(program, "float32"), cut, tensors))
    for fired in ([0, 1], [1]):
        joined, results = np.zeros(places.slots, int), np.zeros(places.results, int)
        for _, one, at, to, rounds, apart, step, limit in jobs(places, np.array(fired)).tolist():
            lane = np.arange(FINISHED)
            for done in range(rounds):
                inside = lane[done * one * FINISHED + lane < limit]
                joined[at + done * apart + inside * step] += 1
            results[to : to + (1 if one else limit)] += 1
        for region, first in zip(places.regions, places.first, strict=True):
            for tensor in range(2):
                slots = joined[first[tensor] :][: region.sizes[tensor] * region.counts[tensor]]
                assert (slots == (tensor in fired)).all()
        assert results.sum() == sum(int(region.sizes[fired].sum()) for region in places.regions)
        assert results.max(initial=0) <= 1


# Blocks


def test_the_default_blocks_fill_sixteen_bytes_in_every_thread() -> None:
    for moved in range(2, 100):
        triton_blocks.check(triton_blocks.block_for(moved, "any GPU"))
        triton_blocks.check(triton_blocks.reducing(triton_blocks.block_for(moved, "any GPU")))
    for vector in (2, 4, 8):
        tile = triton_blocks.tile_for(vector, "any GPU")
        assert tile.elements == tile.threads * vector


def test_a_measured_table_takes_the_place_of_the_default(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RULEC_CACHE_DIR", str(tmp_path))
    triton_blocks.saved.cache_clear()
    try:
        triton_blocks.save("Some GPU", {8: Block(4096, 256), 1 << 30: Block(2048, 128)})
        assert triton_blocks.block_for(8, "Some GPU") == Block(4096, 256)
        assert triton_blocks.block_for(9, "Some GPU") == Block(2048, 128)
        assert triton_blocks.block_for(8, "another") == triton_blocks.DEFAULT[12]
        for damaged in ("{", "[]", json.dumps({"Some GPU": {"8": [3, 1]}}), json.dumps({"Some GPU": {"8": "x"}})):
            (tmp_path / "triton" / "blocks.json").write_text(damaged)
            triton_blocks.saved.cache_clear()
            assert triton_blocks.block_for(8, "Some GPU") == triton_blocks.DEFAULT[12]
    finally:
        triton_blocks.saved.cache_clear()


@pytest.mark.parametrize("block", [Block(1000, 128), Block(1024, 96), Block(512, 128), Block(1 << 20, 2048)])
def test_a_block_that_kernels_cannot_have_is_refused(block: Block) -> None:
    with pytest.raises(RulecError, match="both must be powers of two"):
        triton_blocks.save("Some GPU", {1 << 30: block})


def test_a_table_without_an_end_is_refused() -> None:
    with pytest.raises(RulecError, match="a last line"):
        triton_blocks.save("Some GPU", {16: Block(1024, 128)})


# Tables that are copied while a step runs


def test_tables_on_the_cpu_are_plain_memory() -> None:
    import torch

    device = torch.device("cpu")
    one = uploads(device, 2)
    for table in ([1, 2], [3, 4]):
        assert one.put(np.array(table), None, None, False).tolist() == table
    kept = one.put(np.array([5, 6]), None, None, True)
    one.put(np.array([7, 8]), None, None, False)
    assert kept.tolist() == [5, 6]


# Calls

CALL = """
import numpy as np, torch
from rulec.backend.protocol import Rows
program = rulec.compile(rulec.load('adamw'))
layout = layout_for(program, 'float32')
kernel = subject.kernel(program, layout)
params = [torch.ones(5), torch.ones(3)]
call = kernel.bind(params, [{'m': torch.zeros_like(p), 'v': torch.zeros_like(p)} for p in params])
rows = Rows(np.full((1, len(program.columns)), 0.5), np.zeros(2, np.int64))
"""


def test_a_step_with_the_same_addresses_and_scalars_copies_nothing() -> None:
    program = f"""{CALL}
from rulec.kernel.multi_tensor.uploads import Ring
copied = []
plain = Ring.copy
Ring.copy = lambda self, target, table, *options: (copied.append(len(table)), plain(self, target, table, *options))
grads = [torch.ones(5), torch.ones(3)]
call(0, grads, rows)
call(0, grads, Rows(rows.table.copy(), rows.index))
same = len(copied)
call(0, [torch.ones(5), torch.ones(3)], rows)
call(0, [torch.ones(5), torch.ones(3)], Rows(rows.table + 1, rows.index))
"""
    same, copied = check_in_interpreter(program, "[same, copied]")
    assert same == 1
    assert len(copied) in (2, 3)  # new gradients may lie where the last ones did
    assert set(copied) == {2 * 2 + 9}


def test_too_few_gradients_are_a_defect() -> None:
    program = f"""{CALL}
from rulec.errors import InternalError
try:
    call(0, [torch.ones(5)], rows)
except InternalError as error:
    message = str(error)
"""
    assert check_in_interpreter(program, "message") == "the triton kernel needs 2 gradients and was given 1"


def test_gradients_that_moved_are_found_where_the_first_stage_reads_none() -> None:
    """In a list like the last step's, of which the first one is where it was."""
    program = f"""{CALL}
program = rulec.compile(rulec.parse("name: Scaled\\nstep: 'direction = g*norm(p)'"))
layout = layout_for(program, 'float32')
call = subject.kernel(program, layout).bind(params, [{{}}, {{}}])
norms = [torch.ones(2, dtype=torch.float64)]
grads = [torch.ones(5), torch.ones(3)]
rows = Rows(np.ones((1, len(program.columns))), np.zeros(2, np.int64))
given = {{name: [torch.ones(1), torch.ones(1)] for name in program.stages[1].reads}}
for value in (1.0, 2.0):
    params[1].fill_(5)
    grads[1] = torch.full((3,), value)
    for stage in (0, 1):
        call(stage, grads, rows, given)
"""
    assert check_in_interpreter(program, "params[1].tolist()") == [3.0] * 3


SPECIALISED = """
import inspect, json
import torch, triton, rulec
from triton.backends.compiler import GPUTarget
from triton.compiler import make_backend
from triton.runtime.jit import create_function_from_signature
from rulec.compiler.layout import layout_for
from rulec_backends.triton import TritonBackend

backend = make_backend(GPUTarget("cuda", 90, 32))
words, floats = torch.zeros(64, dtype=torch.int64), torch.zeros(64, dtype=torch.float64)
found = {}
for name in ("adamw", "lamb", "adafactor", "nadam"):
    program = rulec.compile(rulec.load(name))
    layout = layout_for(program, "bfloat16")
    kernels = TritonBackend().build(program, layout, TritonBackend().emit(program, layout)).kernels
    for kernel in [k for k in kernels.values() if hasattr(k, "params") and any(p.do_not_specialize for p in k.params)]:
        bind = create_function_from_signature(kernel.signature, kernel.params, backend)
        switches = {"BLOCK": 1024, "VECTOR": 8, "EMULATED": False, "LANES": 128}
        def key(numbers, tables, **others):
            given = {}
            for p in kernel.params:
                if p.is_constexpr:
                    given[p.name] = switches[p.name]
                elif p.name in ("tensors", "kinds"):
                    given[p.name] = numbers
                else:
                    given[p.name] = tables
                given[p.name] = others.get(p.name, given[p.name]) if p.name in ("stays", "scale") else given[p.name]
            return repr(bind(**given)[1])
        same = {key(n, t) for n in (1, 16, 17, 1000) for t in (words, words[1:], words[2:3])}
        with_none = {key(1, words, stays=None, scale=None)}
        found[f"{name} {kernel.fn.__name__}"] = [len(same), len(same | with_none)]
print(json.dumps(found))
"""


@pytest.mark.slow
def test_neither_numbers_nor_counts_nor_addresses_specialise_a_kernel() -> None:
    """Only whether there are tensors that stay, or a scale, makes another kernel: see Triton's own key."""
    found = in_a_process(SPECIALISED)
    assert len(found) >= 10
    for name, (same, with_none) in found.items():
        assert same == 1, name
        assert with_none == (2 if " stage_" in name else 1), name


def test_the_tables_of_tensors_fired_are_remembered_and_kept_for_a_graph() -> None:
    """Those that are made while a graph is captured are filled by its replays alone, and nobody else's."""
    program = f"""{CALL}
from rulec_backends.triton import work as triton_work
triton_work._REMEMBERED = 16
work = call._works[0]
captured = work.launch((1,), capturing=True)
first = work.launch((1,))
apart = first is not captured
same = work.launch((1,)) is first and work.launch((1,), capturing=True) is first
for i in range(100):
    work.launch((0, 1) * (i + 1))
again = work.launch((1,)) is first
kept = work._captured == [captured, first]
"""
    shown = "[apart, same, again, kept, len(work._some) < 20]"
    assert check_in_interpreter(program, shown) == [True, True, False, True, True]


class Tables(StageWork):
    """The remembered tables of tensors of one chunk each."""

    def __init__(self, tensors: int) -> None:
        self._some, self._captured = {}, []
        self.everything = self._launch(range(tensors))

    def _launch(self, fired: Sequence[int]) -> Launch:
        return Launch([*fired], None, {}, [])

    @property
    def remembered(self) -> list[tuple[int, ...]]:
        return [*self._some]


def test_remembered_tables_have_no_more_chunks_in_all_than_some_times_those_of_all_tensors() -> None:
    """All portions of a large model are remembered, and of large sets as many as before."""
    portions, halves = Tables(200), Tables(200)
    for i in range(200):
        portions.launch((i,))
        halves.launch((*range(i % 100, i % 100 + 99), 100 + i))
    assert len(portions.remembered) == 200
    assert len(halves.remembered) == 32
    assert halves.remembered[-1][-1] == 299
