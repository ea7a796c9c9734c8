"""The noise of all layers at one step."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor

from rulec.es.perturbations import Perturbations
from rulec.torch.es.model import Perturbed
from rulec.torch.es.noise.base import LayerNoise
from rulec.torch.es.noise.draws import Draws
from rulec.torch.es.noise.dropout import Dropout
from rulec.torch.es.noise.independent import Independent, Sparse
from rulec.torch.es.noise.shared import LowRank, Permuted, SignFlip

_FAMILIES: dict[str, type[LayerNoise]] = {
    "independent": Independent, "spsa": Independent, "sparse": Sparse, "permuted": Permuted, "signflip": SignFlip,
    "lowrank": LowRank, "dropout": Dropout,
}  # fmt: skip


class Noises:
    """Makes each perturbed parameter's noise where it is first asked for; `used` are the parameters asked for."""

    def __init__(self, perturbations: Perturbations, perturbed: Iterable[Perturbed], step: int) -> None:
        self._perturbations, self.step = perturbations, step
        self._entries = {id(entry.param): entry for entry in perturbed if not entry.is_self_estimated}
        self._noises: dict[int, LayerNoise] = {}

    def entry(self, tensor: object) -> Perturbed | None:
        """The perturbed parameter that a tensor is; None where it is none."""
        return self._entries.get(id(tensor))

    def of(self, entry: Perturbed) -> LayerNoise:
        """Its noise."""
        noise = self._noises.get(id(entry.param))
        if noise is None:
            noise = self._noises[id(entry.param)] = self._make(entry)
        return noise

    def _make(self, entry: Perturbed) -> LayerNoise:
        p, param = self._perturbations[entry.pattern], entry.param
        dtype = torch.float64 if param.dtype is torch.float64 else torch.float32
        draws = Draws(p.seed_or_0, entry.number, self.step, p.values, param.device, dtype)
        kind = _FAMILIES[p.family] if param.dim() > 1 else Independent
        return kind(p, param.shape, draws)

    def used(self, param: Tensor) -> bool:
        """Whether a parameter's noise was asked for in this step."""
        return id(param) in self._noises

    @property
    def nbytes(self) -> int:
        """Bytes that are kept of all noise."""
        return sum(noise.nbytes for noise in self._noises.values())

    def free(self) -> None:
        """Forgets what is kept."""
        for noise in self._noises.values():
            noise.free()
