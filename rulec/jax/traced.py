"""Values under a trace of JAX, and numbers that must be known while JAX traces."""

from __future__ import annotations

from typing import Any

import jax

from rulec.errors import RuleError


def is_traced(value: Any) -> bool:
    """Whether a value is a tracer of JAX: unknown while a step is traced."""
    return isinstance(value, jax.core.Tracer)


def known_number(value: Any, what: str) -> float:
    """A number that must be known when a step is traced; RuleError where it is traced itself."""
    if is_traced(value):
        raise RuleError(
            f"{what} must be a Python number, and is traced here: close over it, or leave it out of inject_hyperparams"
        )
    return float(value)
