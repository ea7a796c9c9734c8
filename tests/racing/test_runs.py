"""The runs of a race: a batch has the numbers of separate runs, and those are what the rule says."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import rulec
from rulec.errors import RulecError
from rulec.runtime.engine import Engine
from rulec.tools.race.optimizers import SeparateOptimizers, is_batched
from rulec.tools.race.outcome import Grid, grid
from rulec.tools.race.race import PARTS, Contender
from rulec.tools.race.tasks.digits import HandwrittenDigits
from rulec.tools.race.tasks.surfaces import rosenbrock

GRID = Grid((1e-3, 1e-2, 3e-2), (0, 1))


@pytest.mark.parametrize("text", ["adamw", "muon", "lamb", "schedule_free_sgd"])
def test_a_batch_has_the_bits_of_separate_runs(text: str) -> None:
    rule, task = rulec.load(text), HandwrittenDigits((64, 12, 12, 10))
    assert is_batched(rule)
    batch = Contender(text, rule, GRID, task)
    batch.advance(4)
    measures = batch.measures()
    for rate, seed in np.ndindex(3, 2):
        one = Contender(text, rule, Grid((GRID.rates[rate],), (GRID.seeds[seed],)), task)
        one.advance(4)
        np.testing.assert_array_equal(np.array(one.losses)[:, 0, 0], np.array(batch.losses)[:, rate, seed])
        for name, values in one.measures().items():
            assert values[0, 0] == measures[name][rate, seed], name


#: Statistics of each tensor, of rows, and of each group, in one race.
SIZES = {
    "moved": "norm(update)", "largest": 'max(abs(update), per="row")', "pushed": 'norm(grad, per="group")', "rate": "lr"
}  # fmt: skip


def counted_steps(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The number of tensors of each step of an engine from here on."""
    steps, step = [], Engine.step

    def counting(engine: Engine, ids: tuple[int, ...], *rest: Any) -> None:
        steps.append(len(ids))
        step(engine, ids, *rest)

    monkeypatch.setattr(Engine, "step", counting)
    return steps


@pytest.mark.parametrize(("text", "watch"), [("adamw", SIZES), ("muon", SIZES), ("lamb", ["trust", "norms"])])
def test_a_batch_measures_what_separate_runs_do_in_as_many_steps_as_without(
    text: str, watch: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    rule, task = rulec.load(text), HandwrittenDigits((64, 12, 12, 10))
    assert is_batched(rule, watch)
    steps = counted_steps(monkeypatch)
    plain, batch = (Contender(text, rule, GRID, task, each) for each in ((), watch))
    plain.advance(3)
    without = steps[:]
    steps.clear()
    batch.advance(3)
    assert steps == without == [36] * 3
    np.testing.assert_array_equal(batch.losses, plain.losses)
    together = batch.statistics()
    for rate, seed in ((0, 1), (2, 0)):
        one = Contender(text, rule, Grid((GRID.rates[rate],), (GRID.seeds[seed],)), task, watch)
        hyper = one.grid.hyper(rule, "float32")
        one._optimizers = SeparateOptimizers(rule, one._params, hyper, task.tags, one.grid.seeds, watch)
        one.advance(3)
        alone = one.statistics()
        assert alone.keys() == together.keys()
        for name, values in alone.items():
            # A batch adds the tensors of a group in another order.
            rtol = 1e-14 if name == "pushed" else 0
            np.testing.assert_allclose(values[:, 0, 0], together[name][:, rate, seed], rtol, err_msg=name)


@pytest.mark.parametrize(
    "watch",
    [
        {"all": 'norm(update, per="model")'},
        {"share": 'norm(update)/norm(update, per="model")'},
        {"all": 'max(grad, per="model")'},
    ],
)
def test_statistics_of_the_model_are_not_batched(watch: dict[str, str]) -> None:
    rule = rulec.load("sgd")
    assert (is_batched(rule), is_batched(rule, watch)) == (True, False)


@pytest.mark.parametrize("text", ["clip_by_global_norm >> sgd", "sam(sgd)", "noise >> sgd", "polyak_sgd"])
def test_rules_that_see_other_runs_are_not_batched(text: str) -> None:
    assert not is_batched(rulec.load(text))


def test_sgd_on_rosenbrock_is_a_loop_by_hand() -> None:
    contender = Contender("sgd", rulec.load("sgd"), Grid((1e-3,), (0,)), rosenbrock())
    contender.advance(40)
    x, y, losses = -1.2, 1.0, []
    for _ in range(40):
        bend = y - x * x
        losses.append(100 * bend**2 + (1 - x) ** 2)
        x, y = x - 1e-3 * (-400 * bend * x - 2 * (1 - x)), y - 1e-3 * 200 * bend
    np.testing.assert_allclose(np.array(contender.losses)[:, 0, 0], losses, rtol=1e-12)
    distance = contender.measures()["distance"][0, 0]
    assert distance == pytest.approx(np.hypot(x - 1, y - 1), rel=1e-12)


def bowl() -> Any:
    return {"x": np.array([3.0, 4.0])}, lambda params, step, seed: (
        float(params["x"] @ params["x"]) / 2, {"x": params["x"].copy()}
    )  # fmt: skip


def test_passes_and_the_loss_are_those_of_each_run() -> None:
    result = rulec.race(["sam(sgd, rho=0.5)", "polyak_sgd"], bowl, lr=(0.1, 0.2), rates=2, seeds=1, steps=3)
    sam, polyak = sorted(result.outcomes, key=lambda outcome: outcome.label != "sam(sgd, rho=0.5)")
    for place, lr in enumerate((0.1, 0.2)):
        length, losses = 5.0, []
        for _ in range(3):
            losses.append(length**2 / 2)
            length -= lr * (length + 0.5)
        np.testing.assert_allclose(sam.losses[:, place, 0], losses, rtol=1e-9)
        ratio = polyak.losses[1:, place, 0] / polyak.losses[:-1, place, 0]
        assert (ratio < 1).all()


def test_a_run_that_diverges_stops_alone() -> None:
    contender = Contender("sgd", rulec.load("sgd"), Grid((1e-3, 1.0), (0, 1)), rosenbrock())
    contender.advance(20)
    losses = np.array(contender.losses)
    assert np.isfinite(losses[:, 0]).all()
    assert np.isfinite(losses[0, 1]).all()
    assert np.isnan(losses[-1, 1]).all()
    assert np.isnan(contender.measures()["distance"]).tolist() == [[False, False], [True, True]]


def test_further_rates_keep_their_ratio_to_lr() -> None:
    table = Grid((1e-3, 1e-2), (0,)).hyper(rulec.load("muon"), "float32")
    assert [(h["lr"], h["adamw_lr"]) for h in table.values()] == [(1e-3, 1e-3), (1e-2, pytest.approx(1e-2))]


def test_rates_are_spaced_by_equal_ratios() -> None:
    rates = np.array(grid((1e-4, 1e-1), 7, 1).rates)
    assert (rates[0], rates[-1]) == (1e-4, 1e-1)
    np.testing.assert_allclose(rates[1:] / rates[:-1], 10**0.5)


def test_after_the_budget_all_rules_stop_at_the_same_step() -> None:
    result = rulec.race(["sgd", "adam"], "rosenbrock", rates=2, seeds=1, steps=PARTS * 3, budget=1e-9)
    assert [row["steps"] for row in result.rows] == [3, 3]


def test_statistics_of_a_race_are_those_of_each_run_and_change_no_loss() -> None:
    options: dict[str, Any] = {"task": "rosenbrock", "lr": (1e-4, 1e-3), "rates": 2, "seeds": 2, "steps": 6}
    plain = rulec.race(["sgd", "adam"], **options)
    watching = rulec.race(["sgd", "adam"], **options, watch={"moved": "norm(update)", "pushed": "norm(grad)"})
    for with_statistics, without in zip(watching.outcomes, plain.outcomes, strict=True):
        assert with_statistics.label == without.label
        np.testing.assert_array_equal(with_statistics.losses, without.losses)
        assert without.statistics == {}
    sgd = next(outcome for outcome in watching.outcomes if outcome.label == "sgd")
    assert sgd.statistics["moved"].shape == (6, 2, 2)
    for place, rate in enumerate(sgd.grid.rates):
        moved, pushed = (sgd.statistics[name][:, place] for name in ("moved", "pushed"))
        np.testing.assert_allclose(moved, rate * pushed, rtol=1e-5)
    assert sgd.curve(1, "moved")[1].shape == (6, 2)


def test_a_rule_without_a_statistic_has_no_curve_of_it() -> None:
    options: dict[str, Any] = {"task": "rosenbrock", "lr": (1e-3, 1e-3), "rates": 1, "seeds": 1, "steps": 3}
    result = rulec.race(["lamb", "sgd"], **options, watch="trust")
    statistics = {outcome.label: [*outcome.statistics] for outcome in result.outcomes}
    assert statistics == {"lamb": ["trust"], "sgd": []}
    assert "statistics" not in result.data()["curves"]["sgd"]
    assert len(result.data()["curves"]["lamb"]["statistics"]["trust"][0]) == 3
    with pytest.raises(RulecError, match="has no statistic 'trusty'"):
        rulec.race(["lamb", "sgd"], **options, watch="trusty")


def test_a_run_that_diverged_has_no_statistics_from_there_on() -> None:
    result = rulec.race(["sgd"], "rosenbrock", lr=(1e-4, 1e3), rates=2, seeds=1, steps=8, watch="norms")
    (outcome,) = result.outcomes
    lost = np.isnan(outcome.losses[:, 1, 0])
    assert lost.any()
    assert (np.isnan(outcome.statistics["grad_norm"][:, 1, 0]) == lost).all()
    assert np.isfinite(outcome.statistics["grad_norm"][:, 0, 0]).all()
