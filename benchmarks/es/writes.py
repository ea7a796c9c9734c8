"""Counts what is written while something runs: into given tensors' memory, and in all."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


@dataclass
class Writes:
    """Bytes written so far: into the `watched` tensors, and in all."""

    watched: int = 0
    all: int = 0


@contextmanager
def counted(watched: Iterable[torch.Tensor]) -> Iterator[Writes]:
    """Within the block, writes of torch's operations and of the cpu backend's kernels for one stage are counted.

    An operation writes the tensors it changes in place, and its results except views; making an empty tensor is no
    write.
    """
    mode = _Counting(watched)
    with _kernels(mode), mode:
        yield mode.writes


class _Counting(TorchDispatchMode):  # type: ignore[no-untyped-call]
    def __init__(self, watched: Iterable[torch.Tensor]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._storages = {tensor.untyped_storage().data_ptr() for tensor in watched}
        self.writes = Writes()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        self.add(_written(func, args, kwargs or {}, result))
        return result

    def add(self, tensors: Iterable[torch.Tensor]) -> None:
        """Counts these as written whole."""
        for tensor in tensors:
            self.writes.all += tensor.nbytes
            if tensor.untyped_storage().data_ptr() in self._storages:
                self.writes.watched += tensor.nbytes


def _written(func: Any, args: Sequence[Any], kwargs: dict[str, Any], result: Any) -> list[torch.Tensor]:
    """What an operation has written, by its schema."""
    if "empty" in func.__name__:
        return []
    schema = func._schema
    arguments = [*zip(schema.arguments, args, strict=False), *((a, kwargs.get(a.name)) for a in schema.arguments)]
    changed = [
        value for argument, value in arguments if argument.alias_info is not None and argument.alias_info.is_write
    ]
    new = [] if any(r.alias_info is not None for r in schema.returns) else [result]
    return [leaf for leaf in tree_leaves([changed, new]) if isinstance(leaf, torch.Tensor)]


@contextmanager
def _kernels(mode: _Counting) -> Iterator[None]:
    """Within the block, parameters, states and noise that kernels write are counted too."""
    noise, calls = (importlib.import_module(f"rulec_backends.cpu.{name}") for name in ("noise", "call"))
    kind = calls.OneStageCall
    call, fill = kind.__call__, noise.fill_noise

    def counting(self: Any, *args: Any, **keywords: Any) -> Any:
        written = call(self, *args, **keywords)
        mode.add(leaf for leaf in tree_leaves([written.params, written.states]) if isinstance(leaf, torch.Tensor))
        return written

    def filling(out: Any, *args: Any, **keywords: Any) -> None:
        fill(out, *args, **keywords)
        mode.add([torch.as_tensor(out)])

    with _replaced(kind, "__call__", counting), _replaced(noise, "fill_noise", filling):
        yield


@contextmanager
def _replaced(owner: Any, name: str, function: Callable[..., Any]) -> Iterator[None]:
    plain = getattr(owner, name)
    setattr(owner, name, function)
    try:
        yield
    finally:
        setattr(owner, name, plain)
