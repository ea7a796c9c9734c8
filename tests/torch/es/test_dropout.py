"""Dropped inputs in many shapes of populations: windows of all neighbours, against each member as a plain network."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from rulec.es import Perturbation
from rulec.torch.es import Strategy, perturb
from tests.torch.es.oracle import member_model, member_outputs

LAYERS: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...]]] = {
    "linear": (lambda: nn.Linear(16, 5), (16,)),
    "inputs of which directions are no multiple": (lambda: nn.Linear(30, 5, bias=False), (30,)),
    "sequences": (lambda: nn.Linear(16, 5), (3, 16)),
    "long sequences": (lambda: nn.Linear(16, 5), (70, 16)),
    "conv2d": (lambda: nn.Conv2d(16, 6, 3, padding=1), (16, 4, 3)),
    "conv2d in groups": (lambda: nn.Conv2d(32, 6, 2, groups=2, bias=False), (32, 3, 3)),
    "conv2d of a point": (lambda: nn.Conv2d(16, 8, 1), (16, 1, 1)),
}

POPULATIONS: dict[str, Perturbation] = {
    "one pair": Perturbation("dropout", 1, seed=3),
    "an odd number of pairs": Perturbation("dropout", 7, seed=3),
    "pairs": Perturbation("dropout", 24, seed=3),
    "more pairs than inputs": Perturbation("dropout", 64, seed=3),
    "few are kept": Perturbation("dropout", 24, antithetic=False, keep=0.1, seed=3),
    "most are kept": Perturbation("dropout", 40, antithetic=False, keep=0.93, seed=3),
}


def _each_by_itself(es: Strategy, batch: Tensor) -> Tensor:
    """What each member makes of its own rows."""
    p = es.perturbation
    rows = batch.view(p.signs, -1, p.directions, *batch.shape[1:])
    with torch.no_grad():
        found = [
            torch.stack([member_model(es, d, s)(rows[s, :, d]) for d in range(p.directions)], 1) for s in range(p.signs)
        ]
    return torch.stack(found).flatten(0, 2)


@pytest.mark.parametrize("repeats", [1, 3])
@pytest.mark.parametrize("layer", LAYERS)
@pytest.mark.parametrize("population", POPULATIONS)
def test_members_see_what_they_do_not_drop(population: str, layer: str, repeats: int) -> None:
    make, shape = LAYERS[layer]
    torch.manual_seed(1)
    model = make().double()
    es = perturb(model, POPULATIONS[population])
    batch = torch.randn(repeats * es.perturbation.members, *shape, dtype=torch.float64)
    torch.testing.assert_close(es(batch), _each_by_itself(es, batch), rtol=0, atol=1e-10)
    x = batch[:repeats]
    torch.testing.assert_close(es(es.member_batch(x)), member_outputs(es, x), rtol=0, atol=1e-10)


def test_a_batch_without_places_has_outputs_without_places() -> None:
    es = perturb(nn.Linear(16, 5), POPULATIONS["pairs"])
    assert es(torch.empty(48, 0, 16)).shape == (48, 0, 5)
