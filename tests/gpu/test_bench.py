"""The measurement itself, at sizes that do not count, and what it compares with in CuPy."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

import rulec.torch
from benchmarks.gpu import large as gpu_large
from benchmarks.gpu import measure as gpu
from benchmarks.gpu import seed as gpu_seed
from benchmarks.gpu import tune as gpu_tune
from benchmarks.gpu.device import Bench
from benchmarks.result import Row, read_result
from tests.cli.running import run
from tests.gpu.training import assert_near, give, gradients, parameters

pytestmark = pytest.mark.gpu


def test_the_command_runs_and_says_what_it_left_out(tmp_path: Path) -> None:
    file = tmp_path / "out.json"
    run("bench", "gpu", "--quick", "--rule", "adamw", "--rule", "nadam", "--rule", "lamb", "--json", str(file))
    result = read_result(file)
    assert [note for note in result.notes if ": failed:" in note] == []
    agree = [row for row in result.rows if row.measure.startswith("rules that agree")]
    assert [row.what for row in agree if not row.met] == []
    assert {"triton, float32", "triton, float64"} <= {row.subject for row in agree}
    said = {row.measure for row in result.rows}
    assert {"host time of a step", "host time of a captured step", "step, of the copy bandwidth"} <= said
    (same,) = (row for row in result.rows if row.measure == "largest difference from uncaptured steps")
    assert same.met


def test_blocks_are_tried() -> None:
    (row,) = gpu_tune.blocks(Bench(quick=True), "adamw", "float32")
    assert row.detail["bytes"] > 0
    assert len(row.detail["seconds"]) >= len(gpu_tune.BLOCKS)


def test_a_tensor_past_32_bits_is_updated_as_small_ones_are() -> None:
    if torch.cuda.mem_get_info()[0] < gpu_large.ARRAYS * gpu_large.DTYPES["float32"] * gpu_large.ELEMENTS:
        pytest.skip("needs 32 GiB of the device's memory")
    (row,) = (found for found in gpu_large.large(Bench()) if isinstance(found, Row))
    assert row.met


def test_cupys_ways_compute_what_ours_does() -> None:
    pytest.importorskip("cupy")
    ways = [gpu_seed.plain_operators, gpu_seed.four_broadcasts]
    found = [parameters([(10_000,)]) for _ in range(3)]
    for params in found:
        give(params, gradients(params, 0))
    steps = [way(params[0]) for way, params in zip(ways, found[1:], strict=True)]
    optimizer = rulec.torch.Adam(found[0], lr=1e-3)
    for _ in range(5):
        optimizer.step()
        for step in steps:
            step()
    torch.cuda.synchronize()
    for params in found[1:]:
        assert_near(params, found[0], 1e-5)


def test_all_parts_have_a_name_of_their_own() -> None:
    names = [part.name for section in gpu.sections((), gpu.gpu_check.BACKENDS) for part in section.parts]
    assert len(names) == len(set(names))
