"""Arrays as one vector, for methods that go along a direction."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from rulec.array.arrays import NumpyArrays
from rulec.array.checks import matching_leaves
from rulec.errors import RulecError, TensorError

#: A function that gives the loss and the gradients where the arrays are, in their structure.
Evaluate = Callable[[], tuple[Any, Any]]


def module_of(arrays: NumpyArrays) -> Any:
    """NumPy or CuPy."""
    return np if arrays.module == "np" else sys.modules[arrays.module]


class Vectors:
    """Arrays as one vector, of float32 at least. `owner` names the method in errors; `grads` are the last gradients."""

    def __init__(self, owner: str, params: Mapping[str, Any], arrays: NumpyArrays, evaluate: Evaluate) -> None:
        if not callable(evaluate):
            raise RulecError(
                f"{owner} evaluates the model again in a step: give step() a function of no arguments that returns the "
                f"loss and the gradients where the arrays are then"
            )
        self._owner, self._params, self._arrays, self._evaluate = owner, params, arrays, evaluate
        self.grads: Any = None
        wide = any(arrays.dtype(array) == "float64" for array in params.values())
        self._type = np.dtype("float64" if wide else "float32")

    def evaluate(self) -> tuple[Any, Any]:
        """The loss where the arrays are, and its gradient."""
        pair = self._evaluate()
        if not isinstance(pair, tuple | list) or len(pair) != 2:
            raise RulecError(
                f"the function that {self._owner} evaluates must return the loss and the gradients, a pair"
            )
        self.grads = pair[1]
        grads = matching_leaves(pair[1], [*self._params], "the gradient")
        return pair[0], module_of(self._arrays).concatenate([self._flat(grads, name) for name in self._params])

    def _flat(self, grads: Mapping[str, Any], name: str) -> Any:
        param = self._params[name]
        if name not in grads:
            return module_of(self._arrays).zeros(param.size, self._type)
        grad = grads[name]
        if not self._arrays.is_one(grad) or grad.shape != param.shape:
            what = f"has shape {grad.shape}" if self._arrays.is_one(grad) else f"is a {type(grad).__name__}"
            raise TensorError(f"the gradient of {name} {what}: give a {self._arrays.kind} of shape {param.shape}")
        return grad.reshape(-1).astype(self._type)

    def change(self, before: Sequence[Any]) -> Any:
        """The change of the arrays since these copies."""
        pairs = zip(self._params.values(), before, strict=True)
        return module_of(self._arrays).concatenate([(p.astype(self._type) - b).reshape(-1) for p, b in pairs])

    def move(self, step: float, direction: Any) -> None:
        """Adds a step along a direction to the arrays."""
        start = 0
        for param in self._params.values():
            part = direction[start : start + param.size].reshape(param.shape)
            param[...] = param + step * part
            start += param.size

    def copies(self) -> list[Any]:
        """Copies of the arrays."""
        return [param.copy() for param in self._params.values()]

    def put_back(self, copies: Sequence[Any]) -> None:
        """Gives the arrays the values of these copies."""
        for param, copy in zip(self._params.values(), copies, strict=True):
            param[...] = copy

    def add(self, vector: Any, scale: Any, other: Any) -> None:
        """Adds a multiple of another vector to a vector, in place."""
        vector += scale * other
