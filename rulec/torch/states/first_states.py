"""States before the first update: a step without a learning rate and without gradients asks for them alone.

torch's `get_optimizer_state_dict` and `set_optimizer_state_dict` have an optimizer make its states by a step with
`lr=0` and gradients of zeros, and so has torchtitan. Such a step makes the states, at the learning rates of the groups
before it. It updates no parameter and counts as no update, so a run goes on as one without it.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from rulec.torch.distributed.cross_process import Across
from rulec.torch.groups.values import Groups
from rulec.torch.tensors.dtensor import is_placed, part_of
from rulec.torch.tensors.fake import has_no_memory
from rulec.torch.tensors.memory import plain_memory


def asks_for_states(groups: Groups, across: Across | None = None) -> bool:
    """Whether a first step of these groups asks for states alone: no group has a learning rate, no gradient a number.

    Processes that have other parts of the parameters, or of the same tensors, answer alike.
    """
    if any(_rate_of(group) for group in groups):
        return False
    params = [p for group in groups for p in group["params"]]
    grads = [p.grad for p in params if p.grad is not None]
    with plain_memory():
        moves = not grads or any(map(_has_number, grads))
        idle = not grads and across is not None
        return not _anywhere(moves and not idle, [p for p in params if is_placed(p)], across)


def _rate_of(group: Mapping[str, Any]) -> bool:
    """Whether a group has a learning rate that is not 0. A fake one may be any."""
    rate = group.get("lr", 0.0)
    return has_no_memory(rate) or bool(rate != 0)


def _has_number(grad: Tensor) -> bool:
    """Whether a gradient has an element that is not 0, in this process."""
    here = part_of(grad)
    if has_no_memory(here):
        return True
    here = here._values() if here.layout is torch.sparse_coo else here
    return bool((here != 0).any())


def _anywhere(truth: bool, placed: Sequence[Any], across: Across | None) -> bool:
    """Whether it is true in any of the processes of these DTensors' meshes, and of `across`."""
    meshes = list(dict.fromkeys(param.device_mesh for param in placed))
    groups = [group for mesh in meshes if mesh.get_coordinate() is not None for group in mesh.get_all_groups()]
    groups += [] if across is None else [across.group]
    for group in groups if len(groups) < 2 else [*groups, *groups]:  # what one group knows, the others hear after it
        nccl = torch.distributed.get_backend(group) == "nccl"
        word = torch.tensor([float(truth)], device="cuda" if nccl else "cpu")
        torch.distributed.all_reduce(word, torch.distributed.ReduceOp.MAX, group)
        truth = bool(word)
    return truth


@contextmanager
def at_rates(groups: Sequence[dict[str, Any]], rates: Sequence[Any]) -> Iterator[None]:
    """A block with these learning rates in the groups."""
    before = [(group, group["lr"]) for group in groups if "lr" in group]
    try:
        if len(rates) == len(groups):
            for group, rate in zip(groups, rates, strict=True):
                group.update({} if rate is None else {"lr": rate})
        yield
    finally:
        for group, rate in before:
            group["lr"] = rate
