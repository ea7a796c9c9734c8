"""Evaluation of one member at a time: operations see the member's parameters instead of the model's.

A member's parameters are made for one operation and freed after it. The model's parameters are never written, so there
is nothing to restore. Compiled models run uncompiled meanwhile, for their operations are replaced. `check_mixing` tests
whether a model mixes the members of a batch.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.modules.instancenorm import _InstanceNorm
from torch.nn.modules.module import register_module_forward_hook
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves

from rulec.errors import RulecError
from rulec.torch.es.model import Perturbed
from rulec.torch.es.noise.build import Noises
from rulec.torch.es.population import Population


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


def uncompiled() -> AbstractContextManager[object]:
    """While it is entered, what torch.compile made runs without being compiled.

    Members are never the same twice: torch.compile would trace how their noise is made, anew in each step.
    """
    # A model can only have been compiled where this module is there; importing it takes seconds.
    there = sys.modules.get("torch._dynamo")
    return (
        nullcontext() if there is None or not hasattr(there, "set_stance") else torch.compiler.set_stance("force_eager")
    )


def check_modules(model: nn.Module) -> None:
    """RulecError where a layer that is known to mix members would."""
    for name, module in model.named_modules():
        kind = type(module).__name__
        if isinstance(module, _InstanceNorm):
            if module.training and module.track_running_stats:
                raise RulecError(
                    f"{kind} {name!r} in training mode keeps statistics over all members: call eval() on it, or give "
                    f"it track_running_stats=False"
                )
        elif isinstance(module, _BatchNorm) and (module.training or module.running_mean is None):
            raise RulecError(
                f"{kind} {name!r} in training mode mixes members: call eval() on it, or use a group or layer norm"
            )


def check_mixing(model: nn.Module, run: Callable[[Tensor], Any], x: Tensor, who: Population) -> None:
    """RulecError where another input of the first member changes what `run` gives for other members.

    Floating-point inputs become NaN, which whatever is computed from them is too; others become the last row's. Both
    runs draw the same random numbers, such as those of dropped activations, and leave torch's generators as they were.
    """
    other = x.clone()
    first = other.view(*who.lead, *x.shape[1:])[0, :, 0]
    first.copy_(torch.full_like(first, torch.nan) if x.is_floating_point() else x[-1].expand_as(first))
    before, after = (_of_others(_same_draws(run, batch), who) for batch in (x.clone(), other))
    if not before:
        raise RulecError(f"no output has the {who.rows} rows of the batch: members cannot be told apart")
    if all(torch.equal(a.nan_to_num(), b.nan_to_num()) for a, b in zip(before, after, strict=True)):
        return
    where = _first_mixing(model, lambda: run(other), who) if x.is_floating_point() else ""
    raise RulecError(f"members are mixed: what {where or 'the model'} gives for one depends on the input of another")


def _same_draws(run: Callable[[Tensor], Any], batch: Tensor) -> Any:
    devices = [batch.device] if batch.device.type == "cuda" else []
    with torch.random.fork_rng(devices):
        return run(batch)


def _of_others(out: Any, who: Population) -> list[Tensor]:
    """Outputs by row, except for those of the first member."""
    rows = [leaf for leaf in tree_leaves(out) if isinstance(leaf, Tensor) and leaf.dim() and leaf.shape[0] == who.rows]
    mine = torch.zeros(who.lead, dtype=torch.bool)
    mine[0, :, 0] = True
    return [leaf[~mine.flatten().to(leaf.device)] for leaf in rows]


def _first_mixing(model: nn.Module, run: Callable[[], Any], who: Population) -> str:
    """The first module in whose outputs the NaN of the first member is found in others' rows."""
    names = {id(module): name for name, module in model.named_modules()}
    mixing: list[str] = []

    def look(module: nn.Module, _: Any, out: Any) -> None:
        if any(leaf.isnan().any() for leaf in _of_others(out, who)):
            mixing.append(f"{type(module).__name__} {names.get(id(module), '')!r}")

    handle = register_module_forward_hook(look)
    try:
        run()
    finally:
        handle.remove()
    return mixing[0] if mixing else ""
