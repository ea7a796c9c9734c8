"""Steps that the host does not see: in a CUDA graph, under GradScaler, and within what torch compiles."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import rulec.torch
from benchmarks.gpu.host import RATES, WARM_UP, capture
from rulec.errors import RulecError
from tests.gpu.training import DEVICE, assert_near, check_no_waiting, give, gradients, parameters

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("name", ["adamw", "nadam", "lion", "lamb"])
def test_a_graph_follows_the_learning_rate_and_counts_on(name: str) -> None:
    """Replays with other rates and gradients, and the same steps uncaptured."""
    kind = rulec.torch.optimizer(name)
    ours, plain = parameters(), parameters()
    lr = torch.tensor(RATES[0], device=DEVICE)
    static = gradients(ours, 0)
    give(ours, static)
    give(plain, gradients(plain, 0))
    captured, other = kind(ours, lr=lr, capturable=True), kind(plain, lr=RATES[0])
    graph = capture(captured.step)
    for _ in range(WARM_UP):
        other.step()
    for step, rate in enumerate(RATES):
        lr.fill_(rate)
        for held, new in zip(static, gradients(ours, step), strict=True):
            held.copy_(new)
        graph.replay()
        other.param_groups[0]["lr"] = rate
        give(plain, gradients(plain, step))
        other.step()
    assert_near(ours, plain, 2.0**-20)


def test_a_captured_optimizer_is_torchs_fused_one() -> None:
    ours, theirs = parameters(), parameters()
    rates = [torch.tensor(1e-2, device=DEVICE) for _ in range(2)]
    mine = rulec.torch.AdamW(ours, lr=rates[0], capturable=True)
    other = torch.optim.AdamW(theirs, lr=rates[1], capturable=True, fused=True)
    for params in (ours, theirs):
        give(params, gradients(params, 0))
    graphs = [capture(mine.step), capture(other.step)]
    for rate in RATES:
        for lr, graph in zip(rates, graphs, strict=True):
            lr.fill_(rate)
            graph.replay()
    assert_near(ours, theirs, 2.0**-20)
    steps = [float(optimizer.state[params[0]]["step"]) for optimizer, params in ((mine, ours), (other, theirs))]
    assert steps == [WARM_UP + len(RATES)] * 2


@pytest.mark.parametrize("steps", [1, 8])
def test_a_step_that_is_not_capturable_is_not_captured(steps: int) -> None:
    """Neither the second step, nor one that repeats the steps before it."""
    params = parameters([(7,), (33, 5)] * 10)
    optimizer = rulec.torch.AdamW(params)
    give(params, gradients(params, 0))
    for _ in range(steps):
        optimizer.step()
    assert optimizer._machine is not None
    assert (optimizer._machine.repeat is not None) == (steps > 1)
    before = [p.detach().clone() for p in params]
    with pytest.raises(RulecError, match="capturable=True"), torch.cuda.graph(torch.cuda.CUDAGraph()):
        optimizer.step()
    for param, old in zip(params, before, strict=True):
        assert torch.equal(param, old)


def scaled_steps(params: list[Tensor], optimizer: Any, broken: int) -> list[float]:
    """Steps under a scaler, one of them with an infinite gradient; the scale after each."""
    scaler = torch.amp.GradScaler(DEVICE, init_scale=2.0**8, growth_interval=3)
    scales = []
    for step in range(8):
        optimizer.zero_grad()
        grads = gradients(params, step)
        loss = sum((p * g).sum() for p, g in zip(params, grads, strict=True))
        scaler.scale(loss).backward()
        if step == broken:
            assert params[2].grad is not None
            params[2].grad.view(-1)[1] = float("inf")
        scaler.step(optimizer)
        scaler.update()
        scales.append(scaler.get_scale())
    return scales


@pytest.mark.parametrize("broken", [0, 4])
@pytest.mark.parametrize("fused", [None, True])
def test_a_scaler_skips_a_step_with_an_infinite_gradient_as_torchs_does(broken: int, fused: bool | None) -> None:
    ours, theirs = parameters(), parameters()
    mine, other = rulec.torch.AdamW(ours, lr=1e-2, fused=fused), torch.optim.AdamW(theirs, lr=1e-2, fused=True)
    assert scaled_steps(ours, mine, broken) == scaled_steps(theirs, other, broken)
    assert_near(ours, theirs, 2.0**-20)
    assert float(mine.state[ours[0]]["step"]) == float(other.state[theirs[0]]["step"]) == 7


@pytest.mark.parametrize("fused", [None, True])
def test_a_skipped_step_changes_no_bit(fused: bool | None) -> None:
    params = parameters()
    optimizer = rulec.torch.AdamW(params, fused=fused)
    scaler = torch.amp.GradScaler(DEVICE, init_scale=2.0)
    kept: list[list[Tensor]] = []
    for step in range(3):
        optimizer.zero_grad()
        loss = sum((p * g).sum() for p, g in zip(params, gradients(params, step), strict=True))
        scaler.scale(loss).backward()
        if step == 2:
            assert params[0].grad is not None
            params[0].grad.fill_(float("nan"))
        scaler.step(optimizer)
        scaler.update()
        states = [optimizer.state[p][name] for p in params for name in ("exp_avg", "exp_avg_sq", "step")]
        kept.append([t.detach().clone() for t in (*params, *states)])
    for before, after in zip(kept[1], kept[2], strict=True):
        assert torch.equal(before, after)


def test_a_scaled_step_does_not_wait_for_the_device() -> None:
    params = parameters()
    optimizer = rulec.torch.AdamW(params, fused=True)
    scaler = torch.amp.GradScaler(DEVICE)
    for step in range(3):
        give(params, gradients(params, step))
        scaler.scale(params[0].detach().sum())  # makes the scale, as a loss does
        with check_no_waiting() if step else contextlib.nullcontext():
            scaler.step(optimizer)
            scaler.update()


def trained(around: Callable[[Callable[..., Tensor]], Callable[..., Tensor]]) -> list[Tensor]:
    """The parameters of a small model after some steps, the whole of a training step given to `around`."""
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(16, 32), torch.nn.Tanh(), torch.nn.Linear(32, 4)).to(DEVICE)
    optimizer = rulec.torch.AdamW(model.parameters(), lr=1e-2)
    data = torch.randn(8, 16, device=DEVICE)

    def step(x: Tensor) -> Tensor:
        optimizer.zero_grad()
        loss = model(x).square().mean()
        loss.backward()
        optimizer.step()
        return loss

    wrapped = around(step)
    for _ in range(5):
        wrapped(data)
    return [p.detach() for p in model.parameters()]


def test_a_compiled_training_step_trains_as_it_does_uncompiled() -> None:
    torch.compiler.reset()
    assert_near(trained(torch.compile), trained(lambda step: step), 1e-4)
