"""The hooks that report gradients and reads to an eager optimizer, without a reference to it; they count arrivals."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from rulec.errors import RulecError
from rulec.torch.tensors.dtensor import local_tensor
from rulec.torch.tensors.fake import is_fake

Arrived = Callable[[int], None]


class Hooks:
    """One hook for each trained parameter: it calls `owner.arrived(place)`, and is gone with the owner.

    They run after all others on the same parameters, which see the whole gradient before it is freed. The places in
    `outside` get none: of their gradients the owner hears in another way.
    """

    def __init__(self, owner: Any) -> None:
        self._owner = weakref.ref(owner)
        self.outside: set[int] = set()
        self._handles: dict[int, tuple[Tensor, int, Any]] = {}
        self.finalizer = weakref.finalize(owner, _remove_all, self._handles)

    def set(self, params: list[Tensor]) -> None:
        """Hooks on exactly these parameters, last among all hooks there; frozen parameters get none."""
        for place, param in enumerate(params):
            held, wanted = self._handles.get(place), param.requires_grad and place not in self.outside
            if held is not None and held[0] is param and wanted:
                _put_last(param, held[2])
                continue
            if held is not None:
                self._handles.pop(place)[2].remove()
            if wanted:
                _check_free(param)
                hook = _Hook(self._owner, place)
                register: Any = param.register_post_accumulate_grad_hook
                self._handles[place] = param, place, register(hook)
        for place in [place for place in self._handles if place >= len(params)]:
            self._handles.pop(place)[2].remove()

    def put_last(self, place: int) -> bool:
        """Puts the hook on a parameter behind all others for the next backward pass; whether it was not there."""
        held = self._handles.get(place)
        return held is not None and _put_last(held[0], held[2])

    def remove_all(self) -> None:
        """Takes all hooks away."""
        _remove_all(self._handles)


class _Hook:
    """The hook that torch calls when a parameter's gradient arrived."""

    __slots__ = ("owner", "place")

    def __init__(self, owner: weakref.ref[Any], place: int) -> None:
        self.owner, self.place = owner, place

    def __call__(self, param: Tensor) -> None:
        owner = self.owner()
        if owner is not None:
            owner.arrived(self.place)


def _hooks_on(param: Tensor) -> Any:
    return getattr(param, "_post_accumulate_grad_hooks", None)


def hears_alone(param: Tensor) -> bool:
    """Whether an eager optimizer gets a parameter's gradient, and no other object does."""
    hooks = _hooks_on(param)
    return bool(hooks) and not param._backward_hooks and all(isinstance(hook, _Hook) for hook in hooks.values())


def _check_free(param: Tensor) -> None:
    """RulecError where another eager optimizer has the parameter."""
    if any(isinstance(hook, _Hook) and hook.owner() is not None for hook in (_hooks_on(param) or {}).values()):
        raise RulecError(
            f"a parameter of shape {tuple(param.shape)} has an eager optimizer already: give each parameter one, or "
            f"close() the other"
        )


def _put_last(param: Tensor, handle: Any) -> bool:
    """Moves a hook behind all registered after it; whether there were any."""
    hooks = _hooks_on(param)
    moves = bool(hooks) and next(reversed(hooks)) != handle.id and handle.id in hooks
    if moves:
        hooks[handle.id] = hooks.pop(handle.id)
    return moves


def _remove_all(handles: dict[int, tuple[Tensor, int, Any]]) -> None:
    for _, _, handle in handles.values():
        handle.remove()
    handles.clear()


class Arrivals:
    """The largest number of arrivals of each parameter so far, by index; at first the `assumed` one.

    Steps in which fewer arrive are deferred for the parameters concerned; the number is not lowered, since the next
    step may have more again. Parameters that are `late`, being read again after their last arrival, always wait.
    """

    def __init__(self, assumed: int | None = None) -> None:
        self._assumed = assumed or 0
        self._seen: dict[int, int] = {}
        self.late: set[int] = set()
        #: Whether every read of parameters is looked at in the next pass.
        self.watches = True

    def expected(self, place: int) -> int:
        """The number of expected arrivals; 0 where it is not known, or the update must wait."""
        return 0 if place in self.late else self._seen.get(place, self._assumed)

    def comes(self, place: int) -> bool:
        """Whether a gradient is to be expected in a pass in which it has not arrived so far."""
        return place in self._seen or not self._seen

    def learn(self, counts: Mapping[int, int], late: Iterable[int], collected: Mapping[int, int]) -> None:
        """Takes over what a pass has shown; reads of parameters do not matter to the `collected` gradients."""
        self.watches = not counts.keys() <= self._seen.keys()
        for place, count in {**counts, **collected}.items():
            self._seen[place] = max(count, self._seen.get(place, 0))
        self.late.update(late)

    def forget(self) -> None:
        """Watches the next step anew, whatever was assumed."""
        self._assumed = 0
        self._seen.clear()
        self.late.clear()
        self.watches = True


class Reads(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """While it is entered, calls `noted(place, operation)` for every parameter, or view of one, that is looked at."""

    def __init__(self, params: Sequence[Tensor], noted: Callable[[int, str], None]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._noted = noted
        here = ((place, local_tensor(param)) for place, param in enumerate(params))
        self._places = {_memory(p): place for place, p in here if p.numel() and not is_fake(p)}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Runs the operation, after it was looked at."""
        if self._places:
            for tensor in _tensors((*args, *(kwargs or {}).values())):
                place = self._places.get(_memory(local_tensor(tensor)), -1)
                if place >= 0:
                    self._noted(place, str(func))
        return func(*args, **(kwargs or {}))


def _tensors(values: Iterable[Any]) -> Iterator[Tensor]:
    """The tensors among arguments, and in lists among them, that have memory."""
    for value in values:
        if isinstance(value, Tensor):
            if value.layout is torch.strided and not is_fake(value):
                yield value
        elif isinstance(value, list | tuple):
            yield from _tensors(value)


def _memory(tensor: Tensor) -> int:
    """The address of the memory of which a tensor is a view."""
    return tensor.untyped_storage().data_ptr()
