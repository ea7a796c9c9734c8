"""Members of a compiled model are those of the model, and nothing of how they are made is compiled."""

from __future__ import annotations

import copy
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from rulec.es import Perturbation
from rulec.torch.es import Strategy, perturb


class _Network(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(3, 4), nn.Linear(4, 2)

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = self.last(torch.tanh(self.first(x)))
        return found


def _fitness(es: Strategy, x: Tensor) -> Tensor:
    if es.perturbation.family == "spsa":
        return es.evaluate(lambda: es.model(x).square().sum())
    found: Tensor = es(es.member_batch(x)).square().sum(1)
    return found


@pytest.mark.slow
@pytest.mark.parametrize("family", ["lowrank", "spsa"])
def test_members_of_a_compiled_model(family: str) -> None:
    compiled: list[object] = []

    def backend(graph: torch.fx.GraphModule, _: object) -> Callable[..., object]:
        compiled.append(graph)
        return graph.forward

    torch.manual_seed(0)
    plain, x = _Network(), torch.randn(2, 3)
    other = copy.deepcopy(plain)
    other.compile(backend=backend)
    strategies = [perturb(model, Perturbation(family, 2, 0.1, seed=0)) for model in (plain, other)]  # type: ignore[arg-type]
    other(x)
    assert len(compiled) == 1
    for _ in range(2):
        found = [_fitness(es, x) for es in strategies]
        torch.testing.assert_close(found[0], found[1], rtol=0, atol=0)
        for es, fitness in zip(strategies, found, strict=True):
            es.update(fitness)
    other(x)
    assert len(compiled) == 1
