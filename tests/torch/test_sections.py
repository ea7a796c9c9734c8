"""Fused parameters: `split` gives their sections the numbers of parameters of their own."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

import rulec
import rulec.torch
from rulec.errors import HyperError, RulecError, StateMismatch, TensorError
from tests.torch.eager.processes import check_in_processes

#: A shape, what it is split in, and along which dimension: equal parts, grouped queries, columns, matrices in a batch.
CASES: list[tuple[tuple[int, ...], int | list[int], int]] = [
    ((12, 4), 3, 0),
    ((14, 5), [8, 3, 3], 0),
    ((4, 12), 3, 1),
    ((2, 6, 4), [4, 2], 1),
]

#: A rule of each kind that sees more than elements, one that does not, and a composition.
RULES = ("muon", "normuon", "soap", "lamb", "adafactor", "came", "sm3", "adam_mini", "adamw", "prodigy", "clip >> lamb")

#: Rules of matrices, that are not given batches of them here.
OF_MATRICES = ("muon", "normuon")


def kind_of(name: str) -> Any:
    if ">>" in name:
        return rulec.torch.optimizer(rulec.load("clip_by_global_norm") >> rulec.load("lamb"))
    return rulec.torch.optimizer(name)


def draw(shape: Sequence[int], seed: int) -> torch.Tensor:
    return torch.randn(tuple(shape), generator=torch.Generator().manual_seed(seed))


class Fused:
    """One fused parameter, and its sections as parameters, each with an optimizer."""

    def __init__(self, name: str, shape: tuple[int, ...], split: int | list[int], dim: int, **keywords: Any) -> None:
        self.shape, self.dim = shape, dim
        self.sizes = split if isinstance(split, list) else [shape[dim] // split] * split
        self.kind, self.keywords = kind_of(name), {"lr": 0.1, **keywords}
        self.group = {"split": split, "split_dim": dim}
        self.param = nn.Parameter(draw(shape, 0))
        self.parts = [nn.Parameter(x.clone(memory_format=torch.contiguous_format)) for x in self.cut(draw(shape, 0))]
        self.optimizer = self.fresh()
        self.apart = self.kind([(f"w[{i}]", p) for i, p in enumerate(self.parts)], **self.keywords)

    def fresh(self) -> Any:
        return self.kind([{"params": [("w", self.param)], **self.group}], **self.keywords)

    def cut(self, tensor: torch.Tensor) -> Sequence[torch.Tensor]:
        return tensor.split(self.sizes, self.dim)

    def step(self, seed: int) -> None:
        self.param.grad = draw(self.shape, seed)
        for part, grad in zip(self.parts, self.cut(self.param.grad), strict=True):
            part.grad = grad.clone(memory_format=torch.contiguous_format)
        self.optimizer.step()
        self.apart.step()

    def check(self) -> None:
        assert torch.equal(self.param, torch.cat([*self.parts], self.dim))


@pytest.mark.parametrize("name", RULES)
def test_sections_have_the_bits_of_parameters(name: str) -> None:
    for shape, split, dim in CASES:
        if len(shape) > 2 and name in OF_MATRICES:
            continue
        fused = Fused(name, shape, split, dim)
        for seed in (1, 2, 3):
            fused.step(seed)
        saved = copy.deepcopy(fused.optimizer.state_dict())
        fused.optimizer = fused.fresh()
        fused.optimizer.load_state_dict(saved)
        for seed in (4, 5):
            fused.step(seed)
        fused.check()
        again = fused.optimizer.state_dict()["state"][0]
        assert again.keys() == saved["state"][0].keys()


def test_states_are_those_of_the_whole_parameter_where_they_can_be() -> None:
    fused = Fused("normuon", (12, 4), 3, 0)
    fused.step(1)
    state = fused.optimizer.state_dict()["state"][0]
    assert {name: tuple(value.shape) for name, value in state.items()} == {"m": (12, 4), "v": (12, 1), "step": ()}
    fused = Fused("soap", (12, 4), 3, 0)
    fused.step(1)
    assert {"m", "step", "l.0", "qr.2"} < fused.optimizer.state_dict()["state"][0].keys()
    # A parameter that is not split goes on from it, and the other way round.
    fused = Fused("muon", (12, 4), 3, 0)
    fused.step(1)
    whole = fused.kind([fused.param], lr=0.1)
    whole.load_state_dict(fused.optimizer.state_dict())
    (momentum,) = whole.state[fused.param].values()
    assert torch.equal(momentum, torch.cat([s["momentum_buffer"] for s in fused.apart.state.values()]))
    fused.optimizer = fused.fresh()
    fused.optimizer.load_state_dict(whole.state_dict())
    assert fused.optimizer.param_groups[0]["split"] == 3
    fused.step(2)
    fused.check()


def test_a_table_of_routes_names_the_sections() -> None:
    routing = Fused("muon", (14, 5), [8, 3, 3], 0).optimizer.routing()
    assert str(routing).splitlines() == ["w[0]  (8, 5)  Muon", "w[1]  (3, 5)  Muon", "w[2]  (3, 5)  Muon"]
    # Shape facts are those of a section: 8/5, not 14/5; a rule of elements sees no sections.
    assert str(Fused("adamw", (12, 4), 3, 0).optimizer.routing()) == "w  (12, 4)  AdamW"
    tagged = rulec.torch.Muon([{"params": [nn.Parameter(torch.ones(6, 4))], "tags": ["head"], "split": 3}])
    assert len(tagged.routing()) == 1


def test_a_split_changes_only_before_there_are_states_of_sections() -> None:
    fused = Fused("muon", (12, 4), 3, 0)
    fused.step(1)
    fused.optimizer.param_groups[0]["split"] = None
    fused.param.grad = draw((12, 4), 2)
    with pytest.raises(StateMismatch, match=r"has momentum_buffer.0 of its sections, and w is not split here"):
        fused.optimizer.step()
    whole = fused.kind([("w", fused.param)], **fused.keywords)
    whole.step()
    whole.param_groups[0]["split"] = 3
    whole.step()
    assert {*whole.state[fused.param]} == {"momentum_buffer"}
    assert all(whole.state[fused.param][f"momentum_buffer.{i}"].shape == (4, 4) for i in range(3))


def test_a_split_that_does_not_fit_is_refused() -> None:
    matrix, vector = nn.Parameter(torch.ones(12, 4)), nn.Parameter(torch.ones(12))
    for group, kind, words in (
        ({"params": [matrix], "split": 5}, TensorError, "split=5 does not divide dimension 0 of .*, which has 12"),
        ({"params": [matrix], "split": [8, 2]}, TensorError, "adds up to 10, and dimension 0 of .* has 12"),
        ({"params": [matrix], "split": 2, "split_dim": 2}, TensorError, "parameter 0 has no dimension 2 for split=2"),
        ({"params": [vector], "split": 3}, TensorError, "parameter 0 has 1 dimension, and split=3 is for matrices"),
        ({"params": [matrix], "split": "qkv"}, HyperError, "split='qkv' of a group must be a number of equal parts"),
        ({"params": [matrix], "split": [12, 0]}, HyperError, "must be a number of equal parts, or the sizes"),
        ({"params": [matrix], "split": 2, "split_dim": -1}, HyperError, "split_dim=-1 of a group must be a dimension"),
        ({"params": [matrix], "split_dim": 1}, HyperError, "give split, or leave it out"),
    ):  # fmt: skip
        for optimizer in (rulec.torch.Muon, rulec.torch.AdamW):
            with pytest.raises(kind, match=words):
                optimizer([group], lr=0.1)
    sparse = Fused("muon", (12, 4), 3, 0)
    sparse.param.grad = torch.eye(12, 4).to_sparse()
    with pytest.raises(TensorError, match="the gradient of w is sparse"):
        sparse.optimizer.step()
    fused = Fused("muon", (12, 4), 3, 0)
    fused.step(1)
    with pytest.raises(
        RulecError, match=r"save is for states of whole parameters, and w\[0\] is split: use state_dict"
    ):
        rulec.torch.save(fused.optimizer, "fused.safetensors")
    with pytest.raises(RulecError, match=r"layout='torchao' is for states of whole parameters, and w\[0\] is split"):
        fused.optimizer.state_dict(layout="torchao")
    fused.param.grad = None
    saved = fused.optimizer.state_dict()
    saved["state"][0]["momentum_buffer"] = torch.ones(4, 12)
    with pytest.raises(StateMismatch, match=r"momentum_buffer of w was saved with shape \(4, 12\), where"):
        fused.optimizer.load_state_dict(saved)


@pytest.mark.parametrize(
    ("name", "shape", "split", "dim", "word"),
    [
        ("lamb", (192, 64), 3, 0, "dynamic4"), ("lamb", (70, 180), [60, 120], 1, "dynamic8"),
        ("soap", (2 * 65, 64), [65, 64, 1], 0, {"m": "dynamic8/64", "v": "int8"}),
    ],
)  # fmt: skip
def test_codes_of_sections(name: str, shape: Any, split: Any, dim: int, word: Any) -> None:
    """Their bits are those of parameters; in a file they are the codes of the whole parameter."""
    fused = Fused(name, shape, split, dim, state_dtype=word)
    for seed in (1, 2):
        fused.step(seed)
    saved = copy.deepcopy(fused.optimizer.state_dict())
    mine = saved["state"][0]
    fused.optimizer = fused.fresh()
    fused.optimizer.load_state_dict(saved)
    for key, value in fused.optimizer.state_dict()["state"][0].items():
        assert torch.equal(value, mine[key]), key
    if name == "lamb":
        blocks = {"dynamic4": ((192, 32), (192, 8)), "dynamic8": ((70, 180), (70, 180))}
        assert (tuple(mine["m::codes"].shape), tuple(mine["m::scale"].shape)) == blocks[word]
        # Through a parameter without a split, and through states in floats, values stay what they are.
        for keywords, group in ((fused.keywords, {}), ({"lr": 0.1}, fused.group)):
            between = fused.kind([{"params": [fused.param], **group}], **keywords)
            between.load_state_dict(fused.optimizer.state_dict())
            if dim == 0 or group:
                fused.optimizer = fused.fresh()
                fused.optimizer.load_state_dict(between.state_dict())
    else:  # a section of less than 4,096 elements has floats
        assert {"m::codes.0", "m::scale.1", "m.2", "l.0"} < mine.keys()
    fused.step(3)
    fused.check()


# Processes


def placements(rank: int, folder: str, names: Sequence[str], cases: Sequence[tuple[Any, Any]]) -> None:
    """Sections of DTensors: the numbers of one process, states as DTensors of the whole, and checkpoints."""
    mesh = init_device_mesh("cpu", (2,))
    for name in names:
        for number, ((shape, split, dim), place) in enumerate(cases):
            if len(shape) > 2 and name in OF_MATRICES:
                continue
            alone = Fused(name, shape, split, dim, backend="c")
            param = nn.Parameter(distribute_tensor(draw(shape, 0), mesh, [place]))
            optimizer = alone.kind([{"params": [("w", param)], **alone.group}], **alone.keywords)
            for seed in (1, 2, 3):
                alone.step(seed)
                param.grad = distribute_tensor(draw(shape, seed), mesh, [place])
                if seed == 3 and number == 0:
                    optimizer = reloaded(optimizer, param, alone, f"{folder}/{name}")
                optimizer.step()
            at = f"{name} {shape} {split} {place}"
            torch.testing.assert_close(param.full_tensor(), alone.param.detach(), rtol=1e-6, atol=1e-7, msg=at)  # type: ignore[attr-defined]
            check_states(optimizer.state_dict(), alone.optimizer.state_dict(), at)
    refusals(mesh)
    codes(mesh, folder)


def codes(mesh: Any, folder: str) -> None:
    """Codes of sections of DTensors: those of one process where blocks divide rows, and the same after a file."""
    for shape in ((192, 64), (180, 70)):
        alone = Fused("lamb", shape, 3, 0, state_dtype="dynamic8/32", backend="c")
        param = nn.Parameter(distribute_tensor(draw(shape, 0), mesh, [Shard(0)]))
        optimizer = alone.kind([{"params": [("w", param)], **alone.group}], **alone.keywords)
        for seed in (1, 2):
            alone.step(seed)
            param.grad = distribute_tensor(draw(shape, seed), mesh, [Shard(0)])
            optimizer.step()
        mine = optimizer.state_dict()
        assert tuple(mine["state"][0]["m::scale"].shape) == ((192, 8) if shape[1] == 64 else shape)
        if shape[1] == 64:
            check_states(mine, alone.optimizer.state_dict(), str(shape))
        again = reloaded(optimizer, param, alone, f"{folder}/codes{shape[1]}").state_dict()
        for key, value in mine["state"][0].items():
            other = again["state"][0][key]
            assert torch.equal(*(x.to_local() if isinstance(x, DTensor) else x for x in (value, other))), key


def reloaded(optimizer: Any, param: Any, alone: Fused, folder: str) -> Any:
    """Another optimizer that goes on from a checkpoint of torch's."""
    saved = optimizer.state_dict()
    dcp.save({"optim": saved["state"][0]}, checkpoint_id=folder)
    kept = param.detach().clone()
    other = alone.kind([{"params": [("w", param)], **alone.group}], **alone.keywords)
    other.step()
    with torch.no_grad():
        param.copy_(kept)
    read = other.state_dict()
    dcp.load({"optim": read["state"][0]}, checkpoint_id=folder)
    other.load_state_dict(read)
    return other


def check_states(ours: Any, theirs: Any, at: str) -> None:
    assert ours["state"][0].keys() == theirs["state"][0].keys()
    for name, value in theirs["state"][0].items():
        state = ours["state"][0][name]
        assert value.dim() == 0 or isinstance(state, DTensor), (at, name)
        got = state.full_tensor() if isinstance(state, DTensor) else state
        torch.testing.assert_close(got, value, rtol=1e-6, atol=1e-7, msg=f"{name} of {at}")


def refusals(mesh: Any) -> None:
    param = nn.Parameter(distribute_tensor(torch.ones(12, 4), mesh, [Shard(0)]))
    with pytest.raises(RulecError, match="split=5 does not divide dimension 0 of w, which has 12"):
        rulec.torch.Muon([{"params": [("w", param)], "split": 5}])
    dist.barrier()


def test_sections_of_dtensors(tmp_path: Any) -> None:
    check_in_processes(
        partial(placements, folder=str(tmp_path), names=["muon"], cases=[(CASES[1], Shard(0)), (CASES[2], Shard(1))])
    )


@pytest.mark.slow
@pytest.mark.parametrize(
    "names",
    [
        pytest.param(["adafactor", "soap", "lamb"], id="some"),
        pytest.param(["muon", "normuon", "came", "adam_mini", "adamw", "prodigy"], marks=pytest.mark.whole, id="rest"),
    ],
)
def test_sections_of_all_placements(tmp_path: Any, names: list[str]) -> None:
    cases = [(case, place) for case in CASES for place in (Shard(0), Shard(1), Replicate())]
    check_in_processes(partial(placements, folder=str(tmp_path), names=names, cases=cases))


def test_gradients_of_sections_may_arrive_in_the_backward_pass() -> None:
    model, plain = nn.Linear(4, 12, bias=False), nn.Linear(4, 12, bias=False)
    plain.load_state_dict(model.state_dict())
    groups = [{"params": [("w", m.weight)], "split": 3} for m in (model, plain)]
    eager = rulec.torch.EagerUpdate(groups[:1], "muon", lr=0.1, contributions=1)
    whole = rulec.torch.Muon(groups[1:], lr=0.1)
    for seed in (1, 2):
        with eager.backward():
            model(draw((3, 4), seed)).square().sum().backward()
        eager.step()
        plain(draw((3, 4), seed)).square().sum().backward()
        whole.step()
        whole.zero_grad()
    assert torch.equal(model.weight, plain.weight)
