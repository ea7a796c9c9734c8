"""Rules in JAX: as optax's transformations, and as one donated step."""

from __future__ import annotations

from rulec.jax.functional import init, step
from rulec.jax.transform import transform

__all__ = ["init", "step", "transform"]
