"""Offload of parameters of unusual shapes: without elements, without dimensions, in other memory orders, with gaps."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

import rulec.torch
from tests.torch.offload.runs import assert_same_bits, take_steps

BF16 = torch.bfloat16


def unusual() -> dict[str, tuple[Tensor, Tensor]]:
    """Parameters by what is unusual in them, each with the memory that it is a view of."""
    generator = torch.Generator().manual_seed(3)

    def memory(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator).to(BF16)

    wholes = [memory(0), memory(0, 4), memory(), memory(1), memory(12, 8), memory(40, 32), memory(3, 4, 5)]
    wholes += [memory(2, 4, 5, 3), memory(40, 30)]
    views = [
        *wholes[:4], wholes[4].t(), wholes[5][::2, ::2], wholes[6].permute(2, 0, 1), wholes[7].permute(0, 3, 1, 2),
        wholes[8],
    ]  # fmt: skip
    names = ["empty", "no rows", "a number", "one", "transposed", "gaps", "permuted", "channels last", "plain"]
    made = {name: view.detach().requires_grad_() for name, view in zip(names, views, strict=True)}
    return {name: (made[name], whole) for name, whole in zip(names, wholes, strict=True)}


@pytest.mark.parametrize("buffer", [64, 512, 1 << 20])
@pytest.mark.parametrize("weights", ["kahan", "split", "master", ""])
@pytest.mark.parametrize("offload", ["step", "states"])
def test_bits_are_those_without_offload(offload: str, weights: str, buffer: int) -> None:
    """Gaps between the elements of a parameter stay as they are too."""
    for rule in ("adamw", "lion", "clip_by_global_norm >> adamw", "lamb"):
        runs = []
        for words in ({}, {"offload": offload, "offload_buffer": buffer}):
            made = unusual()
            params = [param for param, _ in made.values()]
            optimizer = rulec.torch.optimizer(rule)(params, weights=weights, **words)
            take_steps(optimizer, params, 3)
            runs.append(([whole for _, whole in made.values()], optimizer.state_dict()["state"]))
        assert_same_bits(runs[1], runs[0])
