"""Rules in MLX: under the names, keywords and defaults of mlx.optimizers, and a class for every rule of the library.

Classes such as `AdamW` are made when first asked for. What else mlx.optimizers has is there as it is.
"""

from __future__ import annotations

import functools
from typing import Any

from rulec.extras import needing

with needing("rulec.mlx", "mlx"):
    from mlx import optimizers

from rulec.language.library.load import installed_titles, no_title
from rulec.mlx.checkpoint import load, load_params, save
from rulec.mlx.classes import mlx_optimizer, optimizer
from rulec.mlx.entries import CLASSES, FORMS, THEIRS, library_names
from rulec.mlx.optimizer import RuleOptimizer

__all__ = ["RuleOptimizer", "load", "load_params", "optimizer", "save"]


@functools.cache
def __getattr__(name: str) -> Any:
    if name in CLASSES or name in FORMS:
        return mlx_optimizer(name)
    if name in THEIRS:
        return getattr(optimizers, name)
    if name.startswith("_"):
        raise AttributeError(f"module 'rulec.mlx' has no attribute {name!r}")
    if file := library_names().get(name) or installed_titles().get(name):
        return optimizer(file)
    raise AttributeError(no_title("rulec.mlx", name))


def __dir__() -> list[str]:
    return sorted([*__all__, *CLASSES, *FORMS, *THEIRS, *library_names(), *installed_titles()])
