"""What a CUDA graph is, without one: a step's operations on memory, run again as they were recorded.

Nothing of the host takes part in a second run: what it knew when the graph was recorded stays what it was.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_leaves

from rulec.backend.protocol import Written
from tests.runtime.elsewhere import ElsewhereCall


class Graph(TorchDispatchMode):
    """Records torch's operations, and the kernels of the backend `elsewhere`, while it is entered by `recording`."""

    def __init__(self) -> None:
        super().__init__()
        self._calls: list[Callable[[], None]] = []

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        keywords = kwargs or {}
        made = function(*args, **keywords)
        self._calls.append(lambda: _renew(made, function(*args, **keywords)))
        return made

    @contextmanager
    def recording(self) -> Iterator[None]:
        """Everything meanwhile is done and recorded."""
        kernel = ElsewhereCall.__call__

        def recorded(call: ElsewhereCall, *args: Any, **keywords: Any) -> Written:
            with _disable_current_modes():
                written = kernel(call, *args, **keywords)
            self._calls.append(lambda: _renew(dict(written.reduced), dict(kernel(call, *args, **keywords).reduced)))
            return written

        with mock.patch.object(ElsewhereCall, "__call__", recorded), self:
            yield

    def replay(self) -> None:
        """Does it again."""
        for call in self._calls:
            call()


def _renew(made: Any, again: Any) -> None:
    """Writes new results where the old ones are, but for those that lie there already."""
    for old, new in zip(tree_leaves(made), tree_leaves(again), strict=True):
        if isinstance(old, Tensor) and old is not new and not _overlap(old, new):
            old.copy_(new)


def _overlap(a: Tensor, b: Tensor) -> bool:
    return bool(a.numel()) and a.untyped_storage().data_ptr() == b.untyped_storage().data_ptr()
