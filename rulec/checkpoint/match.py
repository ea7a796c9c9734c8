"""Which parameter of a checkpoint is which of ours, and whether its states may go on here."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from rulec.checkpoint.content import Checkpoint, Parameter
from rulec.checkpoint.meaning import meaning
from rulec.errors import StateMismatch
from rulec.language.rule import Rule
from rulec.language.source import did_you_mean
from rulec.language.traits import draws, sees_shape

#: From the file's names to ours: a mapping of those that differ, or a function.
Names = Mapping[str, str] | Callable[[str], str] | None

#: Of parameters, by our names, that have their axes in another order here: for each axis here that in the file.
Axes = Mapping[str, Sequence[int]] | None


@dataclass(frozen=True)
class Own:
    """A parameter that a state is loaded for, the rule that it goes to, and the number of its random numbers."""

    name: str
    shape: tuple[int, ...]
    rule: Rule
    number: int


def matched(
    file: str | Path, checkpoint: Checkpoint, own: Sequence[Own], names: Names = None, axes: Axes = None,
    rule_may_differ: bool = False, seed: int = 0,
) -> tuple[Checkpoint, list[int]]:  # fmt: skip
    """The checkpoint with names and axes as here, and for each of our parameters the place of its own in there.

    StateMismatch, in one sentence, where a parameter is missing or left over, has another shape or is updated by
    another rule, and where random numbers would be other ones.
    """
    checkpoint, places = paired(file, checkpoint, [(p.name, p.shape) for p in own], names, axes)
    for place, ours in zip(places, own, strict=True):
        if not rule_may_differ:
            _check_rule(file, checkpoint.parameters[place], ours)
        if ours.name in (axes or {}) and sees_shape(ours.rule):
            raise StateMismatch(
                f"axes= turns {ours.name}, and {ours.rule.name} treats its rows and columns differently: only "
                f"states of rules that treat all elements alike can be turned"
            )
    if any(draws(p.rule) for p in own):
        _check_random(file, checkpoint, places, own, seed)
    return checkpoint, places


def paired(
    file: str | Path, checkpoint: Checkpoint, own: Sequence[tuple[str, tuple[int, ...]]], names: Names = None,
    axes: Axes = None,
) -> tuple[Checkpoint, list[int]]:  # fmt: skip
    """The same for parameters that are given by name and shape, whatever their rules."""
    checkpoint = _turned(_renamed(file, checkpoint, names), axes or {})
    place_of = {p.name: place for place, p in enumerate(checkpoint.parameters)}
    missing = [name for name, _ in own if name not in place_of]
    extra = [name for name in place_of if name not in {name for name, _ in own}]
    if missing or extra:
        raise StateMismatch(_other_names(file, checkpoint, own, missing, extra))
    for name, shape in own:
        saved = checkpoint.parameters[place_of[name]]
        if saved.shape != shape:
            turned = sorted(saved.shape) == sorted(shape)
            advice = (
                "give axes= if its axes are in another order" if turned else "give the model that it was saved from"
            )
            raise StateMismatch(f"{name} has shape {shape} here, and {saved.shape} in {file}: {advice}")
    return checkpoint, [place_of[name] for name, _ in own]


def _renamed(file: str | Path, checkpoint: Checkpoint, names: Names) -> Checkpoint:
    """The checkpoint with our names for its parameters."""
    if names is None:
        return checkpoint
    saved = [p.name for p in checkpoint.parameters]
    if isinstance(names, Mapping):
        for name in names:
            if name not in saved:
                raise StateMismatch(f"names= has {name!r}, and {file} has no such parameter{did_you_mean(name, saved)}")
        ours = [names.get(name, name) for name in saved]
    else:
        ours = [str(names(name)) for name in saved]
    if len({*ours}) < len(ours):
        raise StateMismatch(f"names= gives two parameters of {file} the same name: each needs one of its own")
    renamed = [replace(p, name=name) for p, name in zip(checkpoint.parameters, ours, strict=True)]
    return replace(checkpoint, parameters=renamed)


def _turned(checkpoint: Checkpoint, axes: Mapping[str, Sequence[int]]) -> Checkpoint:
    """The checkpoint with the axes of some parameters, and of their states, in another order."""
    known = [p.name for p in checkpoint.parameters]
    for name in axes:
        if name not in known:
            raise StateMismatch(f"axes= has {name!r}, which is no parameter{did_you_mean(name, known)}")
    turned = [_turn(p, axes[p.name]) if p.name in axes else p for p in checkpoint.parameters]
    return replace(checkpoint, parameters=turned)


def _turn(saved: Parameter, order: Sequence[int]) -> Parameter:
    if sorted(order) != [*range(len(saved.shape))]:
        raise StateMismatch(
            f"axes= gives {tuple(order)} for {saved.name} of shape {saved.shape}: give each of its axes once, counted "
            f"from 0"
        )
    states = {k: v.turned(order) if v.shape == saved.shape else v for k, v in saved.states.items()}
    value = None if saved.value is None else saved.value.turned(order)
    return replace(saved, shape=tuple(saved.shape[axis] for axis in order), states=states, value=value)


def _other_names(
    file: str | Path, checkpoint: Checkpoint, own: Sequence[tuple[str, tuple[int, ...]]], missing: Sequence[str],
    extra: Sequence[str],
) -> str:  # fmt: skip
    alike = [p.shape for p in checkpoint.parameters] == [shape for _, shape in own]
    if alike and missing and extra:
        return (
            f"{file} has {extra[0]} where there is {missing[0]} here: the shapes agree in their order, so if names "
            f"alone differ give names=, a mapping or a function from the file's names to these"
        )
    parts = [f"has nothing for {names[0]}{_more(names)}" for names in [missing] if names]
    parts += [f"has {names[0]}{_more(names)}, which is no parameter here" for names in [extra] if names]
    return f"{file} {' and '.join(parts)}: give the parameters it was saved with, or names= where they are renamed"


def _more(names: Sequence[str]) -> str:
    return f" and {len(names) - 1} more" if len(names) > 1 else ""


def _check_rule(file: str | Path, saved: Parameter, own: Own) -> None:
    if saved.meaning == meaning(own.rule):
        return
    before = saved.rule if saved.rule != own.rule.name else f"another rule called {saved.rule}"
    raise StateMismatch(
        f"{own.name} was updated by {before} when {file} was saved, and {own.rule.name} computes something else: go on "
        f"with the rule that it was saved with, or give rule_may_differ=True"
    )


def _check_random(
    file: str | Path, checkpoint: Checkpoint, places: Sequence[int], own: Sequence[Own], seed: int
) -> None:
    """A tensor's random numbers follow from the seed and from its number."""
    numbered = [checkpoint.parameters[place].number for place in places]
    moved = next(
        (p.name for p, number in zip(own, numbered, strict=True) if draws(p.rule) and p.number != number), None
    )
    if moved is not None:
        raise StateMismatch(
            f"{moved} is at another place among the parameters than in {file}, and would draw other random numbers: "
            f"give the parameters in the order that they were saved in"
        )
    if checkpoint.seed is not None and checkpoint.seed != seed:
        raise StateMismatch(f"{file} was saved with seed={checkpoint.seed}, and the seed is {seed} here: give the same")


# Numbers of groups


def group_numbers(
    file: str | Path, checkpoint: Checkpoint, places: Sequence[int], groups: Sequence[int], count: int
) -> dict[str, list[float]]:
    """What each of our groups remembers, from the groups that its parameters were in; `groups` are ours of each.

    StateMismatch where those of one of our groups disagree.
    """
    found = {}
    for state, saved in checkpoint.group_numbers.items():
        found[state] = [
            _agreed(file, state, [saved[checkpoint.parameters[p].group] for p in own] or saved)
            for own in _by_group(places, groups, count)
        ]
    return found


def group_steps(
    file: str | Path, checkpoint: Checkpoint, places: Sequence[int], groups: Sequence[int], count: int
) -> list[int]:
    """How many steps each of our groups has taken, found in the same way."""
    saved = checkpoint.group_steps
    return [
        int(_agreed(file, "the number of steps", [saved[checkpoint.parameters[p].group] for p in own] or saved))
        for own in _by_group(places, groups, count)
    ]


def _by_group(places: Sequence[int], groups: Sequence[int], count: int) -> list[list[int]]:
    return [[p for p, group in zip(places, groups, strict=True) if group == own] for own in range(count)]


def _agreed(file: str | Path, what: str, values: Iterable[float]) -> float:
    different = list({repr(value): value for value in values}.values())
    if len(different) != 1:
        listed = " and ".join(f"{value:g}" for value in different[:2])
        raise StateMismatch(
            f"{what} is {listed} in groups of {file} that are one group here: give the parameters in the same groups"
        )
    return different[0]
