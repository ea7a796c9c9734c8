"""Compiled models as they are written, while operations are replaced under them."""

from __future__ import annotations

import sys
from contextlib import AbstractContextManager, nullcontext

import torch


def uncompiled() -> AbstractContextManager[object]:
    """While it is entered, what torch.compile made runs without being compiled.

    Members are never the same twice: torch.compile would trace how their noise is made, anew in each step.
    """
    # A model can only have been compiled where this module is there; importing it takes seconds.
    there = sys.modules.get("torch._dynamo")
    return (
        nullcontext() if there is None or not hasattr(there, "set_stance") else torch.compiler.set_stance("force_eager")
    )
