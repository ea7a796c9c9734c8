"""Parameters of which each of several processes has a part: 16-bit weights and states in codes as in one process."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_optimizer_state_dict, set_optimizer_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.testing._internal.distributed.fake_pg import FakeStore

import rulec.torch
from rulec.errors import TensorError
from rulec.formats import decode, of_key, parse
from rulec.formats.tables import table
from rulec.torch.eager import EagerUpdate
from rulec.torch.step.checks import watch_of
from tests.torch.eager.processes import check_in_processes

BRAIN = torch.bfloat16

#: Shapes that two and four processes split unevenly, and one that not all have a part of.
SHAPES = {"uneven": (67, 96), "even": (64, 128), "few": (3, 5000), "line": (8190,), "cube": (26, 12, 24), "small": (5,)}


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


def unbiased(rank: int, ways: Any = (fsdp,), backends: Any = ("cpu",)) -> None:
    """States that are rounded at random have the bits of whole tensors."""
    words = {"state_dtype": "bfloat16_sr", "seed": 70000}
    for backend in backends:
        alone = Model()
        whole = adamw(alone, backend=backend, **words)
        train(alone, whole, range(3))
        for way in ways:
            model = way(Model())
            optimizer = adamw(model, backend=backend, **words)
            train(model, optimizer, range(3))
            for (name, p), q in zip(alone.named_parameters(), model.parameters(), strict=True):
                for state in ("exp_avg", "exp_avg_sq"):
                    ours = optimizer.state[q][state]
                    assert ours.dtype is BRAIN
                    assert torch.equal(here(ours), part(whole.state[p][state], q)), (way.__name__, name, backend)


def unbiased_everywhere(rank: int) -> None:
    four = (both, twice, strided) if dist.get_world_size() > 2 else ()
    unbiased(rank, (fsdp, hsdp, columns, replicated, *four), ("cpu", "c"))


#: Noise for every element, and elements left out at random; the second for each matrix of a stack.
DRAWING = {
    "noise": lambda: rulec.load("noise") >> rulec.load("adamw"),
    "thinned": lambda: rulec.parse(
        "name: Thinned\nsummary: A part of the elements at random.\nhyper: {lr: 0.1}\nstep: |\n"
        "  kept = where(uniform([rows, cols], at=t) < 0.5, g, 0)\n  direction = kept + 0.1*normal([rows, cols], at=t)\n"
    ),
}


def draws(rank: int, ways: Any = (fsdp, columns), backends: Any = ("cpu",)) -> None:
    """Random numbers of a rule follow from the place of an element in its whole tensor."""
    for backend, (name, rule) in product(backends, DRAWING.items()):
        kind = rulec.torch.optimizer(rule())
        alone = Model()
        train(alone, kind(alone.named_parameters(), lr=0.1, seed=9, backend=backend), range(2))
        for way in ways:
            model = way(Model())
            optimizer = kind(model.named_parameters(), lr=0.1, seed=9, backend=backend)
            train(model, optimizer, range(2))
            assert str(optimizer.communication()) == "a step sends nothing"
            for (at, p), q in zip(alone.named_parameters(), model.parameters(), strict=True):
                assert torch.equal(here(q), part(p, q)), (name, way.__name__, at, backend)


def drawn(expression: str) -> Any:
    text = f"name: Drawn\nsummary: One number.\nhyper: {{lr: 0.1}}\nstep: |\n  direction = {expression}\n"
    return rulec.torch.optimizer(rulec.parse(text))


def draws_of_others(rank: int) -> None:
    """Sums of random numbers are those of the whole tensor, or of a matrix of other extents."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    for extents in ("rows, cols", "8, 8"):
        alone, kind = Model(), drawn(f"g*sum(normal([{extents}]))")
        train(alone, kind(alone.named_parameters()), range(1))
        for axis in (0, -1) if "rows" in extents else (-1,):
            model = placed(Model(), mesh, lambda p, axis=axis: [Shard(axis % p.dim())])  # type: ignore[misc]
            train(model, kind(model.named_parameters()), range(1))
            for p, q in zip(alone.parameters(), model.parameters(), strict=True):
                torch.testing.assert_close(here(q), part(p, q), rtol=1e-5, atol=1e-5)
    model = placed(Model(), mesh, lambda p: [Shard(0)])
    with pytest.raises(TensorError, match="is cut between its matrices, and Drawn reduces a random matrix for all"):
        train(model, kind(model.named_parameters()), range(1))


def draws_everywhere(rank: int) -> None:
    four = (both, twice, strided) if dist.get_world_size() > 2 else ()
    draws(rank, (fsdp, hsdp, columns, replicated, *four), ("cpu", "c"))


def stochastic_everywhere(rank: int) -> None:
    four = (both, twice, strided) if dist.get_world_size() > 2 else ()
    stochastic(rank, (fsdp, hsdp, columns, replicated, *four), ("cpu", "c"))


#: Blocks that divide the rows of some tensors, or all behind their first dimension, and of no other in codes.
CODES = {"exp_avg": "int8/32", "exp_avg_sq": "dynamic8/32"}
FOUR_BITS = {"exp_avg": "dynamic4/32", "exp_avg_sq": "float8_e4m3/32"}
DIVIDED = ("even", "uneven", "cube")


def held(optimizer: Any, param: Any) -> dict[str, Tensor]:
    """The values of a parameter's states here, decoded."""
    formats, states = optimizer.param_groups[0].get("formats", {}), optimizer.state[param]
    values = {
        name.removesuffix("::codes"): here(value)
        for name, value in states.items()
        if not name.endswith("::scale") and name != "step"
    }
    for name, value in values.items():
        if f"{name}::scale" in states:
            scales, shape = states[f"{name}::scale"].numpy(), tuple(here(param).shape)
            values[name] = torch.from_numpy(decode(of_key(formats[name]), value.numpy(), scales, shape))
    return values


def codes(rank: int, ways: Any = (fsdp,), words: Any = (CODES,), backends: Any = ("cpu",)) -> None:
    """Shards that begin at blocks have the bits of one process; others are as far from states in floats as it is."""
    floats = Model()
    train(floats, adamw(floats), range(4))
    for backend, state_dtype in product(backends, words):
        alone = Model()
        first = adamw(alone, state_dtype=state_dtype, backend=backend)
        train(alone, first, range(4))
        for way in ways:
            model = way(Model())
            second = adamw(model, state_dtype=state_dtype, backend=backend)
            train(model, second, range(4))
            assert first.storage() == second.storage()
            assert first.storage()["small"] == {"exp_avg": "float32", "exp_avg_sq": "float32"}
            for (name, p), q in zip(alone.named_parameters(), model.parameters(), strict=True):
                ours, theirs = here(q), part(p, q)
                if name == "small" or (name in DIVIDED and way not in (columns, both)):
                    assert torch.equal(ours, theirs), (way.__name__, name)
                elif ours.numel():
                    exact = part(floats.get_parameter(name), q)
                    ratio = (ours - exact).abs().mean() / (theirs - exact).abs().mean()
                    assert 0.7 < ratio < 1.4, (way.__name__, name, ratio)


def codes_everywhere(rank: int) -> None:
    four = (both, twice, strided) if dist.get_world_size() > 2 else ()
    codes(rank, (fsdp, hsdp, columns, replicated, *four), (CODES, FOUR_BITS), ("cpu", "c"))


def saved(model: nn.Module, optimizer: Any, folder: str) -> None:
    dcp.save(
        {"optimizer": get_optimizer_state_dict(model, optimizer), "model": model.state_dict()}, checkpoint_id=folder
    )


def loaded(model: nn.Module, optimizer: Any, folder: str) -> None:
    state = {"optimizer": get_optimizer_state_dict(model, optimizer), "model": model.state_dict()}
    dcp.load(state, checkpoint_id=folder)
    model.load_state_dict(state["model"])
    set_optimizer_state_dict(model, optimizer, state["optimizer"])


def resumed(rank: int, folder: str, way: Any = fsdp, words: Any = CODES) -> None:
    """A run that is saved and loaded has the bits of one that is not."""
    straight, broken = way(Model()), way(Model())
    first, second = (adamw(model, state_dtype=words) for model in (straight, broken))
    train(straight, first, range(4))
    train(broken, second, range(2))
    if way is fsdp:
        states = get_optimizer_state_dict(broken, second)["state"]
        shapes = {name: tuple(state["exp_avg::scale"].shape) for name, state in states.items() if name != "small"}
        divided = {"even": (64, 8), "uneven": (67, 24), "cube": SHAPES["cube"]}
        assert shapes == {"few": SHAPES["few"], "line": SHAPES["line"], **divided}
    saved(broken, second, folder)
    again = way(Model())
    third = adamw(again, state_dtype=words)
    loaded(again, third, folder)
    for p, q in zip(broken.parameters(), again.parameters(), strict=True):
        for key, value in second.state[p].items():
            assert torch.equal(here(value), here(third.state[q][key])), key
    train(again, third, range(2, 4))
    for (name, p), q in zip(straight.named_parameters(), again.parameters(), strict=True):
        assert torch.equal(here(p), here(q)), name


def kinds(rank: int, way: Any = fsdp) -> None:
    """Shards change the kind of their weights as whole parameters do."""
    values = []
    for model in (Model(BRAIN), way(Model(BRAIN))):
        split, master = (adamw(model, weights=kind) for kind in ("split", "master"))
        train(model, split, range(2))
        master.load_state_dict(split.state_dict())
        train(model, master, range(2, 4))
        split.load_state_dict(master.state_dict())
        values.append([(p, split.state[p]["param::low"], master.state[p]["param::master"]) for p in model.parameters()])
    for whole, parts in zip(*values, strict=True):
        for ours, theirs in zip(parts, whole, strict=True):
            assert torch.equal(here(ours), part(theirs, parts[0]))
        assert whole[1].any()


class Layers(nn.Sequential):
    """Two layers with rows that blocks divide."""

    def __init__(self) -> None:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(3)
            super().__init__(nn.Linear(96, 67), nn.Tanh(), nn.Linear(67, 64))


def eager(rank: int) -> None:
    """Updates in the backward pass of shards, in codes or with random numbers, have the bits of steps."""
    codes: dict[str, Any] = {"weights": "stochastic", "state_dtype": "dynamic8/32", "seed": 5}
    for rule, words in ((rulec.load("adamw"), codes), (DRAWING["noise"](), {"seed": 5})):
        one, other = fully_shard(Layers().to(BRAIN)), fully_shard(Layers().to(BRAIN))
        plain = rulec.torch.optimizer(rule)(one.named_parameters(), lr=1e-3, **words)
        opt = EagerUpdate(other, rule, lr=1e-3, **words)
        for step in range(3):
            inputs = torch.randn(4, 96, generator=torch.Generator().manual_seed(step)).to(BRAIN)
            one(inputs).square().mean().backward()
            plain.step()
            plain.zero_grad()
            with opt.backward():
                other(inputs).square().mean().backward()
            opt.step()
        for p, q in zip(one.parameters(), other.parameters(), strict=True):
            assert torch.equal(here(p), here(q))
        assert "state_dtype" not in words or "dynamic8/32" in plain.storage()["0.weight"].values()


def reducing(rank: int, kind: str, words: dict[str, Any]) -> None:
    """Rules with norms, rows and columns: codes and random bits of shards are as of rules of elements."""
    dtype = BRAIN if "weights" in words else torch.float32
    alone = Model(dtype)
    train(alone, rulec.torch.optimizer(kind)(alone.named_parameters(), lr=1e-3, **words), range(3))
    for way in (fsdp, columns):
        model = way(Model(dtype))
        train(model, rulec.torch.optimizer(kind)(model.named_parameters(), lr=1e-3, **words), range(3))
        for name in ("even", "small") if way is columns else (*DIVIDED, "small"):
            ours, p = model.get_parameter(name), alone.get_parameter(name)
            different = here(ours) != part(p, ours)
            # A norm is a sum of sums, so its last bit may be another.
            assert not different.numel() or different.float().mean() < 0.02, (kind, way.__name__, name)


def gathered(rank: int) -> None:
    """Whole states that torch gathers load into one process, and from there into shards."""
    model = fsdp(Model())
    optimizer = adamw(model, state_dtype=FOUR_BITS)
    train(model, optimizer, range(2))
    states = get_optimizer_state_dict(model, optimizer, options=StateDictOptions(full_state_dict=True))
    alone, again = Model(), fsdp(Model())
    first, second = adamw(alone, state_dtype=FOUR_BITS), adamw(again, state_dtype=FOUR_BITS)
    set_optimizer_state_dict(alone, first, states, options=StateDictOptions(full_state_dict=True))
    second.load_state_dict(first.state_dict())
    for (name, p), q, one in zip(model.named_parameters(), again.parameters(), alone.parameters(), strict=True):
        theirs, whole, ours = (held(opt, x) for opt, x in ((optimizer, p), (first, one), (second, q)))
        for state, value in theirs.items():
            if name in (*DIVIDED, "small"):
                assert torch.equal(value, part(whole[state], p)), (name, state)
                assert torch.equal(value, ours[state]), (name, state)
            elif value.numel():
                near = 0.2 * value.abs().max()
                assert (value - part(whole[state], p)).abs().max() <= near, (name, state)
                assert (value - ours[state]).abs().max() <= 2 * near, (name, state)


def saved_here(rank: int, folder: str, before: str = "") -> None:
    """Some steps, or those of a file; saved, with the values of this process beside them."""
    model = fsdp(Model())
    optimizer = adamw(model, state_dtype=CODES)
    if before:
        loaded(model, optimizer, before)
        compared(model, optimizer, before)
    else:
        train(model, optimizer, range(2))
    saved(model, optimizer, folder)
    values = {name: [here(p).detach(), held(optimizer, p)] for name, p in model.named_parameters()}
    torch.save(values, Path(folder, f"values{rank}"))


def compared(model: nn.Module, optimizer: Any, folder: str) -> None:
    """Weights and states are those that were saved: exactly where blocks divide rows, else as near as formats are."""
    processes = [torch.load(path) for path in sorted(Path(folder).glob("values*"))]
    for name, p in model.named_parameters():
        assert torch.equal(here(p), part(torch.cat([each[name][0] for each in processes]), p))
        for state, value in held(optimizer, p).items():
            wanted = part(torch.cat([each[name][1][state] for each in processes]), p)
            if name in (*DIVIDED, "small"):
                assert torch.equal(value, wanted), (name, state)
            else:
                assert not value.numel() or (value - wanted).abs().max() <= 0.01 * wanted.abs().max(), (name, state)


@pytest.fixture
def four() -> Iterator[Any]:
    """A mesh of two by two processes, of which this is the first and the others are none."""
    dist.init_process_group("fake", rank=0, world_size=4, store=FakeStore())
    yield init_device_mesh("cpu", (2, 2))
    dist.destroy_process_group()


def test_shards_that_stand_still_are_warned_of(four: Any) -> None:
    """The look chooses the largest local shard; a shard without elements is passed over."""
    here = {"none": torch.zeros(0, 64), "many": torch.ones(4, 64), "few": torch.ones(4, 8)}
    shards = {name: DTensor.from_local(x.to(BRAIN), four, [Shard(0), Replicate()]) for name, x in here.items()}
    params = [nn.Parameter(shard) for shard in shards.values()]
    for param in params:
        param.grad = torch.ones_like(param)
    watch = watch_of("AdamW", [{"params": params}], [*shards])
    assert watch is not None
    for _ in range(9):
        watch.watched(lambda: None)
    with pytest.warns(RuntimeWarning, match=r"AdamW left 100% of the elements of many .* in step 10:"):
        watch.watched(lambda: None)
    assert watch.done


def still(rank: int) -> None:
    """Every process warns of its shards, once, in the tenth step."""
    model = fsdp(Model(BRAIN))
    optimizer = rulec.torch.AdamW(model.named_parameters(), lr=1e-6)
    with pytest.warns(RuntimeWarning, match=r"left \d+% of the elements of few with a gradient .* in step 10:") as told:
        train(model, optimizer, range(12))
    assert len(told) == 1


@pytest.mark.slow
def test_processes_warn_of_shards_that_stand_still() -> None:
    check_in_processes(still)


def test_parts_without_equal_rows_are_refused(four: Any) -> None:
    cube = DTensor.from_local(torch.ones(4, 3, 4).to(BRAIN), four, [Shard(1), Shard(2)])
    assert cube.shape == (4, 6, 8)
    with pytest.raises(TensorError, match=r"parts that are a range or equal rows of the whole: .* weights='split'"):
        rulec.torch.AdamW([nn.Parameter(cube)], weights="stochastic").storage()
    rulec.torch.AdamW([nn.Parameter(cube)], weights="split").storage()
    with pytest.raises(TensorError, match=r"state_dtype='bfloat16_sr' is for parts that .* state_dtype='float32'"):
        rulec.torch.AdamW([nn.Parameter(cube)], state_dtype="bfloat16_sr").storage()


def test_states_of_rows_of_a_part_are_not_rounded_at_random(four: Any) -> None:
    """Processes that hold the same numbers would round them differently."""
    part = nn.Parameter(DTensor.from_local(torch.ones(4, 12), four, [Shard(0), Shard(1)]))
    optimizer = rulec.torch.Adafactor([part], state_dtype="bfloat16_sr")
    part.grad = torch.ones_like(part)
    optimizer.step()
    assert optimizer.storage() == {"parameter 0": {"row_var": "float32", "col_var": "float32"}}
    named = rulec.torch.Adafactor([part], state_dtype={"row_var": "bfloat16_sr"})
    with pytest.raises(TensorError, match=r"r of Adafactor is a state of rows .* parts of a tensor: give "):
        named.step()


class Quantized(torch.Tensor):
    """Codes with scales and a table in the place of a tensor of floats, as torchao's, for what loading does with it."""

    def __new__(cls, codes: Tensor, scale: Tensor, qmap: Tensor) -> Any:
        return torch.Tensor._make_wrapper_subclass(cls, codes.shape, dtype=torch.float32)  # type: ignore[attr-defined]

    def __init__(self, codes: Tensor, scale: Tensor, qmap: Tensor) -> None:
        self.codes, self.scale, self.qmap = codes, scale, qmap

    def dequantize(self) -> Tensor:
        numbers = self.qmap[self.codes.long()].view(self.scale.numel(), -1) * self.scale[:, None]
        return numbers.view(self.codes.shape)

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func._schema.name not in ("aten::view", "aten::view_as", "aten::detach", "aten::_to_copy", "aten::clone"):
            raise NotImplementedError(f"{func} of a tensor in codes")
        return cls(args[0].codes, args[0].scale, args[0].qmap)


def quantized(rank: int) -> None:
    """States that torchao keeps in the parts of DTensors load into the same codes, and into floats."""
    form, model = parse("dynamic8"), fsdp(Model(names=["even"]))
    (param,) = model.parameters()
    first = adamw(model, state_dtype="dynamic8")
    train(model, first, range(2))
    saved = first.state_dict()
    entry, states = saved["state"][0], first.state[param]
    for name, signed in (("exp_avg", True), ("exp_avg_sq", False)):
        del entry[f"{name}::codes"], entry[f"{name}::scale"]
        numbers = torch.tensor(table(form.for_state(signed=signed, floor=False)))
        codes, scales = here(states[f"{name}::codes"]), states[f"{name}::scale"].reshape(-1)
        entry[name] = _as_part(Quantized(codes, scales, numbers), param)
    saved["param_groups"][0].pop("formats")
    for word in ("dynamic8", "float32"):
        second = adamw(model, state_dtype=word)
        second.load_state_dict(saved)
        for state, value in held(first, param).items():
            assert torch.equal(held(second, param)[state], value), (word, state)


def _as_part(own: Tensor, param: Any) -> Tensor:
    return DTensor.from_local(
        own, param.device_mesh, param.placements, run_check=False, shape=param.shape, stride=param.stride()
    )


def everyday(rank: int) -> None:
    stochastic(rank)
    codes(rank)
    draws_of_others(rank)


def test_shards_of_two_processes_are_those_of_whole_parameters() -> None:
    check_in_processes(everyday)


def more(rank: int, folder: str) -> None:
    unbiased(rank)
    kinds(rank)
    eager(rank)
    resumed(rank, folder)
    draws(rank)
    quantized(rank)


@pytest.mark.slow
def test_more_of_shards_is_as_of_whole_parameters(tmp_path: Path) -> None:
    check_in_processes(partial(more, folder=str(tmp_path)))


@pytest.mark.slow
@pytest.mark.parametrize("count", [*(pytest.param(n, marks=pytest.mark.whole) for n in (1, 2)), 4])
def test_codes_of_all_shards_are_those_of_whole_parameters(count: int) -> None:
    check_in_processes(codes_everywhere, count)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "words"),
    [
        ("lamb", {"state_dtype": "dynamic8/32"}),
        ("came", {"weights": "stochastic", "seed": 3}),
        pytest.param("came", {"state_dtype": "dynamic8/32"}, marks=pytest.mark.whole),
        pytest.param("lamb", {"weights": "stochastic", "seed": 3}, marks=pytest.mark.whole),
    ],
)
def test_rules_with_reductions_over_shards_have_the_bits_of_one_process(kind: str, words: dict[str, Any]) -> None:
    check_in_processes(partial(reducing, kind=kind, words=words))


def whole_loaded(rank: int) -> None:
    """The state of one process, loaded into shards of every kind, goes on with its bits where blocks allow it."""
    for words, dtype in ((CODES, torch.float32), (FOUR_BITS, BRAIN)):
        alone = Model(dtype)
        first = adamw(alone, state_dtype=words, weights="split" if dtype is BRAIN else None)
        train(alone, first, range(2))
        saved = first.state_dict()
        for way in (fsdp, hsdp, columns, both, twice, strided, replicated):
            model = way(Model(dtype))
            second = adamw(model, state_dtype=words, weights="split" if dtype is BRAIN else None)
            second.load_state_dict(saved)
            for (name, p), q in zip(alone.named_parameters(), model.parameters(), strict=True):
                if dtype is BRAIN:
                    assert torch.equal(here(second.state[q]["param::low"]), part(first.state[p]["param::low"], q))
                for (state, value), ours in zip(held(first, p).items(), held(second, q).values(), strict=True):
                    wanted = part(value, q)
                    if name == "small" or (name in DIVIDED and way not in (columns, both)):
                        assert torch.equal(ours, wanted), (way.__name__, name, state)
                    assert not ours.numel() or (ours - wanted).abs().max() <= 0.3 * value.abs().max()


@pytest.mark.slow
def test_the_state_of_one_process_loads_into_all_shards() -> None:
    check_in_processes(whole_loaded, 4)


@pytest.mark.slow
def test_whole_states_in_codes_load_into_one_process_and_into_shards() -> None:
    check_in_processes(gathered)


@pytest.mark.another
@pytest.mark.parametrize("words", [CODES, FOUR_BITS], ids=["eight bits", "four bits"])
@pytest.mark.parametrize("way", [fsdp, hsdp, columns, both, twice, replicated])
def test_a_run_of_all_shards_goes_on_bit_for_bit(tmp_path: Path, way: Any, words: Any) -> None:
    check_in_processes(partial(resumed, folder=str(tmp_path), way=way, words=words), 4)


@pytest.mark.slow
@pytest.mark.parametrize(
    "counts", [(2, 1, 2), *(pytest.param(c, marks=pytest.mark.whole) for c in ((2, 4), (4, 2), (1, 2)))], ids=str
)
def test_a_file_of_shards_loads_on_another_number_of_processes(tmp_path: Path, counts: tuple[int, ...]) -> None:
    before = ""
    for number, count in enumerate(counts):
        folder = str(tmp_path / str(number))
        check_in_processes(partial(saved_here, folder=folder, before=before), count)
        before = folder


@pytest.mark.slow
@pytest.mark.parametrize("drawn", [stochastic_everywhere, unbiased_everywhere, draws_everywhere])
@pytest.mark.parametrize("count", [*(pytest.param(n, marks=pytest.mark.whole) for n in (1, 2)), 4])
def test_random_bits_of_all_shards_are_those_of_whole_parameters(count: int, drawn: Any) -> None:
    check_in_processes(drawn, count)
