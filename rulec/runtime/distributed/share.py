"""The share of one of several owners in the work on a matrix: its memory, and its bytes for the others."""

from __future__ import annotations

from dataclasses import dataclass

from rulec.compiler.layout import ITEM_SIZE
from rulec.language.expr.newton_schulz import Coefficients
from rulec.language.expr.static import MUON, NORM


@dataclass(frozen=True)
class Share:
    """The share of one of several owners in `newton_schulz` of a matrix: its place among `count` of them.

    `rows` is the shorter side of the matrix. Each owner adds up some rows of the Gram matrix, and gives them to all.
    """

    rows: int
    steps: int
    dtype: str
    place: int = 0
    count: int = 1
    coefficients: str | Coefficients = MUON
    normalize: str | float = NORM

    @property
    def kind(self) -> tuple[int, str, str | Coefficients, str | float]:
        """The properties in which matrices of one batch are equal."""
        return self.steps, self.dtype, self.coefficients, self.normalize

    @property
    def wide(self) -> str:
        """The dtype of sums."""
        return "float64" if self.dtype == "float64" else "float32"

    def block(self, place: int) -> slice:
        """The rows of the Gram matrix that the owner at this place adds up."""
        return slice(self.rows * place // self.count, self.rows * (place + 1) // self.count)

    @property
    def room(self) -> int:
        """The bytes that the work needs beside the piece: sums here and of others, the Gram matrix, its polynomial."""
        item: int = ITEM_SIZE[self.wide] + ITEM_SIZE[self.dtype]
        return 2 * self.rows * self.rows * item if self.count > 1 else 0

    @property
    def exchanges(self) -> int:
        """The exchanges between the owners: of squares, then in each step of sums, rows and polynomials."""
        return 1 + 3 * self.steps if self.count > 1 else 0

    @property
    def sent(self) -> int:
        """The bytes that this owner sends to the others."""
        mine, others = self.block(self.place), self.count - 1
        sums = (self.rows - (mine.stop - mine.start)) * ITEM_SIZE[self.wide]
        rows = 2 * (mine.stop - mine.start) * others * ITEM_SIZE[self.dtype]
        products: int = self.steps * self.rows * (sums + rows)
        return 8 * others + products
