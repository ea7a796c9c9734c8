"""The demonstration's parts, and the whole of it, short."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

import rulec
from rulec.runtime.engine import default_hyper
from rulec.tools.demo import digits, training
from rulec.tools.demo.digits import Network, softmax
from rulec.tools.demo.training import TEXT, Unfused, compare_update
from tests.cli.running import error, run, run_json


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    """A network that trains in a moment."""
    monkeypatch.setattr(training, "WIDTHS", (64, 64, 10))


def test_the_rule_is_valid_and_not_in_the_library() -> None:
    rule = rulec.parse(TEXT)
    assert rule.name == "WaryAdam"
    assert rule.key not in rulec.rules()


def test_unfused_numpy_is_the_same_rule() -> None:
    rule = rulec.parse(TEXT)
    rng = np.random.default_rng(0)
    ours = [rng.normal(size=(5, 7)).astype(np.float32), rng.normal(size=7).astype(np.float32)]
    theirs = [p.copy() for p in ours]
    optimizer, unfused = rulec.array.Optimizer(rule, ours), Unfused(theirs, default_hyper(rule, {}))
    for _ in range(20):
        grads = [rng.normal(size=p.shape).astype(np.float32) for p in ours]
        optimizer.step(grads)
        unfused.step(grads)
    for a, b in zip(ours, theirs, strict=True):
        np.testing.assert_allclose(a, b, rtol=0, atol=4 * 2.0**-23 * np.max(np.abs(b)))


def test_gradients_are_those_of_the_loss() -> None:
    network = Network((6, 5, 4), seed=1)
    network.params = [p.astype(np.float64) + 0.1 for p in network.params]
    rng = np.random.default_rng(0)
    images, labels = rng.normal(size=(8, 6)), rng.integers(0, 4, 8)
    loss, grads = network.gradients(images, labels)
    assert loss == pytest.approx(network.loss(images, labels))
    for param, grad in zip(network.params, grads, strict=True):
        for at in list(np.ndindex(param.shape))[:7]:
            value, step = param[at], 1e-6
            param[at] = value + step
            above = network.loss(images, labels)
            param[at] = value - step
            below = network.loss(images, labels)
            param[at] = value
            assert grad[at] == pytest.approx((above - below) / (2 * step), rel=1e-5, abs=1e-9)


def test_probabilities_sum_to_one_without_overflow() -> None:
    probabilities = softmax(np.array([[1000.0, 0.0], [-1000.0, -1000.0]]))
    np.testing.assert_allclose(probabilities, [[1.0, 0.0], [0.5, 0.5]])


def test_no_test_image_is_trained_on() -> None:
    data = digits.load()
    assert len(data.images) + len(data.test_images) == 1797
    assert data.images.dtype == np.float32
    assert 0 <= data.images.min() < data.images.max() <= 1
    trained = {image.tobytes() for image in data.images}
    assert sum(image.tobytes() in trained for image in data.test_images) <= 5  # the digits hold a few twins
    seen = np.concatenate([labels for _, labels in data.batches(64, 0)])
    assert len(seen) == len(data.images) // 64 * 64


@pytest.mark.usefixtures("small")
def test_updates_are_compared_on_the_same_numbers() -> None:
    found = compare_update(rulec.parse(TEXT), {"lr": 1e-3}, rounds=1)
    assert found.parameters == 64 * 64 + 64 + 64 * 10 + 10
    assert found.largest_difference < 1e-6
    assert found.fused > 0
    assert found.unfused > 0


@pytest.mark.usefixtures("small")
def test_the_demonstration_trains_and_draws(tmp_path: Path) -> None:
    found = run_json("demo", "--out", str(tmp_path / "out"), "--epochs", "3")
    assert set(found["training"]) == {"WaryAdam", "AdamW"}
    for curve in found["training"].values():
        assert len(curve["training_loss"]) == len(curve["test_loss"]) == 3
        assert curve["training_loss"][-1] < curve["training_loss"][0]
        assert curve["test_accuracy"] > 0.7
    assert Path(found["picture"]).read_bytes().startswith(b"\x89PNG")
    assert rulec.load(found["rule_file"]).name == "WaryAdam"
    assert "@compiled" in (tmp_path / "out" / "wary_adam_kernel.py").read_text()


@pytest.mark.usefixtures("small")
def test_the_demonstration_shows_rule_kernel_accuracy_and_time(tmp_path: Path) -> None:
    shown = run("demo", "--out", str(tmp_path), "--epochs", "1")
    for part in ("name: WaryAdam", "def kernel(job):", "test accuracy", "unfused NumPy", "losses.png"):
        assert part in shown


def test_a_folder_that_cannot_be_written_is_said(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    assert "cannot be written" in error("demo", "--out", str(tmp_path / "file" / "out"))
