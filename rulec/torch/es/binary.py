"""Layers whose weights are bits, for evolution strategies: Linear, Conv2d, MaxPool2d and thresholds.

Bits go in and come out: torch.bool in PyTorch's own layout, or packed in torch.int64 with the features in the last axis
(`pack_bits`), as they were given. They have no gradient; members draw weights of their own, and the estimate of the
gradient is each layer's (see `rulec.torch.es.self_estimator`). The plain network has each weight's most likely bit.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from typing import Any

import torch
from torch import Tensor, nn

from rulec.backend.capabilities import Window
from rulec.errors import HyperError, TensorError
from rulec.es.binary import SHARPNESS, Bits, draw, likely, max_pool, pack, score_gradient, words_of
from rulec.es.binary.kernels import kernels_of
from rulec.es.binary.product import Pair, pair, window_of
from rulec.torch.es.self_estimator import Draw
from rulec.torch.es.thresholds import (
    SIGMA,
    Thresholds,
    Weights,
    array_of,
    as_given,
    pack_bits,
    packed,
    tensor_of,
    unpack_bits,
)

__all__ = [
    "BinaryConv2d", "BinaryLinear", "BinaryMaxPool2d", "BinaryThreshold", "pack_bits", "unpack_bits",
]  # fmt: skip


class BinaryThreshold(Thresholds):
    """Bits of numbers (rows, features, *space): 1 where a number is above its feature's threshold.

    For sums of the outputs of layers without thresholds, as in residual networks. `scale` is how far the numbers
    scatter.
    """

    def __init__(self, features: int, *, scale: float = 1.0, sigma: float = SIGMA, centre: bool = False) -> None:
        super().__init__(features, scale, sigma, centre)

    def forward(self, numbers: Tensor) -> Tensor:
        """Booleans of the same shape."""
        return self.fire(numbers.movedim(1, -1)).movedim(-1, 1)

    def members(self, batch: Tensor, draw: Draw) -> Tensor:
        """The same of all members."""
        dealt = deal(batch.movedim(1, -1), draw)
        return gather(self.fire_members(dealt, draw), draw).movedim(-1, 1)

    def estimate(self, draw: Draw, weights: Weights) -> dict[str, Tensor]:
        """The gradient of the thresholds."""
        assert self.bias is not None
        return {"bias": narrowed(self.estimate_bias(draw, weights), self.bias)}

    def noise_bytes(self, draw: Draw) -> int:
        """None: noise is made again."""
        return 0

    def free_memory(self) -> None:
        """Nothing is kept."""


class _BinaryWeights(Thresholds, ABC):
    """Layers with binary weights; `weight` (outputs, *kernel, inputs) has the logits of their bits, before scaling.

    A bit is 1 with probability sigmoid(sharpness*weight/mean|weight|), or sigmoid(weight) where `sharpness` is None.
    """

    def __init__(
        self, shape: tuple[int, ...], threshold: bool, centre: bool, sharpness: float | None, sigma: float
    ) -> None:
        if any(not isinstance(x, int) or x < 1 for x in shape):
            raise HyperError(f"a binary layer of {shape} (outputs, kernel, inputs) must have at least one of each")
        if sharpness is not None and not 0.0 < sharpness < math.inf:
            raise HyperError(f"sharpness={sharpness!r} must be a finite number above 0, or None for plain logits")
        if centre and not threshold:
            raise HyperError("centre=True is for layers with thresholds: give threshold=True")
        super().__init__(shape[0], math.sqrt(math.prod(shape[1:])), sigma, centre, threshold)
        self.inputs, self.sharpness = shape[-1], sharpness
        self.weight = nn.Parameter(torch.randn(shape))
        self._drawn: tuple[Draw, Any] | None = None

    def own_parameters(self) -> tuple[str, ...]:
        """The weights, and the thresholds where there are any."""
        return ("weight", *super().own_parameters())

    @abstractmethod
    def numbers(self, batch: Tensor, words: Any, weights: Any) -> Tensor:
        """Products of inputs (members, rows..., words) and weights (members, outputs, ..., words), features last."""

    @abstractmethod
    def lines(self, bits: Tensor) -> Tensor:
        """Bits with their features in the last axis."""

    @abstractmethod
    def outward(self, features: Tensor, batch: Tensor) -> Tensor:
        """Outputs (rows..., features) with the features where `batch` has its own."""

    def forward(self, bits: Tensor) -> Tensor:
        """The plain network's outputs."""
        words = packed(self.lines(bits), self.inputs, type(self).__name__)
        weights = pack(likely(array_of(self.weight.float())))
        sums = self.numbers(bits, words[None], weights[None]).squeeze(0)
        return self._finished(sums if self.bias is None else self.fire(sums), bits)

    def members(self, batch: Tensor, draw: Draw) -> Tensor:
        """The outputs of all members."""
        words = packed(deal(self.lines(batch), draw), self.inputs, type(self).__name__)
        sums = self.numbers(batch, words, self._weights(draw))
        return self._finished(gather(sums if self.bias is None else self.fire_members(sums, draw), draw), batch)

    def estimate(self, draw: Draw, weights: Weights) -> dict[str, Tensor]:
        """The gradients of weights and thresholds."""
        by_score = score_gradient(array_of(self.weight.double()), self._weights(draw), weights, self.sharpness)
        gradients = {"weight": narrowed(tensor_of(by_score), self.weight)}
        if self.bias is not None:
            gradients["bias"] = narrowed(self.estimate_bias(draw, weights), self.bias)
        return gradients

    def noise_bytes(self, draw: Draw) -> int:
        """The members' weights: a bit of each."""
        return 8 * draw.members * words_of(self.inputs) * (self.weight.numel() // self.inputs)

    def free_memory(self) -> None:
        """Forgets the members' weights."""
        self._drawn = None

    def _finished(self, features: Tensor, batch: Tensor) -> Tensor:
        """Numbers as they are, and bits in the form of the batch, both with the features in its place for them."""
        return self.outward(features if self.bias is None else as_given(features, batch), batch)

    def _weights(self, step: Draw) -> Any:
        """The members' weights, drawn once for a step."""
        if self._drawn is None or self._drawn[0] != step:
            bits = Bits(step.seed, step.layers["weight"], step.step, step.directions, step.signs)
            self._drawn = step, draw(array_of(self.weight.double()), bits, self.sharpness)
        return self._drawn[1]


class BinaryLinear(_BinaryWeights):
    """Bits (rows, inputs), or packed (rows, words), to bits (rows, outputs), or packed.

    Each output is 2*(equal bits) - inputs, and 1 where that is above its threshold; without `threshold` the number
    itself, int32. `weight` (outputs, inputs), float32: see `rulec.es.binary.weights`. `sigma` is the noise on
    thresholds, in roots of `inputs`; `centre` and `mean` as in `Thresholds`.
    """

    def __init__(
        self, in_features: int, out_features: int, *, threshold: bool = True, centre: bool = False,
        sharpness: float | None = SHARPNESS, sigma: float = SIGMA,
    ) -> None:  # fmt: skip
        super().__init__((out_features, in_features), threshold, centre, sharpness, sigma)

    def numbers(self, batch: Tensor, words: Any, weights: Any) -> Tensor:
        """Products of lines."""
        if words.ndim != 3:
            raise TensorError(f"BinaryLinear takes bits (rows, inputs) and was given shape {tuple(batch.shape)}")
        members, rows, _ = words.shape
        window = Window(members, rows, (1, 1), self.inputs, self.features)
        sums = kernels_of(words).convolve(words, weights, window)
        return tensor_of(sums.reshape(members, rows, self.features))

    def lines(self, bits: Tensor) -> Tensor:
        """The same: features are last already."""
        return bits

    def outward(self, features: Tensor, batch: Tensor) -> Tensor:
        """The same: features are last already."""
        return features


class BinaryConv2d(_BinaryWeights):
    """Bits (rows, inputs, height, width), or packed (rows, height, width, words), to those of the outputs.

    Each output is 2*(equal bits) - (all bits) over the positions of the kernel inside the image: what is in the padding
    counts for nothing. Without `threshold` it is the number itself, int32, with its features where those of the bits
    are. `weight` (outputs, kernel height, kernel width, inputs), float32; the rest as in `BinaryLinear`.
    """

    def __init__(
        self, in_channels: int, out_channels: int, kernel_size: Pair, *, stride: Pair = 1, padding: Pair = 0,
        threshold: bool = True, centre: bool = False, sharpness: float | None = SHARPNESS, sigma: float = SIGMA,
    ) -> None:  # fmt: skip
        kernel = pair("kernel_size", kernel_size, 1)
        super().__init__((out_channels, *kernel, in_channels), threshold, centre, sharpness, sigma)
        self.stride, self.padding = pair("stride", stride, 1), pair("padding", padding, 0)

    def numbers(self, batch: Tensor, words: Any, weights: Any) -> Tensor:
        """Convolutions of images."""
        if words.ndim != 5:
            raise TensorError(f"BinaryConv2d takes bits (rows, inputs, height, width), not {tuple(batch.shape)}")
        window = window_of(words.shape, self.inputs, weights.shape, self.stride, self.padding)
        return tensor_of(kernels_of(words).convolve(words, weights, window))

    def lines(self, bits: Tensor) -> Tensor:
        """Channels last."""
        return bits.movedim(1, -1) if bits.dtype == torch.bool and bits.dim() == 4 else bits

    def outward(self, features: Tensor, batch: Tensor) -> Tensor:
        """Channels where they were."""
        return features.movedim(-1, 1) if batch.dtype == torch.bool else features


class BinaryMaxPool2d(nn.Module):
    """The union of bits in windows: booleans (rows, channels, height, width), or packed (rows, height, width, words).

    As many windows as fit whole; `stride` is the window's size where it is not given.
    """

    def __init__(self, kernel_size: Pair, stride: Pair | None = None) -> None:
        super().__init__()
        self.kernel_size = pair("kernel_size", kernel_size, 1)
        self.stride = self.kernel_size if stride is None else pair("stride", stride, 1)

    def forward(self, bits: Tensor) -> Tensor:
        """Bits as they were given."""
        if bits.dim() != 4 or bits.dtype not in (torch.bool, torch.int64):
            raise TensorError(
                f"BinaryMaxPool2d takes torch.bool (rows, channels, height, width) or packed torch.int64 "
                f"(rows, height, width, words), not {bits.dtype} of shape {tuple(bits.shape)}"
            )
        if bits.dtype == torch.int64:
            return max_pool(bits, self.kernel_size, stride=self.stride)  # type: ignore[no-any-return]
        lines = bits.movedim(1, -1)
        return max_pool(lines, self.kernel_size, stride=self.stride).movedim(-1, 1)  # type: ignore[no-any-return]


def deal(batch: Tensor, draw: Draw) -> Tensor:
    """Rows in the order (sign, repeat, direction) by members: (members, rows of each, *rest), contiguous."""
    rows = len(batch)
    if rows == 0 or rows % draw.members:
        raise TensorError(
            f"a batch of {rows} rows cannot be dealt to {draw.members} members: make it a multiple of them"
        )
    by_sign = batch.reshape(draw.signs, -1, draw.directions, *batch.shape[1:])
    return by_sign.transpose(1, 2).flatten(0, 1)


def gather(outputs: Tensor, draw: Draw) -> Tensor:
    """Results of members (members, rows of each, *rest) as rows of the batch."""
    by_sign = outputs.reshape(draw.signs, draw.directions, *outputs.shape[1:])
    return by_sign.transpose(1, 2).flatten(0, 2)


def narrowed(gradient: Tensor, parameter: Tensor) -> Tensor:
    """The gradient in its parameter's dtype and place, as large as that can be: half precision has no room for more."""
    most = torch.finfo(parameter.dtype).max
    return gradient.clamp(-most, most).to(parameter.dtype).to(parameter.device)
