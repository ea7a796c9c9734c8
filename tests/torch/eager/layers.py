"""A model of linear layers, whose weights may be updated tile by tile."""

from __future__ import annotations

import functools
from collections.abc import Iterable

import torch
from torch import Tensor, nn

from tests.torch.eager import recipe
from tests.torch.eager.recipe import LR

WIDE = 48


@functools.cache
def tiles_are_exact() -> bool:
    """Whether this machine's library gives some rows of a product the bits that they have in the whole of it."""
    generator = torch.Generator().manual_seed(0)
    for dtype in (torch.float32, torch.bfloat16):
        for rows, tokens in ((37, 35), (WIDE, 35), (70, 6)):
            left = torch.randn(tokens, rows, generator=generator).to(dtype).t()
            right = torch.randn(tokens, WIDE, generator=generator).to(dtype)
            whole = left @ right
            if not all(torch.equal(left[i : i + 16] @ right, whole[i : i + 16]) for i in range(0, rows - 15, 16)):
                return False
    return True


def same(ours: Iterable[Tensor], theirs: Iterable[Tensor]) -> bool:
    """Whether two lists of tensors are equal bit for bit, or, where products of tiles are not, nearly."""
    if tiles_are_exact():
        return recipe.same(ours, theirs)
    return all(torch.allclose(a.double(), b.double(), 0, 0.1 * LR) for a, b in zip(ours, theirs, strict=True))


class Layers(nn.Module):
    """Linear layers with and without a bias, for inputs of any number of dimensions."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.first, self.second = nn.Linear(WIDE, 70), nn.Linear(70, WIDE, bias=False)
        self.norm, self.last = nn.LayerNorm(WIDE), nn.Linear(WIDE, 37)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.norm(x + self.second(torch.tanh(self.first(x)))))


def numbers(step: int, *shape: int) -> Tensor:
    return torch.randn(*shape, WIDE, generator=torch.Generator().manual_seed(step))
