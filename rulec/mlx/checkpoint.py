"""Checkpoints in the format of all frameworks, of optimizers of MLX."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
from mlx.optimizers import MultiOptimizer, Optimizer
from mlx.utils import tree_map

from rulec import checkpoint
from rulec.checkpoint import Axes, Leaf, Names, Shared, Stored
from rulec.checkpoint.loading import with_slashes
from rulec.compiler.weights import part_name
from rulec.errors import RulecError
from rulec.functional.filling import Filling, states_of
from rulec.functional.plan import StepPlan
from rulec.functional.quantized import Unbiased
from rulec.functional.values import Values, dtype_name
from rulec.mlx.arrays import is_traced
from rulec.mlx.optimizer import RuleOptimizer
from rulec.mlx.trees import is_trained, parameter_tree, trained_leaves


def save(optimizer: RuleOptimizer, file: str | Path, params: Any, *, parameters: bool = False) -> None:
    """Writes an optimizer's state, and with `parameters` the parameters, as a safetensors file for every framework.

    `params` is a tree of the parameters that the optimizer updates, or a module with them. The trained leaves have
    their paths as names, with `/` for `.`. A leaf without a state in the optimizer is written with the state that
    `init` begins with. The file is there as a whole, or the one before it stays.

    RulecError for another optimizer and inside of `mx.compile`; StateMismatch where the state is of other parameters.
    """
    tree = parameter_tree(params)
    leaves = _leaves(optimizer, tree, "save")
    plan, values = optimizer.current(tree)
    checkpoint.save(_MlxRun(optimizer, leaves, plan, values), file, parameters)


def load(
    optimizer: RuleOptimizer, file: str | Path, params: Any, *, names: Names = None, axes: Axes = None,
    rule_may_differ: bool = False,
) -> None:  # fmt: skip
    """Goes on from a file of `save`, here or in another framework.

    `params` is as for `save`. The state is written into `optimizer.state`, so a step that was compiled with
    `optimizer.state` goes on from the file too. The new state has the dtypes of `init`, and entries of `params` alone.
    Hyper-parameters stay as they are. `names` is a mapping of the file's names to the paths here, or a function. `axes`
    has for parameters, by their paths here, the axis of the file for each of their own: `{"conv.weight": (0, 2, 3, 1)}`
    for a kernel of torch.
    `rule_may_differ` takes the states of a rule with other equations.

    StateMismatch, before anything is written, where the file belongs to other parameters or another rule, or is
    damaged; RulecError for another optimizer and inside of `mx.compile`.
    """
    tree = parameter_tree(params)
    leaves = _leaves(optimizer, tree, "load")
    plan, fresh = optimizer.before_a_step(leaves)
    run = _MlxRun(optimizer, leaves, plan, fresh)
    loaded = checkpoint.load(run, file, 1, with_slashes(names), _axes(axes), rule_may_differ)
    filling = Filling(str(file), loaded, plan, range(len(leaves)), [*leaves.values()], fresh, _ARRAYS)
    optimizer.begin_with(tree, plan, filling.values(fresh))


def load_params(file: str | Path, params: Any, *, names: Names = None, axes: Axes = None) -> Any:
    """The parameters of a file that was saved with `parameters=True`, in the tree and the dtypes of `params`.

    `params` is a tree, or a module, of which it is the trainable parameters: `model.update` takes the result. `names`
    and `axes` are as for `load`; leaves that are not trained stay as they are.
    """
    tree = parameter_tree(params)
    leaves = trained_leaves(tree)
    shapes = {_slashed(name): array.shape for name, array in leaves.items()}
    stored = checkpoint.load_values(file, shapes, with_slashes(names), _axes(axes))
    values = iter(_ARRAYS.array(value, like, None) for value, like in zip(stored, leaves.values(), strict=True))
    return tree_map(lambda leaf: next(values) if is_trained(leaf) else leaf, tree)


def _slashed(path: str) -> str:
    return path.replace(".", "/")


def _axes(axes: Axes) -> Axes:
    return {_slashed(path): order for path, order in (axes or {}).items()}


def _leaves(optimizer: Any, tree: Any, verb: str) -> dict[str, Any]:
    """The trained leaves by path. RulecError for another optimizer, and for arrays without values yet."""
    if not isinstance(optimizer, RuleOptimizer):
        raise RulecError(_not_ours(optimizer, verb))
    leaves = trained_leaves(tree)
    if any(map(is_traced, [optimizer.step, *leaves.values()])):
        raise RulecError(f"the state of {type(optimizer).__name__} is traced: {verb} it outside of mx.compile")
    return leaves


def _not_ours(optimizer: Any, verb: str) -> str:
    kind = f"{type(optimizer).__module__}.{type(optimizer).__qualname__}"
    if isinstance(optimizer, MultiOptimizer):
        return f"a MultiOptimizer has several optimizers: {verb} each with its own parameters, in a file of its own"
    if isinstance(optimizer, Optimizer):
        return (
            f"{verb} takes an optimizer of rulec.mlx, not {kind}: give its state to the class of that name in rulec.mlx"
        )
    return f"{verb} takes an optimizer of rulec.mlx, not a {kind}"


@dataclass(frozen=True)
class _MlxRun:
    """An optimizer of MLX for parameters by path, in the terms of `rulec.checkpoint.Run`."""

    optimizer: RuleOptimizer
    params: Mapping[str, Any]
    plan: StepPlan
    values: Values

    @property
    def seed(self) -> int:
        """The seed of random numbers."""
        return self.plan.options.seed

    @cached_property
    def count(self) -> int:
        """The number of updates, which is one for all parameters."""
        return int(self.values.count.item())

    def leaves(self) -> list[Leaf]:
        """The parameters by their paths."""
        static, weights = self.optimizer.static, self.plan.options.weights
        return [
            Leaf(
                _slashed(path), tuple(array.shape), dtype_name(array), rule, place, rounded=self._rounds(place),
                part=part_name(weights, dtype_name(array)), hyper=static,
            )
            for place, ((path, array), rule) in enumerate(zip(self.params.items(), self.plan.rules, strict=True))
        ]  # fmt: skip

    def _rounds(self, place: int) -> bool:
        """Whether a step rounds the leaf at a place, or a state of it, at random."""
        planned = any(bucket.program.memory.random for bucket in self.plan.buckets if place in bucket.places)
        return planned or any(isinstance(arrays.get(place), Unbiased) for arrays in self.values.arrays.values())

    def states(self, place: int) -> tuple[int, dict[str, Stored]]:
        """The number of updates of a leaf, and its states by name."""
        return self.count, states_of(self.plan, self.values, place, _ARRAYS)

    def value(self, place: int) -> Stored:
        """The parameter itself."""
        return _ARRAYS.stored([*self.params.values()][place])

    def shared(self) -> Shared:
        """Hyper-parameters that are numbers, and the numbers of the one group and the model."""
        kept = [name for name, level in self.plan.numbers.items() if level != "tensor"]
        numbers = {name: np.array(self.values.numbers[name], np.float64).reshape(-1).tolist() for name in kept}
        return Shared([self.optimizer.numbers], numbers, [self.count], self.count)


class _MlxArrays:
    """MLX's arrays as those of a file."""

    def stored(self, array: Any, format: str = "") -> Stored:
        """The bytes of an array of MLX or of a number of NumPy; an array of codes has the key of its format."""
        if isinstance(array, mx.array) and array.dtype == mx.bfloat16:
            return Stored.of(np.array(array.view(mx.uint16)), "bfloat16", format)
        return Stored.of(np.array(array), format=format)

    def array(self, stored: Stored, like: Any, placed_as: Any) -> Any:
        """A saved array in the shape and dtype of `like`; memory is the same for all devices."""
        with mx.stream(mx.cpu):
            return mx.array(np.array(stored.values), like.dtype).reshape(like.shape)


_ARRAYS = _MlxArrays()
