"""The work between the stages of a pure step."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

from rulec.language.node import Node, Op
from rulec.pure.leaf import dtype_name
from rulec.runtime.between import Between
from rulec.runtime.joins import Joining
from rulec.runtime.plan import Gap

#: Matrix functions that every device has in float32 and narrower.
_ANYWHERE = frozenset({Op.MATMUL, Op.NEWTON_SCHULZ})


class Gaps(Between):
    """The work between stages. Tiles are left to the framework's compiler, and products to the device of elements."""

    def work_out(self, gap: Gap) -> Joining:
        """Computes all values of a gap that are read after it."""
        yield from self._each(gap.values, gap)

    def _matrix_function(self, value: Node) -> Callable[..., Any]:
        function, on_device = super()._matrix_function(value), self.around.step.on_device  # type: ignore[attr-defined]
        if on_device is nullcontext or value.op not in _ANYWHERE:
            return function

        def where_elements_are(*operands: Any) -> Any:
            wide = any(dtype_name(x) == "float64" for x in operands if hasattr(x, "dtype"))
            with nullcontext() if wide else on_device():
                return function(*operands)

        return where_elements_are
