"""Sparse gradients: the rows that have one are copied out, updated by the ordinary kernel, and put back."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from rulec.errors import TensorError
from rulec.runtime.buckets.launch import Launch
from rulec.torch.groups.engine import TensorRef
from rulec.torch.groups.entries import GroupRule
from rulec.torch.tensors.fake import plain_memory
from rulec.torch.tensors.memory import check_gradient_memory


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
    see more than the rows.
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
