"""Transformations of one group of leaves, in which a mask may spare leaves from weight decay."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import jax
import optax

from rulec.errors import StateMismatch
from rulec.functional.axes import AS_SEEN, AxisRoles
from rulec.functional.plan import Options
from rulec.jax.leaves import flat
from rulec.jax.recipe import Group, Recipe
from rulec.jax.state import Shown
from rulec.jax.transform import of_recipe, options


@dataclass(frozen=True)
class _Decayed:
    """The group of a leaf: 0 where weights decay, 1 where a mask spares them."""

    spared: frozenset[str]

    def __call__(self, name: str, shape: tuple[int, ...]) -> int:
        return int(name in self.spared)


@dataclass(frozen=True, eq=False)
class Maker:
    """A group's transformation; with a mask, leaves without weight decay are a group of their own."""

    group: Group
    mask: Any = None
    options: Options = field(default_factory=lambda: options(None, False, 0))
    renamed: Mapping[str, Shown] = field(default_factory=dict)
    axes: AxisRoles = AS_SEEN

    def __post_init__(self) -> None:
        self.group.check()

    def transformation(self) -> optax.GradientTransformationExtraArgs:
        """The transformation of one recipe, or with a mask of the recipe for each tree."""
        if self.mask is None or self.mask is True:
            return self._of(Recipe([self.group], _Decayed(frozenset()), axes=self.axes))

        def init(params: Any) -> Any:
            return self._of(self._masked(params)).init(params)

        def update(grads: Any, state: Any, params: Any = None, **extra: Any) -> Any:
            tree = grads if params is None else params
            return self._of(self._masked(tree)).update(grads, state, params, **extra)

        return optax.GradientTransformationExtraArgs(init, update)

    def _of(self, recipe: Recipe) -> optax.GradientTransformationExtraArgs:
        return of_recipe(recipe, self.options, self.renamed)

    def _masked(self, tree: Any) -> Recipe:
        spared = Group(self.group.rule, {**self.group.hyper, "weight_decay": 0.0})
        return Recipe([self.group, spared], _Decayed(_spared(self.mask, tree)), axes=self.axes)


def _spared(mask: Any, tree: Any) -> frozenset[str]:
    """The names of the leaves with False in a mask. A function is called with the tree for its mask."""
    known = flat(tree, "the parameter")
    marks = marked(mask, tree)
    try:
        whole = jax.tree.map(lambda word, part: jax.tree.map(lambda _: bool(word), part), marks, tree)
    except ValueError as error:
        raise StateMismatch(
            f"the mask is {jax.tree.structure(marks)} and the parameters are {known.structure}: give True or False for "
            f"each of these, or for a part of them, or a function that gives that"
        ) from error
    return frozenset(name for name, word in zip(known.names, jax.tree.leaves(whole), strict=True) if not word)


def marked(mask: Any, tree: Any) -> Any:
    """The mask itself, from a function the mask that it gives for a tree."""
    return mask(tree) if _is_function(mask) else mask


def _is_function(mask: Any) -> bool:
    """Whether a mask is called, as optax decides: a tree whose class is callable, such as a module, is not."""
    leaves = jax.tree.leaves(mask)
    return bool(leaves) and all(map(callable, leaves))
