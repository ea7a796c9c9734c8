"""The sides of a comparison: our optimizer on arrays, the oracle, and the optimizers of torch and optax."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, Literal, Protocol

import jax
import numpy as np
import optax
import torch
from numpy.typing import NDArray

import rulec
from rulec.array import Optimizer
from rulec.compiler.reference import ReferenceOptimizer
from rulec.tools.compare.sides import sparse_of

Array = NDArray[Any]
Hyper = Mapping[str, float]


class Run(Protocol):
    """One side of a comparison: it owns its parameters, and gradients move them."""

    def step(self, grads: Sequence[Array], hyper: Hyper) -> None:
        """One update with the hyper-parameters of this step."""

    def params(self) -> list[Array]:
        """The parameters now, as arrays of their own."""


class OurRun:
    """A rule of ours on arrays, through a backend."""

    def __init__(self, rule: rulec.Rule, params: Sequence[Array], hyper: Hyper, backend: str) -> None:
        self.arrays = [p.copy() for p in params]
        settings: dict[str, Any] = {**hyper, "backend": backend}
        self.optimizer = Optimizer(rule, self.arrays, **settings)

    def step(self, grads: Sequence[Array], hyper: Hyper) -> None:
        for name, value in hyper.items():
            self.optimizer.hyper[name] = value
        self.optimizer.step([g.copy() for g in grads])

    def params(self) -> list[Array]:
        return [p.copy() for p in self.arrays]

    def state(self, index: int) -> dict[str, Array]:
        """The states of the parameter of that index, and those that all share."""
        saved = self.optimizer.state_dict()
        own = {name: value for name, value in saved["state"][self.optimizer.names[index]].items() if name != "step"}
        return {**own, **{name: value[0] for name, value in saved["shared"].items()}}


class OracleRun:
    """A rule of ours as its formulas say, in float64 or in 50 digits, whatever the dtype of the parameters."""

    def __init__(
        self, rule: rulec.Rule, params: Sequence[Array], arithmetic: Literal["float64", "mpmath"] = "mpmath",
        hyper: Hyper | None = None,
    ) -> None:  # fmt: skip
        wide = [p.astype(np.float64) for p in params]
        self.optimizer = ReferenceOptimizer(rule, wide, dict(hyper or {}), arithmetic=arithmetic)

    def step(self, grads: Sequence[Array], hyper: Hyper) -> None:
        self.optimizer.step([g.astype(np.float64) for g in grads], hyper)

    def params(self) -> list[Array]:
        return [np.array(p, dtype=np.float64) for p in self.optimizer.params]


def our_run(rule: rulec.Rule, params: Sequence[Array], hyper: Hyper, run: str) -> OurRun | OracleRun:
    """Our side by the float64 reference, where `run` is that word, or on the backend of that name."""
    if run == "reference":
        return OracleRun(rule, params, "float64", hyper)
    return OurRun(rule, params, hyper, run)


@contextmanager
def float64_scalars() -> Iterator[None]:
    """torch with float64 as its default dtype.

    torch keeps what it counts per tensor (NAdam's mu_product, ASGD's eta and mu) in the default dtype, float32 as it
    is shipped. Under float64 its own code shows what it would compute without that rounding.
    """
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


class TorchRun:
    """An optimizer of torch.optim's kind, of the class `kind`.

    `keywords` gives its arguments for hyper-parameters of ours. `prepare` is called once, when gradients are there
    and the first step is not taken. Where `shipped` is false it computes without its float32 scalars: `widen` is
    called like `prepare`, and torch's default dtype is float64 while it steps.
    """

    def __init__(
        self, kind: Any, keywords: Callable[[Hyper], Mapping[str, Any]], params: Sequence[Array], hyper: Hyper, *,
        prepare: Callable[[Any], None] | None = None, widen: Callable[[Any], None] | None = None,
        shipped: bool = True,
    ) -> None:  # fmt: skip
        self.tensors = [torch.tensor(p, requires_grad=True) for p in params]
        self.keywords = keywords
        plain = {} if kind is torch.optim.SparseAdam else {"foreach": False}
        self.optimizer = kind(self.tensors, **plain, **keywords(hyper))
        self.before_first = [hook for hook in (prepare, None if shipped else widen) if hook is not None]
        self.shipped = shipped

    def step(self, grads: Sequence[Array], hyper: Hyper) -> None:
        self.optimizer.param_groups[0].update(self.keywords(hyper))
        for tensor, grad in zip(self.tensors, grads, strict=True):
            tensor.grad = torch.tensor(grad)
            if isinstance(self.optimizer, torch.optim.SparseAdam):
                tensor.grad = sparse_of(tensor.grad)
        for hook in self.before_first:
            hook(self.optimizer)
        self.before_first = []
        if self.shipped:
            self.optimizer.step()
        else:
            with float64_scalars():
                self.optimizer.step()

    def params(self) -> list[Array]:
        return [tensor.detach().numpy().copy() for tensor in self.tensors]

    def state(self, index: int) -> dict[str, Array]:
        """What it stores for the parameter of that index."""
        stored = self.optimizer.state[self.tensors[index]]
        return {
            key: torch.as_tensor(value).detach().numpy().copy() for key, value in stored.items() if value is not None
        }


class OptaxRun:
    """An optax transformation: `make` gives it for the hyper-parameters of one step, `prepare` changes its start."""

    def __init__(
        self, make: Callable[[Hyper], Any], params: Sequence[Array], hyper: Hyper, *,
        prepare: Callable[[Any], Any] | None = None,
    ) -> None:  # fmt: skip
        self.update = _update(make)
        with jax.enable_x64(True):
            self.now = [jax.numpy.asarray(p) for p in params]
            self.optax_state = make(hyper).init(self.now)
            if prepare is not None:
                self.optax_state = prepare(self.optax_state)

    def step(self, grads: Sequence[Array], hyper: Hyper) -> None:
        with jax.enable_x64(True):
            given = [jax.numpy.asarray(g) for g in grads]
            whole = tuple((k, v) for k, v in hyper.items() if not isinstance(v, float))
            moving = {k: v for k, v in hyper.items() if isinstance(v, float)}
            updates, self.optax_state = self.update(whole, moving, given, self.optax_state, self.now)
            self.now = optax.apply_updates(self.now, updates)

    def params(self) -> list[Array]:
        return [np.array(p) for p in self.now]

    def state(self, index: int) -> dict[str, Array]:
        """What it stores for the parameter of that index, or for all of them together, by the names of the fields.

        A list has one item for each parameter, and one number is for all; what counts steps is left out.
        """
        found = {}
        for name, value in _fields(self.optax_state):
            if isinstance(value, list):
                found[name] = np.array(value[index])
            elif jax.numpy.issubdtype(jax.numpy.asarray(value).dtype, jax.numpy.floating):
                found[name] = np.array(value)
        return found


@functools.cache
def _update(make: Callable[[Hyper], Any]) -> Any:
    """The update, compiled once for all steps and runs: a step's numbers, but whole ones, are no constants of it."""
    return jax.jit(lambda whole, moving, *given: make({**dict(whole), **moving}).update(*given), static_argnums=0)


def _fields(state: Any) -> Iterator[tuple[str, Any]]:
    """Every field in a nest of named tuples, by name."""
    for name, part in zip(getattr(state, "_fields", [""] * len(state)), state, strict=True):
        if isinstance(part, tuple):
            yield from _fields(part)
        else:
            yield name, part
