"""The tensors bound to a kernel, for all machines."""

from __future__ import annotations

from collections.abc import Sequence

from rulec.compiler.ir import Program, Stage
from rulec.compiler.layout import Layout
from rulec.compiler.view import MatrixView
from rulec.errors import InternalError
from rulec.kernel.multi_tensor.arguments import Moving, byte_counts
from rulec.kernel.place import is_shaped, moving_lines

from .cut import Lying, lying, rows_of


class Tensors:
    """Tensors with these numbers of elements and matrix views, under a program of a `backend`.

    InternalError where the program sees matrices, and a view is missing or does not fit the layout.
    """

    def __init__(
        self, backend: str, program: Program, layout: Layout, sizes: Sequence[int], views: Sequence[MatrixView]
    ) -> None:
        self.backend, self.program, self.layout, self.sizes = backend, program, layout, sizes
        shaped = any(is_shaped(program, stage, layout) for stage in program.stages)
        if shaped and len(views) != len(sizes):
            raise InternalError(f"{program.name} sees matrices: bind its {backend} kernel with a view of each tensor")
        self._views = views if shaped else ()
        self._flat = rows_of(sizes)
        #: As matrices in memory, where the program sees matrices.
        self.lying = lying(views, layout.transposed) if shaped else self._flat

    def seen(self, shaped: bool) -> Lying:
        """The tensors in memory for a stage: as matrices, or as single rows where it is not `shaped`."""
        return self.lying if shaped else self._flat

    def moving(self, stage: Stage, lines: Sequence[str]) -> list[Moving]:
        """The arguments of each call of a stage besides gradients. `lines` has the lines of the table of addresses."""
        names = moving_lines(self.program, stage)
        return [Moving(self.backend, name, lines.index(name), self._bytes(name)) for name in names]

    def _bytes(self, name: str) -> list[int]:
        return byte_counts(self.program, self.layout, name, self.sizes, self._views)
