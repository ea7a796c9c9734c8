"""`rulec bench reductions`: the limit of several stages, what is measured, and beside what."""

from __future__ import annotations

import numpy as np
import pytest
import torch

import rulec
from benchmarks import peers, reductions
from benchmarks.kernels import Pool
from benchmarks.stages import bound_limit, scheduled_for, staged
from benchmarks.suite import measurement
from benchmarks.tensors import tensors
from rulec.array import Optimizer
from rulec.compiler.layout import traffic

SHAPE = (30, 40)


@pytest.mark.parametrize("name", ["lamb", "adafactor", "sm3", reductions.CLIPPED])
def test_the_limit_of_stages_leaves_every_array_as_it_is(name: str) -> None:
    rng = np.random.default_rng(0)
    param, grad = (rng.normal(size=SHAPE).astype(np.float32) for _ in range(2))
    optimizer = Optimizer(reductions.rule_of(name), [param])
    optimizer.step([grad])
    arrays = {"p": param, "g": grad, **optimizer.state("0")}
    before = {k: v.copy() for k, v in arrays.items()}
    program, layout, view = scheduled_for(reductions.rule_of(name), SHAPE)
    bound_limit(program, layout, [view], [param], [grad], [optimizer.state("0")])()
    for key, value in arrays.items():
        np.testing.assert_array_equal(value, before[key], key)


@pytest.mark.parametrize("name", ["lamb", "adafactor", "came", "apollo", reductions.CLIPPED])
@pytest.mark.parametrize("shape", [SHAPE, SHAPE[::-1]])
def test_the_limit_is_of_the_program_that_the_engine_runs(name: str, shape: tuple[int, int]) -> None:
    param = np.ones(shape, np.float32)
    optimizer = Optimizer(reductions.rule_of(name), [param], backend="numpy")
    optimizer.step([param.copy()])
    (bucket,) = optimizer._engine.buckets.values()
    program, layout, view = scheduled_for(reductions.rule_of(name), shape)
    version = bucket.version()
    assert version.layout == layout
    assert version.program.stages == program.stages
    assert bucket.tensors[0].view == view


def test_a_step_and_its_limit_share_memory_and_bytes_are_counted_by_stages() -> None:
    pool = Pool(SHAPE[0] * SHAPE[1])
    found = staged(rulec.load("lamb"), SHAPE, pool)
    before = pool._bytes["p"].copy()
    found.limit()
    assert (pool._bytes["p"] == before).all()
    found.step()
    assert not (pool._bytes["p"] == before).all()
    assert found.bytes_per_element == sum(traffic(found.program, found.layout)) > 28


def test_every_rule_that_reduces_is_planned_and_none_with_matrix_functions() -> None:
    planned = reductions.plan(())
    assert planned[:3] == ["lamb", "cautious_adamw", "clip_by_global_norm >> adamw"]
    assert {"adafactor", "prodigy", "sm3", "novograd"} <= set(planned)
    assert not {"adamw", "muon", "soap", "shampoo", "apollo"} & set(planned)
    assert len(planned) == len(set(planned))


@pytest.mark.parametrize(
    ("only", "planned"),
    [("lamb", ["lamb"]), ("adamw", [reductions.CLIPPED]), ("transforms/clip_by_global_norm", [reductions.CLIPPED]),
     ("sm3", ["sm3"]), ("muon", []), ("adam", [])],
)  # fmt: skip
def test_one_rule_alone(only: str, planned: list[str]) -> None:
    assert reductions.plan([only]) == planned
    assert bool(measurement("reductions", True, [only]).parts) == bool(planned)


def test_reductions(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reductions, "QUICK", (20, 50))
    monkeypatch.setattr(reductions, "QUICK_ROUNDS", 1)
    monkeypatch.setattr(reductions, "AGAINST_FUSED", ((1, None, 1.2, 9), (3, 100, 8.0, 41)))
    ticks: list[None] = []
    only = ["lamb", "adamw", "novograd"]
    result = reductions.measure(True, only, lambda: ticks.append(None))
    assert len(ticks) == measurement("reductions", True, only).parts == 7
    targets = {row.what: row.target for row in result.rows}
    fused = f"{reductions.CLIPPED}, {{}}, clip_grad_norm_ and torch.optim.AdamW(fused=True): {reductions.FUSED}"
    assert targets.pop(fused.format("1 tensor of 1,000")) == 1.2
    assert targets.pop(fused.format("3 tensors of 100")) == 8.0
    for name, target in (("lamb", 0.9), (reductions.CLIPPED, 0.9), ("novograd", None)):
        assert targets.pop(f"{name}: {reductions.LIMIT}") == target
    assert sorted(what.split(",")[0] for what in targets) == [reductions.CLIPPED, "lamb"]
    assert set(targets.values()) == {4.0}


def test_what_a_row_is_made_of(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reductions, "QUICK", (20, 50))
    monkeypatch.setattr(reductions, "QUICK_ROUNDS", 1)
    monkeypatch.setattr(reductions, "AGAINST_FUSED", ())
    limit, python = reductions.measure(True, ["lamb"]).rows
    assert limit.value == pytest.approx(limit.detail["limit"] / limit.detail["step"])
    assert (limit.detail["bytes"], limit.detail["stages"]) == (40 * 1000, 2)
    fastest = python.subject.partition(", ")[2]
    assert python.value == pytest.approx(python.detail[fastest] / python.detail["step"])
    assert fastest.startswith(("pytorch_optimizer.Lamb(", "timm.optim.Lamb("))


@pytest.mark.parametrize("name", ["lamb", "cautious_adamw", reductions.CLIPPED])
def test_the_others_do_what_our_step_does(name: str) -> None:
    """Nearly: pytorch_optimizer's LAMB corrects no bias, which its trust ratio makes up for but for the decay."""
    theirs = peers.makers(name)
    assert theirs
    ours = tensors(2, 100)
    start = [p.detach().clone() for p in ours]
    step = reductions._our_step(name, ours)
    for _ in range(3):
        step()
    for kind, make in theirs.items():
        params = tensors(2, 100)
        step = make(params)
        for _ in range(3):
            step()
        for p, other, begin in zip(ours, params, start, strict=True):
            moved, expected = other.detach() - begin, p.detach() - begin
            assert torch.norm(moved - expected) < 0.05 * torch.norm(expected), kind


@pytest.mark.parametrize("name", ["soap", "shampoo"])
def test_a_library_to_compare_with_is_found(name: str) -> None:
    ((kind, make),) = peers.makers(name).items()
    assert kind.startswith("pytorch_optimizer.")
    params = tensors(1, (8, 8))
    before = params[0].detach().clone()
    step = make(params)
    for _ in range(peers.EVERY + 1):
        step()
    assert not torch.equal(params[0].detach(), before)


def test_a_library_that_is_not_installed_is_left_out() -> None:
    assert peers._optimizer("no_such_library", "Lamb", {}) is None
    assert peers._optimizer("torch.optim", "NoSuchOptimizer", {}) is None
    assert peers.makers("novograd") == {}
