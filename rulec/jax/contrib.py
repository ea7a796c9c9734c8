"""The functions of `optax.contrib` that rules of the library compute, under their names and with their signatures."""

from __future__ import annotations

from typing import Any

from rulec.jax.drop_ins import function_named, names

__all__ = [*names("contrib.")]


def __getattr__(name: str) -> Any:
    if name in __all__:
        return function_named(f"contrib.{name}")
    raise AttributeError(f"module 'rulec.jax.contrib' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted(__all__)
