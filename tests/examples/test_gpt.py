"""The GPT's training: equal text, equal models, and equal losses where formulas are equal."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch

from examples.gpt import in_jax, train
from examples.gpt.contenders import CONTENDERS, PAIRS
from examples.gpt.model import SIZES, loss_of, model
from examples.gpt.text import batches, corpus

ROOT = Path(__file__).parents[2]


def test_text_is_long_and_batches_are_its_own() -> None:
    text = corpus()
    assert len(text) > 5_000_000
    first, again = batches(text, 2, 16, seed=3), batches(text, 2, 16, seed=3)
    tokens, following = next(first)
    np.testing.assert_array_equal(tokens, next(again)[0])
    np.testing.assert_array_equal(tokens[:, 1:], following[:, :-1])
    assert bytes(tokens[0].astype(np.uint8)) in text


def test_model_in_jax_is_the_model_in_torch() -> None:
    size = SIZES["tiny"]
    net = model(size)
    tokens, following = next(batches(corpus(), size.sequences, size.length, seed=1))
    theirs = float(loss_of(net, torch.from_numpy(tokens), torch.from_numpy(following)).detach())
    assert abs(float(in_jax.loss_of(in_jax.params_of(net), size, tokens, following)) - theirs) < 1e-5


def test_sizes() -> None:
    weights = {name: sum(p.numel() for p in model(SIZES[name]).parameters()) for name in ("tiny", "small")}
    assert weights["small"] == pytest.approx(10.9e6, rel=0.01)


@pytest.mark.slow
def test_losses_of_equal_formulas(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The bytes of one contender stand for all: each is a process of its own."""
    results, chart = tmp_path / "gpt.json", tmp_path / "gpt.png"
    monkeypatch.chdir(ROOT)
    one = train.peak(next(iter(CONTENDERS)), "tiny", "cpu")
    monkeypatch.setattr(train, "peak", lambda *_: one)
    train.train("tiny", 8, json_path=results, chart=chart)
    runs = json.loads(results.read_text())["runs"]
    assert {*CONTENDERS} < {*runs}
    for name in (*PAIRS, "rulec.jax.adamw", "rulec.jax.step"):
        # The iteration of Muon is in bfloat16, where sums in another order part by more.
        apart = 1e-3 if name.endswith("Muon") else 1e-4
        assert runs[name]["largest difference of losses in 100 steps"] < apart, name
        assert runs[name]["losses"][-1] < runs[name]["losses"][0]
    assert all(runs[name]["peak bytes"] > 1e7 for name in CONTENDERS)
    assert chart.stat().st_size > 10_000
