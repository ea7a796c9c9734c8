"""Binary layers among others under `rulec.torch.perturb`."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import rulec.torch
from rulec.errors import HyperError
from rulec.es import Perturbation
from rulec.es.binary import member_weights
from rulec.torch.es import BinaryConv2d, BinaryLinear, BinaryMaxPool2d
from rulec.torch.es.self_estimator import Draw


class Mixed(nn.Module):
    """Bits of a convolution, then a layer of floats."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = BinaryConv2d(2, 5, 3, padding=1)
        self.pool = BinaryMaxPool2d(2)
        self.bits = BinaryLinear(20, 6)
        self.head = nn.Linear(6, 3)

    def forward(self, x: Tensor) -> Tensor:
        found = self.bits(self.pool(self.conv(x)).flatten(1))
        return self.head(2.0 * found.float() - 1.0)  # type: ignore[no-any-return]


def images(count: int) -> Tensor:
    return torch.rand(count, 2, 4, 4, generator=torch.Generator().manual_seed(0)) < 0.5


@pytest.fixture
def model() -> Mixed:
    torch.manual_seed(0)
    return Mixed()


def test_binary_layers_and_others_are_perturbed_together(model: Mixed) -> None:
    """Gradients are what each layer's own estimate gives, with numbers from the model's order of parameters."""
    es = rulec.torch.perturb(model, Perturbation("independent", directions=3, seed=5))
    assert es.left_alone == {}
    names = [name for name, _ in model.named_parameters()]
    out = es(es.member_batch(images(4)))
    fitness = out.double().square().mean(dim=1).view(2, 4, 3).mean(dim=1)
    draw = Draw(5, 0, 3, True, {own: names.index(f"bits.{own}") for own in ("weight", "bias")})
    expected = model.bits.estimate(draw, member_weights(fitness.numpy()))
    es.update(fitness.flatten())
    for name, param in model.named_parameters():
        assert param.grad is not None, name
        assert param.grad.abs().sum() > 0, name
    for own, gradient in expected.items():
        assert (getattr(model.bits, own).grad == gradient).all()


def test_the_plain_network_is_as_before(model: Mixed) -> None:
    plain = model(images(4))
    es = rulec.torch.perturb(model, Perturbation("signflip", directions=4, seed=0))
    members = es(es.member_batch(images(4)))
    assert (model(images(4)) == plain).all()
    assert len({members[m::4][:4].sum().item() for m in range(4)}) > 1


def test_a_resumed_run_draws_the_same_bits(model: Mixed) -> None:
    outs = []
    for resumed in (False, True):
        es = rulec.torch.perturb(model, Perturbation("independent", directions=3, seed=0))
        batch = es.member_batch(images(4))
        if not resumed:
            es(batch)
            es.update(torch.arange(6.0))
            state = es.state_dict()
        else:
            es.load_state_dict(state)
        outs.append(es(batch))
    assert (outs[0] == outs[1]).all()


def test_fitness_that_is_not_finite_leaves_binary_layers_alone(model: Mixed) -> None:
    before = {name: param.clone() for name, param in model.named_parameters()}
    es = rulec.torch.perturb(model, Perturbation("independent", directions=3, seed=0))
    optimizer = rulec.torch.optimizer("adam")(model.parameters(), lr=0.1)
    es(es.member_batch(images(4)))
    with pytest.warns(RuntimeWarning, match="skipped|not updated"):
        es.step(torch.full((6,), float("nan")), optimizer)
    assert all((param == before[name]).all() for name, param in model.named_parameters())


def test_a_step_updates_binary_layers_and_others(model: Mixed) -> None:
    es = rulec.torch.perturb(model, Perturbation("independent", directions=3, seed=0))
    optimizer = rulec.torch.optimizer("adam")(model.parameters(), lr=0.1)
    before = {name: param.clone() for name, param in model.named_parameters()}
    for _ in range(2):
        out = es(es.member_batch(images(4)))
        es.step(out.double().square().mean(dim=1), optimizer)
    assert all((param != before[name]).any() for name, param in model.named_parameters())
    assert all(param.isfinite().all() for param in model.parameters())


@pytest.mark.parametrize("way", ["update", "step"])
def test_penalties_are_of_weights_of_bits_alone(model: Mixed, way: str) -> None:
    """What they add is what torch's own gradient of the penalty is."""
    fitness, grads = torch.arange(6.0), []
    optimizer = _Seen(model.parameters())
    for penalty in ({}, {"l1": 0.5, "l2": 0.25}):
        es = rulec.torch.perturb(model, Perturbation("independent", directions=3, seed=0))
        es(es.member_batch(images(4)))
        if way == "update":
            es.update(fitness, **penalty)
            optimizer.step()
        else:
            es.step(fitness, optimizer, **penalty)
        grads.append(optimizer.seen)
    bits = {id(layer.weight) for layer in (model.conv, model.bits)}
    for (name, param), plain, other in zip(model.named_parameters(), *grads, strict=True):
        if id(param) in bits:
            weight = param.detach().clone().requires_grad_()
            (0.5 * weight.abs().sum() + 0.125 * weight.square().sum()).backward()
            assert weight.grad is not None
            torch.testing.assert_close(other - plain, weight.grad, rtol=1e-5, atol=1e-5)
        else:
            assert torch.equal(plain, other), name


class _Seen(torch.optim.Optimizer):
    """Keeps the gradients that it is given."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, {})
        self.seen: list[torch.Tensor] = []

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        self.seen = [p.grad.clone() for group in self.param_groups for p in group["params"] if p.grad is not None]


def test_what_is_no_penalty_is_refused(model: Mixed) -> None:
    for bad in (-1.0, float("nan"), "much"):
        es = rulec.torch.perturb(model, Perturbation("independent", directions=3, seed=0))
        es(es.member_batch(images(4)))
        with pytest.raises(HyperError, match=r"l2=.* must be a finite number of at least 0"):
            es.update(torch.arange(6.0), l2=bad)
        assert es.step_count == 0
        assert all(param.grad is None for param in model.parameters())
    plain = rulec.torch.perturb(torch.nn.Linear(3, 2), Perturbation("independent", directions=3))
    plain(torch.ones(6, 3))
    with pytest.raises(HyperError, match="l1= is for weights of binary layers, and there is none"):
        plain.update(torch.arange(6.0), l1=0.1)


def test_a_part_of_a_binary_layer_cannot_be_left_out(model: Mixed) -> None:
    model.bits.bias.requires_grad_(False)
    with pytest.raises(HyperError, match="perturbs weight and bias together: train all of them, by one pattern"):
        rulec.torch.perturb(model, Perturbation("independent", directions=3))
    model.bits.bias.requires_grad_(True)
    with pytest.raises(HyperError, match="perturbs weight and bias together"):
        rulec.torch.perturb(model, {"*.weight": Perturbation("lowrank", 3), "*": Perturbation("lowrank", 3)})
