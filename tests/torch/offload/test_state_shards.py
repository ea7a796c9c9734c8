"""States of DTensors that stream through the device, in steps of several processes."""

from __future__ import annotations

from functools import partial
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_optimizer_state_dict, set_optimizer_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard
from torch.testing._internal.distributed.fake_pg import FakeStore

import rulec.torch
from rulec.torch.tensors import dtensor
from tests.torch.eager.processes import check_in_processes
from tests.torch.offload.links import late_links
from tests.torch.offload.runs import BUFFER, assert_same_bits
from tests.torch.test_shards import Model, fsdp, here, train


def locals_of(model: torch.nn.Module, optimizer: Any) -> list[Any]:
    """The local tensors of parameters and states."""
    states = [{k: here(v) for k, v in optimizer.state[p].items()} for p in model.parameters()]
    return [[here(p) for p in model.parameters()], states]


def run_of(rule: str, names: Any, words: dict[str, Any], streamed: bool) -> tuple[Any, Any]:
    model = fsdp(Model(names=names))
    offload: dict[str, Any] = {"offload": "states", "offload_buffer": 4 * BUFFER} if streamed else {}
    return model, rulec.torch.optimizer(rule)(model.named_parameters(), **words, **offload)


def check_bits(rank: int, rule: str, names: Any, words: dict[str, Any]) -> None:
    with late_links():
        one, other = (run_of(rule, names, words, streamed) for streamed in (False, True))
        for model, optimizer in (one, other):
            train(model, optimizer, range(3))
        assert_same_bits(locals_of(*other), locals_of(*one))


def check_checkpoint(rank: int) -> None:
    """`get_optimizer_state_dict` copies no state that lies on the host, and others continue from it."""
    options = StateDictOptions(cpu_offload=True)
    with late_links():
        model, optimizer = run_of("adamw", ("uneven", "line"), {}, True)
        train(model, optimizer, range(2))
        saved: Any = get_optimizer_state_dict(model, optimizer, options=options)
        for name, param in model.named_parameters():
            for state in ("exp_avg", "exp_avg_sq"):
                mine, given = here(optimizer.state[param][state]), here(saved["state"][name][state])
                assert mine.data_ptr() == given.data_ptr()
        plain, follower = run_of("adamw", ("uneven", "line"), {}, False)
        plain.load_state_dict(model.state_dict())
        set_optimizer_state_dict(plain, follower, saved, options=options)
        for each, stepped in ((model, optimizer), (plain, follower)):
            train(each, stepped, range(2, 4))
        assert_same_bits(locals_of(plain, follower), locals_of(model, optimizer))


@pytest.mark.parametrize(
    ("rule", "names", "words"),
    [
        ("adamw", ("uneven", "few", "line", "small"), {"state_dtype": "int8"}),
        ("clip_by_global_norm >> lamb", ("uneven", "even", "line", "small"), {}),
        ("soap", ("even",), {}),
    ],
)
def test_bits_of_shards_are_those_without_offload(rule: str, names: Any, words: dict[str, Any]) -> None:
    check_in_processes(partial(check_bits, rule=rule, names=names, words=words))


def test_states_on_the_host_of_shards_on_a_device_are_not_copied() -> None:
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=2)
    try:
        mesh = init_device_mesh("cuda", (2,))
        param = SimpleNamespace(device_mesh=mesh, placements=(Shard(0),))
        state = torch.randn(3, 4)
        with mock.patch.object(dtensor, "is_dtensor", return_value=True):
            shown: Any = dtensor.as_part(state, (6, 4), (4, 1), param)
        assert shown.to_local().data_ptr() == state.data_ptr()
        assert (shown.shape, shown.stride(), shown.placements) == ((6, 4), (4, 1), (Shard(0),))
        assert shown.device.type == "cpu"
    finally:
        dist.destroy_process_group()


def test_checkpoints_of_shards_copy_nothing() -> None:
    check_in_processes(check_checkpoint)
