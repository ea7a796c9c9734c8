"""Kernels that make a gradient from its factors, beside those that are given it, and beside the definition."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

import rulec
from rulec.backend import registry
from rulec.backend.capabilities import Product
from rulec.backend.protocol import Rows
from rulec.compiler.layout import Layout, layout_for
from rulec.testing.cases import loaded
from rulec_backends.triton.product import Tile

SHAPES = ((70, 100), (64, 128), (1, 5), (64, 70), (33, 128))
TOKENS = (37, 64, 1, 0)

#: The tile of the interpreter, of factors that are not described.
PLAIN = (Tile(32, 64, 16, 4, 4, 1),)


class AsProducts:
    """A kernel of gradients that are products, called with gradients: each is made a product of the same value.

    It is the sum of its halves, which is exact: in any order, of any dtype, but for NaN, infinities and subnormals.
    """

    def __init__(self, kernel: Any) -> None:
        self.kernel = kernel

    def bind(self, *arguments: Any) -> Any:
        """A call that takes gradients."""
        call = self.kernel.bind(*arguments)
        return lambda stage, moving, *others, **named: call(stage, [*map(halved, moving)], *others, **named)


def halved(gradient: Tensor) -> Product:
    """Factors of a gradient."""
    one = torch.eye(len(gradient), dtype=gradient.dtype, device=gradient.device)
    return Product(torch.cat([one, one]), torch.cat([gradient / 2, gradient / 2]))


def kernels(rule: str, layout: Layout, factors: str, backend: str = "triton") -> tuple[Any, Any]:
    """The kernel that is given factors of this dtype, and the one that is given the gradient."""
    program, made = rulec.compile(loaded(rule)), registry.get(backend)
    own: Any = made
    product = own.build_epilogue(program, layout, factors, own.emit_epilogue(program, layout, factors))
    return product, made.build(program, layout, made.emit(program, layout))


class Twins:
    """A matrix twice, with the same states, in the storage of a layout."""

    def __init__(self, rule: str, layout: Layout, shape: Sequence[int], device: str) -> None:
        self.program = rulec.compile(loaded(rule))
        random = torch.Generator().manual_seed(1)
        drawn = {b.name: torch.rand(*shape, generator=random) for b in self.program.states}
        start = torch.randn(*shape, generator=random)
        self.sets = [
            {n: x.clone().to(device, getattr(torch, layout.dtype(n))) for n, x in {**drawn, "p": start}.items()}
            for _ in range(2)
        ]

    def call(self, which: int, kernel: Any, gradient: Any, rows: Rows, **options: Any) -> None:
        """One update of one of the two."""
        own = self.sets[which]
        kernel.bind([own["p"]], [{n: x for n, x in own.items() if n != "p"}], **options)(0, [gradient], rows)

    def same(self) -> bool:
        """Whether the two have the same bits."""
        one, other = self.sets
        return all(torch.equal(x.view(torch.uint8), other[n].view(torch.uint8)) for n, x in one.items())


def rows_of(program: Any, **given: Any) -> Rows:
    """Scalars, the second of two rows being the tensor's."""
    table = np.random.default_rng(0).uniform(0.1, 0.9, (2, len(program.columns)))
    return Rows(table, np.ones(1, np.int64), **given)


def integers(tokens: int, size: int, dtype: str, device: str, seed: int) -> Tensor:
    """A factor of whole numbers: sums of their products are exact in float32, in any order, and not in 16 bits."""
    drawn = torch.randint(-30, 31, (tokens, size), generator=torch.Generator().manual_seed(seed))
    return drawn.to(getattr(torch, dtype)).to(device)


def same_bits(
    rule: str, dtype: str, factors: str, shape: tuple[int, int], tokens: int, device: str = "cpu", *,
    states: str | None = None, maximize: bool = False, stays: bool | None = None, scale: float | None = None,
    turned: bool = False, plain_tile: bool = False,
) -> bool:  # fmt: skip
    """Whether an update by factors has the bits of one by their product, rounded as torch would and then stored."""
    program = rulec.compile(loaded(rule))
    layout = layout_for(program, dtype, states=dict.fromkeys((b.name for b in program.states), states or dtype),
                        maximize=maximize)  # fmt: skip
    product, plain = kernels(rule, layout, factors)
    twins = Twins(rule, layout, shape, device)
    outputs, inputs = (integers(tokens, n, factors, device, seed) for seed, n in enumerate(shape))
    if turned:
        outputs, inputs = (x.t().contiguous().t() for x in (outputs, inputs))
    found = (outputs.double().t() @ inputs.double()).to(outputs.dtype).to(getattr(torch, dtype))
    stay = None if stays is None else torch.tensor([not stays, stays], device=device)
    rows = rows_of(program, stays=stay, scale=None if scale is None else torch.tensor([scale], device=device))
    before = twins.sets[0]["p"].clone()
    options = {"tiles": PLAIN} if plain_tile else {}
    twins.call(0, product, Product(outputs, inputs), rows, **options)
    twins.call(1, plain, found.contiguous(), rows)
    moved = not torch.equal(before, twins.sets[0]["p"])
    return twins.same() and moved == (not stays)
