"""Two optimizers over equal parameters, given equal gradients: ours and torch's."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from rulec.backend import registry

#: Where many rules are looked at, the backend whose kernels are compiled soonest: a third of the time of the default's,
#: whose numbers are the same.
QUICK = "cpu" if registry.get("c").unavailable_reason() else "c"

SHAPES = ((5,), (3, 4), (), (2, 3, 2))


def parameters(dtype: torch.dtype = torch.float32, shapes: Sequence[tuple[int, ...]] = SHAPES) -> list[Tensor]:
    """The same parameters at every call."""
    made = torch.Generator().manual_seed(7)
    return [torch.nn.Parameter(torch.randn(s, generator=made, dtype=torch.float64).to(dtype)) for s in shapes]


def give_gradients(params: Sequence[Tensor], step: int) -> None:
    """Gradients that depend on the step alone."""
    made = torch.Generator().manual_seed(1000 + step)
    for p in params:
        grad = torch.randn(p.shape, generator=made, dtype=torch.float64)
        p.grad = grad.to(p.dtype)


class Twins:
    """Optimizers of equal parameters. `make(kind, params)` gives one; `kinds` are the classes, ours first."""

    def __init__(
        self, kinds: Sequence[Any], make: Callable[[Any, list[Tensor]], Optimizer], dtype: torch.dtype = torch.float32,
    ) -> None:  # fmt: skip
        self.params = [parameters(dtype) for _ in kinds]
        self.optimizers = [make(kind, params) for kind, params in zip(kinds, self.params, strict=True)]

    def step(self, number: int) -> None:
        """One step of each, with the same gradients."""
        for params, optimizer in zip(self.params, self.optimizers, strict=True):
            give_gradients(params, number)
            optimizer.step()

    def ulps(self) -> float:
        """How far the parameters of the two are apart, in units in the last place of the largest in the tensor."""
        return difference(*self.params)


def difference(ours: Sequence[Tensor], theirs: Sequence[Tensor]) -> float:
    """The largest difference in units in the last place of the largest magnitude in the tensor, or of 1."""
    found = 0.0
    for a, b in zip(ours, theirs, strict=True):
        assert a.dtype == b.dtype
        wide_a, wide_b = a.detach().double(), b.detach().double()
        assert wide_a.isfinite().all()
        size = max(1.0, wide_b.abs().max().item())
        found = max(found, ((wide_a - wide_b).abs().max() / (size * torch.finfo(a.dtype).eps)).item())
    return found
