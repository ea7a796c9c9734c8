"""Tensors in host memory for parameters that lie elsewhere."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from rulec.runtime.storage.allocator import StateSpec
from rulec.torch.groups.routes import Route
from rulec.torch.offload.link import host_of
from rulec.torch.tensors.fake import plain_memory
from rulec.torch.tensors.tensors import TorchArrays, is_dense


class HostArrays(TorchArrays):
    """Tensors on the host for parameters elsewhere: `routes` has the route of each by the identity of its tensor."""

    def __init__(self) -> None:
        self.routes: dict[int, Route] = {}

    def allocate(
        self, params: Sequence[Tensor], specs: Sequence[StateSpec], shapes: Sequence[Sequence[tuple[int, ...]]],
        hyper: Sequence[Mapping[str, float]], facts: Sequence[Mapping[str, float]],
    ) -> list[dict[str, Tensor]]:  # fmt: skip
        """Allocates the states of each parameter on the host; a parameter that one of them begins with is copied."""
        reads = any(spec.copies_parameter or spec.reads_parameter for spec in specs)
        states = []
        for i, param in enumerate(params):
            values = self._values(param) if reads else param
            states += super().allocate([values], specs, shapes[i : i + 1], hyper[i : i + 1], facts[i : i + 1])
        return states

    def _values(self, param: Tensor) -> Tensor:
        with plain_memory():
            return torch.empty_like(param).copy_(self.routes[id(param)].here)


def without_memory(like: Tensor, contiguous: bool = False) -> Tensor:
    """A tensor in host memory of the shape and memory order of another, of which no byte is held."""
    where: dict[str, Any] = {"dtype": like.dtype, "device": host_of(like)}
    with plain_memory():
        if not contiguous and is_dense(like):
            tensor = torch.empty_strided(like.shape, like.stride(), **where)
        else:
            tensor = torch.empty(like.shape, **where)
        tensor.untyped_storage().resize_(0)
        return tensor


def in_order_of(grad: Tensor, param: Tensor) -> Tensor:
    """A gradient in the memory order of its parameter."""
    if grad.stride() == param.stride():
        return grad
    with plain_memory():
        return torch.empty_strided(param.shape, param.stride(), dtype=grad.dtype, device=grad.device).copy_(grad)
