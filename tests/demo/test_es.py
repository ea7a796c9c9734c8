"""The demonstration without a backward pass: both frameworks, short, and the whole of it."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from rulec.es import Perturbation
from rulec.tools.demo import digits, es
from rulec.tools.demo.digits import Network
from rulec.tools.demo.es import Setting
from tests.cli.running import error, run, run_json


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    """A population that trains in a moment."""
    few = Perturbation("lowrank", directions=8, sigma=0.05, seed=0)
    monkeypatch.setattr(es, "SETTING", Setting(few, widths=(64, 8, 10)))


@pytest.mark.usefixtures("small")
@pytest.mark.parametrize("kind", ["torch", "numpy"])
def test_a_population_begins_at_the_networks_weights_and_learns(kind: str) -> None:
    population, first = es.population(kind), Network(es.SETTING.widths)
    for ours, theirs in zip(population.params(), first.params, strict=True):
        np.testing.assert_array_equal(ours, theirs)
    images, labels = next(digits.load().batches(es.SETTING.batch, 0))
    for _ in range(60):
        population.step(images, labels)
    trained = Network(es.SETTING.widths)
    trained.params = population.params()
    assert trained.loss(images, labels) < 0.9 * first.loss(images, labels)


@pytest.mark.usefixtures("small")
def test_the_first_step_of_both_frameworks_has_the_same_losses() -> None:
    images, labels = next(digits.load().batches(es.SETTING.batch, 0))
    losses = [es.population(kind).step(images, labels) for kind in ("torch", "numpy")]
    assert losses[0] == pytest.approx(losses[1], rel=1e-4)


@pytest.mark.usefixtures("small")
def test_without_torch_it_is_numpy(monkeypatch: pytest.MonkeyPatch) -> None:
    assert es.framework() == "torch"
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    assert es.framework() == "numpy"


@pytest.mark.slow
@pytest.mark.usefixtures("small")
def test_the_command_trains_and_draws(tmp_path: Path) -> None:
    found = run_json("demo", "es", "--out", str(tmp_path / "out"), "--epochs", "2")
    assert list(found["training"]) == ["16 members, no gradient", "gradients"]
    for curve in found["training"].values():
        assert len(curve["training_loss"]) == len(curve["test_loss"]) == 2
        assert curve["training_loss"][1] < curve["training_loss"][0]
    assert Path(found["picture"]).read_bytes().startswith(b"\x89PNG")
    shown = run("demo", "es", "--out", str(tmp_path), "--epochs", "1")
    for part in ("64-8-10", "without a backward pass", "test accuracy", "es_losses.png"):
        assert part in shown


def test_a_demonstration_that_there_is_not_is_said() -> None:
    assert "there is no demonstration 'ess'; did you mean 'es'" in error("demo", "ess")


@pytest.mark.slow
def test_without_a_backward_pass_nine_of_ten_digits_are_read() -> None:
    data = digits.load()
    assert es.train(data, 20, "torch").accuracy >= 0.9
