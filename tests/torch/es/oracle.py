"""Every member's network as a plain one of its own, with the noise that `rulec.es.dense` defines: the oracle."""

from __future__ import annotations

import copy

import torch
from torch import Tensor, nn

from rulec.es import Perturbation
from rulec.es.dense import noise
from rulec.torch.es import Strategy


def member_model(es: Strategy, direction: int, sign: int, step: int = 0) -> nn.Module:
    """A copy of the model whose parameters are those of one member, in the parameters' dtype."""
    model = copy.deepcopy(es.model)
    params = dict(model.named_parameters())
    p = es.perturbation
    for number, name in enumerate(es.parameters):
        param = params[name]
        eps = torch.from_numpy(noise(p, tuple(param.shape), number, step, direction))
        exact = param.detach().double()
        change = exact * eps if p.family == "dropout" else p.sigma * eps
        with torch.no_grad():
            param.copy_(exact + (-change if sign else change))
    return model


def member_outputs(es: Strategy, x: Tensor, step: int = 0) -> Tensor:
    """What `es(es.member_batch(x))` must be: each member's own model on all of `x`, in the layout of a batch."""
    p: Perturbation = es.perturbation
    with torch.no_grad():
        found = [
            torch.stack([member_model(es, d, s, step)(x) for d in range(p.directions)], dim=1) for s in range(p.signs)
        ]
    return torch.stack(found).flatten(0, 2)
