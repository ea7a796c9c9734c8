"""A step that is taken layer by layer, while it is open and where it broke off."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from rulec.array.store import GradStore, copied
from rulec.errors import HyperError, PartialUpdate, TensorError
from rulec.runtime.buckets.scalar_table import Numbers


class PartialStep:
    """The arrays updated by a step so far, and the gradients that it still expects.

    `table` are the hyper-parameters, read once for the whole step. `uses` says of layers how many gradients they get;
    the sum updates them. Where `journal`, `old` keeps the updated arrays and states as they were before.
    """

    def __init__(self, names: Sequence[str], table: Numbers, journal: bool, uses: Mapping[Any, int]) -> None:
        self.names, self.table, self.journal = names, table, journal
        self.left = {str(layer): count for layer, count in uses.items()}
        for layer, count in self.left.items():
            if not any(name == layer or name.startswith(f"{layer}/") for name in names):
                raise TensorError(f"uses has {layer}, which is no layer here: give keys or indices of the parameters")
            if type(count) is not int or count < 1:
                raise HyperError(f"uses of {layer} must be a whole number of gradients, at least 1, not {count!r}")
        self.updated: dict[str, None] = {}
        self.sums = GradStore()
        self.waiting: dict[str, tuple[dict[str, None], Mapping[str, Any]]] = {}
        self.old: dict[str, dict[str, Any]] = {}

    @property
    def pending(self) -> list[str]:
        """The arrays that were not updated."""
        return [name for name in self.names if name not in self.updated]

    def gather(self, layer: str, leaves: dict[str, Any], inputs: Mapping[str, Any]) -> dict[str, Any]:
        """The gradients for an update now: these, or the sum of several with the last; before the last, none."""
        if layer not in self.left:
            return leaves
        self.left[layer] -= 1
        if not self.left[layer] and layer not in self.waiting:
            return leaves
        self.sums.extend(leaves)
        names, _ = self.waiting.get(layer, ({}, {}))
        self.waiting[layer] = {**names, **dict.fromkeys(leaves)}, copied(inputs) if self.left[layer] else inputs
        return {} if self.left[layer] else self.take(layer)[0]

    def take(self, layer: str) -> tuple[dict[str, Any], Mapping[str, Any]]:
        """The sums of a layer's gradients, and the inputs that came with the last."""
        names, inputs = self.waiting.pop(layer)
        return {name: self.sums.pop(name) for name in names}, inputs

    def check_new(self, names: Iterable[str]) -> None:
        """TensorError where one of these was updated in this step already."""
        again = self.updated.keys() & set(names)
        if again:
            raise TensorError(f"{min(again)} is updated twice in one step: give it its whole gradient once")

    def broken(self) -> PartialUpdate:
        """The error for calls that this broken step is in the way of."""
        undo = "rollback()" if self.journal else "partial(journal=True) keeps what rollback() needs"
        return PartialUpdate(
            f"a step broke off after {_listed(self.updated)} and before {_listed(self.pending)} were updated: call "
            f"accept_partial() to go on from here, or go back to before it ({undo})",
            self.updated, self.pending,
        )  # fmt: skip


def _listed(names: Iterable[str]) -> str:
    listed = list(names)
    return ", ".join(listed[:4]) + (f" and {len(listed) - 4} more" if len(listed) > 4 else "")
