"""What a step needs of arrays that are never written."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from rulec.arrays.functions import Functions
from rulec.arrays.library import ArrayLibrary
from rulec.language.node import Node, walk


class PureFunctions(Functions):
    """Those of a library whose numbers are arrays, and which multiplies matrices of 16 bits too."""

    def fitted(self, x: Any, dtype: Any) -> Any:
        """A number in that dtype, where there is one."""
        if dtype is None or bool(getattr(x, "ndim", 0)):
            return x
        number = self.xp.asarray(x)
        return number.astype(dtype) if self.is_float(number) else x

    def product_dtype(self, x: Any, dtype: str) -> str:
        """Any."""
        return dtype

    def wide(self, x: Any) -> Any:
        """In at least 32 bits."""
        return x.astype(self.xp.result_type(x.dtype, self.xp.float32))

    def wide_matmul(self, a: Any, b: Any) -> Any:
        """A product that is not rounded to 16 bits."""
        return self.matmul(self.wide(a), self.wide(b))

    def norm(self, x: Any, dtype: Any) -> Any:
        """Summed in the dtype that the matrices had."""
        squares = self.xp.square(x.astype(dtype))
        return self.xp.sqrt(self.xp.sum(squares, axis=(-2, -1), keepdims=True)).astype(x.dtype)


class PureLibrary(ArrayLibrary):
    """What a step needs of a library beside what all array libraries do."""

    of: PureFunctions

    def read(self, array: Any) -> Any:
        """The array itself, or in float32 one of 16 bits."""
        return self.of.wide(array)

    def constant(self, value: Any) -> Any:
        """A number, or an array of one, in float64."""
        return self.of.xp.asarray(value, self.of.xp.float64)

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
