"""Modules that pages import and the environment of development does not have: `make trainers` has the real ones."""

from __future__ import annotations

import contextlib
import importlib.util
import sys
from collections.abc import Iterator
from types import ModuleType
from typing import Any


class SummaryWriter:
    """The methods of TensorBoard's writer that the manual calls; `scalars` has what was written."""

    def __init__(self, log_dir: Any = None) -> None:
        self.log_dir, self.scalars = log_dir, list[tuple[str, float, int | None]]()

    def add_scalar(self, tag: str, scalar_value: float, global_step: int | None = None) -> None:
        assert isinstance(tag, str)
        self.scalars.append((tag, float(scalar_value), global_step))

    def close(self) -> None:
        assert self.scalars, "a writer was closed that has written nothing"


@contextlib.contextmanager
def stand_ins() -> Iterator[None]:
    """Puts them among the imported modules where the real ones are not installed."""
    name = "torch.utils.tensorboard"
    if importlib.util.find_spec("tensorboard") is not None or name in sys.modules:
        yield
        return
    module = ModuleType(name)
    module.SummaryWriter = SummaryWriter  # type: ignore[attr-defined]
    sys.modules[name] = module
    try:
        yield
    finally:
        del sys.modules[name]
