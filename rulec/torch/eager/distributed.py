"""Gradients that several ranks compute together: an update waits until they were reduced.

The hooks on a parameter run before `DistributedDataParallel` has reduced its gradient: an update there would be made of
this process's share, and the copies of the model would part without a word. So DDP's communication hook tells of
gradients instead. `fully_shard` runs the hooks on its parameters after it has reduced and split their gradients: the
optimizers update the part in this process.
"""

from __future__ import annotations

import sys
import weakref
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from rulec.errors import RulecError
from rulec.torch.eager.on_gradient import BackwardHandler, Counting
from rulec.torch.eager.params import ParameterIndex
from rulec.torch.tensors.dtensor import is_dtensor

#: The attribute of a DistributedDataParallel for its registered hook; a hook can be registered once.
_REPLICAS = "_rulec_replicas"

Pairs = Sequence[tuple[Tensor, Tensor]]


class Replicas:
    """The communication hook of a DistributedDataParallel: it reduces as DDP does, and reports reduced gradients.

    One bucket is on its way while the backward pass makes the next. `managed` are the parameters, by identity, whose
    gradients come this way.
    """

    def __init__(self, model: Any) -> None:
        self.managed = {id(param) for param in model._module_parameters if param.requires_grad}
        self._group, self._share = model.process_group, 1.0 / model.process_group.size()
        self._owner: Any = lambda: None
        self._coming: tuple[Any, Pairs] | None = None
        model.register_comm_hook(self, _reduce)
        # Otherwise DDP would make every gradient anew at the end of the backward pass.
        model.reducer._set_optimizer_in_backward()

    def report_to(self, owner: Any) -> None:
        """Has `owner.arrived(place)` called for reduced gradients, until the owner is gone or closed."""
        self._owner = weakref.ref(owner)

    def reduce(self, bucket: Any) -> None:
        """Sends a bucket on its way, and delivers the one before it; the last one at once."""
        buffer, pairs = bucket.buffer(), [*zip(bucket.parameters(), bucket.gradients(), strict=True)]
        buffer.mul_(self._share)
        work = torch.distributed.all_reduce(buffer, group=self._group, async_op=True)
        before, self._coming = self._coming, (work, pairs)
        self._deliver(before)
        if bucket.is_last():
            last, self._coming = self._coming, None
            self._deliver(last)

    def _deliver(self, coming: tuple[Any, Pairs] | None) -> None:
        if coming is None:
            return
        work, pairs = coming
        work.wait()
        owner = self._owner()
        places = {} if owner is None or owner.closed else owner.parameter_index.places
        for param, grad in pairs:
            local, place = param.grad, places.get(id(param))
            param.grad = grad
            if place is not None:
                owner.arrived(place)
            if param.grad is grad:
                # The bucket's memory is DDP's, and is used again in the next backward pass.
                param.grad = grad.clone() if local is None else _filled(local, grad)


def _reduce(replicas: Replicas, bucket: Any) -> Any:
    replicas.reduce(bucket)
    done: Any = torch.futures.Future()
    done.set_result(bucket.buffer())
    return done


_reduce.__annotations__ = {}  # torch compares them with the types themselves


def _filled(local: Tensor, grad: Tensor) -> Tensor:
    """The reduced gradient in the memory of the local one, which may be the same."""
    if local.data_ptr() != grad.data_ptr():
        local.copy_(grad)
    return local


def replicas_of(model: Any) -> Replicas | None:
    """The communication hook of a DistributedDataParallel; None for any other model.

    RulecError where it would not be known before the end of a backward pass which gradients there are, or someone else
    has its communication hook.
    """
    if not isinstance(model, nn.parallel.DistributedDataParallel):
        return None
    for name, value in (
        ("find_unused_parameters", model.find_unused_parameters), ("static_graph", model.static_graph),
        ("mixed_precision", model.mixed_precision), ("delay_all_reduce_named_params", model._delay_all_reduce_params),
    ):  # fmt: skip
        if value:
            raise RulecError(
                f"DistributedDataParallel(..., {name}=...) knows at the end of a backward pass only which gradients "
                f"there are: make it without, or use the optimizer without eager updates"
            )
    if not hasattr(model, _REPLICAS):
        if model._comm_hooks:
            raise RulecError(
                "this DistributedDataParallel has a communication hook already, and eager updates need that place: use "
                "it without, or the optimizer without eager updates"
            )
        setattr(model, _REPLICAS, Replicas(model))
    replicas: Replicas = getattr(model, _REPLICAS)
    return replicas


class Reducer:
    """The reduction of an eager optimizer's gradients, where it was made of a `model` that several ranks train.

    If `local`, every rank trains by itself.
    """

    def __init__(self, model: Any, local: bool) -> None:
        self._local, self._replicas = local, replicas_of(model)
        # Parameters that a DistributedDataParallel ignores are local to their rank.
        self._known = {id(p) for p in model.parameters()} if self._replicas is not None else set()

    def attach(self, owner: Any) -> None:
        """Has reduced gradients reported to `owner`, instead of by hooks on the parameters."""
        if self._replicas is not None:
            self._replicas.report_to(owner)

    def outside(self, parameter_index: ParameterIndex) -> set[int]:
        """The indices of the parameters on which there must be no hook."""
        if self._replicas is None:
            return set()
        return {place for place, param in enumerate(parameter_index.params) if id(param) in self._replicas.managed}

    def check(self, parameter_index: ParameterIndex) -> None:
        """RulecError where there are several ranks, and no known wrapper reduces a parameter's gradient."""
        count = 1 if self._local else _count()
        if count == 1:
            return
        for param, name in zip(parameter_index.params, parameter_index.names, strict=True):
            if param.requires_grad and not is_dtensor(param) and id(param) not in self._known:
                raise RulecError(
                    f"there are {count} processes, and {name} would be updated before its gradient is reduced: give "
                    f"EagerUpdate the DistributedDataParallel itself or a model after fully_shard, or local=True "
                    f"where every process trains by itself"
                )

    def check_reduced(self, parameter_index: ParameterIndex, handler: BackwardHandler) -> None:
        """RulecError where a pass left gradients that DistributedDataParallel did not reduce."""
        if not isinstance(handler, Counting):
            return
        for place in self.outside(parameter_index) - handler.counts.keys():
            if parameter_index.params[place].grad is not None:
                raise RulecError(
                    f"the gradient of {parameter_index.names[place]} was not reduced "
                    "by DistributedDataParallel, which does so "
                    f"once for each forward pass outside of no_sync(): run the model again before the last backward "
                    f"pass of a step, and before each of two"
                )

    def check_epilogue(self) -> None:
        """RulecError where gradients must exist to be reduced."""
        if self._replicas is not None:
            raise RulecError("epilogue= leaves no gradient for DistributedDataParallel to reduce: leave it out")


def _count() -> int:
    """The world size."""
    distributed: Any = sys.modules.get("torch.distributed")
    if distributed is None or not distributed.is_available() or not distributed.is_initialized():
        return 1
    return int(distributed.get_world_size())
