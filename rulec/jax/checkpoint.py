"""Checkpoints in the format of all frameworks, of states in JAX."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax

from rulec import checkpoint
from rulec.checkpoint import Axes, Names
from rulec.errors import TensorError
from rulec.jax.checkpoint_run import Filling, array_of, inner_state, leaf_names, real_tree, run_of
from rulec.jax.packing import Packed, packed
from rulec.jax.recipe import Given, Rules
from rulec.jax.xla import is_traced


def save(
    file: str | Path, rule: Rules, params: Any, state: Any, *, parameters: bool = False, seed: int = 0,
    weights: str = "", tags: Mapping[str, Collection[str]] | None = None, **hyper: Given,
) -> None:  # fmt: skip
    """Writes a state, and with `parameters` the parameters, as a safetensors file for every framework.

    `state` is the result of `rulec.jax.step` or of a transformation of the rule, or a larger state of optax with it
    inside. Parameters are called by their paths in the tree. `seed`, `weights` and `tags` are as they were for `init`;
    `hyper` is written for information. The file is there as a whole, or the one before it stays.

    Raises StateMismatch where the state is of another rule, TensorError for arrays of other processes.
    """
    _, inner = inner_state(state)
    run = run_of(rule, hyper, tags, params, seed, state=inner, weights=weights)
    _check_here([("the state", x) for x in jax.tree.leaves(inner)], "save")
    _check_here(list(zip(run.tree.names, run.tree.arrays, strict=True)) if parameters else [], "save")
    checkpoint.save(run, file, parameters)


def load(
    file: str | Path, rule: Rules, params: Any, *, like: Any = None, names: Names = None, axes: Axes = None,
    rule_may_differ: bool = False, seed: int = 0, state_dtype: Any = None, weights: str = "",
    tags: Mapping[str, Collection[str]] | None = None, **hyper: Given,
) -> Any:  # fmt: skip
    """The state in a file that `save` has written here, or in another framework.

    Without `like` it has the structure of `rulec.jax.init` of these arguments. With `like`, a state such as
    `tx.init(params)`, it has the structure and dtypes of that state. `names` is a mapping of the file's names to the
    paths here, or a function. `axes` has for parameters, by their paths here, the axis of the file for each of their
    own, as in `{"dense/kernel": (1, 0)}`. `rule_may_differ` takes the states of a rule with other equations, `seed` is
    the seed of the steps to come. Arrays get the sharding of their parameters. States of leaves that had not been
    updated when the file was saved are as in `rulec.jax.init`, whatever `like` has.

    StateMismatch where the file belongs to other parameters or another rule, or is damaged.
    """
    existing = None if like is None else inner_state(like)[1]
    run = run_of(rule, hyper, tags, params, seed, state_dtype, existing, weights)
    loaded = checkpoint.load(run, file, run.plan.groups, names, axes, rule_may_differ)
    first = run.first(params)
    put, inner = inner_state(first if like is None else like)
    values = Filling(run, str(file), loaded, run.values_of(inner_state(first)[1])).values(run.values_of(inner))
    state = run.fields_of(inner).packed(values, run.tree)
    return put(packed(state) if any(isinstance(field, Packed) for field in inner) else state)


def load_params(file: str | Path, params: Any, *, names: Names = None, axes: Axes = None) -> Any:
    """The parameters of a file that was saved with `parameters=True`, in the tree, dtypes and shardings of `params`."""
    tree = real_tree(params)
    shapes = {name: tuple(array.shape) for name, array in zip(leaf_names(tree), tree.arrays, strict=True)}
    values = checkpoint.load_values(file, shapes, names, axes)
    return tree.structure.unflatten(
        array_of(value, array, array) for value, array in zip(values, tree.arrays, strict=True)
    )


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
