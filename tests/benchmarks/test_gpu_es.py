"""The measurement of noise as a gradient on a GPU, on the processor at sizes that take no time."""

from __future__ import annotations

import pytest
import torch

from benchmarks.gpu import es as gpu_es
from benchmarks.gpu.device import Bench
from benchmarks.gpu.part import Note
from benchmarks.result import Row
from rulec_backends.c.compile import missing
from tests.benchmarks.gpu_fakes import HostDevice
from tests.benchmarks.test_gpu_eager import taking_turns

needs_c = pytest.mark.skipif(bool(missing()), reason=missing() or "there is a C compiler")


@pytest.fixture
def bench() -> Bench:
    return Bench(True, HostDevice())


@needs_c
def test_steps_are_compared_by_their_times(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpu_es, "timed", taking_turns)
    found = [*gpu_es.noise(bench, "popcount")]
    assert not [one for one in found if isinstance(one, Note)]
    rows = [one for one in found if isinstance(one, Row)]
    shares = [row for row in rows if row.measure == gpu_es.SHARE]
    assert [row.value for row in shares] == [pytest.approx(1.0 / 3.0)] * 3
    assert [row.target for row in shares] == [0.7, 1.0, 1.0]
    rates = [row.value for row in rows if row.measure == gpu_es.RATE]
    assert rates == [pytest.approx(1e-9 * 10_000 * directions) for directions in gpu_es.DIRECTIONS]


@needs_c
def test_both_ways_update_alike(bench: Bench) -> None:
    step = gpu_es.NoisyStep(bench, "c", "rademacher", 3)
    with torch.no_grad():
        step.theirs.copy_(step.param)
    step.fused()
    step.both()
    torch.testing.assert_close(step.param, step.theirs, rtol=1e-5, atol=1e-6)


def test_a_backend_that_fails_costs_itself_alone(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpu_es, "ON_HOST", ("triton",))
    monkeypatch.setattr(gpu_es, "DIRECTIONS", (1,))
    (note,) = gpu_es.noise(bench, "normal")
    assert isinstance(note, Note)
    assert note.text.startswith("normal noise of 1 directions on triton: not run: ")


def test_other_rules_have_no_part() -> None:
    assert gpu_es.parts(("lion",)) == []
    assert len(gpu_es.parts(())) == len(gpu_es.VALUES)
