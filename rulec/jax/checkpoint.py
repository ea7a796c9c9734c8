"""Checkpoints in the format of all frameworks: a state of `rulec.torch` goes on in JAX, and one of JAX there."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from rulec.checkpoint import Checkpoint, Own, Parameter, Stored, matched, meaning, read, write
from rulec.checkpoint.match import Axes, Names, group_numbers, group_steps, paired
from rulec.errors import RulecError, StateMismatch, TensorError
from rulec.jax.leaves import Tree, flat
from rulec.jax.machine import Machine, Settings, call, is_wide, machine
from rulec.jax.packing import Packed, packed, unpacked
from rulec.jax.plan import StepPlan
from rulec.jax.recipe import Given, Group, Rules, recipe
from rulec.jax.state import Fields, State
from rulec.jax.traced import is_traced
from rulec.jax.transform import options
from rulec.jax.values import Values
from rulec.language.node import Node
from rulec.language.rule import Rule
from rulec.language.seed import checked_seed
from rulec.language.traits import draws


def save(
    file: str | Path, rule: Rules, params: Any, state: Any, *, parameters: bool = False, seed: int = 0,
    tags: Mapping[str, Collection[str]] | None = None, **hyper: Given,
) -> None:  # fmt: skip
    """Writes a state, with `parameters` these too, as a safetensors file that every framework loads.

    `state` is what `rulec.jax.step` or a transformation of the rule returned, or a larger state of optax with that
    inside. Parameters are called by their paths in the tree. `seed` and `tags` are those that the state was made with;
    `hyper` is written for information. The file is there as a whole, or the one before it stays.

    Raises StateMismatch where the state is of another rule, TensorError for arrays of other processes.
    """
    own = _side(rule, hyper, tags, params, None)
    _, inner = _inner(state)
    _check_here([("the state", x) for x in jax.tree.leaves(inner)], "save")
    values, seed = own.values_of(inner), checked_seed(seed)
    _check_here(list(zip(own.tree.names, own.tree.arrays, strict=True)) if parameters else [], "save")
    write(file, _checkpoint(own, values, parameters, seed))


def load(
    file: str | Path, rule: Rules, params: Any, *, like: Any = None, names: Names = None, axes: Axes = None,
    rule_may_differ: bool = False, seed: int = 0, state_dtype: Any = None,
    tags: Mapping[str, Collection[str]] | None = None, **hyper: Given,
) -> Any:  # fmt: skip
    """The state in a file that `save` has written here, or in another framework.

    Without `like` it is what `rulec.jax.init` of these arguments gives, with the file's values. With it, a state such
    as `tx.init(params)`, it has that one's structure and dtypes. `names` is a mapping of the file's names to the paths
    here, or a function; `axes` gives for parameters, by their paths here, which axis of the file each of theirs is, as
    in `{"dense/kernel": (1, 0)}`. `rule_may_differ` takes the states of a rule with other equations, `seed` is that of
    the steps to come. Arrays get the sharding of their parameters; those that had not been updated when the file was
    saved are as `rulec.jax.init` makes them, whatever `like` has.

    StateMismatch where the file belongs to other parameters or another rule, or is damaged.
    """
    own = _side(rule, hyper, tags, params, state_dtype)
    checkpoint = read(file)
    wanted = [
        Own(own.names[place], tuple(own.tree.arrays[place].shape), found, place) for place, found in own.rules.items()
    ]
    checkpoint, found = matched(file, checkpoint, wanted, names, axes, rule_may_differ, checked_seed(seed))
    places = dict(zip(own.rules, found, strict=True))
    first = own.first(params)
    whole = first if like is None else like
    path, inner = _inner(whole)
    fresh = own.values_of(_inner(first)[1])
    loaded = _Loading(own, str(file), checkpoint, places, fresh).values(own.values_of(inner))
    made = own.fields_of(inner).packed(loaded, own.tree)
    return path(packed(made) if any(isinstance(field, Packed) for field in inner) else made)


def load_params(file: str | Path, params: Any, *, names: Names = None, axes: Axes = None) -> Any:
    """The parameters of a file that was saved with `parameters=True`, in the tree, dtypes and shardings of `params`."""
    tree, checkpoint = _real(params), read(file)
    own = [(name, tuple(array.shape)) for name, array in zip(_names(tree), tree.arrays, strict=True)]
    checkpoint, places = paired(file, checkpoint, own, names, axes)
    found = []
    for place, array in zip(places, tree.arrays, strict=True):
        saved = checkpoint.parameters[place]
        if saved.value is None:
            raise StateMismatch(f"{file} has no value of {saved.name}: it was saved without parameters=True")
        found.append(_array(saved.value, array, array))
    return tree.structure.unflatten(found)


# The side of JAX: a rule for a tree of parameters


@dataclass(frozen=True)
class _Side:
    machine: Machine
    tree: Tree
    plan: StepPlan
    hyper: Sequence[Group]

    @cached_property
    def rules(self) -> dict[int, Rule]:
        """The rule of each leaf that has one, by its place."""
        rules = iter(self.plan.rules)
        return {place: next(rules) for place, own in enumerate(self.plan.assigned) if own is not None}

    def group(self, place: int) -> int:
        """The group of a leaf."""
        own = self.plan.assigned[place]
        return 0 if own is None else own.group

    @cached_property
    def groups(self) -> list[int]:
        """The groups of the leaves that have a rule."""
        return [self.group(place) for place in self.rules]

    @cached_property
    def names(self) -> list[str]:
        """The leaves' paths."""
        return _names(self.tree)

    def first(self, params: Any) -> Any:
        """The state before the first step."""
        return call(self.machine.init, params, [group.numbers() for group in self.hyper])

    def values_of(self, state: Any) -> Values:
        """The values of a state, of each leaf apart."""
        plain = unpacked(state) if isinstance(state, State) else state
        return self.fields_of(state).unpacked(plain, self.tree, self.machine.recipe.title)

    def fields_of(self, state: Any) -> Fields:
        """The fields of a state, which a transformation may call otherwise than the rule, in the same order."""
        fields = self.machine.fields
        if not isinstance(state, State):
            return fields
        names: Sequence[str] = state._fields[1:]  # type: ignore[attr-defined]
        if len(names) != len(fields.every):
            raise StateMismatch(
                f"the state has {', '.join(names) or 'no states'}, and {self.machine.recipe.title} has "
                f"{', '.join(fields.every) or 'none'}: give the rule that it is of"
            )
        called = dict(zip(fields.every, names, strict=True))
        return Fields({n: called[n] for n in fields.arrays}, {n: called[n] for n in fields.numbers})


def _side(
    rule: Rules, hyper: Mapping[str, Given], tags: Mapping[str, Collection[str]] | None, params: Any,
    state_dtype: Any,
) -> _Side:  # fmt: skip
    made = recipe(rule, hyper, tags)
    found = machine(made, Settings(options(state_dtype, False, 0), (), is_wide()))
    tree = _real(params)
    plan = found.plan_of(tree, None, None, False)
    return _Side(found, tree, plan, made.groups)


def _real(params: Any) -> Tree:
    """The leaves of parameters, all of them real."""
    tree = flat(params, "the parameter")
    tree.check_real("files that other frameworks read have real ones")
    return tree


def _names(tree: Tree) -> list[str]:
    """The paths of a tree's leaves; of one that is a leaf itself its place."""
    return ["0"] if tree.names == ("the parameter",) else list(tree.names)


def _inner(state: Any) -> tuple[Callable[[Any], Any], Any]:
    """The one state of a rule inside a larger one, and what puts another in its place."""
    structure: Any
    leaves, structure = jax.tree.flatten(state, is_leaf=lambda x: isinstance(x, State))
    places = [i for i, leaf in enumerate(leaves) if isinstance(leaf, State)]
    if len(places) > 1:
        raise RulecError(
            f"there are {len(places)} states of rules in the state: save and load each by itself, in a file of its own"
        )
    if not places:
        return lambda new: new, state
    return lambda new: structure.unflatten([*leaves[: places[0]], new, *leaves[places[0] + 1 :]]), leaves[places[0]]


def _check_here(arrays: Sequence[tuple[str, Any]], verb: str) -> None:
    """TensorError for an array whose values are not at hand."""
    for name, array in arrays:
        if is_traced(array):
            raise TensorError(f"{name} is traced: {verb} outside of jit")
        if getattr(array, "is_deleted", bool)():
            raise TensorError(f"{name} was donated to a later step: {verb} what that step returned")
        if not getattr(array, "is_fully_addressable", True):
            raise TensorError(
                f"{name} is spread over several processes: gather it first, as with "
                f"jax.experimental.multihost_utils.process_allgather, or use Orbax"
            )


# What is saved


def _checkpoint(own: _Side, values: Values, parameters: bool, seed: int) -> Checkpoint:
    plan, count = own.plan, np.asarray(values.count)
    steps = np.broadcast_to(count, (len(own.names),)).tolist()
    arrays = own.tree.arrays
    described = [
        Parameter(
            own.names[place],
            tuple(arrays[place].shape),
            str(arrays[place].dtype),
            rule.name,
            meaning(rule),
            place,
            own.group(place),
            steps[place],
            _states(plan, values, place),
            _stored(arrays[place]) if parameters else None,
        )
        for place, rule in own.rules.items()
    ]
    levels = {name: level for name, level in plan.numbers.items() if level != "tensor"}
    number = {name: np.asarray(values.numbers[name], np.float64) for name in levels}
    updates = int(count.max(initial=0))
    return Checkpoint(
        described, [_plain(group) for group in own.hyper],
        {name: number[name].tolist() for name, level in levels.items() if level == "group"},
        [updates] * plan.groups,
        {name: float(number[name]) for name, level in levels.items() if level == "model"},
        updates, seed if any(draws(rule) for rule in plan.rules) else None,
    )  # fmt: skip


def _states(plan: StepPlan, values: Values, place: int) -> dict[str, Stored]:
    found = {name: _stored(arrays[place]) for name, arrays in values.arrays.items() if place in arrays}
    for name, level in plan.numbers.items():
        if level == "tensor" and place in plan.having[name]:
            found[name] = _stored(np.asarray(values.numbers[name])[plan.having[name].index(place)])
    return found


def _stored(array: Any) -> Stored:
    here = np.asarray(array)
    dtype = str(here.dtype)
    return Stored.of(here.view(np.uint16) if dtype == "bfloat16" else here, dtype)


def _plain(group: Group) -> dict[str, float]:
    """The hyper-parameters of a group that are numbers here and now."""
    given = {name: group.hyper.get(name, setting.default) for name, setting in group.settings.items()}
    known = {k: v for k, v in given.items() if not (v is None or callable(v) or is_traced(v) or isinstance(v, Node))}
    return {name: float(value) for name, value in known.items()}


# What is loaded


@dataclass(frozen=True)
class _Loading:
    """A checkpoint's values for our leaves; `places` are theirs in the checkpoint, by those in the tree.

    `fresh` has what leaves that were never updated begin with.
    """

    own: _Side
    file: str
    checkpoint: Checkpoint
    places: Mapping[int, int]
    fresh: Values

    def values(self, like: Values) -> Values:
        """They in the structure, dtypes and shardings of a state."""
        found = Values(self._count(like.count))
        for state, arrays in like.arrays.items():
            found.arrays[state] = {place: self._state(place, state, array) for place, array in arrays.items()}
        for state, numbers in like.numbers.items():
            found.numbers[state] = call(jnp.asarray, self._numbers(state, numbers).astype(numbers.dtype))
        return found

    def _saved(self, place: int) -> Parameter:
        return self.checkpoint.parameters[self.places[place]]

    def _count(self, first: Any) -> Any:
        steps = [self._saved(place).steps for place in self.places]
        plan, checkpoint = self.own.plan, self.checkpoint
        shared = {*plan.numbers.values()}
        if "group" in shared and checkpoint.group_numbers:
            steps += group_steps(self.file, checkpoint, [*self.places.values()], self.own.groups, plan.groups)
        if "model" in shared and checkpoint.model_numbers:
            steps.append(checkpoint.model_steps)
        if jnp.ndim(first):
            counts = np.zeros(first.shape, first.dtype)
            counts[[*self.places]] = steps[: len(self.places)]
            return jnp.asarray(counts)
        if len({*steps}) > 1:
            raise StateMismatch(self._other_counts(steps))
        return jnp.asarray(steps[0] if steps else 0, first.dtype)

    def _other_counts(self, steps: Sequence[int]) -> str:
        other = next(i for i, count in enumerate(steps) if count != steps[0])
        names = [self.own.names[place] for place in self.places]
        called = names[other] if other < len(names) else "their group or the model"
        return (
            f"in {self.file} {names[0]} was updated {steps[0]} times and {called} {steps[other]} times, and a state "
            f"here has one count for all: save when all were updated equally often, and none but those that are trained"
        )

    def _state(self, place: int, state: str, like: Any) -> Any:
        saved, name = self._saved(place), self.own.names[place]
        found = saved.states[state] if state in saved.states else self._missing(saved, state, place)
        if found.shape != tuple(like.shape):
            raise StateMismatch(
                f"{state} of {name} was saved with shape {found.shape}, where it has {tuple(like.shape)}: give the "
                f"hyper-parameters that decide it as they were"
            )
        param = self.own.tree.arrays[place]
        return _array(found, like, param if found.shape == tuple(param.shape) else like)

    def _missing(self, saved: Parameter, state: str, place: int) -> Stored:
        """The first value of what a parameter has no value of, which it needs none of before its first update."""
        if saved.steps or saved.states:
            known = ", ".join(saved.states) or "none"
            raise StateMismatch(f"{self.file} has no {state} of {saved.name} (it has {known}): it is of another rule")
        return _states(self.own.plan, self.fresh, place)[state]

    def _numbers(self, state: str, like: Any) -> np.ndarray[Any, Any]:
        """A state that is a number for each leaf that has it, for each group or for the model."""
        plan, checkpoint, level = self.own.plan, self.checkpoint, self.own.plan.numbers[state]
        if level == "tensor":
            return np.array([self._number(place, state) for place in plan.having[state]])
        if all(p.steps == 0 and not p.states for p in checkpoint.parameters):
            return np.asarray(self.fresh.numbers[state])
        saved = checkpoint.group_numbers if level == "group" else checkpoint.model_numbers
        if state not in saved:
            raise StateMismatch(f"{self.file} has no {state}, which is kept per {level}: it is of another rule")
        if level == "model":
            return np.array(checkpoint.model_numbers[state])
        made = group_numbers(self.file, checkpoint, [*self.places.values()], self.own.groups, plan.groups)
        if np.shape(like) != (plan.groups,):
            raise StateMismatch(
                f"{state} of the state has shape {np.shape(like)}, and the rule has {plan.groups} groups"
            )
        return np.array(made[state])

    def _number(self, place: int, state: str) -> float:
        saved = self._saved(place)
        return (saved.states[state] if state in saved.states else self._missing(saved, state, place)).number


def _array(stored: Stored, like: Any, placed_as: Any) -> Any:
    """A saved array in the dtype of one, where another is."""
    bits = stored.bits.view(jnp.bfloat16) if stored.dtype == "bfloat16" else stored.bits
    values = np.array(bits.astype(like.dtype))
    with jax.enable_x64(True):
        sharding = getattr(placed_as, "sharding", None)
        committed = getattr(placed_as, "committed", False)
        return jax.device_put(values, sharding) if committed else jnp.array(values)
