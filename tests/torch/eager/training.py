"""A small model, its batches, and two copies of it: one trained inside the backward pass, one after it."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

import rulec
import rulec.torch
from rulec.torch import EagerUpdate
from rulec.torch.eager.scope import scope_of_rule
from tests.library import single
from tests.torch.twins import QUICK


def model(dtype: torch.dtype = torch.float32) -> nn.Sequential:
    """The same at every call: small gradients beside one that is large enough for them to wait for each other."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(3)
        table = nn.Embedding(7, 12)
        layers = [nn.Linear(12, 20), nn.Tanh(), nn.LayerNorm(20), nn.Linear(20, 60), nn.Tanh(), nn.Linear(60, 5)]
        return nn.Sequential(table, *layers).to(dtype)


def loss_of(net: nn.Module, number: int) -> Tensor:
    """The loss of batch `number`."""
    made = torch.Generator().manual_seed(number)
    words = torch.randint(7, (9,), generator=made)
    return nn.functional.cross_entropy(net(words).float(), words.remainder(5))


def rules(*scopes: str) -> list[str]:
    """The names of the library's optimizers whose update depends on no more than that, but for wrappers."""
    names = [name for name in single() if not name.startswith("transforms/")]
    return [name for name in names if scope_of_rule(rulec.load(name)) in scopes]


def plain(net: nn.Module, rule: str, **keywords: Any) -> Optimizer:
    """The optimizer without eager updates."""
    return rulec.torch.optimizer(rule)(rulec.torch.tagged_groups(net), **keywords)


class Pair:
    """Two equal models: `ours` is trained by `eager`, `theirs` by `deferred`, the same optimizer without it."""

    def __init__(self, rule: str, dtype: torch.dtype = torch.float32, **keywords: Any) -> None:
        self.ours, self.theirs = model(dtype), model(dtype)
        keywords = {"backend": QUICK, **keywords}
        own = {
            key: keywords.pop(key) for key in ("contributions", "journal", "only", "max_grad_norm") if key in keywords
        }
        self.eager = EagerUpdate(rulec.torch.tagged_groups(self.ours), rule, **own, **keywords)
        self.deferred = plain(self.theirs, rule, **keywords)
        self.number = 0

    def step(self) -> None:
        """One step of both, of the same batch."""
        with self.eager.backward():
            loss_of(self.ours, self.number).backward()
        self.eager.step()
        self.deferred.zero_grad()
        loss_of(self.theirs, self.number).backward()
        self.deferred.step()
        self.number += 1

    def same(self) -> bool:
        """Whether parameters and states of both are equal, bit for bit."""
        pairs = zip(self.ours.parameters(), self.theirs.parameters(), strict=True)
        alike = equal(self.eager.state_dict(), self.deferred.state_dict())
        return alike and all(torch.equal(a, b) and bool(a.isfinite().all()) for a, b in pairs)


def equal(a: Any, b: Any) -> bool:
    """Whether two nests of dicts, lists, tensors and numbers are equal, bit for bit."""
    if isinstance(a, Tensor) and isinstance(b, Tensor):
        return a.dtype == b.dtype and torch.equal(a, b)
    if isinstance(a, Mapping) and isinstance(b, Mapping):
        return a.keys() == b.keys() and all(equal(a[key], b[key]) for key in a)
    if isinstance(a, list | tuple) and isinstance(b, list | tuple):
        return len(a) == len(b) and all(equal(x, y) for x, y in zip(a, b, strict=True))
    return bool(a == b)


def gone(net: nn.Module) -> bool:
    """Whether no parameter has a gradient."""
    return all(p.grad is None for p in net.parameters())


def cloned(params: Iterable[Tensor]) -> list[Tensor]:
    """Copies of parameters as they are now."""
    return [p.detach().clone() for p in params]
