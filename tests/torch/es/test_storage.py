"""Evolution strategies behind optimizers with small states and 16-bit weights."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import rulec.torch
from rulec.es import Perturbation

STORED: list[dict[str, Any]] = [
    {"state_dtype": "dynamic8"}, {"state_dtype": "bfloat16_sr", "seed": 2}, {"weights": "split"},
    {"weights": "stochastic", "seed": 3},
]  # fmt: skip


@pytest.mark.parametrize("stored", STORED, ids=lambda words: "-".join(map(str, words.values())))
@pytest.mark.parametrize("values", ["rademacher", "popcount"])
def test_steps_that_make_their_noise_are_those_with_a_gradient(stored: dict[str, Any], values: Any) -> None:
    """A step of the strategy has the bits of an update of gradients and a step of the optimizer."""
    runs = []
    for together in (True, False):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(16, 256), nn.Tanh(), nn.Linear(256, 4))
        model = model.bfloat16() if "weights" in stored else model
        inputs = torch.randn(8, 16).to(model[0].weight.dtype)  # type: ignore[arg-type]
        es = rulec.torch.perturb(model, Perturbation("independent", directions=4, sigma=0.05, seed=5, values=values))
        optimizer = rulec.torch.AdamW(model.parameters(), lr=1e-2, backend="c", **stored)
        for _ in range(3):
            loss = es(es.member_batch(inputs)).float().square().mean(1).detach()
            if together:
                es.step(None, optimizer, loss=loss)
            else:
                es.update(loss=loss)
                optimizer.step()
        runs.append((model, optimizer))
    (first, fused), (second, plain) = runs
    for p, q in zip(first.parameters(), second.parameters(), strict=True):
        assert torch.equal(p, q)
        states = fused.state[p], plain.state[q]
        assert all(torch.equal(torch.as_tensor(states[0][k]), torch.as_tensor(states[1][k])) for k in states[1])
