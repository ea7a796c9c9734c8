"""What parameters and states were before a step, for as long as it may have to be taken back."""

from __future__ import annotations

import copy
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from rulec.torch.eager.inner import Inner
from rulec.torch.memory import plain_memory


@dataclass
class _Entry:
    param: Tensor
    held: Mapping[str, Any]


class Journal:
    """Copies of parameters and of what an optimizer remembers of them, taken before they fire."""

    def __init__(self, inner: Inner, params: Sequence[Tensor]) -> None:
        self._inner, self._params = inner, params
        self._entries: dict[int, _Entry] = {}
        self.bytes = 0

    def keep(self, places: Iterable[int]) -> None:
        """Copies these parameters and their states before an update writes them."""
        with plain_memory():
            for place in places:
                if place in self._entries:
                    continue
                held = {key: _copy(value) for key, value in self._inner.buffers(place).items()}
                entry = self._entries[place] = _Entry(self._params[place].detach().clone(), held)
                self.bytes += sum(x.nbytes for x in (entry.param, *held.values()) if isinstance(x, Tensor))

    def restore(self) -> None:
        """Writes everything back; what had no state before has none."""
        with plain_memory():
            for place, entry in self._entries.items():
                self._params[place].copy_(entry.param)
                now = self._inner.buffers(place)
                for key, value in entry.held.items():
                    if isinstance(value, Tensor) and isinstance(now.get(key), Tensor):
                        now[key].copy_(value)
                    elif isinstance(now, dict):
                        now[key] = value
        for place, entry in self._entries.items():
            if not entry.held:
                self._inner.forget(self._params[place])


def _copy(value: Any) -> Any:
    return value.detach().clone() if isinstance(value, Tensor) else copy.deepcopy(value)
