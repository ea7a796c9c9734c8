"""How this package's own tensors are made, and computed with."""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import ExitStack

import torch


def plain_memory() -> ExitStack:
    """A context in which tensors are ordinary ones and nothing is recorded, whatever the caller's own context."""
    stack = ExitStack()
    stack.enter_context(torch.inference_mode(False))
    stack.enter_context(torch.no_grad())
    return stack


def plain_arithmetic(types: Iterable[str]) -> ExitStack:
    """A context in which torch computes in its operands' dtypes on these types of devices, and as `plain_memory`."""
    stack = plain_memory()
    for kind in types:
        stack.enter_context(torch.autocast(kind, enabled=False))
    return stack
