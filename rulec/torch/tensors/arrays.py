"""What torch tensors differ in from NumPy's arrays, where they are: on a device, or where NumPy cannot see them.

Numbers known here are 0-d tensors on the CPU. torch hands them to the kernels of any device as arguments; functions
that would copy them there, and wait for the copy, are avoided. torch itself waits for the device in `eigh` and in
singular value decompositions, to look for failures.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, cast

import torch
from torch import Tensor

from rulec.array_api import bits
from rulec.array_api.functions import Functions, arithmetic
from rulec.array_api.matrix import iterations, matrix_functions, times
from rulec.backend.quintic import QuinticProducts
from rulec.language.expr.newton_schulz import Coefficients, coefficients_of
from rulec.language.expr.node import Op
from rulec.language.expr.static import MUON, NORM, UNDIVIDED
from rulec.torch.tensors.products import TORCH


class TorchFunctions(Functions):
    """torch's names; numbers are made where the arrays are."""

    def cast(self, x: Tensor, dtype: Any) -> Tensor:
        """The tensor in another dtype."""
        return x.to(getattr(torch, dtype) if isinstance(dtype, str) else dtype)

    def diagonal(self, x: Tensor) -> Tensor:
        """By other keywords."""
        return torch.diagonal(x, dim1=-2, dim2=-1)

    def backwards(self, x: Tensor, axes: int) -> Tensor:
        """By `flip`: torch has no negative strides."""
        return torch.flip(x, (1, 2)[:axes])

    def matmul(self, a: Tensor, b: Tensor) -> Tensor:
        """Of stacks of equal length at once: `torch.matmul` comes to the same by five calls more."""
        return torch.bmm(a, b) if a.dim() == b.dim() == 3 and len(a) == len(b) else torch.matmul(a, b)

    def solve_upper(self, a: Tensor, b: Tensor) -> Tensor:
        """By torch's own function for triangular matrices, which does not wait for a device."""
        return cast(Tensor, torch.linalg.solve_triangular(a, b, upper=True))

    def filled(self, condition: Tensor, x: Tensor, number: float) -> Tensor:
        """With memory that is filled on the device."""
        return torch.where(condition, x, torch.full_like(x, number))

    def at_least(self, x: Tensor, least: float) -> Tensor:
        """By `clamp`, which takes a number."""
        return torch.clamp(x, min=least)

    def largest(self, x: Tensor) -> Tensor:
        """By `gather`."""
        return torch.gather(x, -2, torch.argmax(torch.abs(x), dim=-2, keepdim=True))

    def beside(self, number: Any, x: Tensor) -> Any:
        """An array in the matrix's dtype; a number as it is."""
        return number.to(x.dtype) if isinstance(number, Tensor) else number


def _where(condition: Tensor, a: Tensor, b: Tensor) -> Tensor:
    """Truth from the scalar table is a number."""
    condition = condition if condition.dtype is torch.bool else condition != 0
    device = next((x.device for x in (condition, a, b) if x.device.type != "cpu"), condition.device)
    return torch.where(_on(device, condition), _on(device, a), _on(device, b))


def _on(device: torch.device, value: Tensor) -> Tensor:
    if value.device == device:
        return value
    return torch.full((), value.item(), dtype=value.dtype, device=device)


def _power(x: Tensor, y: Tensor) -> Tensor:
    """C99's pow. For exponents of 0.5 and -0.5 torch takes a square root, which is -0 at -0 and NaN at -inf: there the
    result follows from the sizes."""
    result = torch.pow(x, y)
    half = torch.eq(torch.abs(y), 0.5)
    special = torch.logical_and(half, torch.logical_or(torch.eq(x, 0), torch.eq(x, -torch.inf)))
    size = torch.abs(x).to(result.dtype)
    return _where(special, _where(torch.gt(y, 0), size, 1 / size), result)


def _remainder(a: Tensor, b: Tensor) -> Tensor:
    """What is left of a division rounded down, a zero too with the sign of `b`."""
    left = torch.remainder(a, b)
    return _where(torch.eq(left, 0), torch.copysign(torch.zeros_like(left), b), left)


def _cbrt(x: Tensor) -> Tensor:
    """A power near the root, and one step of Newton's in float64, away from zero and infinity."""
    size = torch.abs(x.double())
    plain = torch.logical_and(size > 0, size < torch.inf)
    value = torch.where(plain, size, torch.ones_like(size))
    root = torch.pow(value, 1 / 3)
    root = root - (root - value / (root * root)) / 3
    return torch.where(plain, torch.copysign(root, x), x.double()).to(x.dtype)


def _chance(like: Tensor, *words: Tensor) -> Tensor:
    """The random bits of elements, where they are: torch has few operations of uint32."""
    with torch.device(like.device):
        return cast(Tensor, bits.chance(torch, like, *words, word=torch.int64))


def newton_schulz(
    x: Tensor, steps: float, dtype: str | None, coefficients: str | Coefficients = MUON, normalize: str | float = NORM,
    products: Callable[[Tensor], QuinticProducts] = lambda y: TORCH,
) -> Tensor:  # fmt: skip
    """The quintic iteration in the dtype asked for or the stack's own, on all of it, by the `products` chosen for it.

    Iterations take turns in the memory of two stacks, and share that of the symmetric matrices.
    """
    y = x if dtype is None else x.to(getattr(torch, dtype))
    by, gram, polynomial, last = products(y), None, None, None
    if normalize != UNDIVIDED:
        norm = torch.linalg.vector_norm(y, dim=(-2, -1), keepdim=True).clamp(min=1e-7)
        y = by.divided(y, times(norm, normalize))
    for a, b, c in coefficients_of(coefficients, iterations(steps)):
        gram = by.gram(y, out=gram)
        polynomial = by.polynomial(gram, b, c, out=polynomial)
        y, last = by.following(y, polynomial, a, out=last), y
    return y.to(x.dtype)


def _rsqrt(x: Tensor) -> Tensor:
    """The inverse of the root, rounded twice as in NumPy: torch's own may be off by a bit."""
    return torch.reciprocal(torch.sqrt(x))


FUNCTIONS = TorchFunctions(torch)

#: The operations, in the tensors' own dtype.
ARITHMETIC: Mapping[Op, Callable[..., Any]] = arithmetic(
    FUNCTIONS,
    power=_power,
    remainder=_remainder,
    equal=torch.eq,
    where=_where,
    cbrt=_cbrt,
    rsqrt=_rsqrt,
    chance=_chance,
)

#: The matrix functions, where the tensors are.
DEVICE_MATRIX: Mapping[Op, Callable[..., Any]] = {**matrix_functions(FUNCTIONS), Op.NEWTON_SCHULZ: newton_schulz}
