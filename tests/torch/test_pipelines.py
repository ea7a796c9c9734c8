"""Pipelines: stages that are split over meshes of their own, and values of the model over all stages."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

import rulec
import rulec.torch
from rulec.backend import registry
from rulec.errors import HyperError, RulecError
from rulec.runtime.stages import step
from tests.runtime.elsewhere import Elsewhere
from tests.torch.eager.processes import check_in_processes
from tests.torch.test_communication import everywhere
from tests.torch.test_failures import fault, fault_between

#: The layers of two stages: uneven parts, and a vector.
STAGES = ({"first": (7, 5), "bias": (7,)}, {"second": (3, 7), "last": (6, 3), "small": (1,)})

RULES: dict[str, Callable[[], Any]] = {
    "clip >> adamw": lambda: rulec.load("clip_by_global_norm") >> rulec.load("adamw"),
    "clip >> lamb": lambda: rulec.load("clip_by_global_norm") >> rulec.load("lamb"),
    "prodigy": lambda: "prodigy",
}


def draws(stage: int, seed: int) -> dict[str, torch.Tensor]:
    made = torch.Generator().manual_seed(10 * seed + stage)
    return {name: torch.randn(shape, generator=made) for name, shape in STAGES[stage].items()}


class Stages:
    """All stages in one process, and the stage of this process on its mesh; each with an optimizer."""

    def __init__(self, name: str, mesh: Any, place: Callable[[str, torch.Tensor], Any], **keywords: Any) -> None:
        self.stage, self.place = mesh.get_coordinate()[0], place
        kind = rulec.torch.optimizer(RULES[name]())
        keywords = {"lr": 0.05, "backend": "c", **({"max_norm": 0.3} if "clip" in name else {}), **keywords}
        self.alone = [{n: nn.Parameter(x) for n, x in draws(stage, 0).items()} for stage in range(2)]
        self.parts = {n: nn.Parameter(place(n, x)) for n, x in draws(self.stage, 0).items()}
        self.all = kind([(n, p) for stage in self.alone for n, p in stage.items()], **keywords)
        self.optimizer = kind([*self.parts.items()], reduce_over=mesh["pp"].get_group(), **keywords)

    def give(self, seed: int) -> None:
        for stage in range(2):
            for name, grad in draws(stage, seed).items():
                self.alone[stage][name].grad = grad
        for name, grad in draws(self.stage, seed).items():
            self.parts[name].grad = self.place(name, grad)

    def step(self, seed: int) -> None:
        self.give(seed)
        self.all.step()
        self.optimizer.step()

    def check(self) -> None:
        for name, param in self.alone[self.stage].items():
            part: Any = self.parts[name]
            whole = part.full_tensor() if isinstance(part, DTensor) else part.detach()
            torch.testing.assert_close(whole, param.detach(), rtol=1e-6, atol=1e-7, msg=name)


def stages_of_shards(rank: int) -> None:
    """Two stages of two processes: the numbers of one process, errors that all know of, and what is sent."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("pp", "dp"))
    for name in RULES:
        stages = Stages(name, mesh, lambda _, x: distribute_tensor(x, mesh["dp"], [Shard(0)]))
        for seed in (1, 2, 3):
            stages.step(seed)
        stages.check()
        if name == "prodigy":
            assert stages.optimizer.param_groups[0]["d"] == pytest.approx(stages.all.param_groups[0]["d"], rel=1e-6)
        record = {each.processes: each.rounds for each in stages.optimizer.communication().reductions}
        assert record.keys() == {"reduce_over (2)", "dp (2)"}, record
        failing(rank, stages)
        failing_between(rank, stages)
    other_infinities(rank, mesh)
    one_stage_behind(rank, Stages("clip >> lamb", mesh, lambda _, x: distribute_tensor(x, mesh["dp"], [Shard(0)])))
    kind = rulec.torch.optimizer(RULES["clip >> adamw"]())
    with pytest.raises(HyperError, match="of reduce_over has the same DTensors"):
        kind([nn.Parameter(distribute_tensor(torch.ones(4), mesh["dp"], [Replicate()]))], reduce_over=dist.group.WORLD)


def failing(rank: int, stages: Stages) -> None:
    """What goes wrong in one of four processes is an error in all, and nothing is written."""
    before = [p.detach().clone() for p in stages.parts.values()]
    for bad in range(4):
        stages.give(4)
        stages.optimizer.param_groups[0]["lr"] = -1.0 if rank == bad else 0.05
        with pytest.raises(RulecError, match=r"lr=-1\.0" if rank == bad else "takes no step"):
            stages.optimizer.step()
    stages.optimizer.param_groups[0]["lr"] = 0.05
    assert all(torch.equal(_here(a), _here(b)) for a, b in zip(before, stages.parts.values(), strict=True))
    stages.step(5)
    stages.check()


def failing_between(rank: int, stages: Stages) -> None:
    """One of four processes fails before a value of all stages: all say the same, and nothing is written."""
    before = [_here(p.detach()).clone() for p in stages.parts.values()]
    for bad in range(4):
        stages.give(6)
        with fault(step, "_joined") if rank == bad else nullcontext(), pytest.raises(RulecError) as caught:
            stages.optimizer.step()
        (text,) = {*everywhere(str(caught.value))}
        assert text.startswith(f"process {bad} failed in work that all processes wait for")
        assert "MemoryError: no room" in text
        assert isinstance(caught.value.__cause__, MemoryError) == (rank == bad)
    assert all(torch.equal(a, _here(p)) for a, p in zip(before, stages.parts.values(), strict=True))
    stages.step(6)
    stages.check()


def one_stage_behind(rank: int, stages: Stages) -> None:
    """After the last value of all stages, an error is one of its stage; the next step is nobody's."""
    stages.step(1)
    stages.give(2)
    failing = rank < 2
    with (
        fault_between(1) if rank == 1 else nullcontext(),
        check_refused("process 1 failed") if failing else nullcontext(),
    ):
        stages.optimizer.step()
    with check_refused("load a checkpoint in every process" if failing else "takes no step"):
        stages.optimizer.step()


def other_infinities(rank: int, mesh: Any) -> None:
    """GradScaler looks at the gradients of one stage: where stages disagree, all say so, and nothing is written."""
    plain = registry.get
    with mock.patch.object(registry, "get", lambda name: Elsewhere() if name == "elsewhere" else plain(name)):
        words = {"backend": "elsewhere", "capturable": True}
        stages = Stages("clip >> lamb", mesh, lambda _, x: distribute_tensor(x, mesh["dp"], [Shard(0)]), **words)
        before = [_here(p.detach()).clone() for p in stages.parts.values()]
        for overflows in ((True, False), (True, True), (False, False)):
            stages.give(1)
            stages.optimizer.found_inf = torch.tensor(float(overflows[stages.stage]))
            differ = check_refused("the scaled gradients of some processes of reduce_over have an infinity")
            with differ if overflows[0] != overflows[1] else nullcontext():
                stages.optimizer.step()
            changed = [not torch.equal(a, _here(p)) for a, p in zip(before, stages.parts.values(), strict=True)]
            assert any(changed) == (not any(overflows))
        stages.all.step()
        stages.check()


def check_refused(words: str) -> Any:
    return pytest.raises(RulecError, match=words)


def _here(tensor: Any) -> torch.Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def layers_on_the_data_dimension(rank: int) -> None:
    """Layers of tensor parallelism beside layers that lie on the data dimension alone, which count once."""
    mesh = init_device_mesh("cpu", (2, 1, 2), mesh_dim_names=("pp", "dp", "tp"))

    def place(name: str, x: torch.Tensor) -> Any:
        if name in ("first", "second"):
            return distribute_tensor(x, mesh["dp", "tp"], [Shard(0), Shard(1)])
        return distribute_tensor(x, mesh["dp"], [Shard(0)])

    for name in RULES:
        stages = Stages(name, mesh, place)
        for seed in (1, 2, 3):
            stages.step(seed)
        stages.check()


def pipelines(rank: int) -> None:
    stages_of_shards(rank)
    layers_on_the_data_dimension(rank)


def test_stages_of_a_pipeline_have_the_numbers_of_one_process() -> None:
    check_in_processes(pipelines, 4)
