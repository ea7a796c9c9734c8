"""Three ways to train one model: after the backward pass, inside it as tutorials do, and inside it as we do."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

import rulec.torch
from rulec.torch import EagerUpdate

#: Runs the backward passes of a step, each in the scope that it is given: `with scope(last_microbatch):`.
Passes = Callable[[nn.Module, int, Callable[..., AbstractContextManager[Any]]], None]

LR = 0.05


class Recipe:
    """An optimizer for each parameter, stepped by a hook as soon as there is a gradient, which is then dropped."""

    def __init__(self, params: Iterable[Tensor], make: Callable[[list[Tensor]], Optimizer]) -> None:
        self.each = {p: make([p]) for p in params}
        for param in self.each:
            param.register_post_accumulate_grad_hook(self.update)

    def update(self, param: Tensor) -> None:
        """What the hook does."""
        self.each[param].step()
        self.each[param].zero_grad()


def adamw(params: Any) -> Optimizer:
    """The optimizer of all three."""
    return rulec.torch.AdamW(params, lr=LR)


def scope(last_microbatch: bool = True) -> AbstractContextManager[None]:
    """What surrounds a backward pass where nothing need."""
    return nullcontext()


def deferred(model: nn.Module, passes: Passes, steps: int = 4) -> list[Tensor]:
    """The parameters after some steps that are taken after their backward passes."""
    opt = adamw(model.parameters())
    for step in range(steps):
        opt.zero_grad()
        passes(model, step, scope)
        opt.step()
    return [*model.parameters()]


def by_recipe(model: nn.Module, passes: Passes, steps: int = 4) -> list[Tensor]:
    """The same by the recipe."""
    Recipe([p for p in model.parameters() if p.requires_grad], adamw)
    for step in range(steps):
        passes(model, step, scope)
    return [*model.parameters()]


def eager(model: nn.Module, passes: Passes, steps: int = 4, **keywords: Any) -> tuple[list[Tensor], EagerUpdate]:
    """The same by EagerUpdate, and the optimizer."""
    opt = EagerUpdate(model, "adamw", lr=LR, **keywords)
    for step in range(steps):
        passes(model, step, opt.backward)
        opt.step()
    return [*model.parameters()], opt


def same(ours: Iterable[Tensor], theirs: Iterable[Tensor]) -> bool:
    """Whether two lists of parameters are equal bit for bit."""
    return all(torch.equal(a, b) for a, b in zip(ours, theirs, strict=True))
