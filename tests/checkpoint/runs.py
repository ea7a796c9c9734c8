"""A model trained in torch, in JAX or on arrays, by the same gradients, and handed from one to the other in a file."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import jax
import numpy as np
import torch

import rulec.jax
import rulec.torch

Array = np.ndarray[Any, Any]

#: In the order of their names, which is that of a dict's leaves in JAX.
SHAPES: Mapping[str, tuple[int, ...]] = {"bias": (5,), "kernel": (4, 6)}

STEPS = 5

ROOT = Path(__file__).resolve().parent.parent.parent


def first_parameters() -> dict[str, Array]:
    """The same numbers at every call."""
    made = np.random.default_rng(1)
    return {name: made.standard_normal(shape) for name, shape in SHAPES.items()}


def gradients(step: int) -> dict[str, Array]:
    """Numbers that follow from the step alone."""
    made = np.random.default_rng(100 + step)
    return {name: made.standard_normal(shape) for name, shape in SHAPES.items()}


@contextmanager
def precision(dtype: str) -> Iterator[None]:
    """JAX allowed 64 bits where the parameters are; torch's numbers in float64 there, as JAX's then are."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64 if dtype == "float64" else torch.float32)
    try:
        with jax.enable_x64(dtype == "float64"):
            yield
    finally:
        torch.set_default_dtype(before)


class TorchRun:
    """Training by a class of optimizers; `keywords` are the class's."""

    def __init__(self, kind: Any, dtype: str, **keywords: Any) -> None:
        self.dtype = getattr(torch, dtype)
        self.params = {
            name: torch.nn.Parameter(torch.tensor(array, dtype=self.dtype))
            for name, array in first_parameters().items()
        }
        tags: dict[str, Any] = {} if kind.__module__.startswith("torch.optim") else {"tags": []}
        self.optimizer = kind([{"params": [*self.params.items()], **tags}], **keywords)

    def steps(self, numbers: range) -> TorchRun:
        """Takes these steps."""
        for number in numbers:
            for name, grad in gradients(number).items():
                self.params[name].grad = torch.tensor(grad, dtype=self.dtype)
            self.optimizer.step()
        return self

    def now(self) -> dict[str, Array]:
        """The parameters in float64."""
        return {name: p.detach().double().numpy() for name, p in self.params.items()}

    def save(self, file: Path) -> None:
        """With the parameters."""
        rulec.torch.save(self.optimizer, file, parameters=True)

    def load(self, file: Path) -> TorchRun:
        """With the parameters."""
        rulec.torch.load(self.optimizer, file, parameters=True)
        return self


class JaxRun:
    """Training by `rulec.jax.step`; `hyper` are the rule's hyper-parameters."""

    def __init__(self, rule: Any, dtype: str, **hyper: Any) -> None:
        self.rule, self.hyper = rule, hyper
        self.params: Any = {name: jax.numpy.array(array, dtype) for name, array in first_parameters().items()}
        self.state: Any = rulec.jax.init(rule, self.params, **hyper, tags={})

    def steps(self, numbers: range) -> JaxRun:
        """Takes these steps."""
        for number in numbers:
            grads = {name: jax.numpy.array(g, self.params[name].dtype) for name, g in gradients(number).items()}
            found = rulec.jax.step(self.rule, self.params, grads, self.state, donate=False, **self.hyper, tags={})
            self.params, self.state = found
        return self

    def now(self) -> dict[str, Array]:
        """The parameters in float64."""
        return {name: np.asarray(p).astype(np.float64) for name, p in self.params.items()}

    def save(self, file: Path) -> None:
        """With the parameters."""
        rulec.jax.save(file, self.rule, self.params, self.state, parameters=True, **self.hyper, tags={})

    def load(self, file: Path) -> JaxRun:
        """With the parameters."""
        self.params = rulec.jax.load_params(file, self.params)
        self.state = rulec.jax.load(file, self.rule, self.params, **self.hyper, tags={})
        return self


def difference(ours: Mapping[str, Array], theirs: Mapping[str, Array]) -> float:
    """The largest difference, relative to the largest magnitude in the tensor, or to 1."""
    assert all(np.isfinite(array).all() for array in ours.values())
    return max(float(abs(ours[n] - a).max() / max(1.0, abs(a).max())) for n, a in theirs.items())
