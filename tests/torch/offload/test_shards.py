"""Each rank offloads its own shards, and steps have the bits of steps without offload."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.fsdp import CPUOffloadPolicy, fully_shard

import rulec
import rulec.torch
from tests.torch.eager.processes import check_in_processes
from tests.torch.offload.runs import BUFFER, assert_same_bits
from tests.torch.test_shards import BRAIN, Model, columns, fsdp, here, hsdp, train


def _same_bits(rank: int, rule: str, dtype: torch.dtype) -> None:
    made = rulec.torch.optimizer(rulec.load(rule))
    weights = "master" if dtype == BRAIN else None
    for way in (fsdp, columns, *((hsdp,) if dist.get_world_size() > 2 else ())):
        plain, moved = way(Model(dtype)), way(Model(dtype))
        one = made(plain.named_parameters(), weights=weights)
        other = made(moved.named_parameters(), offload="step", offload_buffer=BUFFER)
        train(plain, one, range(3))
        train(moved, other, range(3))
        _assert_same(plain, one, moved, other)
        other.load_state_dict(one.state_dict())
        train(plain, one, range(3, 5))
        train(moved, other, range(3, 5))
        _assert_same(plain, one, moved, other)


def _assert_same(plain: Any, one: Any, moved: Any, other: Any) -> None:
    for p, q in zip(plain.parameters(), moved.parameters(), strict=True):
        assert_same_bits(here(q), here(p))
        states = ({name: here(value) for name, value in of.state[x].items()} for of, x in ((other, q), (one, p)))
        assert_same_bits(*states)


@pytest.mark.parametrize("dtype", [torch.float32, BRAIN])
@pytest.mark.parametrize("rule", ["adamw", "lamb", "adafactor", "muon"])
def test_shards_on_the_host_have_the_same_bits(rule: str, dtype: torch.dtype) -> None:
    check_in_processes(partial(_same_bits, rule=rule, dtype=dtype))


def _with_parameters_on_the_host(rank: int) -> None:
    model: Any = fully_shard(Model(BRAIN), offload_policy=CPUOffloadPolicy(pin_memory=False))
    alone = fsdp(Model(BRAIN))
    train(alone, rulec.torch.AdamW(alone.named_parameters(), weights="master"), range(2))
    train(model, rulec.torch.AdamW(model.named_parameters(), weights="master"), range(2))
    for p, q in zip(alone.parameters(), model.parameters(), strict=True):
        assert_same_bits(here(q), here(p))


def test_the_plain_optimizer_takes_parameters_that_are_on_the_host() -> None:
    check_in_processes(_with_parameters_on_the_host)
