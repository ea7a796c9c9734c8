"""Models on meshes of two dimensions: the numbers of one process, replicas with the same bits, and checkpoints."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_optimizer_state_dict, set_optimizer_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

import rulec
import rulec.torch
from tests.torch.eager.processes import check_in_processes
from tests.torch.test_shards import _as, here, part

RULES: dict[str, Any] = {
    "adamw": "adamw",
    "lamb": "lamb",
    "clip >> adamw": lambda: rulec.load("clip_by_global_norm") >> rulec.load("adamw"),
    "adafactor": "adafactor",
    "muon": "muon",
    "soap": "soap",
    "shampoo": "shampoo",
    "galore": "galore",
    "apollo": "apollo",
}

#: Settings for which a few steps make all branches run.
SETTINGS: dict[str, dict[str, Any]] = {
    "clip >> adamw": {"max_norm": 0.5},
    "soap": {"every": 2},
    "shampoo": {"every": 2},
    "galore": {"rank": 2, "gap": 2},
    "apollo": {"rank": 2, "gap": 2},
}


class Model(nn.Module):
    """Two layers for tensor parallelism, and layers that lie on the data dimension alone."""

    def __init__(self, name: str) -> None:
        super().__init__()
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(3)
            bias = name != "muon"
            self.first, self.up = nn.Linear(5, 6, bias=bias), nn.Linear(6, 10, bias=bias)
            self.down, self.last = nn.Linear(10, 6, bias=bias), nn.Linear(6, 3, bias=bias)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x).tanh()
        return self.last(x + self.down(self.up(x).tanh()))


def alone(model: Model) -> Model:
    return model


def hybrid(model: Model) -> Model:
    mesh = init_device_mesh("cpu", (2, dist.get_world_size() // 2), mesh_dim_names=("replicate", "shard"))
    return fully_shard(model, mesh=mesh)  # type: ignore[return-value]


def data_and_tensor(model: Model) -> Model:
    mesh = init_device_mesh("cpu", (dist.get_world_size() // 2, 2), mesh_dim_names=("dp", "tp"))
    parallelize_module(model, mesh["tp"], {"up": ColwiseParallel(), "down": RowwiseParallel()})
    return fully_shard(model, mesh=mesh["dp"])  # type: ignore[return-value]


def optimizer_of(name: str, model: Model) -> Any:
    rule = RULES[name]() if callable(RULES[name]) else RULES[name]
    return rulec.torch.optimizer(rule)(model.named_parameters(), lr=0.01, backend="c", **SETTINGS.get(name, {}))


def train(model: Model, optimizer: Any, steps: Sequence[int]) -> None:
    """Steps with gradients of their own, the same in any layout: rounding in the model is not looked at."""
    for step in steps:
        made = torch.Generator().manual_seed(step)
        for p in model.parameters():
            grad = torch.randn(p.shape, generator=made)
            p.grad = _as(grad, p)
        optimizer.step()


def check(model: Model, whole: Model) -> None:
    for (name, p), q in zip(whole.named_parameters(), model.parameters(), strict=True):
        torch.testing.assert_close(
            here(q), part(p.detach(), q), rtol=1e-6, atol=1e-7, msg=lambda text, at=name: f"{at}: {text}"
        )


def check_replicas(model: Model) -> None:
    """Processes with the same part of a parameter have the same bits."""
    for p in model.parameters():
        assert isinstance(p, DTensor)
        mesh = p.device_mesh
        for axis, placement in enumerate(p.placements):
            if placement.is_replicate():
                parts = [torch.empty_like(p.to_local()) for _ in range(mesh.size(axis))]
                dist.all_gather(parts, p.to_local().detach().contiguous(), group=mesh.get_group(axis))
                assert all(torch.equal(parts[0], other) for other in parts)


def steps_of(rank: int, ways: Sequence[Any], names: Sequence[str], count: int, last: int = 0) -> None:
    """Some steps are those of one process, and replicas have the same bits after more."""
    for way in ways:
        for name in names:
            whole, model = Model(name), way(Model(name))
            train(whole, optimizer_of(name, whole), range(count))
            optimizer = optimizer_of(name, model)
            train(model, optimizer, range(count))
            check(model, whole)
            train(model, optimizer, range(count, last))
            check_replicas(model)


def test_a_model_on_a_mesh() -> None:
    check_in_processes(partial(steps_of, ways=[hybrid], names=["clip >> adamw"], count=2))


#: Rules of each kind with a mesh each; the others are for `make whole`.
PICKED = {hybrid: ["lamb", "muon", "galore"], data_and_tensor: ["adafactor", "soap", "apollo"]}
OTHERS = {way: [name for name in RULES if name not in names] for way, names in PICKED.items()}
by_way = pytest.mark.parametrize(
    ("way", "names"), [*PICKED.items(), *(pytest.param(*pair, marks=pytest.mark.whole) for pair in OTHERS.items())]
)


@pytest.mark.slow
@by_way
def test_models_on_meshes_of_four(way: Any, names: list[str]) -> None:
    check_in_processes(partial(steps_of, ways=[way], names=names, count=10, last=20), 4)


def check_full_states(model: Model, optimizer: Any, whole: Model, reference: Any) -> None:
    """States put together are those of one process; names hold no process."""
    options = StateDictOptions(full_state_dict=True)
    ours, theirs = get_optimizer_state_dict(model, optimizer, options=options), reference.state_dict()
    for place, (name, _) in enumerate(whole.named_parameters()):
        states = ours["state"].get(name, {})
        assert states.keys() == (theirs["state"][place].keys() if not dist.get_rank() else states.keys())
        for state, value in states.items():
            torch.testing.assert_close(
                value, theirs["state"][place][state], rtol=1e-6, atol=1e-7, msg=f"{name} {state}"
            )


def saved(rank: int, folder: str, names: Sequence[str], way: Any, last: int, steps: Sequence[int]) -> None:
    """Goes on from the last steps, in another number of processes, and saves."""
    for name in names:
        whole, model = Model(name), way(Model(name))
        reference, optimizer = optimizer_of(name, whole), optimizer_of(name, model)
        train(whole, reference, range(steps[-1] + 1))
        if last:
            train(model, optimizer, [99])
            read = {"model": model.state_dict(), "optim": get_optimizer_state_dict(model, optimizer)}
            dcp.load(read, checkpoint_id=f"{folder}/{name}{last}")
            model.load_state_dict(read["model"])
            set_optimizer_state_dict(model, optimizer, read["optim"])
        train(model, optimizer, steps)
        check(model, whole)
        check_full_states(model, optimizer, whole, reference)
        state = {"model": model.state_dict(), "optim": get_optimizer_state_dict(model, optimizer)}
        dcp.save(state, checkpoint_id=f"{folder}/{name}{last + 1}")


@pytest.mark.slow
@by_way
def test_checkpoints_of_four_two_one_and_four(tmp_path: Any, way: Any, names: list[str]) -> None:
    run = partial(saved, folder=str(tmp_path), names=names)
    check_in_processes(partial(run, way=way, last=0, steps=range(2)), 4)
    check_in_processes(partial(run, way=way, last=1, steps=range(2, 4)), 2)
    check_in_processes(partial(run, way=alone, last=2, steps=range(4, 6)), 1)
    check_in_processes(partial(run, way=way, last=3, steps=range(6, 8)), 4)
