"""A network trained on the digits in JAX by our rules, and in torch by torch's: their losses lie on each other."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from torch import Tensor

import rulec.jax
from rulec.tools.demo import digits
from rulec.tools.demo.digits import Network
from tests.rules.runs import Array

EPOCHS, BATCH = 3, 64

Start = Callable[[list[Tensor]], list[torch.optim.Optimizer]]


def batches(dtype: str) -> tuple[Array, Array]:
    """The images and labels of every step: (steps, batch, 64) and (steps, batch)."""
    data = digits.load()
    drawn = [batch for epoch in range(EPOCHS) for batch in data.batches(BATCH, epoch)]
    return np.stack([x for x, _ in drawn]).astype(dtype), np.stack([y for _, y in drawn]).astype(np.int32)


def weights(dtype: str) -> dict[str, Array]:
    """Those of a network of one hidden layer."""
    return {f"layer{i}": w.astype(dtype) for i, w in enumerate(Network((64, 48, 10)).params)}


def jax_losses(rule: str, hyper: dict[str, float], dtype: str) -> Array:
    """The loss of each step, of a training that is one compiled loop."""

    def loss(params: dict[str, Any], images: Any, labels: Any) -> Any:
        hidden = jax.nn.relu(images @ params["layer0"] + params["layer1"])
        logits = jax.nn.log_softmax(hidden @ params["layer2"] + params["layer3"])
        return -jnp.mean(jnp.take_along_axis(logits, labels[:, None], axis=1))

    def step(carry: Any, batch: Any) -> Any:
        params, state = carry
        value, grads = jax.value_and_grad(loss)(params, *batch)
        return rulec.jax.step(rule, params, grads, state, **hyper, tags={}), value

    with jax.enable_x64(dtype == "float64"):
        params = jax.tree.map(jnp.asarray, weights(dtype))
        start = params, rulec.jax.init(rule, params, tags={})
        return np.asarray(jax.lax.scan(step, start, batches(dtype))[1])


def torch_losses(start: Start, dtype: str) -> Array:
    """The same in torch."""
    params = [torch.tensor(w, requires_grad=True) for w in weights(dtype).values()]
    optimizers = start(params)
    found = []
    for images, labels in zip(*map(torch.from_numpy, batches(dtype)), strict=True):
        hidden = torch.relu(images @ params[0] + params[1])
        loss = torch.nn.functional.cross_entropy(hidden @ params[2] + params[3], labels.long())
        for optimizer in optimizers:
            optimizer.zero_grad()
        loss.backward()
        for optimizer in optimizers:
            optimizer.step()
        found.append(loss.item())
    return np.array(found)


def _muon(params: list[Tensor]) -> list[torch.optim.Optimizer]:
    """torch's for the matrices, and its AdamW for the rest."""
    matrices, rest = [p for p in params if p.ndim == 2], [p for p in params if p.ndim < 2]
    return [torch.optim.Muon(matrices, lr=0.02), torch.optim.AdamW(rest, lr=0.01, weight_decay=0.1)]


#: Rules and values, and who else computes them. Muon's matrices are products in bfloat16, in which the two differ by
#: the order of sums.
TRAININGS: dict[str, tuple[dict[str, float], Start]] = {
    "adamw": ({"lr": 0.01}, lambda params: [torch.optim.AdamW(params, lr=0.01)]),
    "adafactor": ({"lr": 0.05}, lambda params: [torch.optim.Adafactor(params, lr=0.05)]),
    "muon": ({"lr": 0.02, "adamw_lr": 0.01}, _muon),
}


@pytest.mark.slow  # docs/jax.md trains by adamw in float32 every day
@pytest.mark.parametrize(
    ("rule", "dtype", "apart"),
    [
        ("adamw", "float64", 1e-11),
        ("adafactor", "float32", 1e-5),
        ("muon", "float32", 5e-3),
    ],
)
def test_losses_lie_on_those_of_torch(rule: str, dtype: str, apart: float) -> None:
    hyper, start = TRAININGS[rule]
    ours, theirs = jax_losses(rule, hyper, dtype), torch_losses(start, dtype)
    assert len(ours) == EPOCHS * (1348 // BATCH)
    assert theirs[:10].mean() > 4 * theirs[-10:].mean()
    np.testing.assert_allclose(ours, theirs, rtol=0, atol=apart)
