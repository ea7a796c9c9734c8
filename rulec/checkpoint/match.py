"""The saved parameter for each parameter of a run: names may differ, and axes may be in another order."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from rulec.checkpoint.content import Parameter
from rulec.errors import StateMismatch
from rulec.language.source import did_you_mean

#: From the file's names to the run's: a mapping of those that differ, or a function.
Names = Mapping[str, str] | Callable[[str], str] | None

#: Of parameters, by the run's names, that have their axes in another order: for each axis of the run that in the file.
Axes = Mapping[str, Sequence[int]] | None

#: The names and shapes of a run's parameters.
Shapes = Mapping[str, tuple[int, ...]]


def matched(
    file: str | Path, saved: Sequence[Parameter], shapes: Shapes, names: Names = None, axes: Axes = None
) -> list[Parameter]:
    """The saved parameters in the order of the run, with its names and axes.

    StateMismatch, in one sentence, where a parameter is missing or left over, or has another shape.
    """
    saved = _turned(_renamed(file, saved, names), axes or {})
    by_name = {p.name: p for p in saved}
    missing = [name for name in shapes if name not in by_name]
    extra = [name for name in by_name if name not in shapes]
    if missing or extra:
        raise StateMismatch(_other_names(file, saved, shapes, missing, extra))
    for name, shape in shapes.items():
        before = by_name[name].shape
        if before != shape:
            turned = sorted(before) == sorted(shape)
            advice = (
                "give axes= if its axes are in another order" if turned else "give the model that it was saved from"
            )
            raise StateMismatch(f"{name} has shape {shape} here, and {before} in {file}: {advice}")
    return [by_name[name] for name in shapes]


def _renamed(file: str | Path, saved: Sequence[Parameter], names: Names) -> Sequence[Parameter]:
    if names is None:
        return saved
    before = [p.name for p in saved]
    if isinstance(names, Mapping):
        for name in names:
            if name not in before:
                raise StateMismatch(
                    f"names= has {name!r}, and {file} has no such parameter{did_you_mean(name, before)}"
                )
        after = [names.get(name, name) for name in before]
    else:
        after = [str(names(name)) for name in before]
    if len({*after}) < len(after):
        raise StateMismatch(f"names= gives two parameters of {file} the same name: each needs one of its own")
    return [replace(p, name=name) for p, name in zip(saved, after, strict=True)]


def _turned(saved: Sequence[Parameter], axes: Mapping[str, Sequence[int]]) -> Sequence[Parameter]:
    """The parameters, some of them and of their states with the axes in another order."""
    known = [p.name for p in saved]
    for name in axes:
        if name not in known:
            raise StateMismatch(f"axes= has {name!r}, which is no parameter{did_you_mean(name, known)}")
    return [_turn(p, axes[p.name]) if p.name in axes else p for p in saved]


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
    file: str | Path, saved: Sequence[Parameter], shapes: Shapes, missing: Sequence[str], extra: Sequence[str]
) -> str:
    if [p.shape for p in saved] == [*shapes.values()] and missing and extra:
        return (
            f"{file} has {extra[0]} where there is {missing[0]} here: the shapes agree in their order, so if names "
            f"alone differ give names=, a mapping or a function from the file's names to these"
        )
    parts = [f"has nothing for {missing[0]}{_more(missing)}"] if missing else []
    parts += [f"has {extra[0]}{_more(extra)}, which is no parameter here"] if extra else []
    return f"{file} {' and '.join(parts)}: give the parameters it was saved with, or names= where they are renamed"


def _more(names: Sequence[str]) -> str:
    return f" and {len(names) - 1} more" if len(names) > 1 else ""
