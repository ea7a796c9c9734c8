"""One member at a time: while its forward runs, operations see its parameters in the place of the model's.

They are made for one operation and freed after it. The model's own are never written, so there is nothing to restore.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves

from rulec.errors import RulecError
from rulec.torch.es.model import Perturbed
from rulec.torch.es.noise.build import Noises


class OneMember(TorchFunctionMode):
    """Entered for the forward of one member: a direction, and a sign, 1 or -1.

    A parameter that only its shape, dtype or the like is asked of stays as it is.
    """

    def __init__(self, noises: Noises, direction: int, sign: int) -> None:
        super().__init__()
        self._noises, self._direction, self._sign = noises, direction, sign

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Runs the operation on the member's parameters."""
        kwargs = kwargs or {}
        there = [e for e in map(self._noises.entry, tree_leaves((args, kwargs))) if e is not None]
        if not there or _asks_only(func):
            return func(*args, **kwargs)
        _check_reads(func, self._written(func, args, kwargs))
        parameters = {id(entry.param): self._parameter(entry) for entry in there}
        args, kwargs = torch.utils._pytree.tree_map(lambda leaf: parameters.get(id(leaf), leaf), (args, kwargs))
        return func(*args, **kwargs)

    def _written(self, func: Any, args: Any, kwargs: Any) -> Perturbed | None:
        """The parameter that an operation writes, if it writes one."""
        name = getattr(func, "__name__", "")
        in_place = name in _WRITERS or (name.endswith("_") and not name.endswith("__"))
        there = [*args[: 1 if in_place else 0], *tree_leaves(kwargs.get("out"))]
        return next((entry for entry in map(self._noises.entry, there) if entry is not None), None)

    def _parameter(self, entry: Perturbed) -> Tensor:
        """The member's parameter, rounded once to its dtype."""
        noise, param = self._noises.of(entry), entry.param.detach()
        dense = noise.dense(self._direction)
        if noise.perturbation.family == "dropout":
            dense = dense * param
        elif entry.fixed is not None:
            dense[entry.fixed] = 0.0
        out = dense if dense.is_contiguous() else torch.empty_like(dense)
        return torch.add(param, dense, alpha=self._sign * noise.perturbation.size, out=out).to(param.dtype)


def _asks_only(func: Any) -> bool:
    """Whether an operation reads no element: an attribute of a tensor, or a question about it."""
    name = getattr(func, "__name__", "")
    return name in _QUESTIONS or (name == "__get__" and getattr(func, "__self__", None) not in _COMPUTED)


#: Attributes that are computed from a tensor's elements.
_COMPUTED = tuple(getattr(torch.Tensor, name) for name in ("T", "mT", "H", "mH", "real", "imag", "data"))

_QUESTIONS = frozenset([
    "dim", "ndimension", "size", "stride", "numel", "nelement", "is_contiguous", "is_floating_point", "is_complex",
    "element_size", "__len__", "get_device", "data_ptr", "has_names", "is_inference",
])  # fmt: skip


#: Operations that write to their first argument, beside those whose names end with one underscore.
_WRITERS = frozenset(["__set__", "__setitem__", *(f"__i{name}__" for name in (
    "add", "sub", "mul", "truediv", "floordiv", "mod", "pow", "and", "or", "xor", "lshift", "rshift",
))])  # fmt: skip


def _check_reads(func: Any, written: Perturbed | None) -> None:
    if written is not None:
        name = getattr(func, "__name__", func)
        raise RulecError(
            f"parameter {written.name!r} is written by {name} while members are evaluated: the closure may only read"
        )
