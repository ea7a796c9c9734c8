"""Networks trained on scikit-learn's digits without a backward pass, behind several rules."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.nn.functional import cross_entropy

import rulec.torch
from rulec.es import Perturbation
from rulec.tools.demo import digits
from rulec.torch import perturb
from tests.torch.es.digits_training import convolutional, perceptron, train

pytestmark = pytest.mark.slow

RULES: dict[str, Callable[[Any], Any]] = {
    "sgd": lambda params: rulec.torch.SGD(params, lr=0.003, momentum=0.9),
    "adam": lambda params: rulec.torch.Adam(params, lr=0.02),
    "lion": lambda params: rulec.torch.Lion(params, lr=0.005),
}

#: Of the convolutional network, whose windows' weights have large gradients: lower rates but for Adam.
SLOWER: dict[str, Callable[[Any], Any]] = {
    "sgd": lambda params: rulec.torch.SGD(params, lr=0.001, momentum=0.9),
    "adam": RULES["adam"],
    "lion": lambda params: rulec.torch.Lion(params, lr=0.002),
}


@pytest.mark.parametrize(
    ("family", "rule"),
    [
        ("permuted", "adam"),
        *(
            pytest.param(*case, marks=pytest.mark.whole)
            for case in (("signflip", "sgd"), ("lowrank", "lion"), ("independent", "sgd"))
        ),
    ],
)
def test_a_perceptron(family: str, rule: str) -> None:
    model = perceptron()
    perturbation = Perturbation(family, 32, 0.05, seed=0)  # type: ignore[arg-type]
    assert train(model, perturbation, RULES[rule], digits.load(), 30).accuracies[-1] >= 0.9


@pytest.mark.parametrize(
    ("family", "rule"),
    [
        ("signflip", "lion"),
        *(
            pytest.param(*case, marks=pytest.mark.whole)
            for case in (("permuted", "sgd"), ("lowrank", "adam"), ("independent", "adam"))
        ),
    ],
)
def test_a_convolutional_network(family: str, rule: str) -> None:
    model = convolutional()
    perturbation = Perturbation(family, 32, 0.05, seed=0)  # type: ignore[arg-type]
    assert train(model, perturbation, SLOWER[rule], digits.load(), 30, batch=32).accuracies[-1] >= 0.9


def test_spsa_goes_on_where_back_propagation_has_ended() -> None:
    data, model = digits.load(), perceptron()
    opt = torch.optim.Adam(model.parameters(), lr=1e-3)
    images, labels = torch.from_numpy(data.images), torch.from_numpy(data.labels)

    def loss() -> torch.Tensor:
        return cross_entropy(model(images), labels)

    for _ in range(60):
        opt.zero_grad()
        loss().backward()
        opt.step()
    before = loss().item()
    opt.zero_grad()
    es = perturb(model, Perturbation("spsa", 4, 1e-3, values="rademacher"))
    ours = rulec.torch.SGD(model.parameters(), lr=3e-3)
    for _ in range(150):
        report = es.step(es.evaluate(lambda: -loss()), ours)
    assert set(report.fused) == set(es.parameters)
    assert (report.gradient_bytes, es.noise_bytes()) == (0, 0)
    assert loss().item() < 0.95 * before
