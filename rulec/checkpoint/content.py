"""The content of a checkpoint: states, rules and step counts of all parameters, and the names of arrays in its file.

| in the file | content |
| --- | --- |
| `state/<parameter>/<state>` | a state of a parameter, an array or one number, or its codes (int8 or uint8) |
| `state/<parameter>/param::low` | the residual of a 16-bit weight; also `param::master`, `param::lost` |
| `state/<parameter>/<state>::scale` | the scales of codes, float32; the metadata's `parameters` name the formats |
| `step` | how often each parameter was updated, int64, in the order of the metadata's `parameters` |
| `group/<state>`, `group_step` | a number of each group, float64; the steps of each group |
| `model/<state>`, `model_step` | a number of the whole model, float64; the steps of the model |
| `parameter/<parameter>` | a parameter itself, where parameters were saved too |

The digest of a rule covers its equations alone: rules of one digest compute the same.
"""

from __future__ import annotations

import functools
import hashlib
import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

import numpy as np

import rulec
from rulec.checkpoint.tensors import Stored, write_file
from rulec.compiler.view import static_defaults
from rulec.errors import StateMismatch
from rulec.language.expr.counts import level_text
from rulec.language.expr.node import Node, Op, name, rewrite
from rulec.language.expr.text import expression_text
from rulec.language.inputs import kind_data
from rulec.language.parse.step import step_text
from rulec.language.rule import Rule
from rulec.language.rule_data import Assign, Branch, State, Statement, assignments, draws

FORMAT = "rulec checkpoint"
VERSION = 1


@dataclass(frozen=True)
class Parameter:
    """A parameter: its path (`layer/0/kernel`), shape and dtype, the name of its rule, and its number of updates.

    `meaning` is the digest of the rule's equations, `number` the parameter's place among all, for random numbers,
    `group` the index of its group. `states` is empty where it was never updated; `value` is the parameter itself where
    it is saved too. `roles` are those of its axes where its layout was another one when it was saved than in the file,
    and `saved_as` is its name in the file.
    """

    name: str
    shape: tuple[int, ...]
    dtype: str
    rule: str
    meaning: str
    number: int
    group: int = 0
    steps: int = 0
    states: Mapping[str, Stored] = field(default_factory=dict)
    value: Stored | None = None
    roles: tuple[str, ...] = ()
    saved_as: str = field(default="", compare=False)

    @property
    def begun(self) -> bool:
        """Whether it was updated, or has states from before its first update."""
        return bool(self.steps or self.states)


@dataclass(frozen=True)
class Checkpoint:
    """Parameters in their order, numbers of groups and the model, and hyper-parameters, for information.

    `group_steps` and `model_steps` are the steps taken by groups and the model; `seed` is the seed of random numbers,
    where a step draws any.
    """

    parameters: Sequence[Parameter]
    hyper: Sequence[Mapping[str, Any]] = ()
    group_numbers: Mapping[str, Sequence[float]] = field(default_factory=dict)
    group_steps: Sequence[int] = ()
    model_numbers: Mapping[str, float] = field(default_factory=dict)
    model_steps: int = 0
    seed: int | None = None


# Writing


def write(file: str | Path, checkpoint: Checkpoint) -> None:
    """Writes a checkpoint as a whole or not at all. StateMismatch where two parameters have one name."""
    check_apart([p.name for p in checkpoint.parameters])
    write_file(Path(file), _tensors(checkpoint), _metadata(checkpoint))


def check_apart(names: Sequence[str]) -> None:
    """StateMismatch where two parameters have one name."""
    twice = {name for name in names if names.count(name) > 1} if len({*names}) < len(names) else set()
    if twice:
        raise StateMismatch(f"two parameters are called {min(twice)}: give each a name of its own")


def _tensors(checkpoint: Checkpoint) -> dict[str, Stored]:
    tensors = {"step": _whole([p.steps for p in checkpoint.parameters])}
    for p in checkpoint.parameters:
        tensors |= {f"state/{p.name}/{state}": value for state, value in p.states.items()}
        if p.value is not None:
            tensors[f"parameter/{p.name}"] = p.value
    if checkpoint.group_numbers:
        tensors["group_step"] = _whole(checkpoint.group_steps)
    if checkpoint.model_numbers:
        tensors["model_step"] = _whole(checkpoint.model_steps)
    tensors |= {f"group/{state}": _wide(values) for state, values in checkpoint.group_numbers.items()}
    return tensors | {f"model/{state}": _wide(value) for state, value in checkpoint.model_numbers.items()}


def _whole(values: Any) -> Stored:
    return Stored.of(np.array(values, np.int64), "int64")


def _wide(values: Any) -> Stored:
    return Stored.of(np.array(values, np.float64), "float64")


def _metadata(checkpoint: Checkpoint) -> dict[str, str]:
    rules = list(dict.fromkeys((p.rule, p.meaning) for p in checkpoint.parameters))
    parameters = [
        {
            "name": p.name, "shape": list(p.shape), "dtype": p.dtype, "rule": rules.index((p.rule, p.meaning)),
            "number": p.number, "group": p.group, **_formats(p), **({"roles": list(p.roles)} if p.roles else {}),
        }
        for p in checkpoint.parameters
    ]  # fmt: skip
    content = {
        "rules": [{"name": name, "meaning": meaning} for name, meaning in rules],
        "parameters": parameters,
        "hyper": [dict(group) for group in checkpoint.hyper],
        "seed": checkpoint.seed,
    }
    header = {"format": FORMAT, "version": str(VERSION), "rulec": rulec.__version__}
    return header | {key: json.dumps(value) for key, value in content.items() if value is not None}


def _formats(parameter: Parameter) -> dict[str, dict[str, str]]:
    """The keys of the formats of a parameter's states in codes, where it has any."""
    keys = {name: state.format for name, state in parameter.states.items() if state.format}
    return {"formats": keys} if keys else {}


@dataclass(frozen=True)
class Leaf:
    """A parameter of a run: its path, shape and dtype, the rule that updates it, and the index of its group.

    Random numbers follow from `number`, the parameter's place among all. `rounded` says that a step rounds the
    parameter or a state at random. `part` is the name of the memory beside the parameter; empty where there is none.
    `hyper` has the values of the group's hyper-parameters, of which the static ones decide which states there are.
    `roles` are those of the axes of an array that lies otherwise than torch keeps it, as the parameter here is seen;
    None where they may be others than torch's, and nobody said so.
    """

    name: str
    shape: tuple[int, ...]
    dtype: str
    rule: Rule
    number: int
    group: int = 0
    rounded: bool = False
    part: str = ""
    hyper: Mapping[str, Any] = field(default_factory=dict)
    roles: tuple[str, ...] | None = ()

    @property
    def static(self) -> dict[str, float]:
        """The values of the rule's static hyper-parameters."""
        named = {k: self.hyper[k] for k, h in self.rule.hyper.items() if h.static and k in self.hyper}
        return {**static_defaults(self.rule), **named}

    @property
    def random(self) -> bool:
        """Whether a step draws random numbers."""
        return self.rounded or draws(self.rule)


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
            *run.states(place), run.value(place) if parameters else None, leaf.roles or (),
        )
        for place, leaf in enumerate(leaves)
    ]  # fmt: skip
    level_of = levels(leaves)
    numbers: dict[str | None, dict[str, Sequence[float]]] = {"group": {}, "model": {}, None: {}}
    for number_name, values in shared.numbers.items():
        numbers[level_of.get(number_name)][number_name] = values
    content = Checkpoint(
        described, shared.hyper, numbers["group"], shared.group_steps,
        {name: values[0] for name, values in numbers["model"].items()}, shared.model_steps,
        run.seed if any(leaf.random for leaf in leaves) else None,
    )  # fmt: skip
    write(file, content)


def levels(leaves: Sequence[Leaf]) -> dict[str, str]:
    """The states that are one number for a group or for the model, with the level: `group` or `model`."""
    kept = {name: state.per for leaf in leaves for name, state in leaf.rule.state.items()}
    return {name: level for name, level in kept.items() if level in ("group", "model")}


@functools.lru_cache(maxsize=256)
def meaning(rule: Rule) -> str:
    """The SHA-256 of a rule's step, states, inputs, skip, evaluation point and view, in the rule language.

    The rule's name, comments and summary, the names of local values, and the defaults and ranges of hyper-parameters
    are no part of it, nor is which tensors it applies to. The rule must be one that runs by itself.
    """
    rule = rule.standalone()
    local = {n: name(f"local{i}") for i, n in enumerate(_locals(rule))}
    said = {
        "state": {key: _state(state) for key, state in rule.state.items()},
        "inputs": {key: kind_data(kind) for key, kind in rule.inputs.items()},
        "step": step_text(_renamed(rule.step, local)),
        "evaluate": _text(rule.evaluate),
        "skip": _text(rule.skip, local),
        "view": dict(rule.view),
    }
    return hashlib.sha256(json.dumps(said, sort_keys=True).encode()).hexdigest()


def _locals(rule: Rule) -> list[str]:
    """The names that a step assigns and nothing keeps, in order."""
    targets = dict.fromkeys(line.target for line in assignments(rule.step))
    return [target for target in targets if target != "p" and target not in rule.state]


def _state(state: State) -> list[Any]:
    shape = None if state.shape is None else [_text(x) for x in state.shape]
    return [_text(state.init), level_text(state.per, state.number), shape, _text(state.condition)]


def _text(value: Node | None, local: Mapping[str, Node] | None = None) -> str | None:
    return None if value is None else expression_text(_with(value, local or {}))


def _with(value: Node, local: Mapping[str, Node]) -> Node:
    return rewrite([value], lambda n: local.get(str(n.arg), n) if n.op is Op.NAME else n)[0]


def _renamed(step: Iterable[Statement], local: Mapping[str, Node]) -> list[Statement]:
    """The lines with local values called by other names."""
    lines: list[Statement] = []
    for line in step:
        if isinstance(line, Assign):
            target = str(local[line.target].arg) if line.target in local else line.target
            lines.append(Assign(target, _with(line.value, local)))
        else:
            then, otherwise = _renamed(line.then, local), _renamed(line.otherwise, local)
            lines.append(Branch(_with(line.condition, local), tuple(then), tuple(otherwise)))
    return lines
