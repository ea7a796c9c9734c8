"""Functions of users: the offered values among their parameters, and the mode of JAX in which they are traced."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import jax

from rulec.errors import HyperError
from rulec.jax.machine import is_wide


class UserFunction:
    """A user's function of some arguments, and of the offered values that it names among its parameters."""

    def __init__(self, function: Callable[..., Any], what: str, offered: Sequence[str]) -> None:
        if not callable(function):
            raise HyperError(f"{what} must be a function, and is a {type(function).__name__}")
        self.taken = [name for name in offered if name in _parameters(function)]
        self._function = function

    def __call__(self, *arguments: Any, **offered: Any) -> Any:
        """Its result."""
        return self._function(*arguments, **{name: offered[name] for name in self.taken})


def _parameters(function: Callable[..., Any]) -> Mapping[str, inspect.Parameter]:
    try:
        return inspect.signature(function).parameters
    except (TypeError, ValueError):
        return {}


@dataclass(frozen=True)
class Mode:
    """How a user's program is traced: whether JAX is allowed 64 bits, and which dtypes may meet."""

    wide: bool
    promotion: Any

    @classmethod
    def now(cls) -> Mode:
        """As JAX is configured here."""
        return cls(is_wide(), jax.config.jax_numpy_dtype_promotion)  # type: ignore[attr-defined]

    @contextmanager
    def __call__(self) -> Iterator[None]:
        """Functions are traced so within."""
        with jax.enable_x64(self.wide), jax.numpy_dtype_promotion(self.promotion):
            yield
