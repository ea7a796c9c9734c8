"""A GPT in plain PyTorch: nothing in it knows of rulec."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from examples.gpt.text import VOCABULARY


@dataclass(frozen=True)
class Size:
    """The extents of a model, and what it is trained with: sequences in a batch, steps, learning rate."""

    layers: int
    heads: int
    width: int
    length: int
    sequences: int
    steps: int
    lr: float


#: `small` is for two cores, `large` has the extents of GPT-2 with 124 million weights but the vocabulary.
SIZES = {
    "tiny": Size(layers=2, heads=2, width=32, length=32, sequences=2, steps=3, lr=1e-3),
    "small": Size(layers=6, heads=6, width=384, length=128, sequences=4, steps=100, lr=3e-4),
    "large": Size(layers=12, heads=12, width=768, length=1024, sequences=32, steps=1000, lr=6e-4),
}


class Block(nn.Module):
    """Causal attention and a layer of four times the width, each added to what comes in."""

    def __init__(self, size: Size) -> None:
        super().__init__()
        self.heads = size.heads
        self.attention_norm = nn.LayerNorm(size.width)
        self.qkv = nn.Linear(size.width, 3 * size.width)
        self.project = nn.Linear(size.width, size.width)
        self.inner_norm = nn.LayerNorm(size.width)
        self.widen = nn.Linear(size.width, 4 * size.width)
        self.narrow = nn.Linear(4 * size.width, size.width)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(self.attention_norm(x)).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        attention = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.project(attention.transpose(1, 2).flatten(-2))
        added: Tensor = self.narrow(F.gelu(self.widen(self.inner_norm(x))))
        return x + added


class GPT(nn.Module):
    """Tokens [sequences, length] to the logits of the tokens that follow, [sequences, length, VOCABULARY]."""

    def __init__(self, size: Size) -> None:
        super().__init__()
        self.tokens = nn.Embedding(VOCABULARY, size.width)
        self.places = nn.Embedding(size.length, size.width)
        self.blocks = nn.ModuleList(Block(size) for _ in range(size.layers))
        self.norm = nn.LayerNorm(size.width)
        self.head = nn.Linear(size.width, VOCABULARY, bias=False)
        self.apply(_begin)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.tokens(tokens) + self.places.weight[: tokens.shape[1]]
        for block in self.blocks:
            x = block(x)
        logits: Tensor = self.head(self.norm(x))
        return logits


def _begin(module: nn.Module) -> None:
    """First weights as GPT-2's: normal with a deviation of 0.02, and no bias."""
    if isinstance(module, nn.Linear | nn.Embedding):
        nn.init.normal_(module.weight, std=0.02)
    if isinstance(module, nn.Linear) and module.bias is not None:
        nn.init.zeros_(module.bias)


def model(size: Size, seed: int = 0) -> GPT:
    """A model with the first weights of a seed."""
    torch.manual_seed(seed)
    return GPT(size)


def loss_of(net: GPT, tokens: Tensor, following: Tensor) -> Tensor:
    """The mean cross entropy in nats."""
    return F.cross_entropy(net(tokens).flatten(0, 1), following.flatten())
