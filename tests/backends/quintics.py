"""The products of `newton_schulz` beside exact ones, in Triton's interpreter or on a device."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from rulec.backend import registry

#: Wide, square and tall stacks: of whole tiles and of ends of them, whose rows begin at multiples of 16 bytes or not.
SHAPES = ((2, 40, 70), (2, 64, 96), (1, 33, 40), (2, 72, 40), (1, 97, 50), (1, 32, 32))

#: Numbers for which the polynomial of whole numbers is exact in float32.
B, C, A = -0.5, 0.25, 1.5

#: What makes a kernel wrong: a text of it, and what stands there instead.
FAULTS = {
    "no mirror image": ("put(out, mirrored, start, top,", "put(out, tile, top, start,"),
    "a mirror image that is not turned": ("put(out, mirrored, start, top,", "put(out, tile, start, top,"),
    "a wrong column": ("tl.where(place < long, place, place - long)", "tl.where(place < long, place, place - line)"),
    "a wrong row": ("odd = deep % 2", "odd = 0"),
    "a matrix of its neighbour": ("out += matrix.to(tl.int64) * height * width", "out += 0 * height"),
    "ends of sums left out": ("range(0, depth, DEEP)", "range(0, depth - DEEP + 1, DEEP)"),
    "terms beyond the end": (
        "tl.load(at, mask=inside & (term < depth - first), other=0.0)",
        "tl.load(at, mask=inside & (term < depth - first), other=1.0)",
    ),
}


#: The same of the kernel that divides by norms.
DIVIDING_FAULTS = {"a norm of its neighbour": ("tl.load(norms + matrix)", "tl.load(norms + 0 * matrix)")}


def products(dtype: str, fault: str = "") -> Any:
    """The triton backend's products, with a fault where one is named."""
    backend: Any = registry.get("triton")
    source = backend.emit_quintic(dtype)
    if fault:
        before, after = (FAULTS | DIVIDING_FAULTS)[fault]
        assert before in source, fault
        source = source.replace(before, after)
    return backend.build_quintic(dtype, source)


def integers(shape: Sequence[int], dtype: str, device: str, most: int = 3) -> Tensor:
    """Whole numbers: sums of their products are exact in float32, in any order, and not in 16 bits."""
    drawn = torch.randint(-most, most + 1, (*shape,), generator=torch.Generator().manual_seed(sum(shape)))
    return drawn.to(device, getattr(torch, dtype))


def symmetric(batch: int, side: int, dtype: str, device: str) -> Tensor:
    """Symmetric matrices of whole numbers."""
    lower = torch.tril(integers((batch, side, side), dtype, device))
    return lower + torch.tril(lower, -1).mT


def divides_otherwise(dtype: str, shape: Sequence[int], device: str = "cpu", fault: str = "") -> bool:
    """Whether matrices over their norms have other bits than torch's, with zeros, infinities and NaN among them."""
    drawn = torch.Generator().manual_seed(1)
    y = torch.randn(tuple(shape), generator=drawn).to(device, getattr(torch, dtype))
    y.view(-1)[:4] = torch.tensor([0.0, -0.0, torch.inf, torch.nan])
    norms = torch.rand((shape[0], 1, 1), generator=drawn).to(device, y.dtype) * 30 + 1e-7
    ours, theirs = products(dtype, fault).divided(y, norms), y / norms
    same = (ours.view(torch.int16) == theirs.view(torch.int16)) | (ours.isnan() & theirs.isnan())
    return not bool(same.all())


PRODUCTS = ("gram", "polynomial", "following")


def wrong(
    dtype: str, shape: Sequence[int], device: str = "cpu", fault: str = "", names: Sequence[str] = PRODUCTS
) -> list[str]:  # fmt: skip
    """The products that have not the bits of exact ones rounded once, or of their own mirror image."""
    by, y = products(dtype, fault), integers(shape, dtype, device).mT.contiguous().mT
    tall, side = shape[1] > shape[2], min(shape[1:])
    gram, wide = symmetric(shape[0], side, dtype, device), y.double()
    square = gram.double()
    pairs = {
        "gram": lambda: (by.gram(y), wide.mT @ wide if tall else wide @ wide.mT),
        "polynomial": lambda: (by.polynomial(gram, B, C), B * square + C * square @ square),
        "following": lambda: (by.following(y, gram, A), A * wide + (wide @ square if tall else square @ wide)),
    }
    failed = []
    for name in names:
        found, exact = pairs[name]()
        same = torch.equal(found, exact.to(found.dtype)) and (name == "following" or torch.equal(found, found.mT))
        failed += [] if same else [name]
    return failed


def orthogonalized(by: Any, y: Tensor, steps: int = 5) -> Tensor:
    """Muon's iteration by some products."""
    y = y / torch.linalg.vector_norm(y, dim=(-2, -1), keepdim=True)
    for _ in range(steps):
        y = by.following(y, by.polynomial(by.gram(y), -4.7750, 2.0315), 3.4445)
    return y


def depends_on_neighbours(dtype: str, shape: tuple[int, int], device: str = "cpu") -> list[str]:
    """In what a matrix with neighbours, some of them NaN or infinite, differs from itself alone."""
    random = torch.Generator().manual_seed(0)
    y = torch.randn(4, *shape, generator=random).to(device, getattr(torch, dtype))
    y[1], y[2, -1, -1] = torch.nan, torch.inf
    by = products(dtype)
    found, failed = orthogonalized(by, y, 1), []
    for k in (0, 3):
        alone = orthogonalized(by, y[k : k + 1].clone(), 1)[0]
        failed += [f"matrix {k}"] * (not torch.equal(found[k], alone))
        failed += [f"no number in {k}"] * (not bool(alone.isfinite().all()))
    return failed + ["numbers of NaN"] * (not bool(found[1].isnan().all()))
