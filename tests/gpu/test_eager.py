"""Updates inside the backward pass on the device, with gradients and with none."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import rulec.torch
from tests.backends.epilogues import same_bits
from tests.gpu.training import DEVICE

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("shape", [(256, 512), (70, 100), (1000, 333), (4096, 1024), (8, 8)])
@pytest.mark.parametrize(("dtype", "factors"), [("bfloat16", "bfloat16"), ("float32", "bfloat16"), ("float16",) * 2])
def test_a_product_with_an_epilogue_has_the_bits_of_product_and_step(
    shape: tuple[int, int], dtype: str, factors: str
) -> None:
    assert same_bits("adamw", dtype, factors, shape, 96, DEVICE)
    assert same_bits("adamw", dtype, factors, shape, 37, DEVICE, states="float32")


@pytest.mark.parametrize("rule", ["lion", "sgd", "madgrad", "adan"])
def test_other_rules_have_them_too(rule: str) -> None:
    assert same_bits(rule, "bfloat16", "bfloat16", (256, 300), 64, DEVICE, maximize=True)
    assert same_bits(rule, "float32", "float32", (100, 128), 33, DEVICE)


def test_a_tensor_that_stays_and_gradients_that_were_scaled() -> None:
    assert same_bits("adamw", "bfloat16", "bfloat16", (128, 256), 64, DEVICE, stays=True)
    assert same_bits("adamw", "bfloat16", "bfloat16", (128, 256), 64, DEVICE, stays=False, scale=3.0)


class Model(nn.Module):
    """Linear layers of different sizes, one with a bias, and a norm."""

    def __init__(self, wide: int) -> None:
        super().__init__()
        self.into, self.norm = nn.Linear(wide, 2 * wide), nn.LayerNorm(2 * wide)
        self.layers = nn.ModuleList([nn.Linear(2 * wide, 2 * wide, bias=False) for _ in range(4)])

    def forward(self, x: Tensor) -> Tensor:
        x = self.norm(self.into(x))
        for layer in self.layers:
            x = x + torch.nn.functional.silu(layer(x))
        return x


def optimizer_of(model: nn.Module, eager: Any) -> Any:
    """AdamW: deferred where `eager` is None, else with that epilogue."""
    if eager is None:
        return rulec.torch.AdamW(model.parameters(), lr=1e-3)  # type: ignore[attr-defined]
    return rulec.torch.EagerUpdate(model, "adamw", lr=1e-3, epilogue=eager)


def train(model: nn.Module, optimizer: Any, steps: int, dtype: torch.dtype, wide: int) -> None:
    """Steps on numbers that are the same whenever they are asked for."""
    for step in range(steps):
        random = torch.Generator(DEVICE).manual_seed(step)
        inputs = torch.randn(3, 40, wide, generator=random, device=DEVICE).to(dtype)
        loss = model(inputs).float().square().mean()
        if isinstance(optimizer, rulec.torch.EagerUpdate):
            with optimizer.backward():
                loss.backward()
        else:
            optimizer.zero_grad()
            loss.backward()
        optimizer.step()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("eager", [False, True, "kernel", "tiles"])
def test_eager_steps_are_the_deferred_ones(eager: Any, dtype: torch.dtype) -> None:
    """Exactly without epilogue; else within what products in another order differ by, which AdamW may make a step."""
    torch.manual_seed(0)
    ours = Model(96).to(DEVICE, dtype)
    theirs = copy.deepcopy(ours)
    train(ours, optimizer_of(ours, eager), 4, dtype, 96)
    train(theirs, optimizer_of(theirs, None), 4, dtype, 96)
    if eager is False:
        assert all(torch.equal(a, b) for a, b in zip(ours.parameters(), theirs.parameters(), strict=True))
    assert_same_steps(ours, theirs, 4, dtype)


def assert_same_steps(ours: nn.Module, theirs: nn.Module, steps: int, dtype: torch.dtype) -> None:
    """The same steps of AdamW, with gradients whose sums were added in another order.

    A gradient near 0 may have another sign: then AdamW takes its step the other way, of at most lr.
    """
    for a, b in zip(ours.parameters(), theirs.parameters(), strict=True):
        assert float((a.double() - b.double()).abs().max()) <= steps * 2 * 1e-3 + 4 * torch.finfo(dtype).eps
        assert float((a.double() - b.double()).abs().mean()) <= 2e-4


def test_no_gradient_of_a_weight_is_ever_whole() -> None:
    """The most memory in a step is less by the gradients than that of a deferred one."""
    wide, peaks = 1024, {}
    for eager in (None, False, "kernel", "tiles"):
        torch.manual_seed(0)
        model = Model(wide).to(DEVICE, torch.bfloat16)
        optimizer = optimizer_of(model, eager)
        train(model, optimizer, 2, torch.bfloat16, wide)
        optimizer.zero_grad()
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        train(model, optimizer, 2, torch.bfloat16, wide)
        peaks[eager] = torch.cuda.max_memory_allocated() - before
    gradients = 2 * (2 * wide * wide + 4 * 4 * wide * wide)
    assert peaks[None] >= gradients
    assert peaks["kernel"] <= peaks[None] - 0.7 * gradients
    assert peaks["kernel"] <= peaks["tiles"] <= peaks[False]


def test_layers_in_the_middle_of_autocast() -> None:
    """Weights of float32, products of bfloat16: as without epilogue, but for the order of sums."""
    torch.manual_seed(0)
    ours = Model(64).to(DEVICE)
    theirs = copy.deepcopy(ours)
    for model, eager in ((ours, "kernel"), (theirs, None)):
        with torch.autocast(DEVICE, torch.bfloat16):
            train(model, optimizer_of(model, eager), 3, torch.float32, 64)
    assert_same_steps(ours, theirs, 3, torch.float32)
