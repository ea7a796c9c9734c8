"""Names and shapes of saved states: one set for `optimizer.state` and `state_dict()`, on every layout."""

from __future__ import annotations

import copy
import importlib.util
import io
import pickle
from collections.abc import Callable, Iterator
from functools import cache, partial
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_optimizer_state_dict, set_optimizer_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.distributed.tensor import DTensor, Shard, distribute_tensor
from torch.distributed.tensor.parallel import RowwiseParallel, parallelize_module
from torch.testing._internal.distributed.fake_pg import FakeStore

import rulec
import rulec.torch as rt
from rulec.errors import StateMismatch
from rulec.formats import NAMES
from rulec.torch.planner import LoadPlanner
from tests.torch.eager.processes import check_in_processes

BRAIN = torch.bfloat16
FLAT = StateDictOptions(flatten_optimizer_state_dict=True)


class Net(nn.Module):
    """A matrix with codes, one whose rows blocks do not divide, and small ones."""

    def __init__(self, dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.up, self.down = nn.Linear(96, 64, dtype=dtype), nn.Linear(64, 70, dtype=dtype)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.down(self.up(x).tanh())
        return out


def train(net: nn.Module, optimizer: Any, steps: range) -> None:
    for step in steps:
        optimizer.zero_grad()
        x = torch.randn(4, 96, generator=torch.Generator().manual_seed(step)).to(next(net.parameters()).dtype)
        net(x).square().mean().backward()
        optimizer.step()


def adamw(**words: Any) -> Callable[[nn.Module], Any]:
    return lambda net: rt.AdamW(net.named_parameters(), lr=1e-3, **words)


def partitioned(net: nn.Module) -> Any:
    partition = rulec.partition({"**/bias": "lion", "**": "adamw"})
    return rt.Partitioned(partition, net.named_parameters(), lr=1e-3, state_dtype="dynamic8")


def muon(net: nn.Module) -> Any:
    return rt.Muon(rt.tagged_groups(net), lr=1e-3, state_dtype="bfloat16_sr", seed=3)


def fused(kind: str, **words: Any) -> Callable[[nn.Module], Any]:
    """Of parameters with sections; those of the first have joined states, and states of their own."""

    def make(net: nn.Module) -> Any:
        (first, up), *rest = net.named_parameters()
        groups = [{"params": [(first, up)], "split": [40, 24]}, {"params": rest}]
        return rt.optimizer(kind)(groups, lr=1e-3, **words)

    return make


#: Optimizers by the kinds of their states: the dtype of weights, and a maker.
KINDS: dict[str, tuple[torch.dtype, Callable[[nn.Module], Any]]] = {
    "floats": (torch.float32, adamw()), "codes": (torch.float32, adamw(state_dtype="dynamic8")),
    "four bits": (torch.float32, adamw(state_dtype="dynamic4")),
    "parts": (BRAIN, adamw(weights="split", state_dtype="int8")), "kahan": (BRAIN, adamw(weights="kahan")),
    "numbers of the model": (torch.float32, lambda net: rt.Prodigy(net.named_parameters(), state_dtype="int8")),
    "factors": (torch.float32, lambda net: rt.SOAP(net.named_parameters(), state_dtype={"m": "int8"})),
    "dotted": (torch.float32, lambda net: rt.optimizer("galore")(net.named_parameters(), lr=1e-3)),
    "routed": (torch.float32, muon), "several rules": (torch.float32, partitioned),
    "sections": (torch.float32, fused("lamb")), "sections of factors": (torch.float32, fused("soap")),
    "codes of sections": (torch.float32, fused("lamb", state_dtype="int8/8")),
}  # fmt: skip


@cache
def torchtitan() -> ModuleType:
    """The flat states of torchtitan, without the rest of it."""
    spec = importlib.util.find_spec("torchtitan")
    if spec is None or spec.submodule_search_locations is None:
        pytest.skip("torchtitan is not installed")
    path = Path(next(iter(spec.submodule_search_locations)), "components", "optimizer", "utils.py")
    flat = importlib.util.spec_from_file_location("torchtitan_flat_states", path)
    assert flat is not None
    assert flat.loader is not None
    module = importlib.util.module_from_spec(flat)
    flat.loader.exec_module(module)
    return module


def flat_of(way: str, net: nn.Module, optimizer: Any) -> dict[str, Any]:
    if way == "torch":
        return get_optimizer_state_dict(net, optimizer, options=FLAT)  # type: ignore[return-value]
    torchtitan().init_optim_state(optimizer)
    flat: dict[str, Any] = torchtitan().get_flat_optim_state_dict(optimizer)
    return flat


def load_flat(way: str, net: nn.Module, optimizer: Any, flat: dict[str, Any]) -> None:
    if way == "torch":
        set_optimizer_state_dict(net, optimizer, flat, options=FLAT)  # type: ignore[arg-type]
        return
    torchtitan().init_optim_state(optimizer)
    torchtitan().load_flat_optim_state_dict(optimizer, flat)


@pytest.mark.parametrize("way", ["torch", "torchtitan"])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.filterwarnings("ignore::UserWarning")
def test_flattened_states_go_on_bit_for_bit(kind: str, way: str, tmp_path: Path) -> None:
    dtype, make = KINDS[kind]
    net = Net(dtype)
    first = make(net)
    train(net, first, range(2))
    dcp.save(flat_of(way, net, first), checkpoint_id=tmp_path, no_dist=True)
    again = Net(dtype)
    second = make(again)
    flat = flat_of(way, again, second)
    dcp.load(flat, checkpoint_id=tmp_path, no_dist=True)
    load_flat(way, again, second, flat)
    with torch.no_grad():
        for p, q in zip(net.parameters(), again.parameters(), strict=True):
            q.copy_(p)
            assert {*first.state[p]} == {*second.state[q]}
    for each, optimizer in ((net, first), (again, second)):
        train(each, optimizer, range(2, 4))
    assert all(torch.equal(p, q) for p, q in zip(net.parameters(), again.parameters(), strict=True))


@pytest.mark.parametrize("kind", KINDS)
def test_states_have_the_names_that_are_saved(kind: str) -> None:
    dtype, make = KINDS[kind]
    net = Net(dtype)
    optimizer = make(net)
    train(net, optimizer, range(1))
    saved = optimizer.state_dict()
    params = [p for group in optimizer.param_groups for p in group["params"]]
    assert [[*optimizer.state[p]] for p in params] == [[*saved["state"].get(i, ())] for i in range(len(params))]
    pickle.loads(pickle.dumps(saved))  # noqa: S301


@pytest.mark.parametrize("way", ["in place", "another tensor", "of one section", "all"])
def test_states_of_sections_are_read_and_written_as_those_of_the_parameter(way: str) -> None:
    kind = fused("lamb")
    net, other = Net(), Net()
    first, second = kind(net), kind(other)
    train(net, first, range(2))
    saved = copy.deepcopy(first.state_dict())
    state = first.state[net.up.weight]
    assert torch.equal(state["m.0"], saved["state"][0]["m"][:40])
    part = slice(40, None) if way == "of one section" else slice(None)
    saved["state"][0]["m"][part] = 0
    if way == "in place":
        state["m"].zero_()
    elif way == "of one section":
        first.state[net.up.weight]["m.1"] = torch.zeros(24, 96)
    elif way == "another tensor":
        state["m"] = torch.zeros(64, 96)
    else:
        for name, value in state.items():
            state[name] = torch.zeros_like(value) if name == "m" else value.clone()
    second.load_state_dict(saved)
    other.load_state_dict(net.state_dict())
    for each, optimizer in ((net, first), (other, second)):
        train(each, optimizer, range(2, 4))
    assert all(torch.equal(p, q) for p, q in zip(net.parameters(), other.parameters(), strict=True))
    assert {*first.state[net.up.weight]} == {"step", "m", "v"}


def test_values_that_a_user_puts_in_the_place_of_codes_count() -> None:
    net = Net()
    optimizer = adamw(state_dtype="dynamic8")(net)
    train(net, optimizer, range(2))
    optimizer.state[net.up.weight]["exp_avg"] = torch.zeros(64, 96)
    optimizer.step()
    wanted = optimizer.state_dict()["state"][0]
    assert {"exp_avg::codes", "exp_avg::scale"} < wanted.keys()
    assert "exp_avg" not in wanted
    grad = net.up.weight.grad
    assert grad is not None
    largest = (0.1 * grad).flatten().unfold(0, 4, 4).abs().amax(1).max()
    assert torch.allclose(wanted["exp_avg::scale"].max(), largest, rtol=1e-2)


def test_a_flattened_state_that_is_not_there_is_named() -> None:
    net = nn.ModuleDict({"a": nn.Linear(3, 3), "b": nn.Linear(3, 3)})
    optimizer = rt.AdamW(net.named_parameters())
    net["b"](torch.ones(3)).sum().backward()
    optimizer.step()
    flat = get_optimizer_state_dict(net, optimizer, options=FLAT)
    again = copy.deepcopy(net)
    other = rt.AdamW(again.named_parameters())
    with pytest.raises(StateMismatch, match=r"saved state of a\.weight has no step, exp_avg, exp_avg_sq: a flattened"):
        set_optimizer_state_dict(again, other, flat, options=FLAT)


# Layouts


#: Rows that blocks divide, and others; one, three and four dimensions.
SHAPES = ((64, 96), (65, 72), (30, 12, 24), (32, 16, 3, 3), (4100,), (8192, 1), (3, 2048))


def placements() -> Iterator[tuple[Any, list[Any]]]:
    """Meshes of the fake processes, and how a parameter is cut over them."""
    for count in (2, 8):
        line = init_device_mesh("cpu", (count,))
        yield from ((line, [Shard(0)]), (line, [Shard(-1)]), (line, [Shard(1)]))
    square = init_device_mesh("cpu", (2, 4))
    yield from ((square, [Shard(0), Shard(-1)]), (square, [Shard(0), Shard(0)]))


@pytest.fixture
def fake_processes() -> Iterator[None]:
    dist.init_process_group("fake", store=FakeStore(), rank=1, world_size=8)
    yield
    dist.destroy_process_group()


def shapes_of(param: Any, word: str) -> dict[str, tuple[int, ...]]:
    """The shapes of a parameter's saved states, after one step."""
    optimizer = rt.AdamW([param], state_dtype=word)
    param.grad = torch.zeros_like(param)
    optimizer.step()
    return {name: tuple(value.shape) for name, value in optimizer.state_dict()["state"][0].items()}


@pytest.mark.parametrize(
    "word",
    [
        pytest.param(name, marks=() if name in ("int8", "dynamic4") else pytest.mark.slow)
        for name in NAMES
        if name != "bfloat16_sr"
    ],
)
@pytest.mark.usefixtures("fake_processes")
def test_every_layout_saves_states_in_the_same_shapes(word: str) -> None:
    for shape in SHAPES:
        wanted = shapes_of(nn.Parameter(torch.zeros(shape)), word)
        assert "exp_avg::scale" in wanted
        for mesh, cuts in placements():
            axes = [cut.dim % len(shape) for cut in cuts]
            if all(len(shape) > cut.dim for cut in cuts) and (max(axes) < 2 or shape[-1] > 3):
                param = nn.Parameter(distribute_tensor(torch.zeros(shape), mesh, cuts))
                assert shapes_of(param, word) == wanted, (shape, cuts)


@pytest.mark.parametrize("old", ["blocks", "elements", "folded"])
@pytest.mark.parametrize("word", ["int8", "dynamic8", "dynamic4"])
def test_files_with_scales_in_other_shapes_load_by_the_planner(word: str, old: str, tmp_path: Path) -> None:
    """Scales of blocks, of rows of blocks, and of elements, as they were in files before there were runs."""
    net = Net()
    first = adamw(state_dtype=word)(net)
    train(net, first, range(2))
    saved = get_optimizer_state_dict(net, first)
    state, kept = saved["state"]["up.weight"], first.state[net.up.weight]  # type: ignore[index, call-overload]
    for name in ("exp_avg", "exp_avg_sq"):
        codes, scales = kept[f"{name}::codes"].reshape(-1), kept[f"{name}::scale"].reshape(-1)
        if old == "elements":
            codes = torch.stack([codes >> 4, codes & 15], -1).reshape(64, 96) if word == "dynamic4" else codes
            scales = scales.repeat_interleave(64 * 96 // scales.numel())
            codes, scales = codes.reshape(64, 96), scales.reshape(64, 96)
        elif old == "folded" and scales.numel() % 64 == 0:
            codes, scales = codes.reshape(64, -1), scales.reshape(64, -1)
        state[f"{name}::codes"], state[f"{name}::scale"] = codes.clone(), scales.clone()  # type: ignore[index]
    dcp.save({"o": saved}, checkpoint_id=tmp_path, no_dist=True)
    again = Net()
    second = adamw(state_dtype=word)(again)
    read = {"o": get_optimizer_state_dict(again, second)}
    dcp.load(read, checkpoint_id=tmp_path, planner=LoadPlanner(), no_dist=True)
    set_optimizer_state_dict(again, second, read["o"])
    for name, value in kept.items():
        assert torch.equal(second.state[again.up.weight][name], value), name


#: Words whose runs are shorter than their blocks in a matrix of 64 by 96, and the largest share that codes lose.
WORDS = {"int8": 0.01, "softsign8": 0.02, "dynamic8": 0.02, "float8_e4m3": 0.08, "dynamic4": 0.3}


def plain(net: nn.Module) -> nn.Module:
    return net


def rows(net: nn.Module) -> nn.Module:
    return fully_shard(net, mesh=init_device_mesh("cpu", (dist.get_world_size(),)))


def columns(net: nn.Module) -> nn.Module:
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    return fully_shard(net, mesh=mesh, shard_placement_fn=lambda p: Shard(p.dim() - 1))


def both(net: nn.Module) -> nn.Module:
    """The columns of the first matrix over two processes, and the rows of all over the others."""
    mesh = init_device_mesh("cpu", (dist.get_world_size() // 2, 2), mesh_dim_names=("rows", "columns"))
    parallelize_module(net, mesh["columns"], {"up": RowwiseParallel()})
    return fully_shard(net, mesh=mesh["rows"])


def values_here(optimizer: Any, param: Any) -> Tensor:
    """The whole of a first moment, in floats."""
    floats = rt.AdamW([param])
    floats.load_state_dict({"state": {0: optimizer.state_dict()["state"][0]}, "param_groups": [_group(optimizer)]})
    value = floats.state[param]["exp_avg"]
    whole: Tensor = value.full_tensor() if isinstance(value, DTensor) else value
    return whole.clone()


def _group(optimizer: Any) -> dict[str, Any]:
    return {**optimizer.state_dict()["param_groups"][0], "params": [0], "param_names": ["up.weight"]}


def moved(rank: int, folder: str, words: tuple[str, ...], before: Any, after: tuple[Any, ...]) -> None:
    """States go from one layout to others, by a file of shards, flattened or not, and as whole tensors."""
    for word in words:
        net = before(Net())
        first = adamw(state_dtype=word)(net)
        train_alike(net, first)
        wanted = values_here(first, net.up.weight)
        whole = get_optimizer_state_dict(net, first, options=StateDictOptions(full_state_dict=True))
        for flat in (False, True):
            options = StateDictOptions(flatten_optimizer_state_dict=flat)
            dcp.save(
                {"o": get_optimizer_state_dict(net, first, options=options)}, checkpoint_id=f"{folder}/{word}{flat}"
            )
        for layout in after:
            for way in (False, True, "whole"):
                again = layout(Net())
                second = adamw(state_dtype=word)(again)
                if way == "whole":
                    options = StateDictOptions(full_state_dict=True)
                    set_optimizer_state_dict(again, second, copy.deepcopy(whole), options=options)
                else:
                    options = StateDictOptions(flatten_optimizer_state_dict=bool(way))
                    read = {"o": get_optimizer_state_dict(again, second, options=options)}
                    dcp.load(read, checkpoint_id=f"{folder}/{word}{way}")
                    set_optimizer_state_dict(again, second, read["o"], options=options)
                far = (values_here(second, again.up.weight) - wanted).abs().max()
                assert far <= WORDS[word] * wanted.abs().max(), (word, layout.__name__, way, float(far))
                if layout is before:
                    assert far == 0


def train_alike(net: nn.Module, optimizer: Any) -> None:
    """Two steps with gradients of magnitudes that follow from the place of an element."""
    for step in range(2):
        for p in net.parameters():
            made = torch.randn(p.shape, generator=torch.Generator().manual_seed(step))
            made *= torch.logspace(-1, 0, p.shape[-1])
            p.grad = distribute_tensor(made, p.device_mesh, p.placements) if isinstance(p, DTensor) else made
        optimizer.step()


def test_codes_of_rows_load_in_one_process_and_in_columns(tmp_path: Path) -> None:
    check_in_processes(partial(moved, folder=str(tmp_path), words=("dynamic8",), before=rows, after=(plain, columns)))


@pytest.mark.slow
@pytest.mark.parametrize("before", [plain, rows, columns, both])
def test_codes_of_every_layout_load_in_every_other(before: Any, tmp_path: Path) -> None:
    layouts = (plain, rows, columns, both)
    check_in_processes(partial(moved, folder=str(tmp_path), words=tuple(WORDS), before=before, after=layouts), 4)


def line(cuts: Any) -> nn.Module:
    """A matrix whose columns three processes cut within runs."""
    net = nn.Linear(64, 70, bias=False)
    weight = torch.randn(70, 64, generator=torch.Generator().manual_seed(3))
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    net.weight = nn.Parameter(weight if cuts is None else distribute_tensor(weight, mesh, [cuts]))
    return net


def cut(rank: int, folder: str) -> None:
    """A file has scales of elements, and the planner reads it in any layout."""
    values = []
    for layout in (Shard(1), Shard(1), Shard(0), None):
        net = line(layout)
        optimizer = adamw(state_dtype="dynamic8")(net)
        if not values:
            train_alike(net, optimizer)
            saved = get_optimizer_state_dict(net, optimizer)
            assert saved["state"]["weight"]["exp_avg::scale"].shape == (70, 64)  # type: ignore[index, call-overload]
            dcp.save({"o": saved}, checkpoint_id=folder)
        else:
            read = {"o": get_optimizer_state_dict(net, optimizer)}
            dcp.load(read, checkpoint_id=folder, planner=LoadPlanner())
            set_optimizer_state_dict(net, optimizer, read["o"])
        values.append(values_here(optimizer, net.weight))
    assert torch.equal(values[0], values[1])
    assert all((values[0] - other).abs().max() <= 0.02 * values[0].abs().max() for other in values[2:])


@pytest.mark.slow
def test_files_of_parts_that_cut_runs_load_by_the_planner(tmp_path: Path) -> None:
    check_in_processes(partial(cut, folder=str(tmp_path)), 3)


# Objects of a process


def redundant(net: nn.Module) -> Any:
    kind = rt.optimizer(rulec.load("clip_by_global_norm") >> rulec.load("adamw"))
    return ZeroRedundancyOptimizer(net.parameters(), kind, reduce_over=dist.group.WORLD, max_norm=1.0, backend="c")


def consolidated(rank: int) -> None:
    """A run of ZeroRedundancyOptimizer goes on from its file, a group that came later included."""
    net, again = Net(), Net()
    first, second = redundant(net), redundant(again)
    train(net, first, range(2))
    first.consolidate_state_dict(0)
    file = [_bytes(first.state_dict()) if rank == 0 else b""]
    dist.broadcast_object_list(file, src=0)
    again.load_state_dict(net.state_dict())
    second.load_state_dict(torch.load(io.BytesIO(file[0]), weights_only=True))
    for each, optimizer in ((net, first), (again, second)):
        train(each, optimizer, range(2, 4))
    assert all(torch.equal(p, q) for p, q in zip(net.parameters(), again.parameters(), strict=True))
    late = nn.Parameter(torch.ones(3))
    late.grad = torch.ones(3)
    first.add_param_group({"params": [late]})
    first.step()
    first.consolidate_state_dict(0)
    assert rank or _bytes(first.state_dict())


def _bytes(saved: Any) -> bytes:
    file = io.BytesIO()
    torch.save(saved, file)
    return file.getvalue()


def test_no_group_has_an_object_of_this_process() -> None:
    check_in_processes(consolidated)


def flat_parameters(rank: int) -> None:
    """Flat parameters show their codes as what is saved of them, in floats, and get the same codes again."""
    nets = [FullyShardedDataParallel(Net(), device_id=torch.device("cpu"), use_orig_params=False) for _ in range(2)]
    first, second = (rt.AdamW(net.parameters(), lr=1e-3, state_dtype="dynamic8") for net in nets)
    train(nets[0], first, range(2))
    set_optimizer_state_dict(nets[1], second, get_optimizer_state_dict(nets[0], first, options=FLAT), options=FLAT)
    (ours,), (theirs,) = (each.param_groups[0]["params"] for each in (first, second))
    assert {*first.state[ours]} == {"step", "exp_avg", "exp_avg_sq"}
    for name in ("exp_avg::codes", "exp_avg::scale", "exp_avg_sq::codes", "exp_avg_sq::scale"):
        assert torch.equal(first.state[ours][name], second.state[theirs][name]), name


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
def test_flat_parameters_in_codes_go_on_from_flattened_states() -> None:
    check_in_processes(flat_parameters)
