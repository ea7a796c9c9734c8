"""Models whose training steps are accounted for: plain linear layers, and transformers of a given shape."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from rulec.memory.shape import Shape


class Linears(nn.Module):
    """Linear layers of one width, one after the other, with a tanh between them; without biases."""

    def __init__(self, layers: int, width: int, **factory: Any) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(width, width, bias=False, **factory) for _ in range(layers))

    def forward(self, x: Tensor) -> Tensor:
        """A number from `(batch, width)`."""
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return x.square().mean()


def rotated(x: Tensor, at: Tensor) -> Tensor:
    """Rotary position embedding: `(batch, heads, length, head)` turned by `at`, of `(length, head/2)` angles."""
    real, imaginary = x.float().chunk(2, dim=-1)
    cos, sin = at.cos(), at.sin()
    return torch.cat((real * cos - imaginary * sin, real * sin + imaginary * cos), dim=-1).to(x.dtype)


class Attention(nn.Module):
    """Causal attention of `heads` heads, which share `groups` heads of keys and values."""

    def __init__(self, shape: Shape, biased: bool, rotary: bool, **factory: Any) -> None:
        super().__init__()
        self.shape, self.rotary = shape, rotary
        inner, outer = shape.heads * shape.head, shape.groups * shape.head
        self.query = nn.Linear(shape.width, inner, bias=biased, **factory)
        self.key = nn.Linear(shape.width, outer, bias=biased, **factory)
        self.value = nn.Linear(shape.width, outer, bias=biased, **factory)
        self.out = nn.Linear(inner, shape.width, bias=biased and not rotary, **factory)
        if shape.normed:
            self.query_norm, self.key_norm = nn.RMSNorm(shape.head, **factory), nn.RMSNorm(shape.head, **factory)

    def forward(self, x: Tensor, angles: Tensor | None) -> Tensor:
        """`(batch, length, width)` to the same."""
        query, key, value = (self._heads(layer(x)) for layer in (self.query, self.key, self.value))
        if self.shape.normed:
            query, key = self.query_norm(query), self.key_norm(key)
        if angles is not None:
            query, key = rotated(query, angles), rotated(key, angles)
        grouped = self.shape.groups < self.shape.heads
        heads = F.scaled_dot_product_attention(query, key, value, is_causal=True, enable_gqa=grouped)
        mixed: Tensor = self.out(heads.transpose(1, 2).flatten(2))
        return mixed

    def _heads(self, x: Tensor) -> Tensor:
        return x.reshape(*x.shape[:2], -1, self.shape.head).transpose(1, 2)


class LlamaLayer(nn.Module):
    """A layer of Llama's: attention and a gated feed-forward, each after a root mean square norm."""

    def __init__(self, shape: Shape, **factory: Any) -> None:
        super().__init__()
        self.before, self.between = nn.RMSNorm(shape.width, **factory), nn.RMSNorm(shape.width, **factory)
        self.attention = Attention(shape, shape.biased, rotary=True, **factory)
        self.gate = nn.Linear(shape.width, shape.inner, bias=False, **factory)
        self.up = nn.Linear(shape.width, shape.inner, bias=False, **factory)
        self.down = nn.Linear(shape.inner, shape.width, bias=False, **factory)

    def forward(self, x: Tensor, angles: Tensor | None) -> Tensor:
        """`(batch, length, width)` to the same."""
        x = x + self.attention(self.before(x), angles)
        y = self.between(x)
        return x + self.down(F.silu(self.gate(y)) * self.up(y))  # type: ignore[no-any-return]


class Gpt2Layer(nn.Module):
    """A layer of GPT-2's: attention and a feed-forward, each after a layer norm, all with biases."""

    def __init__(self, shape: Shape, **factory: Any) -> None:
        super().__init__()
        self.before, self.between = nn.LayerNorm(shape.width, **factory), nn.LayerNorm(shape.width, **factory)
        self.attention = Attention(shape, True, rotary=False, **factory)
        self.up = nn.Linear(shape.width, shape.inner, **factory)
        self.down = nn.Linear(shape.inner, shape.width, **factory)

    def forward(self, x: Tensor, angles: Tensor | None) -> Tensor:
        """`(batch, length, width)` to the same."""
        x = x + self.attention(self.before(x), angles)
        return x + self.down(F.gelu(self.up(self.between(x)), approximate="tanh"))  # type: ignore[no-any-return]


class Transformer(nn.Module):
    """A language model of a shape, which gives its loss. `recompute` keeps the inputs of layers only."""

    def __init__(self, shape: Shape, recompute: bool = False, **factory: Any) -> None:
        super().__init__()
        self.shape, self.recompute = shape, recompute
        llama = shape.family == "llama"
        self.embedding = nn.Embedding(shape.vocabulary, shape.width, **factory)
        self.places = None if llama else nn.Embedding(shape.positions, shape.width, **factory)
        layer = LlamaLayer if llama else Gpt2Layer
        self.layers = nn.ModuleList(layer(shape, **factory) for _ in range(shape.layers))
        self.norm = (nn.RMSNorm if llama else nn.LayerNorm)(shape.width, **factory)
        self.head = nn.Linear(shape.width, shape.vocabulary, bias=False, **factory)
        if shape.tied:
            self.head.weight = self.embedding.weight

    def forward(self, tokens: Tensor) -> Tensor:
        """The mean cross entropy of the next token, from tokens of `(batch, length)`."""
        x, angles = self.embedding(tokens), None
        places = torch.arange(tokens.shape[1], device=tokens.device)
        if self.places is not None:
            x = x + self.places(places)
        else:
            exponents = torch.arange(0, self.shape.head, 2, device=tokens.device) / self.shape.head
            angles = places[:, None] / 10_000**exponents
        for layer in self.layers:
            x = checkpoint(layer, x, angles, use_reentrant=False) if self.recompute else layer(x, angles)
        scores = self.head(self.norm(x))
        return F.cross_entropy(scores[:, :-1].flatten(0, 1).float(), tokens[:, 1:].flatten())


class _Contribution(torch.autograd.Function):
    """A number with a gradient for a weight; nothing is kept for the backward pass."""

    @staticmethod
    def forward(ctx: Any, weight: Tensor, total: Tensor) -> Tensor:
        ctx.like = weight
        return total.clone()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor]:
        return torch.zeros_like(ctx.like), grads[0]


class Weights(nn.Module):
    """Weights of given shapes by name, in a model of which no more is known: gradients come from the last to the
    first, and there are no activations."""

    def __init__(self, shapes: dict[str, tuple[int, ...]], **factory: Any) -> None:
        super().__init__()
        self.weights = nn.ParameterList(nn.Parameter(torch.empty(shape, **factory)) for shape in shapes.values())

    def forward(self) -> Tensor:
        """A number that every weight has a gradient of."""
        total = torch.zeros((), requires_grad=True)
        for weight in self.weights:
            total = _Contribution.apply(weight, total)  # type: ignore[no-untyped-call]
        return total
