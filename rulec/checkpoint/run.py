"""A run of training, as a checkpoint sees it: the four methods that an adapter has, and saving by them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from rulec.checkpoint.content import Checkpoint, Parameter, write
from rulec.checkpoint.meaning import meaning
from rulec.checkpoint.tensors import Stored
from rulec.language.rule import Rule
from rulec.language.traits import draws


@dataclass(frozen=True)
class Leaf:
    """A parameter of a run: its path, shape and dtype, the rule that updates it, and the index of its group.

    Random numbers follow from `number`, the parameter's place among all.
    """

    name: str
    shape: tuple[int, ...]
    dtype: str
    rule: Rule
    number: int
    group: int = 0


@dataclass(frozen=True)
class Shared:
    """What belongs to no parameter: the hyper-parameters of each group, and the numbers of groups and the model.

    `numbers` has one value for each group, or one for the model, by the state's name; `group_steps` and `model_steps`
    are how many steps these have taken.
    """

    hyper: Sequence[Mapping[str, float]]
    numbers: Mapping[str, Sequence[float]]
    group_steps: Sequence[int]
    model_steps: int


class Run(Protocol):
    """Parameters with the states of their rules, in any framework."""

    @property
    def seed(self) -> int:
        """The seed of random numbers."""

    def leaves(self) -> Sequence[Leaf]:
        """The parameters that have a rule, in the run's order."""

    def states(self, place: int) -> tuple[int, Mapping[str, Stored]]:
        """The number of updates of the leaf at a place, and its states by name; none before the first update."""

    def value(self, place: int) -> Stored:
        """The parameter itself."""

    def shared(self) -> Shared:
        """Hyper-parameters, and the numbers of groups and the model."""


def save(run: Run, file: str | Path, parameters: bool) -> None:
    """Writes the states of a run, with `parameters` these too. StateMismatch where two leaves have one name."""
    leaves, shared = run.leaves(), run.shared()
    described = [
        Parameter(
            leaf.name, leaf.shape, leaf.dtype, leaf.rule.name, meaning(leaf.rule), leaf.number, leaf.group,
            *run.states(place), run.value(place) if parameters else None,
        )
        for place, leaf in enumerate(leaves)
    ]  # fmt: skip
    level_of = levels(leaves)
    numbers: dict[str | None, dict[str, Sequence[float]]] = {"group": {}, "model": {}, None: {}}
    for name, values in shared.numbers.items():
        numbers[level_of.get(name)][name] = values
    content = Checkpoint(
        described, shared.hyper, numbers["group"], shared.group_steps,
        {name: values[0] for name, values in numbers["model"].items()}, shared.model_steps,
        run.seed if any(draws(leaf.rule) for leaf in leaves) else None,
    )  # fmt: skip
    write(file, content)


def levels(leaves: Sequence[Leaf]) -> dict[str, str]:
    """The states that are one number for a group or for the model, with the level: `group` or `model`."""
    kept = {name: state.per for leaf in leaves for name, state in leaf.rule.state.items()}
    return {name: level for name, level in kept.items() if level in ("group", "model")}
