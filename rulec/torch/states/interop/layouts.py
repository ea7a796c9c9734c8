"""The layout of another library: the rules it computes, and their groups and states there."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple, Protocol

from torch import Tensor

from rulec.formats import Format
from rulec.torch.groups.entries import GroupRule
from rulec.torch.states.interop.state import HeldState


class Numbers(NamedTuple):
    """A group's hyper-parameters by the rule's names, and `weight_decay`, which may be of a transform."""

    hyper: Mapping[str, float]
    weight_decay: float


class Layout(Protocol):
    """A library's layout. `rules` are the keys of the rules that it computes."""

    @property
    def rules(self) -> tuple[str, ...]: ...

    def group(self, rule: str, group_rule: GroupRule, numbers: Numbers) -> dict[str, Any]:
        """The keys of a group there. StateMismatch where the library cannot compute the same with these numbers."""

    def formats(self, rule: str, states: Mapping[str, HeldState]) -> dict[str, Format]:
        """The formats there of a parameter's states, by the rule's names; the others are floats."""

    def state(
        self, rule: str, states: Mapping[str, HeldState], formats: Mapping[str, Format], names: Mapping[str, str],
        steps: int, param: Tensor,
    ) -> dict[str, Any]:  # fmt: skip
        """A parameter's state there, in these formats. `names` are torch's names of the states."""
