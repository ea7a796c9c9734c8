"""Rules that reduce the value of a branch, and the same in plain NumPy."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

Array = np.ndarray[Any, np.dtype[np.float64]]

#: What an arm assigns, as a rule writes it and in NumPy. Arrays have an extent of 1 for an axis that they lack.
ARMS: Mapping[str, Callable[[Array], Array]] = {
    "3": lambda g: np.full((1, 1), 3.0),
    'mean(g, per="tensor")': lambda g: g.mean(keepdims=True),
    'mean(g, per="row")': lambda g: g.mean(axis=1, keepdims=True),
    'mean(g, per="col")': lambda g: g.mean(axis=0, keepdims=True),
    "g": lambda g: g,
}

#: Level -> the axes of a matrix that a reduction to it takes away; None for reductions over several tensors.
WITHIN: Mapping[str, tuple[int, ...] | None] = {
    '"row"': (1,), '"col"': (0,), '"matrix"': (0, 1), '"tensor"': (0, 1), '"group"': None, '"model"': None,
}  # fmt: skip

#: The same levels by axes.
_BY_AXES = {'"row"': "axis(0)", '"col"': "axis(1)", '"matrix"': '"tensor"'}

REDUCTIONS: Mapping[str, Callable[[Array, tuple[int, ...]], Array]] = {
    "sum": lambda x, axes: x.sum(axis=axes, keepdims=True),
    "mean": lambda x, axes: x.mean(axis=axes, keepdims=True),
    "norm": lambda x, axes: np.sqrt((x * x).sum(axis=axes, keepdims=True)),
    "rms": lambda x, axes: np.sqrt((x * x).mean(axis=axes, keepdims=True)),
    "max": lambda x, axes: x.max(axis=axes, keepdims=True),
    "min": lambda x, axes: x.min(axis=axes, keepdims=True),
    "count_nonzero": lambda x, axes: (x != 0).sum(axis=axes, keepdims=True).astype(float),
}

SHAPES = ((3, 4), (5, 2))


def weights() -> dict[tuple[str, str], float]:
    """A weight for each reduction and level: no other sum of them is as large."""
    pairs = [(f, level) for f in REDUCTIONS for level in WITHIN]
    return {pair: float(np.sqrt(2 + 3 * k)) for k, pair in enumerate(pairs)}


def text(condition: str, arms: Sequence[str], by_axes: bool = False) -> str:
    """A rule with every reduction at every level of what the branch assigns; `by_axes` writes rows as axis 0."""
    terms = [f"{weight!r}*{f}(a, per={level})" for (f, level), weight in weights().items()]
    lines = [f"if {condition}:", f"  a = {arms[0]}", "else:", f"  a = {arms[1]}"]
    lines += [f"d{k} = {term}" for k, term in enumerate(terms)]
    lines.append(f"direction = {' + '.join(f'd{k}' for k in range(len(terms)))} + 0*m")
    body = "".join(f"  {line}\n" for line in lines)
    for level, axis in _BY_AXES.items() if by_axes else ():
        body = body.replace(level, axis)
    return f"name: Branched\nhyper: {{lr: 1, h: 0.25}}\nstate: {{m: 1}}\nstep: |\n  m = m + g\n{body}"


def values(arms: Sequence[str], truths: Sequence[bool], grads: Sequence[Array]) -> list[Array]:
    """The value of the branch for each tensor, with the axes of both arms."""
    each = []
    for truth, g in zip(truths, grads, strict=True):
        then, otherwise = (ARMS[arm](g) for arm in arms)
        each.append(np.where(truth, then, otherwise))
    return each


def direction(values: Sequence[Array]) -> list[float | Array]:
    """The direction of each tensor."""
    total: list[Any] = [0.0 for _ in values]
    flat = np.concatenate([x.ravel() for x in values])
    for (f, level), weight in weights().items():
        axes = WITHIN[level]
        for i, x in enumerate(values):
            reduced = REDUCTIONS[f](flat, (0,)) if axes is None else REDUCTIONS[f](x, axes)
            total[i] = total[i] + weight * (reduced[0] if axes is None else reduced)
    return total
