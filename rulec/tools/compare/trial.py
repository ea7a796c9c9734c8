"""The numbers for the two sides of a comparison."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np

from rulec.array.arrays import numpy_dtype
from rulec.compiler.routing import applies, route
from rulec.errors import RuleError
from rulec.language.rule import Rule
from rulec.tools.compare.sides import Array

#: A matrix and a vector: rules may treat these differently.
SHAPES: tuple[tuple[int, ...], ...] = ((4, 6), (5,))


def shapes_for(rule: Rule, itself: bool = False) -> tuple[tuple[int, ...], ...]:
    """The shapes among `SHAPES` for which a rule has an update; RuleError where there is none.

    With `itself` only shapes that the rule updates itself, without routing to another rule.
    """
    shapes, refused = [], None
    for shape in SHAPES:
        try:
            route(rule, shape)
        except RuleError as error:
            refused = error
        else:
            if not itself or applies(rule, shape, ()):
                shapes.append(shape)
    if not shapes and refused is not None:
        raise refused
    return tuple(shapes)


@dataclass(frozen=True)
class Trial:
    """Parameters and gradients, the same numbers in every dtype that can hold them.

    Gradients have both signs, sizes over three decades, and zeros here and there.
    """

    dtype: str = "float64"
    steps: int = 25
    shapes: tuple[tuple[int, ...], ...] = SHAPES
    seed: int = 0

    @cached_property
    def _numbers(self) -> tuple[list[Array], list[list[Array]]]:
        rng = np.random.default_rng(self.seed)
        params = [self._cast(rng.normal(size=shape)) for shape in self.shapes]
        grads = [[self._cast(self._gradient(rng, shape)) for shape in self.shapes] for _ in range(self.steps)]
        return params, grads

    @staticmethod
    def _gradient(rng: np.random.Generator, shape: tuple[int, ...]) -> Array:
        drawn = rng.normal(size=shape) * 10 ** rng.uniform(-2, 1, size=shape)
        return np.where(rng.random(size=shape) < 0.1, 0.0, drawn)

    def _cast(self, numbers: Array) -> Array:
        # Through bfloat16's 8 bits, so that every dtype starts from the same numbers.
        short = (np.asarray(numbers, np.float32).view(np.uint32) & np.uint32(0xFFFF0000)).view(np.float32)
        return np.asarray(short, dtype=numpy_dtype(self.dtype))

    @property
    def params(self) -> list[Array]:
        """The parameters at the start: copies."""
        return [p.copy() for p in self._numbers[0]]

    def gradients(self) -> Iterator[list[Array]]:
        """The gradients of each step: copies."""
        for grads in self._numbers[1]:
            yield [g.copy() for g in grads]

    def inputs(self, rule: Rule) -> Iterator[dict[str, Any]]:
        """The rule's inputs at each step, by name: a number above 0, or a list of an array for each parameter."""
        rng = np.random.default_rng((self.seed, 1))
        for _ in range(self.steps):
            yield {
                name: [self._cast(rng.normal(size=shape)) for shape in self.shapes]
                if kind == "like p"
                else float(self._cast(np.asarray(rng.uniform(0.5, 2.0))))
                for name, kind in rule.inputs.items()
            }
