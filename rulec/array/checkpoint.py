"""Checkpoints in the format of all frameworks, of optimizers of plain arrays."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from rulec import checkpoint
from rulec.array.checks import checked_hyper
from rulec.array.optimizer import Optimizer
from rulec.checkpoint import Axes, Leaf, Loaded, Names, Shared, Stored
from rulec.checkpoint.convert import settled
from rulec.compiler.layout import scale_name
from rulec.compiler.weights import part_name
from rulec.errors import RulecError


def save(optimizer: Optimizer, file: str | Path, *, parameters: bool = False) -> None:
    """Writes an optimizer's state, and with `parameters` the parameters, as a safetensors file for every framework.

    Parameters have the names of `optimizer.names`; a single array is called `0`. The file is there as a whole, or the
    one before it stays. RulecError where the parameters are where the rule is evaluated.
    """
    checkpoint.save(_run(optimizer, "save"), file, parameters)


def load(
    optimizer: Optimizer, file: str | Path, *, names: Names = None, axes: Axes = None, rule_may_differ: bool = False,
    parameters: bool = False,
) -> None:  # fmt: skip
    """Goes on from a file of `save`, here or in another framework; with `parameters` takes the parameters too.

    Values are copied into this optimizer's own dtypes; its hyper-parameters stay as they are. A parameter that had not
    been updated when the file was saved is as before its first update.

    `names` is a mapping of the file's names to the names here, or a function; `axes` has for parameters the axis of the
    file for each of their own. StateMismatch, before anything is written, where the file belongs to other parameters or
    another rule (`rule_may_differ` allows another rule), or is damaged.
    """
    run = _run(optimizer, "load")
    run.take(checkpoint.load(run, file, 1, names, axes, rule_may_differ, parameters))


def _run(optimizer: Any, verb: str) -> _ArrayRun:
    if not isinstance(optimizer, Optimizer):
        raise RulecError(f"{verb} takes an optimizer of rulec.array, not a {type(optimizer).__name__}")
    if not optimizer._training:
        raise RulecError(f"the parameters are where {optimizer.rule.name} is evaluated: call train() to {verb}")
    return _ArrayRun(optimizer, optimizer._engine.seed)


@dataclass(frozen=True)
class _ArrayRun:
    """An optimizer of plain arrays, in the terms of `rulec.checkpoint.Run`."""

    optimizer: Optimizer
    seed: int

    @cached_property
    def saved(self) -> dict[str, Any]:
        """Everything needed to go on, copied."""
        return self.optimizer.state_dict()

    @property
    def hyper(self) -> dict[str, float]:
        """The hyper-parameters, checked."""
        return checked_hyper(self.optimizer.rule.name, self.optimizer._engine.hyper, self.optimizer.hyper)

    def leaves(self) -> list[Leaf]:
        """The arrays; a single one is called `0`."""
        engine = self.optimizer._engine
        return [
            Leaf(
                "0" if name == "param" else name, tuple(array.shape), engine.arrays.dtype(array),
                engine.tensors[engine.ids[name]].rule, place, rounded=engine.rounds(engine.ids[name]),
                part=part_name(engine.weights, engine.arrays.dtype(array)), hyper=self.optimizer.hyper,
            )
            for place, (name, array) in enumerate(engine.params.items())
        ]  # fmt: skip

    def states(self, place: int) -> tuple[int, dict[str, Stored]]:
        """The number of updates, and the states by name; none before the first update."""
        states = self.saved["state"].get(self.optimizer.names[place], {})
        keys = self.saved["formats"]
        named = {
            k: (array, keys.get(k, "") if scale_name(k) in states or array.dtype == "bfloat16" else "")
            for k, array in states.items()
        }
        return int(states.get("step", 0)), {
            k: Stored.of(array, format=key) for k, (array, key) in named.items() if k != "step"
        }

    def value(self, place: int) -> Stored:
        """The parameter itself."""
        engine = self.optimizer._engine
        return Stored.of(engine.arrays.copied(engine.params[self.optimizer.names[place]]))

    def shared(self) -> Shared:
        """Hyper-parameters, and the numbers of the one group and the model."""
        numbers, counts = {name: array.tolist() for name, array in self.saved["shared"].items()}, self.saved["counts"]
        return Shared([self.hyper], numbers, counts["group"].astype(np.int64).tolist(), int(counts["model"]))

    def take(self, loaded: Loaded) -> None:
        """Goes on from the content of a file; StateMismatch, before anything is written, where it does not fit."""
        optimizer = self.optimizer
        parameters, keys = settled(loaded.parameters)
        named = dict(zip(optimizer.names, parameters, strict=True))
        states = {
            name: {"step": np.float64(p.steps), **{k: array.values for k, array in p.states.items()}}
            for name, p in named.items()
            if p.begun
        }
        saved = {"rule": optimizer.rule.name, "hyper": self.hyper, "state": states, "formats": keys}
        if loaded.begun:
            steps = [*loaded.group_steps, *loaded.model_steps, 0]
            saved["shared"] = {name: np.array(values) for name, values in loaded.numbers.items()}
            saved["counts"] = {"group": np.array(steps[:1], np.float64), "model": [*loaded.model_steps, steps[0]][0]}
        optimizer.load_state_dict(saved)
        engine = optimizer._engine
        with engine.arrays.here():
            for array, value in zip(engine.params.values() if loaded.values else (), loaded.values, strict=True):
                engine.arrays.fill(array, value.values)
