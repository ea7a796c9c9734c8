"""MLX's arrays: their differences from NumPy's, the library of a step on them, and names of states.

Only the CPU has float64 and decompositions: callers make its stream the current one. Trees of MLX are flat names with
dots in a file, so no name of a state has a dot.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import mlx.core as mx

from rulec.array_api.functions import arithmetic, meeting
from rulec.array_api.library import Array
from rulec.array_api.matrix import matrix_functions
from rulec.array_api.slices import Runs
from rulec.backend.printer import unique_name
from rulec.compiler.indices import numpy_index
from rulec.compiler.layout import scale_name
from rulec.errors import BackendUnsupported
from rulec.functional.quantized import Coded, Unbiased
from rulec.functional.values import PureFunctions, PureLibrary
from rulec.language.expr.node import Node, Op
from rulec.language.rule import Rule

words = importlib.import_module("rulec_backends.mlx.words")


class MlxFunctions(PureFunctions):
    """mx's functions. Its dtypes have no names, and its singular vectors are always all."""

    def cast(self, x: Any, dtype: Any) -> Any:
        """The array in another dtype, by its name or MLX's own."""
        return x.astype(getattr(mx, dtype) if isinstance(dtype, str) else dtype)

    def left_vectors(self, x: Any) -> Any:
        """The first of the full matrix."""
        return mx.linalg.svd(x)[0][..., : min(x.shape[-2:])]


def _refused(what: str) -> Callable[[Any], Any]:
    def refuse(x: Any) -> Any:
        raise BackendUnsupported("mlx", what, "this rule")

    return refuse


FUNCTIONS = MlxFunctions(mx)

_PLAIN = arithmetic(
    FUNCTIONS, exp=words.exp, sigmoid=words.sigmoid, cbrt=words.cbrt,
    erf=_refused("erf, which MLX computes to three digits,"), sin=_refused("sin, which MLX computes to seven digits,"),
    cos=_refused("cos, which MLX computes to seven digits,"), **words.FORMULAS,
)  # fmt: skip


class MlxLibrary(PureLibrary):
    """mx on arrays, traced by `mx.compile` or not."""

    of = FUNCTIONS
    arithmetic: Mapping[Op, Callable[..., Any]] = {op: meeting(FUNCTIONS, function) for op, function in _PLAIN.items()}
    matrix: Mapping[Op, Callable[..., Any]] = matrix_functions(FUNCTIONS)

    def numbers(self, values: Any) -> Any:
        """An array as it is; numbers of Python and NumPy in float64."""
        return values if isinstance(values, mx.array) else self.constant(values)

    def index(self, template: Node, operands: Sequence[Any], places: Mapping[str, Runs] | None = None) -> Any:
        """By NumPy where all numbers are known: MLX's sines have few digits."""
        if any(hasattr(x, "dtype") for x in operands):
            return super().index(template, operands, places)
        return self.constant(numpy_index(*operands, template=template))

    def take(self, values: Any, places: Array) -> Any:
        return values[mx.array(places)]

    def placed(self, values: Any, places: Any, numbers: Any) -> Any:
        """Writes to a copy."""
        new = mx.array(values)
        new[mx.array(places)] = numbers
        return new

    def _words(self, count: int, first: int, *, draw: int, **position: Any) -> Any:
        # An integer of Python has no xor with an array to its right.
        return super()._words(count, first, draw=mx.array(draw, mx.int64), **position)  # type: ignore[arg-type]


LIBRARY = MlxLibrary()


def is_traced(array: Any) -> bool:
    """Whether an array is one of a function that `mx.compile` traces; nothing waits for it."""
    try:
        mx.async_eval(array)  # type: ignore[no-untyped-call]
    except ValueError:
        return True
    return False


def apart(tree: Any) -> Any:
    """The same arrays as other values for `mx.compile`, which fuses nothing across them."""
    if isinstance(tree, mx.array):
        return mx.depends([tree], [])[0]
    if isinstance(tree, Mapping):
        return {key: apart(each) for key, each in tree.items()}
    if isinstance(tree, list | tuple):
        return type(tree)(map(apart, tree))
    if isinstance(tree, Coded):
        return replace(tree, codes=apart(tree.codes), scales=apart(tree.scales))
    return replace(tree, values=apart(tree.values)) if isinstance(tree, Unbiased) else tree


def state_names(rules: Iterable[Rule], renamed: Mapping[str, str], parts: Iterable[str]) -> dict[str, str]:
    """State -> name in MLX: `renamed`, else the rule's name as an identifier. `parts` of weights keep their names."""
    taken = set(renamed.values())
    names = dict.fromkeys(name for rule in rules for name in rule.state)
    mlx_names = {name: renamed[name] if name in renamed else unique_name(name, taken) for name in names}
    return mlx_names | {part: part for part in parts}


class Older:
    """The older names of states of composed rules, with dots: `adam.m` for `adam_m`."""

    def __init__(self, names: Mapping[str, str]) -> None:
        dotted = {old: new for old, new in names.items() if "." in old}
        self._names = {**dotted, **{scale_name(old): scale_name(new) for old, new in dotted.items()}}

    def rename(self, state: dict[str, Any]) -> None:
        """Gives entries of a state the names of today, also where `tree_unflatten` made a tree of a name with dots."""
        for old, new in self._names.items():
            for path in ([old], old.split(".")):
                if new not in state and _has(state, path):
                    state[new] = _taken(state, path)


def _has(tree: Any, path: list[str]) -> bool:
    if not path:
        return not isinstance(tree, dict)
    return isinstance(tree, dict) and path[0] in tree and _has(tree[path[0]], path[1:])


def _taken(tree: dict[str, Any], path: list[str]) -> Any:
    """The entry on a path, taken out of its tree with the dicts that it leaves empty."""
    if len(path) == 1:
        return tree.pop(path[0])
    entry = _taken(tree[path[0]], path[1:])
    if not tree[path[0]]:
        del tree[path[0]]
    return entry
