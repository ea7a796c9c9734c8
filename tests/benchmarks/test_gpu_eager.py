"""The measurement of eager updates on a GPU, on the processor at sizes that take no time."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from benchmarks.gpu import eager as gpu_eager
from benchmarks.gpu.device import Bench
from benchmarks.gpu.part import Note
from benchmarks.result import Row
from rulec.tools.compare.measure import Times
from tests.benchmarks.gpu_fakes import HostDevice


@pytest.fixture
def bench() -> Bench:
    return Bench(True, HostDevice())


def taking_turns(device: Any, contenders: dict[str, Any], rounds: int, seconds: float) -> Times:
    """As `timed`, of a machine on which the first contender takes a second, the next two, and so on."""
    for step, *_ in contenders.values():
        step()
    return Times({name: [number + 1.0] * rounds for number, name in enumerate(contenders)})


def test_a_product_alone_is_judged_by_its_flops(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpu_eager, "timed", taking_turns)
    found = {row.measure: row for row in gpu_eager.product(bench, 14336, 4096) if isinstance(row, Row)}
    flops = found["product and update, tile by tile"]
    assert flops.unit == "TFLOP/s"
    assert flops.detail["tile by tile"] == 3.0
    assert flops.value == pytest.approx(2e-12 * 224 * 64 * 32 / 3.0)
    ratio = found["tile by tile, times as fast as torch's product and our step"]
    assert ratio.value == pytest.approx(2.0 / 3.0)


def test_all_ways_update_the_same_matrix(bench: Bench) -> None:
    starts: dict[str, Any] = {}
    for way in (gpu_eager.BOTH, gpu_eager.BY_TILES):
        torch.manual_seed(0)
        matrix = gpu_eager.Matrix(bench, 100, 40, 8)
        matrix.contenders()[way][0]()
        starts[way] = matrix.tensors
    for one, other in zip(*starts.values(), strict=True):
        assert torch.equal(one, other)


def test_steps_are_measured_in_every_way(bench: Bench) -> None:
    found = [*gpu_eager.steps(bench)]
    assert not [one for one in found if isinstance(one, Note)]
    ways = {row.subject.split(": ")[1] for row in found if isinstance(row, Row)}
    assert ways == {way for way in gpu_eager.WAYS if way != gpu_eager.FUSED}
    assert {row.measure for row in found if isinstance(row, Row)} == {
        "peak of memory, times that of torch's fused AdamW",
        "time of a step, times that of torch's fused AdamW",
    }


def test_a_way_that_fails_costs_itself_alone(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    def measured(bench: Bench, way: str, tokens: int, layers: int) -> dict[str, float]:
        if way == gpu_eager.EPILOGUE:
            raise RuntimeError("out of memory")
        return {"step": 1.0, "peak": 2.0}

    monkeypatch.setattr(gpu_eager, "_measured", measured)
    notes = [one.text for one in gpu_eager.steps(bench) if isinstance(one, Note)]
    assert notes == ["eager with epilogue: steps of 1 layers of Llama 8B: not run: RuntimeError: out of memory"]


def test_layers_are_those_of_the_model_and_as_many_as_fit(bench: Bench) -> None:
    elements = sum(p.numel() for p in gpu_eager.stack(bench, 2, 64).parameters())
    each = 2 * 64 * 64 + 2 * 16 * 64 + 3 * 224 * 64 + 2 * 64
    assert elements == 2 * each
    assert gpu_eager._layers(Bench(False, HostDevice(free=140 * 2**30))) == 32
    assert gpu_eager._layers(Bench(False, HostDevice(free=24 * 2**30))) == 10
    assert gpu_eager._layers(Bench(False, HostDevice(free=0))) == 1


def test_other_rules_have_no_part() -> None:
    assert gpu_eager.parts(("lion",)) == []
    assert len(gpu_eager.parts(())) == 1 + len(gpu_eager.SHAPES)
