"""The training that is watched: the steps at which curves show a failure, and the curves against sums by torch."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from examples.gpt import watch
from examples.gpt.model import loss_of, model
from examples.gpt.text import batches, corpus

FLAT = [1.0] * watch.FIRST


def test_a_loss_shows_a_failure_once_its_mean_is_above_its_lowest() -> None:
    assert watch.step_of_loss(FLAT * 3) is None
    # The mean of 20 losses of which k are 2 is 1 + k/20: above 1.3 with k = 7.
    assert watch.step_of_loss([*FLAT, *[2.0] * 30]) == watch.FIRST + 7
    assert watch.step_of_loss([1.0, *[2.0] * 60, *FLAT]) is None


@pytest.mark.parametrize(("value", "falling", "after"), [(4.0, False, 7), (0.0, True, 11), (0.0, False, None)])
def test_a_statistic_shows_a_failure_once_its_mean_left_its_usual_value(
    value: float, falling: bool, after: int | None
) -> None:
    step = watch.step_of([*FLAT, *[value] * 30], falling)
    assert step == (None if after is None else watch.FIRST + after)
    negative = [-1.0] * watch.FIRST
    assert watch.step_of([*negative, *[-value] * 30], falling) == step


def test_curves_are_those_of_torch() -> None:
    curves = watch.trained(0.02, seed=3, steps=2)
    net = model(watch.SIZE, 3)
    tokens, following = next(batches(corpus(), watch.SIZE.sequences, watch.SIZE.length, seed=4))
    loss = loss_of(net, torch.from_numpy(tokens), torch.from_numpy(following))
    loss.backward()
    grad = torch.cat([p.grad.flatten() for p in net.parameters() if p.grad is not None])
    assert curves["loss"][0] == pytest.approx(loss.item(), rel=1e-4)
    assert curves["grad_norm"][0] == pytest.approx(grad.norm().item(), rel=1e-4)
    assert curves["largest_grad"][0] == pytest.approx(grad.abs().max().item(), rel=1e-4)
    step = -grad.sign()  # of Lion's first update, which has the length of the rate
    assert curves["cosine"][0] == pytest.approx((step @ grad / step.norm() / grad.norm()).item(), rel=1e-3)
    assert {len(values) for values in curves.values()} == {2}


@pytest.mark.slow
def test_the_command_writes_what_it_prints(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    results, chart = tmp_path / "watch.json", tmp_path / "watch.png"
    threads = torch.get_num_threads()
    try:
        watch.watch(steps=watch.FIRST + 5, seeds=1, json_path=results, chart=chart)
    finally:
        torch.set_num_threads(threads)
    record = json.loads(results.read_text())
    assert [(run["rate"], run["seed"]) for run in record["runs"]] == [(rate, watch.SEEDS[0]) for rate in watch.RATES]
    assert all(watch.shown(run["curves"]) == run["shown"] for run in record["runs"])
    assert f"rate {watch.RATES[0]:g}, seed {watch.SEEDS[0]}: loss" in capsys.readouterr().out
    assert chart.stat().st_size > 10_000
