"""From whole numbers to bits by thresholds, which are learned by normal noise on them."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from rulec.errors import HyperError
from rulec.es.streams import NOISE
from rulec.torch.es.noise.draws import Draws
from rulec.torch.es.self_estimator import Draw

#: Rows whose whole numbers are added up in 32 bits, which is fast, and exact of numbers below 2**23.
_TOGETHER = 256

#: The standard deviation of the noise on thresholds, in the same units as these.
SIGMA = 0.1

Weights = np.ndarray[Any, np.dtype[np.float64]]


class Thresholds(nn.Module):
    """A module with a threshold for each feature: a bit is 1 where a number is above it.

    `bias` (features,) is in units of `scale`, the root of how many bits a number is made of, as far as such numbers
    scatter. A member's thresholds are bias + sigma*noise. Where `centre`, each member's own mean of a feature, over all
    its rows of the batch, is added: members never mix. The plain network in training mode takes the mean of its batch,
    and keeps it in `mean` for evaluation mode, as BatchNorm does; call it once in training mode before.
    """

    bias: Tensor | None
    mean: Tensor

    def __init__(self, features: int, scale: float, sigma: float, centre: bool, threshold: bool = True) -> None:
        super().__init__()
        if not 0.0 < sigma < math.inf:
            raise HyperError(
                f"sigma={sigma!r} must be a finite number above 0: without noise thresholds are not learnt"
            )
        self.features, self.scale, self.sigma, self.centre = features, scale, sigma, centre
        self.register_parameter("bias", nn.Parameter(torch.zeros(features)) if threshold else None)
        if threshold and centre:
            self.register_buffer("mean", torch.zeros(features))

    def own_parameters(self) -> tuple[str, ...]:
        """The thresholds, where there are any."""
        return () if self.bias is None else ("bias",)

    def fire(self, numbers: Tensor) -> Tensor:
        """The plain network's bits of numbers (rows..., features), as booleans."""
        return self._above(numbers.unsqueeze(0), self._plain_mean(numbers), self._bias().unsqueeze(0)).squeeze(0)

    def fire_members(self, numbers: Tensor, draw: Draw) -> Tensor:
        """The members' bits of numbers (members, rows..., features)."""
        noise = self.noise(draw).repeat(draw.signs, 1)
        noise[draw.directions :] *= -1
        return self._above(numbers, _mean(numbers) if self.centre else None, self._bias() + self.sigma * noise)

    def noise(self, draw: Draw) -> Tensor:
        """The noise on thresholds, float64 (directions, features)."""
        draws = Draws(draw.seed, draw.layers["bias"], draw.step, "normal", self._bias().device, torch.float64)
        return draws.by_torch(range(draw.directions), NOISE, self.features)

    def estimate_bias(self, draw: Draw, weights: Weights) -> Tensor:
        """The gradient of thresholds: the sum of weight times sign times noise, over sigma."""
        signed = weights.reshape(draw.signs, draw.directions)
        folded = signed[0] - signed[1] if draw.antithetic else signed[0]
        noise = self.noise(draw)
        return (torch.from_numpy(folded).to(noise.device) @ noise) / self.sigma

    def _bias(self) -> Tensor:
        assert self.bias is not None
        return self.bias.detach().double()

    def _plain_mean(self, numbers: Tensor) -> Tensor | None:
        if not self.centre:
            return None
        if self.training:
            self.mean.copy_(_mean(numbers.unsqueeze(0)).squeeze(0))
        return self.mean.double().unsqueeze(0)

    def _above(self, numbers: Tensor, mean: Tensor | None, thresholds: Tensor) -> Tensor:
        """Whether numbers (members, rows..., features) are above thresholds (members, features); exact for integers."""
        limits = thresholds * self.scale if mean is None else mean + thresholds * self.scale
        if not numbers.dtype.is_floating_point:
            limits = limits.floor().clamp(-(2**31), 2**31 - 1)
        return numbers > limits.to(numbers.dtype).view(len(limits), *(1,) * (numbers.dim() - 2), self.features)


def _mean(numbers: Tensor) -> Tensor:
    """The mean of each feature over a member's rows, float64 (members, features); 0 of no rows."""
    flat = numbers.flatten(1, -2) if numbers.dim() > 2 else numbers.unsqueeze(1)
    wide = torch.float64 if numbers.dtype.is_floating_point else torch.int32
    sums = [part.sum(dim=1, dtype=wide).double() for part in torch.split(flat, _TOGETHER, dim=1)]
    return torch.stack(sums).sum(dim=0) / max(1, flat.shape[1])
