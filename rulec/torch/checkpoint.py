"""Checkpoints in the format of all frameworks, of optimizers of torch."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torch import Tensor
from torch.optim import Optimizer

from rulec import checkpoint
from rulec.checkpoint import Axes, Names
from rulec.errors import RulecError, TensorError
from rulec.torch.checkpoint_run import TorchRun, names_of
from rulec.torch.optimizer import RuleOptimizer
from rulec.torch.partitioned import Partitioned
from rulec.torch.placed import check_whole


def save(optimizer: RuleOptimizer, file: str | Path, *, parameters: bool = False) -> None:
    """Writes an optimizer's state, and with `parameters` the parameters, as a safetensors file for every framework.

    Parameters are called by their names (`model.named_parameters()`) with `/` for `.`, or else `0`, `1`, ... in their
    order. The file is there as a whole, or the one before it stays. Raises RulecError for what cannot be saved, OSError
    where the file cannot be written.
    """
    checkpoint.save(_run(optimizer, "save"), file, parameters)


def load(
    optimizer: RuleOptimizer, file: str | Path, *, names: Names = None, axes: Axes = None,
    rule_may_differ: bool = False, parameters: bool = False,
) -> None:  # fmt: skip
    """Goes on from a file of `save`, here or in another framework; with `parameters` takes the parameters too.

    Values are copied into this optimizer's buffers, which keep their own dtypes; its hyper-parameters stay as they are.
    `names` is a mapping of the file's names to the names here, or a function. `axes` has for parameters, by their names
    here, the axis of the file for each of their own, as in `{"dense.weight": (1, 0)}`. StateMismatch, before anything
    is written, where the file belongs to other parameters or another rule (`rule_may_differ` allows another rule), or
    is damaged.
    """
    run, groups = _run(optimizer, "load"), len(optimizer.param_groups)
    turned = {name.replace(".", "/"): order for name, order in (axes or {}).items()}
    run.take(checkpoint.load(run, file, groups, _with_slashes(names), turned, rule_may_differ, parameters))


def _run(optimizer: Any, verb: str) -> TorchRun:
    """RulecError where it is no optimizer of ours, or no other framework could go on from it."""
    if not isinstance(optimizer, RuleOptimizer):
        raise RulecError(_not_ours(optimizer, verb))
    if optimizer.interface.evaluates and not optimizer.param_groups[0]["train_mode"]:
        raise RulecError(f"the parameters are where {optimizer.interface.name} is evaluated: call train() to {verb}")
    params: list[Tensor] = [p for group in optimizer.param_groups for p in group["params"]]
    for name, param in zip(names_of(optimizer), params, strict=True):
        if param.is_complex():
            raise TensorError(f"{name} is complex, which other frameworks' rules are not: use state_dict()")
    check_whole(params, verb)
    return TorchRun(optimizer, int(optimizer.param_groups[0].get("seed", 0)))


def _not_ours(optimizer: Any, verb: str) -> str:
    kind = f"{type(optimizer).__module__}.{type(optimizer).__qualname__}"
    if isinstance(optimizer, Partitioned):
        return f"a Partitioned has one optimizer for each class: {verb} each of its optimizers, in a file of its own"
    if isinstance(optimizer, Optimizer):
        return (
            f"{verb} takes an optimizer of rulec.torch, not {kind}: load its state_dict() into the class of its name "
            f"there, where there is one"
        )
    return f"{verb} takes an optimizer of rulec.torch, not a {kind}"


def _with_slashes(names: Names) -> Names:
    """The same, giving names with `/` where they have `.`, as parameters are called in torch."""
    if isinstance(names, Mapping):
        return {before: name.replace(".", "/") for before, name in names.items()}
    return names and (lambda before: names(before).replace(".", "/"))
