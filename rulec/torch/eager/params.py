"""The parameters of an eager optimizer, by index over all groups, and the report of a step on freed gradients.

`ParameterIndex` has the parameters with their names and sizes. `Report` counts updates inside the backward pass, and
the bytes of gradients that were freed. `Released` stands in for a freed gradient.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from threading import Lock
from typing import Any

import torch
from torch import Tensor, nn

from rulec.errors import HyperError, RulecError, TensorError
from rulec.language.source import did_you_mean
from rulec.torch.groups.routes import names_of
from rulec.torch.tensors.dtensor import local_tensor
from rulec.torch.tensors.fake import is_fake
from rulec.torch.tensors.memory import bytes_in_words


class ParameterIndex:
    """The parameters of some groups, by index among the parameters of all groups, in order.

    `chosen` are the indices of parameters that are updated inside the backward pass, without the `late` ones.
    """

    def __init__(
        self, groups: Sequence[Mapping[str, Any]], names: Mapping[int, str], only: Sequence[str] | None,
        late: Collection[int] = (),
    ) -> None:  # fmt: skip
        self.params: list[Tensor] = [p for group in groups for p in group["params"]]
        default_names = names_of(groups)
        self.names = [names.get(id(p), name) for p, name in zip(self.params, default_names, strict=True)]
        self.sizes = [local_tensor(p).nbytes for p in self.params]
        self.places = {id(p): i for i, p in enumerate(self.params)}
        #: The indices of parameters whose gradients are freed inside the backward pass, if they can be.
        self.early = frozenset(_chosen(self.names, only))
        self.chosen = self.early - frozenset(late)
        self._released: dict[int, Released] = {}

    def release(self, places: Iterable[int]) -> None:
        """Replaces the freed gradients by stand-ins: reading a stand-in raises an error."""
        for place in places:
            if is_fake(self.params[place]):
                continue  # fake gradients have no numbers to read either
            param = self.params[place]
            if place not in self._released:
                self._released[place] = Released.of(param)
            try:
                param.grad = self._released[place]
            except RuntimeError:  # the parameter is of another dtype or on another device now
                param.grad = self._released[place] = Released.of(param)

    def unrelease(self) -> None:
        """Removes the stand-ins of released gradients."""
        for place, released in self._released.items():
            if self.params[place].grad is released:
                self.params[place].grad = None

    def is_of(self, groups: Sequence[Mapping[str, Any]]) -> bool:
        """Whether the groups still have the same parameters."""
        now = [p for group in groups for p in group["params"]]
        return len(now) == len(self.params) and all(a is b for a, b in zip(now, self.params, strict=True))

    def named(self, places: Iterable[int]) -> list[str]:
        """The names of the parameters with these indices."""
        return [self.names[i] for i in places]

    @property
    def largest(self) -> int:
        """The bytes of the largest gradient that is freed inside the backward pass."""
        return max((self.sizes[i] for i in self.chosen), default=0)


def _chosen(names: Sequence[str], only: Sequence[str] | None) -> Collection[int]:
    """The indices of the names that one of the patterns matches; TensorError for a pattern without a match."""
    if only is None:
        return range(len(names))
    for pattern in only:
        if not any(fnmatchcase(name, pattern) for name in names):
            raise TensorError(f"only={pattern!r} matches no parameter{did_you_mean(pattern, names)}")
    return frozenset(i for i, name in enumerate(names) if any(fnmatchcase(name, pattern) for pattern in only))


def patterns_of(only: Any) -> list[str] | None:
    """The patterns of `only`, one or several; HyperError where it is no pattern."""
    if only is None:
        return None
    patterns = [only] if isinstance(only, str) else [*only] if isinstance(only, Iterable) else [only]
    if not patterns or not all(isinstance(pattern, str) for pattern in patterns):
        raise HyperError(f"only={only!r} must be a pattern of parameter names, such as 'layers.*', or a list of these")
    return patterns


def parameters_of(model: Any) -> tuple[Any, dict[int, str]]:
    """The parameters for an optimizer, and their names by identity, from a model or any argument of torch.optim."""
    if isinstance(model, nn.Module):
        named = [*model.named_parameters()]
        return [p for _, p in named], {id(p): name for name, p in named}
    if isinstance(model, Tensor):
        raise TensorError("the parameters must be a model or an iterable of tensors, not one tensor: give it in a list")
    entries = [*model]
    pairs = [pair for entry in entries for pair in _pairs(entry)]
    return entries, {id(p): name for name, p in pairs}


def _pairs(entry: Any) -> Iterable[tuple[str, Tensor]]:
    """The names that an entry of an iterable of parameters gives: a pair, or a group of pairs."""
    if isinstance(entry, tuple) and len(entry) == 2 and isinstance(entry[0], str):
        return [entry]
    if not isinstance(entry, dict) or isinstance(entry.get("params"), Tensor):
        return []
    entry["params"] = [*entry["params"]]
    members = entry["params"]
    names = entry.get("param_names")
    if names is not None:
        return zip(names, members, strict=True)
    return [pair for pair in members if isinstance(pair, tuple) and len(pair) == 2 and isinstance(pair[0], str)]


class Released(Tensor):
    """The stand-in for a gradient that was used inside the backward pass and freed; it has no memory."""

    @staticmethod
    def of(param: Tensor) -> Released:
        """The stand-in for a parameter's gradient."""
        with torch.no_grad():
            nothing = torch.zeros((), dtype=param.dtype, device=param.device)
            return nothing.expand(param.shape).as_subclass(Released)

    @classmethod
    def __torch_function__(cls, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Raises RulecError for every operation."""
        raise RulecError(
            f"{getattr(function, '__name__', 'an operation')} needs a gradient that was used inside the backward pass "
            f"and freed: change gradients with Tensor.register_hook, clip them with max_grad_norm= and opt.measure(), "
            f"or give EagerUpdate only the parameters whose gradients nobody needs (only=)"
        )

    def __repr__(self, **how: Any) -> str:  # type: ignore[override]
        return "<a gradient that was used inside the backward pass and freed>"


@dataclass(frozen=True)
class Report:
    """The last step of an eager optimizer.

    Numbers of parameters: `fired` were updated inside the backward pass, `deferred` in `step()`; `untouched` had no
    gradient, and of `dropped` the update was given up, for an infinite gradient. Bytes: `bytes_freed` of gradients
    freed inside the backward pass, `peak_gradient_bytes` of all gradients at the fullest time, `largest_gradient_bytes`
    of the largest gradient, and `journal_bytes` of parameters and states kept for a rollback. `launches` is the number
    of launches of parameters: small parameters share one.
    """

    fired: int = 0
    deferred: int = 0
    untouched: int = 0
    dropped: int = 0
    launches: int = 0
    bytes_freed: int = 0
    peak_gradient_bytes: int = 0
    largest_gradient_bytes: int = 0
    journal_bytes: int = 0

    def __str__(self) -> str:
        rows = [
            ("fired", f"{self.fired} parameters, in {self.launches} launches"),
            ("deferred", f"{self.deferred}"),
            ("untouched", f"{self.untouched}"),
            *([("dropped", f"{self.dropped}")] if self.dropped else []),
            ("gradients freed", bytes_in_words(self.bytes_freed)),
            ("gradients at most", bytes_in_words(self.peak_gradient_bytes)),
            ("largest gradient", bytes_in_words(self.largest_gradient_bytes)),
            *([("kept for rollback", bytes_in_words(self.journal_bytes))] if self.journal_bytes else []),
        ]
        width = max(len(head) for head, _ in rows)
        return "\n".join(f"{head:{width}}  {text}" for head, text in rows)


class GradientBytes:
    """Bytes of the gradients that are held, by parameter index; `sizes` are the bytes of each.

    A gradient is held from its first arrival until it is freed. Other memory, such as a tile, is `lent`.
    """

    def __init__(self, sizes: Sequence[int]) -> None:
        self._sizes = sizes
        self._held: set[int] = set()
        self._mutex = Lock()  # a worker on the host lets gradients go
        self.live = self.peak = self.largest = self.freed = 0

    def arrive(self, place: int) -> None:
        """Counts a gradient that arrived, or got another contribution."""
        with self._mutex:
            if place in self._held:
                return
            self._held.add(place)
            size = self._sizes[place]
            self.live += size
            self.largest = max(self.largest, size)
            self.peak = max(self.peak, self.live)

    def lend(self, size: int) -> None:
        """Counts `size` bytes of a gradient that were held for a moment, beside the other held ones."""
        self.largest = max(self.largest, size)
        self.peak = max(self.peak, self.live + size)

    def leave(self, places: Iterable[int], inside: bool = True) -> None:
        """Counts gradients that are gone; where `inside` the backward pass, they count as freed."""
        with self._mutex:
            for place in places:
                size = self._sizes[place]
                if place in self._held:
                    self._held.remove(place)
                    self.live -= size
                self.freed += size * inside
