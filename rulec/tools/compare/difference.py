"""The differences between two sides of a comparison, the numbers for both sides, and the first value that differs."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from rulec.array.arrays import numpy_dtype
from rulec.compiler.inputs import drawn_input
from rulec.compiler.matrix import takes_eigenvectors
from rulec.compiler.routing import applies, route
from rulec.errors import RulecError, RuleError
from rulec.language.expr.text import expression_text
from rulec.language.inputs import per_tensor
from rulec.language.rule import Rule
from rulec.language.rule_data import assignments
from rulec.tools.compare.sides import Array, Side

Values = Sequence[Mapping[str, Array]]

#: Differences that rounding alone makes, in parts of a tensor's largest magnitude so far, by dtype.
TOLERANCE = {"float64": 1e-12, "float32": 4 * 2.0**-23}


@dataclass(frozen=True)
class Parting:
    """The first value that differs by more than the tolerance: its step, name, tensor and element."""

    step: int
    value: str
    tensor: int
    element: tuple[int, ...]
    ours: float
    theirs: float


@dataclass
class Differences:
    """The largest difference of each value over all steps, relative to its tensor's largest magnitude so far.

    `names` is value of ours -> the value of theirs that it was compared with.
    """

    largest: dict[str, float] = field(default_factory=dict)
    first: Parting | None = None
    names: dict[str, str] = field(default_factory=dict)

    @property
    def maximum(self) -> float:
        """The largest of all."""
        return max(self.largest.values(), default=0.0)

    def add(
        self, step: int, name: str, tensor: int, values: tuple[Array, Array], scale: float, tolerance: float
    ) -> None:
        """Adds one value of a step, ours and theirs; RulecError where the two differ in size."""
        a, b = (np.asarray(v, np.float64) for v in values)
        if a.size != b.size:
            raise RulecError(f"{name} has shape {a.shape} on one side and {b.shape} on the other: name other states")
        b = b.reshape(a.shape)
        relative = _relative(a, b, scale)
        worst = float(np.max(relative, initial=0.0))
        self.largest[name] = max(self.largest.get(name, 0.0), worst)
        if worst > tolerance and self.first is None:
            at = np.unravel_index(int(np.argmax(relative > tolerance)), relative.shape)
            element = tuple(int(i) for i in at)
            self.first = Parting(step, name, tensor, element, float(a[at]), float(b[at]))


def order_of_values(rule: Rule) -> list[str]:
    """States in the order of their lines, then `p`: the first to differ in a step is nearest to the cause."""
    targets = [line.target for line in assignments(rule.step) if line.target in rule.state]
    return [*dict.fromkeys([*targets, *rule.state]), "p"]


def line_of(rule: Rule, value: str) -> str:
    """The last line of a rule's step that assigns a value, with its file and line if known."""
    lines = [line for line in assignments(rule.step) if line.target == value]
    if not lines:
        return ""
    span = lines[-1].span
    # The file's name is enough: the folder of the library differs from one installation to the next.
    place = f" ({Path(span.source.name).name}:{span.line})" if span else ""
    return f"{value} = {expression_text(lines[-1].value)}{place}"


def compare(
    ours: Side, theirs: Side, trial: Trial, order: Sequence[str], tolerance: float, names: Mapping[str, str],
    advance: Callable[[], Any] = lambda: None,
) -> Differences:  # fmt: skip
    """Steps both sides through a trial; `advance` is called after each step.

    `names` is state of ours -> their name for it. Any other state of ours is matched with the first state of theirs
    with the same values after a step, and left out of the comparison until there is one.
    """
    differences = Differences()
    matched = {"p": "p", **names}
    scale: dict[tuple[str, int], float] = {}
    for step, grads in enumerate(trial.gradients(), 1):
        ours.step(grads)
        theirs.step([g.copy() for g in grads])
        here, there = ours.values(), theirs.values()
        matched |= _match([n for n in order if n not in matched], here, there, matched.values(), tolerance)
        for tensor, (a, b) in enumerate(zip(here, there, strict=True)):
            for name in order:
                if name in a and matched.get(name) in b:
                    value, other, key = a[name], b[matched[name]], (name, tensor)
                    scale[key] = max(scale.get(key, 0.0), magnitude(other))
                    differences.add(step, name, tensor, (value, other), scale[key], tolerance)
        advance()
    differences.names = {name: matched[name] for name in differences.largest}
    return differences


def _match(
    names: Sequence[str], ours: Values, theirs: Values, taken: Iterable[str], tolerance: float
) -> dict[str, str]:
    """State of ours -> state of theirs with the same values, not all zero, in every tensor."""
    matches: dict[str, str] = {}
    for name in names:
        for other in [k for k in theirs[0] if k not in {*taken, *matches.values()}]:
            pairs = [(a[name], b[other]) for a, b in zip(ours, theirs, strict=True) if name in a and other in b]
            if len(pairs) == len(ours) and all(_equal(a, b, tolerance) for a, b in pairs):
                matches[name] = other
                break
    return matches


def _equal(a: Array, b: Array, tolerance: float) -> bool:
    scale = magnitude(b)
    return scale > 0 and a.shape == b.shape and float(np.max(_relative(a, b, scale), initial=0.0)) <= tolerance


def _relative(a: Array, b: Array, scale: float) -> Array:
    """Differences in parts of `scale`: none where both are NaN or the same infinity, infinite where one alone is."""
    with np.errstate(invalid="ignore"):
        same = (a == b) | (np.isnan(a) & np.isnan(b))
        apart = np.abs(a - b) / (scale or 1.0)
    return np.where(same, 0.0, np.where(np.isfinite(apart), apart, np.inf))


def magnitude(values: Array) -> float:
    """The largest finite magnitude; 0 where there is none."""
    finite = np.abs(np.asarray(values, np.float64))
    return float(np.max(finite, initial=0.0, where=np.isfinite(finite)))


#: A matrix and a vector: rules may treat these differently.
SHAPES: tuple[tuple[int, ...], ...] = ((4, 6), (5,))

#: The same for rules with eigenvectors, which the products of a matrix that is not square do not determine.
SQUARE_SHAPES: tuple[tuple[int, ...], ...] = ((4, 4), (5,))


def shapes_for(rule: Rule, itself: bool = False) -> tuple[tuple[int, ...], ...]:
    """The shapes among `SHAPES`, or `SQUARE_SHAPES`, for which a rule has an update; RuleError where there is none.

    With `itself` only shapes that the rule updates itself, without routing to another rule.
    """
    shapes, refused = [], None
    for shape in SQUARE_SHAPES if takes_eigenvectors(rule) else SHAPES:
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
                name: [self._cast(drawn_input(rule, kind, shape, rng)) for shape in self.shapes]
                if per_tensor(kind)
                else float(self._cast(np.asarray(rng.uniform(0.5, 2.0))))
                for name, kind in rule.inputs.items()
            }
