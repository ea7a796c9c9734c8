"""How this package's own tensors are made."""

from __future__ import annotations

from contextlib import ExitStack

import torch


def plain_memory() -> ExitStack:
    """A context in which tensors are ordinary ones and nothing is recorded, whatever the caller's own context."""
    stack = ExitStack()
    stack.enter_context(torch.inference_mode(False))
    stack.enter_context(torch.no_grad())
    return stack
