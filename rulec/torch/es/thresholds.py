"""Learned thresholds from integers to bits, trained by normal noise on them, and bits as tensors.

Bits are booleans as PyTorch has them, or packed in int64; kernels get them as arrays.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils.dlpack import from_dlpack

from rulec.errors import HyperError, TensorError
from rulec.es.binary import pack, unpack, words_of
from rulec.es.streams import NOISE
from rulec.torch.es.noise.draws import Draws
from rulec.torch.es.self_estimator import Draw
from rulec.torch.tensors.fake import resolved

#: Rows whose whole numbers are added up in 32 bits, which is fast, and exact of numbers below 2**23.
_TOGETHER = 256

#: The standard deviation of the noise on thresholds, in the same units as these.
SIGMA = 0.1

Weights = np.ndarray[Any, np.dtype[np.float64]]


class Thresholds(nn.Module):
    """A module with a threshold for each feature: a bit is 1 where a number is above it.

    `bias` (features,) is in units of `scale`, the root of how many bits a number is made of, as far as such numbers
    scatter. A member's thresholds are bias + sigma*noise. If `centre`, each member's own mean of a feature, over all
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


def array_of(tensor: Tensor) -> Any:
    """The same memory as an array: NumPy's, or CuPy's on a GPU."""
    plain = resolved(tensor.detach().contiguous())
    if plain.device.type == "cpu":
        return plain.numpy()
    import cupy

    return cupy.from_dlpack(plain)


def tensor_of(array: Any) -> Tensor:
    """The same memory as a tensor, words as int64."""
    whole = array.view(np.int64) if array.dtype == np.uint64 else array
    return torch.from_numpy(whole) if isinstance(whole, np.ndarray) else from_dlpack(whole)


def packed(bits: Tensor, count: int, name: str) -> Any:
    """Words (rows..., words), uint64, of bits (rows..., count): booleans, or int64 that are packed already.

    TensorError where they are something else or have other sizes.
    """
    if bits.dtype == torch.bool:
        if bits.shape[-1] != count:
            raise TensorError(f"{name} takes {count} bits and was given {bits.shape[-1]}")
        return pack(array_of(bits))
    if bits.dtype != torch.int64:
        raise TensorError(f"{name} takes bits, torch.bool or packed in torch.int64, and was given {bits.dtype}")
    if bits.shape[-1] != words_of(count):
        raise TensorError(f"{name} takes {count} bits in {words_of(count)} words and was given {bits.shape[-1]} words")
    return array_of(bits).view(np.uint64)


def as_given(bits: Tensor, batch: Tensor) -> Tensor:
    """Booleans (rows..., count) in the form of the batch: as they are, or packed."""
    return bits if batch.dtype == torch.bool else pack_bits(bits)


def pack_bits(bits: Tensor) -> Tensor:
    """Booleans (..., n) packed along the last axis: int64 (..., words), the first bit in the lowest of the first."""
    return tensor_of(pack(array_of(bits)))


def unpack_bits(words: Tensor, count: int) -> Tensor:
    """The first `count` bits of packed lines, int64 (..., words), as booleans (..., count)."""
    return tensor_of(unpack(array_of(words).view(np.uint64), count))
