"""The array functions of a step, for arrays that are never written."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from rulec.array_api.functions import Functions
from rulec.array_api.library import Library
from rulec.language.expr.node import Node, walk


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
        """In at least 32 bits."""
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
