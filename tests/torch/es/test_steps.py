"""Steps in which kernels make gradients themselves, against gradients and then a step."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import rulec.torch
from rulec.torch import perturb
from tests.torch.es.families import FAMILIES, perturbation_of


def _model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Conv2d(2, 4, 3), nn.ReLU(), nn.Flatten(), nn.Linear(36, 7), nn.Tanh(), nn.Linear(7, 6))


def _trained(family: str, optimizer: Any, fused: bool, **settings: Any) -> tuple[nn.Module, Any]:
    model = _model()
    es = perturb(model, perturbation_of(family, sigma=0.1, values="rademacher", **settings))
    opt = optimizer(model.parameters())
    report = None
    for step in range(3):
        x = torch.randn(2, 2, 5, 5, generator=torch.Generator().manual_seed(step))
        loss = es(es.member_batch(x)).square().sum(1)
        if fused:
            report = es.step(None, opt, loss=loss)
        else:
            report = es.update(loss=loss)
            opt.step()
    return model, report


@pytest.mark.parametrize("family", FAMILIES)
def test_a_step_is_an_update_and_a_step(family: str) -> None:
    def make(params: Any) -> Any:
        return rulec.torch.AdamW(params, lr=0.01)

    fused, report = _trained(family, make, True)
    plain, _ = _trained(family, make, False)
    exact = family in ("independent",)
    for (name, a), b in zip(fused.named_parameters(), plain.parameters(), strict=True):
        assert a.grad is None
        torch.testing.assert_close(a, b, rtol=0 if exact else 1e-5, atol=0 if exact else 1e-6, msg=name)
    if family == "independent":
        assert set(report.fused) == {name for name, _ in fused.named_parameters()}
        assert report.gradient_bytes == 0


def test_an_optimizer_of_torch_takes_gradients() -> None:
    def make(params: Any) -> Any:
        return torch.optim.SGD(params, lr=0.01)

    model, report = _trained("signflip", make, True)
    plain, _ = _trained("signflip", make, False)
    assert report.fused == ()
    assert report.gradient_bytes == sum(p.nbytes for p in model.parameters())
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), plain.parameters(), strict=True))


def test_matrices_that_need_gradients_leave_the_others_without() -> None:
    """Muon and its AdamW under a schedule: weights, states and rates are those of the two steps, bit for bit."""
    models = _model(), _model()
    opts = [rulec.torch.optimizer("muon")(rulec.torch.tagged_groups(model, {"head": []}), lr=0.02) for model in models]
    schedules = [torch.optim.lr_scheduler.ExponentialLR(opt, 0.5) for opt in opts]
    strategies = [perturb(model, perturbation_of("independent", values="popcount")) for model in models]
    for step in range(3):
        x = torch.randn(2, 2, 5, 5, generator=torch.Generator().manual_seed(step))
        losses = [es(es.member_batch(x)).square().sum(1) for es in strategies]
        report = strategies[0].step(None, opts[0], loss=losses[0])
        strategies[1].update(loss=losses[1])
        opts[1].step()
        for schedule in schedules:
            schedule.step()
    assert {*strategies[0].parameters} - {*report.fused} == {"3.weight", "5.weight"}
    assert report.gradient_bytes == 4 * (7 * 36 + 6 * 7)
    assert [group["lr"] for group in opts[0].param_groups] == [group["lr"] for group in opts[1].param_groups]
    for a, b in zip(models[0].parameters(), models[1].parameters(), strict=True):
        assert a.grad is None
        assert torch.equal(a, b)
        assert opts[0].state[a].keys() == opts[1].state[b].keys()
        assert all(torch.equal(opts[0].state[a][k], opts[1].state[b][k]) for k in opts[1].state[b])
