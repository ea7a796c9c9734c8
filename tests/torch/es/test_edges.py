"""Parameters that an optimizer has not, that have no elements, or are only asked for their shape; noise of zeros."""

from __future__ import annotations

import warnings
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import rulec.torch
from rulec.errors import HyperError, RulecError
from rulec.es import Perturbation
from rulec.es.dense import estimate
from rulec.es.fitness import weights
from rulec.torch import perturb
from rulec.torch.es.layers import Linear

FAMILIES: list[dict[str, Any]] = [
    {"family": "independent"}, {"family": "spsa"}, {"family": "sparse", "sparsity": 1}, {"family": "permuted"},
    {"family": "signflip"}, {"family": "lowrank"},
]  # fmt: skip


@pytest.mark.parametrize("optimizer", [rulec.torch.AdamW, torch.optim.AdamW])
def test_only_what_the_optimizer_has_is_updated_and_reported(optimizer: Any) -> None:
    model = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 1))
    before = [param.detach().clone() for param in model.parameters()]
    es = perturb(model, Perturbation("independent", 2))
    report = es.step(es(es.member_batch(torch.randn(2, 3)))[:, 0], optimizer(model[1].parameters(), lr=0.1))
    assert {*report.fused} <= {"1.weight", "1.bias"}
    assert report.gradient_bytes == (0 if report.fused else 4 * 5)
    changed = [not torch.equal(old, new) for old, new in zip(before, model.parameters(), strict=True)]
    assert changed == [False, False, True, True]


def test_an_optimizer_without_any_of_them_takes_no_step() -> None:
    model = nn.Linear(3, 1)
    es = perturb(model, Perturbation("independent", 2))
    fitness = es(es.member_batch(torch.randn(2, 3)))[:, 0]
    with pytest.raises(HyperError, match="has none of the perturbed parameters"):
        es.step(fitness, rulec.torch.AdamW(nn.Linear(2, 2).parameters()))
    with pytest.raises(HyperError, match="not by None"):
        es.step(fitness, None)
    assert es.step_count == 0


@pytest.mark.parametrize("scheduled", [False, True])
def test_an_optimizer_of_closures_takes_no_step(scheduled: bool) -> None:
    model = nn.Linear(3, 1)
    es = perturb(model, Perturbation("independent", 2))
    fitness, opt = es(es.member_batch(torch.randn(2, 3)))[:, 0], torch.optim.LBFGS(model.parameters())
    if scheduled:
        torch.optim.lr_scheduler.StepLR(opt, 1)
    with pytest.raises(HyperError, match=r"cannot step LBFGS: its step\(\) evaluates a closure with gradients"):
        es.step(fitness, opt)
    assert (es.step_count, model.weight.grad) == (0, None)
    es.step(fitness, torch.optim.SGD(model.parameters(), lr=0.1))


@pytest.mark.parametrize("settings", FAMILIES, ids=lambda settings: settings["family"])
@pytest.mark.parametrize("shape", [(0, 4), (4, 0)])
def test_parameters_without_elements_are_left_alone(settings: Any, shape: tuple[int, int]) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch's own, about initializing nothing
        model = nn.Sequential(nn.Linear(*shape), nn.Linear(shape[1], 2))
    es = perturb(model, Perturbation(directions=2, **settings))
    assert es.left_alone["0.weight"] == "it has no elements"
    x = torch.randn(3, shape[0])
    forward = (lambda: es(es.member_batch(x)).sum(1)) if es.perturbation.family != "spsa" else None
    es.update(forward() if forward else es.evaluate(lambda: model(x).sum()))
    assert es.parameters["1.bias"].grad is not None


class _AsWeight(nn.Module):
    def __init__(self, ask: Any) -> None:
        super().__init__()
        self.layer, self.ask = nn.Linear(3, 3), ask

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = self.layer(x) + self.ask(self.layer.weight, x)
        return found


@pytest.mark.parametrize("ask", [
    lambda weight, x: weight.new_zeros(3), lambda weight, x: torch.zeros_like(weight)[0],
    lambda weight, x: x.to(weight), lambda weight, x: x.type_as(weight),
])  # fmt: skip
def test_a_layer_may_be_asked_what_its_weight_is_like(ask: Any) -> None:
    es = perturb(_AsWeight(ask), Perturbation("lowrank", 2))
    assert es(es.member_batch(torch.randn(2, 3))).shape == (8, 3)


@pytest.mark.parametrize("ask", [
    lambda weight, x: weight.to(x), lambda weight, x: weight.type_as(x)[0],
    lambda weight, x: weight.expand_as(weight)[0],
])  # fmt: skip
def test_its_elements_may_not(ask: Any) -> None:
    es = perturb(_AsWeight(ask), Perturbation("lowrank", 2))
    with pytest.raises(RulecError, match=r"'layer.weight' is read by"):
        es(es.member_batch(torch.randn(2, 3)))


def test_noise_that_is_zero_is_not_lost() -> None:
    """A quarter of popcount noise is 0: only what is rounded away is warned of."""
    torch.manual_seed(0)
    layer = nn.Linear(64, 64).bfloat16()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        perturb(layer, Perturbation("independent", 2, 0.1, values="popcount"))
    with pytest.warns(RuntimeWarning, match=r"100% of weights \(of a sample\) round to themselves"):
        perturb(layer, Perturbation("independent", 2, 1e-8, values="popcount"))


class _Tied(nn.Module):
    """A table whose line 0 stands for nothing, and which is the last layer's weight too."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.last = nn.Embedding(4, 3, padding_idx=0), nn.Linear(3, 4, bias=False)
        self.last.weight = self.table.weight

    def forward(self, index: Tensor) -> Tensor:
        found: Tensor = self.last(self.table(index))
        return found


def test_a_line_of_padding_is_trained_by_other_layers() -> None:
    """Looked up it stays as it is, as for autograd, and what the last layer makes of it differs between members."""
    model = _Tied().double()
    es = perturb(model, Perturbation("independent", 4, 0.1))
    nothing = es(es.member_batch(torch.zeros(1, 1, dtype=torch.int64)))
    assert torch.equal(nothing, torch.zeros_like(nothing))
    out = es(es.member_batch(torch.ones(1, 1, dtype=torch.int64)))[:, 0, 0]
    assert len(set(out.tolist())) == 8
    es.update(out)
    scores = weights(out.numpy().reshape(2, 4), es.perturbation).values
    expected = estimate(es.perturbation, model.table.weight.detach().numpy(), 0, 0, scores)
    assert model.table.weight.grad is not None
    np.testing.assert_allclose(model.table.weight.grad, expected, rtol=0, atol=1e-5 * np.abs(scores).sum())


def test_a_batch_is_known_as_shared_after_another_was_dealt(monkeypatch: pytest.MonkeyPatch) -> None:
    """Labels that are dealt before the forward do not make its first layer compute what members share twice."""
    es = perturb(nn.Linear(3, 2), Perturbation("lowrank", 2))
    batch, _ = es.member_batch(torch.randn(2, 3)), es.member_batch(torch.arange(2))
    rows: list[int] = []
    product = Linear.product

    def counted(way: Linear, x: Tensor, *others: Any) -> Tensor:
        rows.append(x.shape[:-1].numel())
        return product(way, x, *others)

    monkeypatch.setattr(Linear, "product", counted)
    es(batch)
    es(batch.clone())
    assert rows == [2, 8]
