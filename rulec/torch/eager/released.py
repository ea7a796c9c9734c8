"""The stand-in in `.grad` for a gradient that is gone, between the backward pass and `step()`.

Code that looks at gradients there, such as `clip_grad_norm_`, would find none and do nothing, without a word. It finds
this instead: the error says how to go on.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from rulec.errors import RulecError


class Released(Tensor):
    """In the place of a gradient that was used inside the backward pass and freed; it has no memory of its own."""

    @staticmethod
    def of(param: Tensor) -> Released:
        """The one for a parameter."""
        with torch.no_grad():
            nothing = torch.zeros((), dtype=param.dtype, device=param.device)
            return nothing.expand(param.shape).as_subclass(Released)

    @classmethod
    def __torch_function__(cls, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """RulecError, whatever is asked of it."""
        raise RulecError(
            f"{getattr(function, '__name__', 'an operation')} needs a gradient that was used inside the backward pass "
            f"and freed: change gradients with Tensor.register_hook, clip them with max_grad_norm= and opt.measure(), "
            f"or give EagerUpdate only the parameters whose gradients nobody needs (only=)"
        )

    def __repr__(self, **how: Any) -> str:  # type: ignore[override]
        return "<a gradient that was used inside the backward pass and freed>"
