"""The demonstration's population in PyTorch."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import numpy as np

from rulec.demo.es_setting import Setting

if TYPE_CHECKING:
    import torch

Array = np.ndarray[Any, Any]


class TorchPopulation:
    """All members in one forward of a `torch.nn.Sequential`."""

    def __init__(self, params: Sequence[Array], setting: Setting) -> None:
        import rulec.torch

        self._model, self._shaping = _model(params), setting.shaping
        self._es = rulec.torch.perturb(self._model, setting.perturbation)
        self._optimizer = rulec.torch.optimizer(setting.rule)(self._model.parameters(), lr=setting.lr)

    def step(self, images: Array, labels: Array) -> float:
        """One update, by the members' losses on a batch; their mean."""
        import torch

        logits = self._es(self._es.member_batch(torch.from_numpy(images)))
        wanted = self._es.member_batch(torch.from_numpy(labels))
        loss = torch.nn.functional.cross_entropy(logits, wanted, reduction="none")
        self._es.step(None, self._optimizer, loss=loss, shaping=self._shaping)
        return float(loss.mean())

    def params(self) -> list[Array]:
        """The network's parameters; weights as (inputs, outputs)."""
        return [param.detach().numpy().T for param in self._model.parameters()]


def _model(params: Sequence[Array]) -> torch.nn.Module:
    """Linear layers with these weights (inputs, outputs) and biases, rectified in between."""
    import torch

    widths = [params[0].shape[0], *(bias.size for bias in params[1::2])]
    linear = [torch.nn.Linear(inputs, outputs) for inputs, outputs in pairwise(widths)]
    with torch.no_grad():
        for layer, weight, bias in zip(linear, params[::2], params[1::2], strict=True):
            layer.weight.copy_(torch.from_numpy(weight.T))
            layer.bias.copy_(torch.from_numpy(bias))
    between = [module for layer in linear for module in (layer, torch.nn.ReLU())]
    return torch.nn.Sequential(*between[:-1])
