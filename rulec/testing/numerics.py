"""The exactness of a machine's arithmetic: all tolerances derive from these numbers."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from rulec.language.expr.node import Op

#: Spacing of the numbers above 1, smallest normal and largest number of each dtype.
EPS: Mapping[str, float] = {"float64": 2.0**-52, "float32": 2.0**-23, "float16": 2.0**-10, "bfloat16": 2.0**-7}
SMALLEST_NORMAL: Mapping[str, float] = {"float64": 2.0**-1022, "float32": 2.0**-126}
LARGEST: Mapping[str, float] = {"float64": (2 - 2.0**-52) * 2.0**1023, "float32": (2 - 2.0**-23) * 2.0**127}

_FUNCTIONS = (Op.EXP, Op.LOG, Op.TANH, Op.SIGMOID, Op.ERF, Op.CBRT, Op.POW, Op.SIN, Op.COS)


@dataclass(frozen=True)
class Numerics:
    """The greatest error of each operation, in ulps of its result in the compute dtype.

    `rounded` is for + - * / sqrt: 0.5 where they are correctly rounded. `function` is for every other function that is
    not exact. With `flushes`, numbers too small to be normal may count as zero.
    """

    rounded: float = 0.5
    function: float = 4.0
    flushes: bool = False

    def ulps(self, op: Op) -> float:
        """The greatest error of one operation."""
        return self.function if op in _FUNCTIONS else self.rounded


#: IEEE 754 arithmetic, and functions good to a few ulps: the promise of every backend but JAX and MLX.
IEEE = Numerics()

#: XLA's arithmetic on CPUs, as exact, but subnormal numbers are zero.
XLA = Numerics(flushes=True)

#: MLX's arithmetic on CPUs: as exact, but subnormal results may be zero.
MLX = Numerics(flushes=True)
