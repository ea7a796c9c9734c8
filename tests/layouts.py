"""One network in the layouts of torch and of other frameworks: parameters, roles of their axes, and matrix rules."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np

import rulec
from rulec.functional.axes import reads_layout
from tests.library import single

#: Parameters as torch keeps them: a convolution, a layer that widens, attention of 2 heads, three layers in a stack.
SHAPES = {
    "conv": (4, 3, 2, 2), "dense_b": (8,), "dense_w": (8, 5), "out": (5, 6), "query": (6, 5), "stack": (3, 6, 4),
}  # fmt: skip

#: A parameter with the axes of another framework, from torch's, and the roles of these axes.
Layout = Mapping[str, tuple[Callable[[Any], Any], tuple[str, ...]]]

#: The layout of Flax and Keras.
HEADS: Layout = {
    "conv": (lambda x: x.transpose(2, 3, 1, 0), ("window", "window", "inputs", "outputs")),
    "dense_b": (lambda x: x, ("outputs",)),
    "dense_w": (lambda x: x.T, ("inputs", "outputs")),
    "out": (lambda x: x.T.reshape(2, 3, 5), ("inputs", "inputs", "outputs")),
    "query": (lambda x: x.T.reshape(5, 2, 3), ("inputs", "outputs", "outputs")),
    "stack": (lambda x: x.transpose(0, 2, 1), ("batch", "inputs", "outputs")),
}
AXES = {name: roles for name, (_, roles) in HEADS.items()}


def arrays(seed: int) -> dict[str, Any]:
    """The parameters as torch keeps them."""
    rng = np.random.default_rng(seed)
    return {name: rng.normal(size=shape) for name, shape in SHAPES.items()}


def as_torch(tree: Mapping[str, Any]) -> dict[str, Any]:
    """The parameters with the layers of the stack one by one."""
    return {name: dict(enumerate(x)) if name == "stack" else x for name, x in tree.items()}


def with_heads(tree: Mapping[str, Any]) -> dict[str, Any]:
    """The parameters in the layout of Flax and Keras."""
    return {name: HEADS[name][0](x) for name, x in tree.items()}


def largest_difference(torchs: Any, others: Any, to_other: Callable[[Any], Any] = with_heads) -> float:
    """The largest difference of parameters in both layouts, beside the largest number; `to_other` turns torch's."""
    whole = to_other({name: np.stack([*x.values()]) if isinstance(x, dict) else x for name, x in torchs.items()})
    return max(float(np.abs(x - others[name]).max() / np.abs(x).max()) for name, x in whole.items())


def whole_rules() -> list[str]:
    """The rules that are neither a transform nor a wrapper."""
    return [name for name in single() if "/" not in name and not rulec.load(name).wraps]


def of_layouts() -> list[str]:
    """The rules that depend on the layout of a parameter."""
    return [name for name in whole_rules() if reads_layout(rulec.load(name))]


@functools.cache
def wide(name: str) -> rulec.Rule:
    """A rule whose iterations of matrices are in float64 rather than bfloat16."""
    rule = rulec.load(name)
    path = Path(rule.path or "")
    text = path.read_text() if path.is_file() else ""
    return rulec.parse(text.replace('"bfloat16"', '"float64"'), str(path), path.parent) if text else rule
