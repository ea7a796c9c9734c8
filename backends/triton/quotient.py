"""Quotients of square roots by numbers of the scalar table: exact, and without a branch for each element.

A square root is zero, infinite, NaN, or from 2**-75 to 2**64. With the reciprocal r of a divisor from 2**-50 to 2**50,
no product below overflows or is subnormal, and Markstein's theorem holds: of q = root*r, rounded, the rest
root - q*divisor is exact, and q + rest*r is rounded to the quotient. Where the rest is zero or NaN, q is the quotient.
"""

from __future__ import annotations

from rulec.backend.printer import StagePrinter
from rulec.language.expr.node import Node, Op

NAME = "quotient_of_root"

#: Triton's interpreter has no fused multiply-add; there the product of a number with itself is rounded.
SOURCE = '''\
@triton.jit
def quotient_of_root(root, divisor):
    """root/divisor as IEEE rounds it, of square roots by one number."""
    above_one = tl.full((), 1.0000001192092896, tl.float32)
    is_fused = tl.fma(above_one, above_one, tl.full((), -1.000000238418579, tl.float32)) > 0
    if is_fused & (divisor > 8.881784197001252e-16) & (divisor < 1125899906842624.0):
        inverse = tl.div_rn(1.0, divisor)
        near = root * inverse
        rest = tl.fma(-near, tl.broadcast_to(divisor, root.shape), root)
        quotient = tl.fma(rest, tl.broadcast_to(inverse, root.shape), near)
        quotient = tl.where(tl.abs(rest) > 0, quotient, near)
    else:
        quotient = tl.div_rn(root, divisor)
    return quotient
'''


class QuotientPrinter(StagePrinter):
    """Prints such quotients as calls of `quotient_of_root`."""

    def text(self, value: Node, defining: bool = False) -> str:
        """As of all stages, but for quotients of square roots in float32."""
        if self.there(value, defining) is None and is_quotient_of_root(value):
            root, divisor = map(self.text, value.args)
            return f"{NAME}({root}, {divisor})"
        return super().text(value, defining)


def is_quotient_of_root(value: Node) -> bool:
    """Whether a value is a square root divided by a number of the scalar table."""
    return value.op is Op.DIV and value.args[0].op is Op.SQRT and value.args[1].op is Op.SCALAR


def functions(text: str) -> list[str]:
    """The function, where a text calls it."""
    return [SOURCE] * (f"{NAME}(" in text)
