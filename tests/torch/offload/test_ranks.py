"""Offload together with `reduce_over`, and with shards that have other sizes in other processes."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

import rulec.torch
from rulec.torch import EagerUpdate
from tests.torch.eager.processes import check_in_processes
from tests.torch.offload.runs import assert_same_bits, parameters
from tests.torch.offload.test_state_shards import locals_of
from tests.torch.test_shards import Model, fsdp, train

#: The shapes of the parameters in each process.
SHAPES = [((8, 6), (6,), (40, 4)), ((5, 5), (30,))]

BF16 = torch.bfloat16


def loss_of(params: list[Tensor], number: int) -> Tensor:
    """A loss whose gradients follow from its number alone."""
    generator = torch.Generator().manual_seed(number)
    return torch.stack(
        [(p * torch.randn(p.shape, generator=generator).to(p.dtype)).float().sum() for p in params]
    ).sum()


def trained(
    params: list[Tensor], rule: str, rank: int, offload: str, **more: Any
) -> tuple[list[Tensor], list[Any]]:  # fmt: skip
    """The parameters after steps, and the statistics of each; in the third step the last process has no gradient."""
    measured = []
    words: dict[str, Any] = {"max_norm": 0.1, "reduce_over": dist.group.WORLD, **more}
    words |= {"weights": "master"} if params[0].dtype == BF16 else {}
    if offload:
        words |= {"offload": offload.removeprefix("eager "), "offload_buffer": 256}
    eager = offload.startswith("eager")
    kind: Any = rulec.torch.optimizer(rule)
    optimizer = EagerUpdate(params, rule, local=True, **words) if eager else kind(params, **words)
    for number in range(4):
        optimizer.zero_grad()
        if (number, rank) != (2, 1):
            loss = loss_of(params, number)
            if eager:
                with optimizer.backward():
                    loss.backward()
            else:
                loss.backward()
        optimizer.step()
        measured += [optimizer.statistics().numbers()] if "watch" in more else []
    return params, measured


def reduced(rank: int, dtype: torch.dtype) -> None:
    """Each process has a part of the model, and all clip by the norm of the whole."""
    rule = "clip_by_global_norm >> adamw"
    plain, _ = trained(parameters(dtype, SHAPES[rank]), rule, rank, "")
    for offload in ("step", "states", "eager step"):
        assert_same_bits(trained(parameters(dtype, SHAPES[rank]), rule, rank, offload)[0], plain)


@pytest.mark.parametrize("dtype", [torch.float32, BF16])
def test_processes_with_other_parameters_reduce_together(dtype: torch.dtype) -> None:
    check_in_processes(partial(reduced, dtype=dtype))


def measured(rank: int) -> None:
    """Statistics of tensors, and of the model, of which each process has a part."""
    rule, joint = "clip_by_global_norm >> adamw", {"whole": 'norm(g, per="model")', "own": "norm(g)"}
    for watch, every in (("norms", 1), ("norms", 2), (joint, 1), (joint, 3)):
        words: dict[str, Any] = {"watch": watch, "watch_every": every}
        plain, numbers = trained(parameters(shapes=SHAPES[rank]), rule, rank, "", **words)
        ways = ("step", "states", "eager step") if watch == "norms" else ("step", "states")
        for offload in ways:
            params, others = trained(parameters(shapes=SHAPES[rank]), rule, rank, offload, **words)
            assert_same_bits(params, plain)
            assert others == [pytest.approx(each, rel=1e-6) for each in numbers]


def test_statistics_of_processes_with_other_parameters() -> None:
    check_in_processes(measured)


def uneven(rank: int, rule: str, offload: str) -> None:
    """Shards of two matrices, which are one transfer group in the second process, and two in the first."""
    runs = []
    words = {"offload": offload, "offload_buffer": {"step": 40000, "states": 80000}[offload]}
    for keywords in ({}, words):
        model = fsdp(Model(names=("uneven", "few", "small")))
        optimizer = rulec.torch.optimizer(rule)(model.named_parameters(), **keywords)
        train(model, optimizer, range(3))
        runs.append(locals_of(model, optimizer))
    assert_same_bits(runs[1], runs[0])


@pytest.mark.parametrize("offload", ["step", "states"])
def test_transfer_groups_of_uneven_shards(offload: str) -> None:
    check_in_processes(partial(uneven, rule="clip_by_global_norm >> lamb", offload=offload))
