"""A task of the user: a function that gives first parameters, and a function of losses and gradients."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from rulec.errors import RulecError
from rulec.tools.race.task import Stack, of_run
from rulec.tools.race.tasks.frameworks import in_numpy

Array = np.ndarray[Any, Any]


class UserTask:
    """Runs a user's functions for one run after the other.

    `function()` or `function(seed)` returns `(params, loss_and_grad)` or `(params, loss_and_grad, held_out)`. `params`
    is a dict of arrays in float32 or float64. `loss_and_grad(params, step, seed)` returns the loss and a dict of
    gradients, `held_out(params)` a number.

    In torch it returns `(model, loss)` or `(model, loss, held_out)`: a module, `loss(model, step, seed)`, and
    `held_out(model)`, called in evaluation mode. In JAX it returns `(params, loss)` or `(params, loss, held_out)`: a
    tree of arrays, `loss(params, step, seed)`, which is compiled, and `held_out(params)`. Gradients of these losses are
    taken here. Raises RulecError for anything else.
    """

    steps = 200
    tags: Mapping[str, frozenset[str]] = {}

    def __init__(self, function: Callable[..., Any], name: str) -> None:
        self.name, self._function = name, function
        self._seeded = "seed" in inspect.signature(function).parameters
        self._first: dict[int, Mapping[str, Array]] = {}
        self._functions: dict[int, Sequence[Any]] = {}

    def initial(self, seed: int) -> dict[str, Array]:
        """Copies of the first parameters. The function is called once for a seed: all rules begin alike."""
        if seed not in self._first:
            result = self._function(seed=seed) if self._seeded else self._function()
            self._first[seed], *self._functions[seed] = self._checked(in_numpy(result, self.name))
        return {name: np.array(array) for name, array in self._first[seed].items()}

    def gradients(self, params: Stack, step: int, seeds: Sequence[int]) -> tuple[Array, Stack]:
        """The losses and gradients, one run after the other."""
        losses = np.empty(self._shape(params, seeds))
        grads = {name: np.empty_like(array) for name, array in params.items()}
        for run in np.ndindex(losses.shape):
            seed = seeds[run[1]]
            result = self._functions[seed][0](self._of_run(params, run), step, seed)
            if not isinstance(result, tuple) or len(result) != 2:
                raise RulecError(f"loss_and_grad of {self.name} must return (loss, grads), not {_kind(result)}")
            losses[run] = self._number(result[0], "loss_and_grad")
            self._take(grads, run, result[1])
        return losses, grads

    def measures(self, params: Stack, seeds: Sequence[int]) -> dict[str, Array]:
        """The held-out figure of each run, where the task has `held_out`."""
        if any(len(self._functions[seed]) < 2 for seed in seeds):
            return {}
        values = np.empty(self._shape(params, seeds))
        for run in np.ndindex(values.shape):
            values[run] = self._number(self._functions[seeds[run[1]]][1](self._of_run(params, run)), "held_out")
        return {"held out": values}

    def _shape(self, params: Stack, seeds: Sequence[int]) -> tuple[int, int]:
        return len(next(iter(params.values()))), len(seeds)

    def _of_run(self, params: Stack, run: tuple[int, ...]) -> dict[str, Array]:
        """The parameters of one run, read-only."""
        views = of_run(params, run)
        for view in views.values():
            view.flags.writeable = False
        return views

    def _take(self, grads: Stack, run: tuple[int, ...], values: Any) -> None:
        """Puts the gradients of one run in their place; RulecError where they do not fit the parameters."""
        if not isinstance(values, Mapping) or values.keys() != grads.keys():
            names = ", ".join(map(str, values)) if isinstance(values, Mapping) else _kind(values)
            raise RulecError(f"loss_and_grad of {self.name} must give gradients of {', '.join(grads)}, not {names}")
        for name, value in values.items():
            if np.shape(value) != grads[name].shape[2:]:
                raise RulecError(
                    f"the gradient of {name} of {self.name} has shape {np.shape(value)}, its parameter "
                    f"{grads[name].shape[2:]}"
                )
            grads[name][run] = value

    def _number(self, value: Any, function: str) -> float:
        try:
            return float(value)
        except (TypeError, ValueError):
            raise RulecError(f"{function} of {self.name} must give a number, not {_kind(value)}") from None

    def _checked(self, result: Any) -> tuple[Any, ...]:
        fits = isinstance(result, tuple) and len(result) in (2, 3) and isinstance(result[0], Mapping) and result[0]
        if not fits or not all(map(callable, result[1:])):
            raise RulecError(
                f"the task {self.name} must return (params, loss_and_grad): a dict of arrays, and a function of "
                f"(params, step, seed) that returns (loss, grads)"
            )
        for name, array in result[0].items():
            if not isinstance(array, np.ndarray) or array.dtype not in (np.float32, np.float64):
                raise RulecError(
                    f"the parameter {name} of the task {self.name} must be a NumPy array in float32 or float64, not "
                    f"{_kind(array)}"
                )
        return result  # type: ignore[no-any-return]


def _kind(value: Any) -> str:
    return f"an array of {value.dtype}" if isinstance(value, np.ndarray) else f"a {type(value).__name__}"
