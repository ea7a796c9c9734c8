"""The addresses of tensors that kernels write: others may move their memory between two steps.

`share_memory_`, `set_`, `resize_`, `swap_tensors`, `tensor.data = ...` and a queue of `torch.multiprocessing` move the
memory of a tensor, or give it another shape. A kernel that was bound before would write to freed memory.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from rulec.torch.fastpath.survey import look_of
from rulec.torch.tensors.dtensor import local_tensor
from rulec.torch.tensors.fake import has_no_memory
from rulec.torch.tensors.memory import Spans, holds_all
from rulec.torch.tensors.tensors import Guard, guard_for, never, real_view


class Addresses:
    """The addresses, shapes, memory orders, dtypes and devices of tensors at the time of this object.

    A DTensor has the facts of its local tensor, and the same object must stay its local tensor. The first look asks
    torch about each tensor, later ones compare words in memory where that can be: see `look_of`.
    """

    def __init__(self, tensors: Sequence[Tensor]) -> None:
        self.tensors = [*tensors]
        self._local = [*map(local_tensor, self.tensors)]
        self._dtensors = [(t, here) for t, here in zip(self.tensors, self._local, strict=True) if here is not t]
        self._addresses = [*map(_address, self._local)]
        self._facts = [*map(facts_of, self._local)]
        self._spans = Spans(self._local)
        self._guard: Guard = never
        self._look = _never
        #: The number of further functions for all tensors at once that may be made.
        self._left = 4

    def same(self) -> bool:
        """Whether every tensor is as before, where it was before, with enough memory."""
        return self._look() or self._asked()

    def _asked(self) -> bool:
        """The same, by torch; the next look may compare words."""
        if any(local_tensor(tensor) is not here for tensor, here in self._dtensors):
            return False
        try:
            if [*map(_address, self._local)] != self._addresses:
                return False
        except RuntimeError:  # a sparse tensor has no address
            return False
        if not (self._spans.are_held(self._local) or all(map(holds_all, self._local))):
            return False
        if not self._guard(*self._local):
            if [*map(facts_of, self._local)] != self._facts:
                return False
            if self._left:
                self._left -= 1
                self._guard, self._look = guard_for(self._local), look_of(self.tensors) or _never
        return True


def _never() -> bool:
    """Always returns False: nothing is known without torch."""
    return False


_address: Callable[[Tensor], int] = Tensor.data_ptr


@dataclass(frozen=True)
class ShownState:
    """A state of a parameter: its array for kernels, and the tensor for users, perhaps a view.

    `place` is the place of its route, `param` the place of the parameter among all. `name` is the name for users.
    `part` is the local tensor of a DTensor.
    """

    place: int
    param: int
    name: str
    array: Tensor
    shown: Tensor
    part: Tensor

    def now(self) -> Tensor:
        """The array for kernels where the shown tensor lies now."""
        return self.array if self.shown is self.array else real_view(self.shown)


class StateAddresses:
    """The addresses of all tensors of states that users see, of one step count for each parameter too."""

    def __init__(self, states: Sequence[ShownState] = ()) -> None:
        self.states = [state for state in states if not has_no_memory(state.array)]
        self.facts = [facts_of(state.array) for state in self.states]
        self.all = Addresses(self._tensors(self.states))
        self._of_params: dict[tuple[int, ...], Addresses] = {}

    @staticmethod
    def _tensors(states: Sequence[ShownState]) -> list[Tensor]:
        tensors = [tensor for state in states for tensor in (state.array, state.shown)]
        return [*{id(tensor): tensor for tensor in tensors}.values()]

    def has(self, states: Sequence[ShownState]) -> bool:
        """Whether these are the same tensors, in whatever order."""
        pairs = [{(id(s.array), id(s.shown), id(s.part)) for s in side} for side in (self.states, states)]
        return pairs[0] == pairs[1]

    def same(self, params: tuple[int, ...] | None = None) -> bool:
        """Whether no state of the parameters `params`, or of all, was moved or given another shape or dtype."""
        if params is None:
            return self.all.same()
        addresses = self._of_params.get(params)
        if addresses is None:
            chosen = {*params}
            if not self.all.same():  # what is noted now must be as it was
                return False
            addresses = Addresses(self._tensors([state for state in self.states if state.param in chosen]))
            self._of_params[params] = addresses
        return addresses.same()


def facts_of(tensor: Tensor) -> tuple[Any, ...]:
    """The facts of a plain tensor on which a bound kernel relies, without its address."""
    if tensor.layout is not torch.strided:
        return (tensor.layout,)
    return tensor.shape, tensor.stride(), tensor.dtype, tensor.device, tensor.is_neg(), tensor.is_conj()
