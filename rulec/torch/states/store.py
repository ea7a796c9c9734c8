"""`optimizer.state`: the states of parameters by name, which notes where others have written to it."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from torch import Tensor

#: The number of a section behind the name of its state.
_SECTION = re.compile(r"\.\d+$")


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
    """The states of one parameter, by name. It is copied and pickled as a plain dict."""

    __slots__ = ("edits",)

    def __init__(self, values: Mapping[str, Any], edits: Edits) -> None:
        super().__init__(values)
        self.edits = edits

    def take(self, values: Mapping[str, Any]) -> None:
        """Writes that are the optimizer's own."""
        dict.update(self, values)

    def __reduce__(self) -> Any:
        return dict, (dict(self),)


class FusedState(ParamState):
    """The states of a parameter with sections, or of a flat one with quantized states, under the names that are saved.

    `join` gives the states as they are saved. They are copies of what kernels write; one that was read is taken over at
    the next step, as if a user had put it into the store. `shown` are the tensors that kernels write, by name.
    """

    __slots__ = ("_names", "join", "shown")

    def __init__(self, shown: Mapping[str, Any], edits: Edits, join: Callable[[], Mapping[str, Any]]) -> None:
        super().__init__(shown, edits)
        self.shown, self.join = dict(shown), join
        self._names: list[str] | None = None

    def parts(self) -> dict[str, Any]:
        """The tensors of the sections, and values that others have put in their place."""
        here = {name: dict.__getitem__(self, name) for name in dict.__iter__(self)}
        put = {_state(name) for name, value in here.items() if name not in self.shown}
        return {
            name: value
            for name, value in here.items()
            if name not in self.shown or value is not self.shown[name] or _state(_SECTION.sub("", name)) not in put
        }

    def _read(self, name: str) -> Any:
        """A state as it is saved. KeyError where there is none of this name."""
        if name not in dict.keys(self) and name in self:
            joined = self.join()
            for key in [key for key in joined if _state(key) == _state(name) and key not in dict.keys(self)]:
                dict.__setitem__(self, key, joined[key])
            self.edits.changed = True
        return dict.__getitem__(self, name)

    def __iter__(self) -> Iterator[str]:
        if self._names is None:
            self._names = [*self.join()]
        put = [name for name in dict.__iter__(self) if name not in self.shown and name not in self._names]
        return iter([*self._names, *put])

    def __len__(self) -> int:
        return sum(1 for _ in iter(self))

    def __contains__(self, name: object) -> bool:
        return dict.__contains__(self, name) or any(name == key for key in self)

    def __getitem__(self, name: str) -> Any:
        return self._read(name)

    def get(self, name: str, default: Any = None) -> Any:
        """The state of this name, or else the default."""
        return self._read(name) if name in self else default

    def keys(self) -> Any:
        """The names that are saved."""
        return [*self]

    def values(self) -> Any:
        """The states as they are saved."""
        return [self._read(name) for name in self]

    def items(self) -> Any:
        """The names that are saved, and their states."""
        return [(name, self._read(name)) for name in self]


def parts_of(state: Mapping[str, Any]) -> Mapping[str, Any]:
    """The states of a parameter as they are kept: of a fused one those of its sections."""
    return state.parts() if isinstance(state, FusedState) else state


def _state(name: str) -> str:
    return name.partition("::")[0]


class Store(defaultdict[Any, Any]):
    """The states of all parameters. A parameter without one has an empty one, as in torch.optim."""

    def __init__(self, states: Mapping[Any, Any] | None = None) -> None:
        super().__init__()
        self.edits = Edits()
        for key, value in (states or {}).items():
            wrapped = ParamState(parts_of(value), self.edits) if isinstance(value, Mapping) else value
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

    def show_sections(self, param: Tensor, shown: Mapping[str, Any], join: Callable[[], Mapping[str, Any]]) -> None:
        """Shows the states of a parameter with sections; what others put under other names stays."""
        before, state = parts_of(self[param]), FusedState(shown, self.edits, join)
        known = {_state(_SECTION.sub("", name)) for name in shown}
        others = [name for name in before if _state(_SECTION.sub("", name)) not in {*known, "param"}]
        state.take({name: before[name] for name in others})
        dict.__setitem__(self, param, state)

    def become(self, other: Store) -> None:
        """Takes over everything of another store. Who holds this one, or the state of a parameter in it, sees it."""
        held = dict(self)
        dict.clear(self)
        for key, new in other.items():
            old = held.get(key)
            if isinstance(old, FusedState) and isinstance(new, FusedState):
                dict.clear(old)
                old.shown, old.join, old._names, old.edits = new.shown, new.join, None, other.edits
                old.take(new.parts())
                new = old
            elif isinstance(old, ParamState) and type(old) is type(new):
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
