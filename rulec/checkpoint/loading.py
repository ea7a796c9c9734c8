"""What a run goes on with from a checkpoint: everything is checked before the run sees any of it."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

from rulec.checkpoint.content import Checkpoint, Leaf, Parameter, Run, check_apart, levels, meaning
from rulec.checkpoint.convert import decoded, reweighed
from rulec.checkpoint.reading import read
from rulec.checkpoint.tensors import Stored
from rulec.compiler.foreseen import decide
from rulec.compiler.layout import scale_name
from rulec.compiler.view import view_of
from rulec.compiler.weights import is_part
from rulec.errors import StateMismatch
from rulec.language.rule_data import sees_shape
from rulec.language.source import did_you_mean


@dataclass(frozen=True)
class Loaded:
    """The saved parameters of a run's leaves, in their order, each with the states of the run's rule alone.

    `numbers` has one value for each of the run's groups, or one for the model, by the state's name. `group_steps` and
    `model_steps` are how many steps these have taken, empty where the file has no numbers of theirs. `values` are the
    parameters themselves, where they were asked for.
    """

    parameters: Sequence[Parameter]
    numbers: Mapping[str, Sequence[float]]
    group_steps: Sequence[int]
    model_steps: Sequence[int]
    values: Sequence[Stored] = ()

    @property
    def begun(self) -> bool:
        """Whether a parameter had been updated when the file was saved."""
        return any(p.begun for p in self.parameters)


def load(
    run: Run, file: str | Path, groups: int, names: Names = None, axes: Axes = None, rule_may_differ: bool = False,
    parameters: bool = False,
) -> Loaded:  # fmt: skip
    """The content of a file for a run of `groups` groups, with `parameters` their values too.

    StateMismatch, in one sentence, where the file belongs to other parameters or to another rule (which
    `rule_may_differ` allows), where random numbers would be other ones, and where a state or value is missing.
    """
    checkpoint, leaves = read(file), run.leaves()
    check_apart([leaf.name for leaf in leaves])
    shapes = {leaf.name: leaf.shape for leaf in leaves}
    saved = matched(file, checkpoint.parameters, shapes, names, axes, {leaf.name: leaf.roles for leaf in leaves})
    for p, leaf in zip(saved, leaves, strict=True):
        if not rule_may_differ:
            _check_rule(file, p, leaf)
        if leaf.name in (axes or {}) and sees_shape(leaf.rule):
            raise StateMismatch(
                f"axes= turns {leaf.name}, and {leaf.rule.name} treats its rows and columns differently: only "
                f"states of rules that treat all elements alike can be turned"
            )
    if checkpoint.seed is not None and any(leaf.random for leaf in leaves):
        _check_random(file, checkpoint, saved, leaves, run.seed)
    level_of = levels(leaves)
    _check_numbers(file, checkpoint, saved, level_of)
    numbers, steps = _of_groups(file, checkpoint, saved, leaves, groups, level_of)
    of_model = {name: [value] for name, value in checkpoint.model_numbers.items() if level_of.get(name) == "model"}
    narrowed = [_narrowed(file, p, leaf) for p, leaf in zip(saved, leaves, strict=True)]
    saved = [
        reweighed(p, leaf, partial(run.value, place), parameters)
        for place, (p, leaf) in enumerate(zip(narrowed, leaves, strict=True))
    ]
    return Loaded(
        saved, numbers | of_model, steps,
        [checkpoint.model_steps] if of_model else [], _values(file, saved) if parameters else [],
    )  # fmt: skip


def load_values(
    file: str | Path, shapes: Shapes, names: Names = None, axes: Axes = None, roles: Roles | None = None
) -> list[Stored]:  # fmt: skip
    """The parameters themselves, in the order of `shapes`; StateMismatch where they were not saved."""
    return _values(file, matched(file, read(file).parameters, shapes, names, axes, roles))


def _values(file: str | Path, saved: Sequence[Parameter]) -> list[Stored]:
    for p in saved:
        if p.value is None:
            raise StateMismatch(f"{file} has no value of {p.name}: it was saved without parameters=True")
    return [p.value for p in saved if p.value is not None]


# Rules and random numbers


def _check_rule(file: str | Path, saved: Parameter, leaf: Leaf) -> None:
    if saved.meaning == meaning(leaf.rule):
        return
    before = saved.rule if saved.rule != leaf.rule.name else f"another rule called {saved.rule}"
    raise StateMismatch(
        f"{leaf.name} was updated by {before} when {file} was saved, and {leaf.rule.name} computes something else: go "
        f"on with the rule that it was saved with, or give rule_may_differ=True"
    )


def _check_random(
    file: str | Path, checkpoint: Checkpoint, saved: Sequence[Parameter], leaves: Sequence[Leaf], seed: int
) -> None:
    """A tensor's random numbers follow from the seed and from its number."""
    for p, leaf in zip(saved, leaves, strict=True):
        if leaf.random and p.number != leaf.number:
            raise StateMismatch(
                f"{leaf.name} is at another place among the parameters than in {file}, and would draw other random "
                f"numbers: give the parameters in the order that they were saved in"
            )
    if checkpoint.seed != seed:
        raise StateMismatch(f"{file} was saved with seed={checkpoint.seed}, and the seed is {seed} here: give the same")


# States


def _narrowed(file: str | Path, saved: Parameter, leaf: Leaf) -> Parameter:
    """The parameter with the states of the leaf's rule; StateMismatch where it was updated and lacks one."""
    facts = {**leaf.static, **view_of(leaf.rule, leaf.shape, leaf.static).facts}
    conditions = {name: s.condition for name, s in leaf.rule.state.items() if s.per not in ("group", "model")}
    names = [
        name for name, condition in conditions.items() if condition is None or decide(condition, facts) is not False
    ]
    for name in names:
        if saved.begun and name not in saved.states:
            known = ", ".join(saved.states) or "none"
            raise StateMismatch(f"{file} has no {name} of {saved.name} (it has {known}): it is of another rule")
    kept = [n for name in names for n in (name, scale_name(name)) if n in saved.states]
    kept += filter(is_part, saved.states)
    return replace(saved, states={name: saved.states[name] for name in kept})


def _check_numbers(
    file: str | Path, checkpoint: Checkpoint, saved: Sequence[Parameter], level_of: Mapping[str, str]
) -> None:
    """StateMismatch where parameters were updated and a number of their groups or the model is missing."""
    known = {"group": checkpoint.group_numbers, "model": checkpoint.model_numbers}
    for name, level in level_of.items():
        if name not in known[level] and any(p.begun for p in saved):
            raise StateMismatch(f"{file} has no {name}, which is kept per {level}: it is of another rule")


def _of_groups(
    file: str | Path, checkpoint: Checkpoint, saved: Sequence[Parameter], leaves: Sequence[Leaf], count: int,
    level_of: Mapping[str, str],
) -> tuple[dict[str, list[float]], list[int]]:  # fmt: skip
    """The numbers and steps of the run's groups, from the groups that their parameters were in when they were saved.

    StateMismatch where the saved groups of one of the run's disagree.
    """
    numbers = {name: values for name, values in checkpoint.group_numbers.items() if level_of.get(name) == "group"}
    if not numbers:
        return {}, []
    before = [[p.group for p, leaf in zip(saved, leaves, strict=True) if leaf.group == i] for i in range(count)]

    def agreed(title: str, saved: Sequence[float]) -> list[float]:
        return [_agreed(file, title, [saved[group] for group in groups] or saved) for groups in before]

    values = {name: agreed(name, saved_values) for name, saved_values in numbers.items()}
    return values, [*map(int, agreed("the number of steps", checkpoint.group_steps))]


def _agreed(file: str | Path, title: str, values: Iterable[float]) -> float:
    different = list({repr(value): value for value in values}.values())
    if len(different) != 1:
        listed = " and ".join(f"{value:g}" for value in different[:2])
        raise StateMismatch(
            f"{title} is {listed} in groups of {file} that are one group here: give the parameters in the same groups"
        )
    return different[0]


#: From the file's names to the run's: a mapping of those that differ, or a function.
Names = Mapping[str, str] | Callable[[str], str] | None

#: Of parameters, by the run's names, that have their axes in another order: for each axis of the run that in the file.
Axes = Mapping[str, Sequence[int]] | None

#: The names and shapes of a run's parameters.
Shapes = Mapping[str, tuple[int, ...]]

#: The roles of the axes of a run's parameters by name, as in `Leaf.roles`.
Roles = Mapping[str, tuple[str, ...] | None]


def matched(
    file: str | Path, saved: Sequence[Parameter], shapes: Shapes, names: Names = None, axes: Axes = None,
    roles: Roles | None = None,
) -> list[Parameter]:  # fmt: skip
    """The saved parameters in the order of the run, with its names and axes.

    StateMismatch, in one sentence, where a parameter is missing or left over, or has another shape.
    """
    saved = _turned(_renamed(file, saved, names), axes or {})
    by_name = {p.name: p for p in saved}
    missing = [name for name in shapes if name not in by_name]
    extra = [name for name in by_name if name not in shapes]
    if missing or extra:
        raise StateMismatch(_other_names(file, saved, shapes, missing, extra))
    for name, words in (roles or {}).items():
        if name not in (axes or {}):
            _check_roles(file, by_name[name], words)
    for name, shape in shapes.items():
        before = by_name[name].shape
        if before != shape:
            turned = sorted(before) == sorted(shape)
            advice = (
                "give axes= if its axes are in another order" if turned else "give the model that it was saved from"
            )
            raise StateMismatch(f"{name} has shape {shape} here, and {before} in {file}: {advice}")
    return [by_name[name] for name in shapes]


def with_slashes(names: Names) -> Names:
    """The same, giving names with `/` where they have `.`, as parameters are called in torch and MLX."""
    if isinstance(names, Mapping):
        return {before: name.replace(".", "/") for before, name in names.items()}
    return names and (lambda before: names(before).replace(".", "/"))


def _check_roles(file: str | Path, saved: Parameter, roles: tuple[str, ...] | None) -> None:
    """StateMismatch where a matrix may lie otherwise in a file than here, which its shape does not always tell."""
    if roles is None and saved.roles:
        raise StateMismatch(
            f"{saved.saved_as} of {file} was saved with roles of its axes, as (outputs, inputs): give axes= for "
            f"{saved.name} too"
        )
    if roles and not saved.roles and saved.saved_as.rpartition("/")[2] == "kernel":
        raise StateMismatch(
            f"{saved.saved_as} of {file} was saved without roles of its axes, and {saved.name} has roles here: load it "
            f"without axes=, and save it with them"
        )


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
    saved = decoded(saved)
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
