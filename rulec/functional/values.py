"""The values of a functional step: facts of a parameter for a plan, values of a state, and array functions.

The array functions are for arrays that are never written.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from copy import copy
from dataclasses import dataclass, field
from typing import Any

from rulec.array_api.functions import Functions
from rulec.array_api.library import Library
from rulec.language.expr.node import Node, walk


@dataclass(frozen=True)
class Leaf:
    """The facts of a parameter for a plan: its path, its shape, and its dtype and its gradient's by our names.

    `states` are the names and dtypes of the states that it has already, or the keys of their formats. A `paired` leaf
    is complex, and its shape is of the pairs of reals. `path` is the path of its parameter, where this is several
    tensors.
    """

    name: str
    shape: tuple[int, ...]
    dtype: str
    grad_dtype: str
    states: tuple[tuple[str, str], ...] = ()
    paired: bool = False
    path: str = ""

    @property
    def parameter(self) -> str:
        """The path of its parameter."""
        return self.path or self.name


def dtype_name(array: Any) -> str:
    """The dtype of an array by our names."""
    return str(array.dtype).rpartition(".")[2]


def leaves_of(
    names: Sequence[str], params: Sequence[Any], grads: Sequence[Any], states: Mapping[str, Mapping[int, Any]],
    paired: Collection[int] = (), paths: Sequence[str] = (),
) -> tuple[Leaf, ...]:  # fmt: skip
    """The leaves of these arrays; existing `states` are name -> place of a leaf -> array.

    `paths` are the paths of their parameters, by default their names.
    """
    return tuple(
        Leaf(
            name, tuple(params[i].shape), dtype_name(params[i]), dtype_name(grads[i]),
            tuple((state, dtype_name(arrays[i])) for state, arrays in states.items() if i in arrays), i in paired, path,
        )
        for i, (name, path) in enumerate(zip(names, paths or names, strict=True))
    )  # fmt: skip


#: Hyper-parameters of each group: numbers, or 0-d arrays.
Hypers = Sequence[Mapping[str, Any]]


@dataclass
class Values:
    """A state's arrays, without the containers that users see.

    `count` is how often the leaves were updated: one number, or one for each leaf. `arrays` is state -> place of a leaf
    -> array, for the leaves with this state. `numbers` is state -> a vector over the leaves with it or over the groups,
    or one number.
    """

    count: Any
    arrays: dict[str, dict[int, Any]] = field(default_factory=dict)
    numbers: dict[str, Any] = field(default_factory=dict)

    def __iter__(self) -> Iterator[Any]:
        return iter((self.count, self.arrays, self.numbers))

    def copied(self) -> Values:
        """The same arrays in containers of their own."""
        return Values(self.count, {k: copy(v) for k, v in self.arrays.items()}, dict(self.numbers))


class PureFunctions(Functions):
    """The functions of a library with numbers as arrays, and with products of matrices of 16 bits."""

    def fitted(self, x: Any, dtype: Any) -> Any:
        """A number in the dtype, unless this is None; arrays stay."""
        if dtype is None or bool(getattr(x, "ndim", 0)):
            return x
        number = self.xp.asarray(x)
        return number.astype(dtype) if self.is_float(number) else x

    def product_dtype(self, x: Any, dtype: str) -> str:
        """The dtype itself: matrices of any can be multiplied."""
        return dtype

    def wide(self, x: Any) -> Any:
        """The array with numbers of at least 32 bits."""
        return x.astype(self.xp.result_type(x.dtype, self.xp.float32))

    def wide_matmul(self, a: Any, b: Any) -> Any:
        """A product that is not rounded to 16 bits."""
        return self.matmul(self.wide(a), self.wide(b))

    def kept(self, x: Any) -> Any:
        """The array with the digits of its dtype, where a compiler would go on with those that it had before."""
        return x

    def looked_up(self, table: Any, places: Any) -> Any:
        """The entries of a small table of NumPy's at these places, which are int32 and inside of it."""
        return self.xp.take(self.xp.asarray(table), places)

    def norm(self, x: Any, dtype: Any) -> Any:
        """Summed in the dtype of the matrices before they were widened."""
        squares = self.xp.square(x.astype(dtype))
        return self.xp.sqrt(self.xp.sum(squares, axis=(-2, -1), keepdims=True)).astype(x.dtype)


class PureLibrary(Library):
    """An array library with the further functions of a step."""

    of: PureFunctions

    def read(self, array: Any) -> Any:
        """The array itself, or in float32 one of 16 bits."""
        return self.of.wide(array)

    def constant(self, value: Any) -> Any:
        """A number, or an array of one, in float64."""
        return self.of.xp.asarray(value, self.of.xp.float64)

    def cast(self, values: Any, dtype: str) -> Any:
        return self.of.cast(self.numbers(values), dtype)

    def placed(self, values: Any, places: Any, numbers: Any) -> Any:
        """The vector of these values, with other numbers at some places."""
        raise NotImplementedError

    def where(self, condition: Any, a: Any, b: Any) -> Any:
        """The elements of `a` where the condition is true, else those of `b`."""
        return self.of.xp.where(condition, a, b)

    def evaluated(self, roots: Sequence[Node], leaf: Callable[[Node], Any]) -> dict[Node, Any]:
        """The values of expressions and of all their parts."""
        values: dict[Node, Any] = {}
        for part in walk(roots):
            operands = (values[operand] for operand in part.args)
            values[part] = self.arithmetic[part.op](*operands) if part.args else leaf(part)
        return values
