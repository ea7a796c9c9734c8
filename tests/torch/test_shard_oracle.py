"""Statistics of sharded parameters beside 50 digits: uneven shards on one process and on several."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

import rulec.torch
from tests.compare.measured import EXPRESSIONS, Bounded, Numbers, Oracle
from tests.torch.eager.processes import check_in_processes

#: Shards of other sizes on each rank, of none on some, and numbers of one.
NUMBERS = Numbers("float64", ((7, 6), (8, 4), (1, 50), (9,), (3, 5)))

RULES = {"AdamW": "adamw", "LAMB": "lamb", "Adafactor": "adafactor"}

#: Rows and columns of sharded tensors are refused.
WATCH = {name: text for name, text in EXPRESSIONS.items() if 'per="row"' not in text and 'per="col"' not in text}


def stepped(kind: str, numbers: Numbers, mesh: Any, placement: Any) -> tuple[Bounded, dict[str, dict[Any, Any]]]:
    """The statistics of a first step, in 50 digits and of shards."""
    oracle, start, grads = Oracle(rulec.load(RULES[kind]), numbers, WATCH), numbers.drawn(0), numbers.drawn(1)
    params = [torch.nn.Parameter(distribute_tensor(torch.tensor(p), mesh, [placement])) for p in start]
    optimizer = getattr(rulec.torch, kind)([(f"tensor {i}", p) for i, p in enumerate(params)], watch=WATCH)
    for param, grad in zip(params, grads, strict=True):
        param.grad = distribute_tensor(torch.tensor(grad), mesh, [placement])
    optimizer.step()
    statistics = optimizer.statistics()
    measured = {name: {place: np.asarray(x) for place, x in statistics[name].items()} for name in statistics}
    return oracle.step([{"p": p} for p in start], grads), measured


def _check(_: int) -> None:
    mesh = init_device_mesh("cpu", (torch.distributed.get_world_size(),))
    for kind in RULES:
        for placement in (Shard(0), Shard(-1), Replicate()):
            bounded, measured = stepped(kind, NUMBERS, mesh, placement)
            bounded.check(measured)
    unequal = Numbers("float64", ((7, 6), (1, 50), (3, 5)), "unequal")
    bounded, measured = stepped("AdamW", unequal, mesh, Shard(0))
    bounded.check(measured)


@pytest.mark.slow
@pytest.mark.parametrize("count", [1, 2, 3, 4])
def test_statistics_of_uneven_shards(count: int) -> None:
    check_in_processes(_check, count)
