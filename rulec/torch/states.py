"""`optimizer.state` as a mapping that knows when someone else has written to it.

Kernels write to buffers of their own. Other code may put another tensor in their place, as checkpoint tools and
Gaussian splatting do: it edits `optimizer.state[p]`. This is noticed, and the values are taken over at the next step.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping
from typing import Any

from torch import Tensor


class Edits:
    """Whether a mapping, or one inside it, was written to."""

    __slots__ = ("changed",)

    def __init__(self) -> None:
        self.changed = False


def _noting(method: Callable[..., Any]) -> Callable[..., Any]:
    def noted(self: Any, *args: Any, **kwargs: Any) -> Any:
        self.edits.changed = True
        return method(self, *args, **kwargs)

    noted.__name__ = method.__name__
    noted.__doc__ = method.__doc__
    return noted


_WRITERS = (
    "__setitem__", "__delitem__", "__ior__", "clear", "pop", "popitem", "setdefault", "update",
)  # fmt: skip


class ParamState(dict[str, Any]):
    """What is remembered of one parameter, by name. It is copied and pickled as a plain dict."""

    __slots__ = ("edits",)

    def __init__(self, values: Mapping[str, Any], edits: Edits) -> None:
        super().__init__(values)
        self.edits = edits

    def take(self, values: Mapping[str, Any]) -> None:
        """Writes that are the optimizer's own."""
        dict.update(self, values)

    def __reduce__(self) -> Any:
        return dict, (dict(self),)


class Store(defaultdict[Any, Any]):
    """The states of all parameters. A parameter without one has an empty one, as in torch.optim."""

    def __init__(self, states: Mapping[Any, Any] | None = None) -> None:
        super().__init__()
        self.edits = Edits()
        for key, value in (states or {}).items():
            wrapped = ParamState(value, self.edits) if isinstance(value, Mapping) else value
            dict.__setitem__(self, key, wrapped)

    def __missing__(self, key: Any) -> ParamState:
        empty = ParamState({}, self.edits)
        dict.__setitem__(self, key, empty)
        return empty

    def plain(self) -> dict[Any, Any]:
        """The same as plain dicts."""
        return {key: dict(value) if isinstance(value, Mapping) else value for key, value in self.items()}

    def entry(self, param: Tensor) -> ParamState:
        """The state of a parameter as one that notes writing, made so where someone put a plain dict there."""
        state = self[param]
        if not isinstance(state, ParamState) or state.edits is not self.edits:
            state = ParamState(state, self.edits)
            dict.__setitem__(self, param, state)
        return state

    def become(self, other: Store) -> None:
        """Takes over everything of another store. Who holds this one, or the state of a parameter in it, sees it."""
        held = dict(self)
        dict.clear(self)
        for key, new in other.items():
            old = held.get(key)
            if isinstance(old, ParamState) and isinstance(new, ParamState):
                dict.clear(old)
                old.take(new)
                old.edits = other.edits
                new = old
            dict.__setitem__(self, key, new)
        self.edits = other.edits

    def __reduce__(self) -> Any:
        return Store, (self.plain(),)


for _name in _WRITERS:
    setattr(ParamState, _name, _noting(getattr(dict, _name)))
    setattr(Store, _name, _noting(getattr(dict, _name)))
