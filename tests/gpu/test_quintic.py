"""Muon's products on the device: exact but for one rounding, in any stack; in graphs, on streams, in compiled steps."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

import rulec.torch
from benchmarks.gpu.host import RATES, WARM_UP, capture
from tests.backends.quintics import depends_on_neighbours, divides_otherwise, wrong
from tests.gpu.training import DEVICE, assert_near, bits, check_no_waiting, give, gradients, parameters

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not hasattr(torch.optim, "Muon"), reason="this torch has no Muon"),
]

#: Small ones for torch's products, wide and tall ones for the backend's, two of a shape.
MATRICES = ((300, 1000), (64, 48), (512, 256), (300, 1000), (1000, 333))

#: An update is lr of a matrix of elements below 1, each off by a few roundings of the largest in bfloat16.
ROUNDING = 2.0**-6


@pytest.mark.parametrize(
    "shape", [(2, 256, 512), (3, 512, 256), (2, 300, 1000), (2, 1000, 333), (1, 1600, 1600), (2, 1024, 4096)]
)
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_products_of_whole_numbers_are_exact_but_for_one_rounding(shape: tuple[int, int, int], dtype: str) -> None:
    assert wrong(dtype, shape, DEVICE) == []


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_matrices_over_their_norms_have_torchs_bits(dtype: str) -> None:
    assert not any(
        divides_otherwise(dtype, shape, DEVICE) for shape in ((3, 300, 1000), (1, 257, 261), (5, 1024, 4096))
    )


@pytest.mark.parametrize("shape", [(256, 300), (1000, 333), (1600, 1600)])
def test_a_matrix_has_the_same_bits_in_every_stack_beside_nan_and_infinity(shape: tuple[int, int]) -> None:
    assert depends_on_neighbours("bfloat16", shape, DEVICE) == []


def stepped(params: list[Tensor], optimizer: Any, steps: int = 3) -> list[Tensor]:
    """The parameters after steps."""
    for step in range(steps):
        give(params, gradients(params, step))
        optimizer.step()
    return params


def test_muon_is_torchs_within_the_rounding_of_bfloat16() -> None:
    ours, theirs = parameters(MATRICES), parameters(MATRICES)
    stepped(ours, rulec.torch.Muon(ours, lr=0.02))
    stepped(theirs, torch.optim.Muon(theirs, lr=0.02))
    for a, b in zip(ours, theirs, strict=True):
        assert float((a - b).abs().max()) <= 3 * 0.02 * ROUNDING


def test_steps_have_the_same_bits_each_time_and_with_fewer_matrices() -> None:
    runs = []
    for shapes in (MATRICES, MATRICES, MATRICES[:3]):
        params = parameters(MATRICES)[: len(shapes)]
        runs.append(bits(stepped(params, rulec.torch.Muon(params, lr=0.02))))
    assert runs[0] == runs[1]
    assert runs[0][:3] == runs[2]


def test_a_graph_of_a_step_has_the_bits_of_the_step() -> None:
    ours, plain = parameters(MATRICES), parameters(MATRICES)
    lr = torch.tensor(RATES[0], device=DEVICE)
    give(ours, gradients(ours, 0))
    give(plain, gradients(plain, 0))
    graph = capture(rulec.torch.Muon(ours, lr=lr, capturable=True).step)
    other = rulec.torch.Muon(plain, lr=RATES[0])
    for _ in range(WARM_UP):
        other.step()
    for rate in RATES:
        lr.fill_(rate)
        graph.replay()
        other.param_groups[0]["lr"] = rate
        other.step()
    assert_near(ours, plain, 2.0**-12)


def test_a_step_on_a_side_stream_does_not_wait_for_the_device() -> None:
    ours, plain = parameters(MATRICES), parameters(MATRICES)
    mine, other = rulec.torch.Muon(ours, lr=0.02), rulec.torch.Muon(plain, lr=0.02)
    stepped(ours, mine, 1)
    stepped(plain, other, 2)
    late = gradients(ours, 1)
    give(ours, [torch.zeros_like(p) for p in ours])
    side = torch.cuda.Stream()
    torch.cuda.synchronize()
    with torch.cuda.stream(side), check_no_waiting():
        torch.cuda._sleep(200_000_000)
        for param, grad in zip(ours, late, strict=True):
            assert param.grad is not None
            param.grad.copy_(grad)
        mine.step()
    side.synchronize()
    assert bits(ours) == bits(plain)


def test_a_step_within_what_torch_compiles() -> None:
    torch.compiler.reset()
    ours, plain = parameters(MATRICES), parameters(MATRICES)
    mine = rulec.torch.Muon(ours, lr=0.02)

    def step(params: list[Tensor]) -> Tensor:
        loss = sum((p.square().sum() for p in params), torch.zeros((), device=DEVICE))
        loss.backward()
        mine.step()
        return loss

    torch.compile(step)(ours)
    give(plain, [2 * p.detach() for p in plain])
    rulec.torch.Muon(plain, lr=0.02).step()
    for a, b in zip(ours, plain, strict=True):
        assert float((a - b).abs().max()) <= 0.02 * ROUNDING
