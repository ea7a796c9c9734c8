"""Parameters of which each of several processes has a part: 16-bit weights and states in codes as in one process."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.testing._internal.distributed.fake_pg import FakeStore

import rulec.torch
from rulec.errors import TensorError
from tests.torch.eager.processes import together

BRAIN = torch.bfloat16

#: Shapes that two and four processes split unevenly, and one that not all have a part of.
SHAPES = {"uneven": (67, 96), "even": (64, 128), "few": (3, 5000), "line": (8190,), "small": (5,)}


def values(seed: int, dtype: torch.dtype = torch.float32) -> dict[str, Tensor]:
    made = torch.Generator().manual_seed(seed)
    return {name: torch.randn(shape, generator=made).to(dtype) for name, shape in SHAPES.items()}


class Model(nn.Module):
    """The parameters of `SHAPES`, whose gradients follow from a step alone."""

    def __init__(self, dtype: torch.dtype = torch.float32, names: Any = SHAPES) -> None:
        super().__init__()
        for name in names:
            self.register_parameter(name, nn.Parameter(values(0, dtype)[name]))


def part(value: Tensor, like: Any) -> Tensor:
    """What this process has of a tensor that is placed as a parameter: FSDP cuts what tensor parallelism has cut."""
    if not isinstance(like, DTensor):
        return value
    at = like.device_mesh.get_coordinate()
    assert at is not None
    cuts = [cut for cut in zip(like.placements, like.device_mesh.shape, at, strict=True) if not cut[0].is_replicate()]
    for placement, count, place in sorted(cuts, key=lambda cut: type(cut[0]) is not Shard):
        axis = placement.dim  # type: ignore[attr-defined]
        chunks = torch.chunk(value, count, axis)
        value = chunks[place] if place < len(chunks) else value.narrow(axis, 0, 0)
    return value.contiguous()


def here(value: Any) -> Tensor:
    return value.to_local() if isinstance(value, DTensor) else value


def _as(value: Tensor, param: Any) -> Tensor:
    if not isinstance(param, DTensor):
        return value
    own = part(value, param)
    return DTensor.from_local(
        own, param.device_mesh, param.placements, run_check=False, shape=value.shape, stride=value.stride()
    )


def train(model: nn.Module, optimizer: Any, steps: Any) -> None:
    """Steps with gradients that are the same whatever the processes."""
    for step in steps:
        wanted = values(step + 1)
        for name, p in model.named_parameters():
            p.grad = _as(wanted[name].to(p.dtype), p)
        optimizer.step()


def adamw(model: nn.Module, **words: Any) -> Any:
    return rulec.torch.AdamW(model.named_parameters(), lr=1e-3, **words)


def mesh_of_two() -> Any:
    """Two dimensions of processes, the first of two where there are so many."""
    count = dist.get_world_size()
    return init_device_mesh("cpu", (min(2, count), max(1, count // 2)), mesh_dim_names=("data", "model"))


def fsdp(model: nn.Module) -> nn.Module:
    return fully_shard(model)


def hsdp(model: nn.Module) -> nn.Module:
    return fully_shard(model, mesh=mesh_of_two())


def columns(model: nn.Module) -> nn.Module:
    """Every matrix by its columns, and lines by their elements."""
    return placed(model, init_device_mesh("cpu", (dist.get_world_size(),)), lambda p: [Shard(p.dim() - 1)])


def both(model: nn.Module) -> nn.Module:
    """Rows over one dimension of the mesh, and columns over the other."""
    mesh = mesh_of_two()
    return placed(model, mesh, lambda p: [Shard(0), Shard(p.dim() - 1)])


def twice(model: nn.Module) -> nn.Module:
    """Rows, and then the rows of each part."""
    mesh = mesh_of_two()
    return placed(model, mesh, lambda p: [Shard(0), Shard(0)])


def strided(model: nn.Module) -> nn.Module:
    """Tensor parallelism of rows inside FSDP: the parts of FSDP are cut from those of tensor parallelism."""
    mesh = mesh_of_two()
    model = placed(model, mesh["model"], lambda p: [Shard(0)])
    return fully_shard(model, mesh=mesh["data"])


def replicated(model: nn.Module) -> nn.Module:
    return placed(model, init_device_mesh("cpu", (dist.get_world_size(),)), lambda p: [Replicate()])


def placed(model: nn.Module, mesh: Any, way: Callable[[Tensor], list[Any]]) -> nn.Module:
    for name, p in [*model.named_parameters()]:
        model.register_parameter(name, nn.Parameter(distribute_tensor(p.detach(), mesh, way(p))))
    return model


def stochastic(rank: int, ways: Any = (fsdp,), backends: Any = ("cpu",)) -> None:
    """Random bits follow from the place of an element in its whole tensor."""
    for backend in backends:
        alone = Model(BRAIN)
        train(alone, adamw(alone, weights="stochastic", seed=70000, backend=backend), range(3))
        for way in ways:
            model = way(Model(BRAIN))
            train(model, adamw(model, weights="stochastic", seed=70000, backend=backend), range(3))
            for (name, p), q in zip(alone.named_parameters(), model.parameters(), strict=True):
                assert torch.equal(here(q), part(p, q)), (way.__name__, name, backend)


def stochastic_everywhere(rank: int) -> None:
    four = (both, twice, strided) if dist.get_world_size() > 2 else ()
    stochastic(rank, (fsdp, hsdp, columns, replicated, *four), ("cpu", "c"))


@pytest.fixture
def four() -> Iterator[Any]:
    """A mesh of two by two processes, of which this is the first and the others are none."""
    dist.init_process_group("fake", rank=0, world_size=4, store=FakeStore())
    yield init_device_mesh("cpu", (2, 2))
    dist.destroy_process_group()


def test_parts_without_equal_rows_are_refused(four: Any) -> None:
    cube = DTensor.from_local(torch.ones(4, 3, 4).to(BRAIN), four, [Shard(1), Shard(2)])
    assert cube.shape == (4, 6, 8)
    with pytest.raises(TensorError, match=r"parts that are a range or equal rows of the whole: .* weights='split'"):
        rulec.torch.AdamW([nn.Parameter(cube)], weights="stochastic").storage()
    rulec.torch.AdamW([nn.Parameter(cube)], weights="split").storage()


def test_random_bits_of_shards_are_those_of_whole_parameters() -> None:
    together(stochastic)


@pytest.mark.slow
@pytest.mark.parametrize("count", [1, 2, 4])
def test_random_bits_of_all_shards_are_those_of_whole_parameters(count: int) -> None:
    together(stochastic_everywhere, count)
