"""The functions of `optax.contrib` that rules of the library compute, under their names and with their signatures."""

from __future__ import annotations

from typing import Any

# These modules enter their functions among the names.
from rulec.jax import around, curvature, factored, low_rank, orthogonal  # noqa: F401
from rulec.jax.around import schedule_free_eval_params
from rulec.jax.drop_ins import function_named, names

__all__ = ["schedule_free_eval_params", *names("contrib.")]


def __getattr__(name: str) -> Any:
    if name in names("contrib."):
        return function_named(f"contrib.{name}")
    raise AttributeError(f"module 'rulec.jax.contrib' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted(__all__)
