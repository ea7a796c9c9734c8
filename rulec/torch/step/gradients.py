"""The gradients of a step as kernels read them: pairs for complex ones, local tensors, and rows of sparse gradients.

The rows that have a sparse gradient are copied out, updated by the ordinary kernel, and put back.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import repeat
from operator import attrgetter, is_
from typing import Any

import torch
from torch import Tensor

from rulec.errors import TensorError
from rulec.runtime.buckets.launch import Launch
from rulec.runtime.buckets.scalar_table_device import Scaling
from rulec.torch.groups.engine import TensorRef
from rulec.torch.groups.entries import GroupRule
from rulec.torch.step.plan import StepPlan, launches_of
from rulec.torch.step.tensors import StepTensors
from rulec.torch.tensors.dtensor import check_gradient, is_dtensor, local_tensor
from rulec.torch.tensors.fake import plain_memory
from rulec.torch.tensors.memory import check_gradient_memory
from rulec.torch.tensors.tensors import dtype_name, real_gradient

_gradient = attrgetter("grad")


def present_gradients(params: Sequence[Tensor]) -> tuple[tuple[int, ...] | None, list[Any]]:
    """The gradients, and the indices of their parameters (None: all)."""
    grads: list[Any] = [*map(_gradient, params)]
    if not any(map(is_, grads, repeat(None))):
        return None, grads
    return tuple([i for i, g in enumerate(grads) if g is not None]), [g for g in grads if g is not None]


def converted_gradients(plan: StepPlan, grads: Sequence[Any], names: Sequence[str]) -> list[Tensor]:
    """The gradients of a plan as kernels read them: pairs for complex ones, and local tensors of DTensors.

    `names` are those of all parameters. TensorError for a gradient that does not fit its parameter.
    """
    grads = [*grads]
    for place in plan.converted:
        name = names[plan.chosen[place]]
        check_gradient(grads[place], plan.written[place], name)
        here = local_tensor(grads[place])
        grads[place] = real_gradient(here, name) if here.is_complex() else here
    return grads


def real_gradients(plan: StepPlan, grads: Sequence[Tensor], names: Sequence[str]) -> list[Tensor]:
    """The gradients of a plan's parameters as kernels read them, where all may be converted."""
    return [real_gradient(grad, names[i]) for grad, i in zip(grads, plan.chosen, strict=True)]


def check_shapes(plan: StepPlan, grads: Sequence[Tensor], names: Sequence[str]) -> None:
    """TensorError where a gradient of a fused parameter cannot be cut as its parameter is."""
    for place in {place for place, section in plan.sections if section is not None}:
        grad, param, name = grads[place], local_tensor(plan.written[place]), names[plan.chosen[place]]
        if grad.layout is not torch.strided:
            raise TensorError(f"the gradient of {name} is sparse ({grad.layout}), and its parameter is split")
        if grad.shape != param.shape:
            raise TensorError(
                f"the gradient of {name} has shape {tuple(grad.shape)}, its parameter {tuple(param.shape)}"
            )


@dataclass(frozen=True)
class SparseRows:
    """The rows of a parameter that a sparse gradient names, each once.

    `index` has their indices among the rows, of which a parameter has one for each place along the sparse dimensions.
    `grad`, `param` and `states` by name are copies of shape (rows, the parameter's other dimensions).
    """

    whole: Tensor
    whole_states: Mapping[str, Tensor]
    index: Tensor
    grad: Tensor
    param: Tensor
    states: Mapping[str, Tensor]

    def launches(self, tensor_ref: TensorRef) -> list[Launch]:
        """The launches that update the copies."""
        engine, tensor_id = tensor_ref
        return engine.ready_rows(tensor_id, self.param, self.states, self.grad)

    def put_back(self) -> None:
        """Writes the copies into the parameter and its states."""
        with plain_memory():
            self._rows_of(self.whole).index_copy_(0, self.index, self.param)
            for name, state in self.states.items():
                self._rows_of(self.whole_states[name]).index_copy_(0, self.index, state)

    def _rows_of(self, tensor: Tensor) -> Tensor:
        return _as_rows(tensor, tensor.dim() - self.param.dim() + 1)


def is_sparse(grad: Tensor) -> bool:
    """Whether a gradient has the rows of some indices alone."""
    return grad.layout is torch.sparse_coo


def check_takes_rows(group_rule: GroupRule, name: str) -> None:
    """TensorError where the rule of a group does not take sparse gradients, or decays rows that have none."""
    rule = group_rule.entry.rule.name
    if not group_rule.entry.takes_rows:
        raise TensorError(
            f"the gradient of {name} is sparse, which {rule} does not take: use SparseAdam, make its layer with "
            f"sparse=False, or give param.grad.to_dense()"
        )
    if group_rule.decay:
        raise TensorError(
            f"the gradient of {name} is sparse, and weight_decay would reach the rows that have none: give {name} to "
            f"an optimizer of its own without weight_decay"
        )


def sparse_rows(tensor_ref: TensorRef, param: Tensor, grad: Tensor, name: str) -> SparseRows:
    """The rows of a parameter and its states, as a sparse gradient names them; gradients of one row are added.

    The states exist. TensorError for a gradient of another shape, a parameter that is not contiguous, and rules that
    read elements of other rows.
    """
    engine, tensor_id = tensor_ref
    engine.check_rows(tensor_id)
    if grad.shape != param.shape:
        raise TensorError(f"the gradient of {name} has shape {tuple(grad.shape)}, its parameter {tuple(param.shape)}")
    check_gradient_memory(grad, name)
    if not param.is_contiguous():
        raise TensorError(f"the gradient of {name} is sparse, and {name} is not contiguous: pass it contiguous")
    tensor = engine.tensors[tensor_id]
    assert tensor.bucket is not None
    states = tensor.bucket.states[tensor.position]
    with plain_memory():
        summed = grad.coalesce()
        count, indices = summed.sparse_dim(), summed._indices()
        strides = [math.prod(param.shape[i + 1 : count]) for i in range(count)]
        index = sum((row * stride for row, stride in zip(indices, strides, strict=True)), torch.zeros_like(indices[0]))
        rows = {state: _as_rows(whole, count).index_select(0, index) for state, whole in states.items()}
        param_rows = _as_rows(param, count).index_select(0, index)
        return SparseRows(param, states, index, summed._values().contiguous(), param_rows, rows)


def _as_rows(tensor: Tensor, count: int) -> Tensor:
    """A view whose first dimension is the first `count` dimensions of a contiguous tensor."""
    return tensor.detach().view(math.prod(tensor.shape[:count]), *tensor.shape[count:])


def launches_of_rows(
    tensors: StepTensors, plan: StepPlan, grads: Sequence[Tensor], scaling: Scaling | None
) -> tuple[list[Launch], list[SparseRows]]:
    """The launches of a step where some gradients are sparse, and the rows that are to be put back after it.

    Rows without a gradient stay as they are. OtherDtype where a gradient's dtype is new.
    """
    sparse = [place for place, grad in enumerate(grads) if is_sparse(grad)]
    dense = [place for place in range(len(grads)) if place not in set(sparse)]
    rows = [_rows(tensors, plan, place, grads[place], scaling) for place in sparse]
    launches = [launch for tensor_ref, each in rows for launch in each.launches(tensor_ref)]
    if dense:
        others = [grads[place] for place in dense]
        whole = tensors.plans.of(tuple([plan.chosen[place] for place in dense]), others)
        if whole.converted or whole.copied or whole.sections:
            raise TensorError("sparse gradients and complex, split or strided parameters cannot be in one step")
        launches += launches_of(whole, others, None, scaling)
    return launches, [each for _, each in rows]


def _rows(
    tensors: StepTensors, plan: StepPlan, place: int, grad: Tensor, scaling: Scaling | None
) -> tuple[TensorRef, SparseRows]:
    """The rows of a sparse gradient, and the reference of its parameter, whose states are allocated now at the latest.

    TensorError where rows alone cannot be updated.
    """
    param, chosen = plan.written[place], plan.chosen[place]
    tensor_ref, name = tensors.tensor_ref(chosen), tensors.names[chosen]
    route = next(route for route in tensors.routes if route.place == chosen)
    if (
        tensor_ref is None
        or is_dtensor(param)
        or param.is_complex()
        or scaling is not None
        or tensors.options.processes
    ):
        raise TensorError(
            f"the gradient of {name} is sparse, and its parameter is complex or split, its gradient scaled, or its "
            f"step offloaded or one with other processes: make its layer with sparse=False"
        )
    check_takes_rows(tensors.group_rules[route.group], name)
    engine, tensor_id = tensor_ref
    engine.take_table(engine.table)
    engine.prepare([tensor_id], [dtype_name(grad.dtype)], engine.table)
    return tensor_ref, sparse_rows(tensor_ref, param, grad, name)
