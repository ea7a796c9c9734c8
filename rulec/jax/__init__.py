"""Rules in JAX: as optax's transformations, under optax's own names, and as one donated step.

Functions such as `adamw` are made when first asked for; `__init__.pyi`, which `tests.jax.stubs` writes, describes them.
"""

from __future__ import annotations

from typing import Any

from rulec.extras import needing

with needing("rulec.jax", "jax"):
    import jax  # noqa: F401
    import optax  # noqa: F401

from rulec.jax import contrib
from rulec.jax.checkpoint import load, load_params, save
from rulec.jax.covariance import covariance
from rulec.jax.drop_ins import function_named, names
from rulec.jax.eager import eager_scan, eager_step
from rulec.jax.exchange import from_optax, to_optax
from rulec.jax.functional import eval_params, hutchinson, init, routing, step
from rulec.jax.layouts import flax_axes, haiku_axes
from rulec.jax.line_search import (
    lbfgs,
    scale_by_backtracking_linesearch,
    scale_by_lbfgs,
    scale_by_zoom_linesearch,
)
from rulec.jax.packing import packed, unpacked
from rulec.jax.statistics import statistics
from rulec.jax.tags import tags_of
from rulec.jax.transform import transform

__all__ = [
    "contrib",
    "eager_scan",
    "eager_step",
    "eval_params",
    "flax_axes",
    "from_optax",
    "covariance",
    "haiku_axes",
    "hutchinson",
    "init",
    "lbfgs",
    "load",
    "load_params",
    "packed",
    "routing",
    "save",
    "scale_by_backtracking_linesearch",
    "scale_by_lbfgs",
    "scale_by_zoom_linesearch",
    "statistics",
    "step",
    "tags_of",
    "to_optax",
    "transform",
    "unpacked",
    *names(),
]


def __getattr__(name: str) -> Any:
    if name in names():
        return function_named(name)
    raise AttributeError(f"module 'rulec.jax' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted(__all__)
