"""Whether something in a model mixes the members of a batch."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.modules.instancenorm import _InstanceNorm
from torch.nn.modules.module import register_module_forward_hook
from torch.utils._pytree import tree_leaves

from rulec.errors import RulecError
from rulec.torch.es.population import Population


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
    """Outputs by row, but for those of the first member."""
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
