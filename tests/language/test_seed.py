"""Seeds: what is none is refused in one sentence, by every framework and before a step."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest
import torch

import rulec.array
import rulec.jax
import rulec.torch
from rulec.errors import HyperError
from rulec.es import Perturbation

RULE = "noise >> sgd"


def jax_step(seed: Any) -> Any:
    weights = {"w": jnp.zeros(8)}
    state = rulec.jax.init(RULE, weights)
    return rulec.jax.step(RULE, weights, weights, state, seed=seed, lr=1.0, donate=False)[0]["w"]


def array_step(seed: Any) -> Any:
    weights = np.zeros(8, np.float32)
    rulec.array.Optimizer(RULE, weights, seed=seed, lr=1.0).step(np.zeros(8, np.float32))
    return weights


def torch_step(seed: Any) -> Any:
    weights = torch.nn.Parameter(torch.zeros(8))
    optimizer = rulec.torch.optimizer(RULE)([weights], seed=seed, lr=1.0)
    weights.grad = torch.zeros(8)
    optimizer.step()
    return weights.detach().numpy()


WAYS: dict[str, Callable[[Any], Any]] = {
    "arrays": lambda seed: rulec.array.Optimizer(RULE, np.ones(3), seed=seed),
    "torch": lambda seed: rulec.torch.optimizer(RULE)([torch.nn.Parameter(torch.ones(2))], seed=seed),
    "torch, a group": lambda seed: rulec.torch.optimizer(RULE)(
        [{"params": [torch.nn.Parameter(torch.ones(2))], "seed": seed}]
    ),
    "jax": lambda seed: rulec.jax.transform(RULE, seed=seed),
    "jax, a step": jax_step,
    "jax, eager": lambda seed: rulec.jax.eager_step(lambda params, batch: 0.0, RULE, seed=seed),
    "jax, a checkpoint": lambda seed: rulec.jax.save(
        Path("none.safetensors"), RULE, [jnp.ones(2)], rulec.jax.init(RULE, [jnp.ones(2)]), seed=seed
    ),
    "perturbations": lambda seed: Perturbation("independent", 4, seed=seed),
}


@pytest.mark.parametrize("way", WAYS)
def test_what_is_no_seed_is_refused(way: str) -> None:
    for seed in (-1, 2**32, 2**40, 1.5, "a", None, True, np.int64(-1)):
        if seed is None and way == "perturbations":
            continue  # each strategy then has one of its own
        with pytest.raises(HyperError) as found:
            WAYS[way](seed)
        assert str(found.value) == f"seed={seed!r} must be a whole number from 0 to 2**32 - 1"


def test_the_first_and_the_last_seed_draw_the_same_everywhere() -> None:
    drawn = []
    for seed in (0, np.int64(0), 2**32 - 1, np.uint32(2**32 - 1)):
        ours = [step(seed) for step in (jax_step, array_step, torch_step)]
        assert all(np.abs(one - ours[0]).max() < 1e-6 < np.abs(one).max() for one in ours)
        drawn.append(ours[0])
    np.testing.assert_array_equal(drawn[0], drawn[1])
    np.testing.assert_array_equal(drawn[2], drawn[3])
    assert np.abs(drawn[0] - drawn[2]).max() > 1e-3
    assert Perturbation("independent", 4, seed=np.int64(3)) == Perturbation("independent", 4, seed=3)  # type: ignore[arg-type]
