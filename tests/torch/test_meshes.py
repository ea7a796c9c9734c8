"""Rules over DTensors: the numbers of one process, counted messages, and steps that all processes agree on."""

from __future__ import annotations

import zlib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from itertools import pairwise
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_optimizer_state_dict, set_optimizer_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

import rulec
import rulec.torch
from rulec.backend import registry
from rulec.compiler.view import matrix_view
from rulec.errors import HyperError, RulecError, RuleError, TensorError
from rulec.runtime.distributed.owners import owners_of
from rulec.torch.distributed.mesh import MeshGroup
from tests.library import by_share, single
from tests.runtime.elsewhere import Elsewhere
from tests.torch.eager.processes import check_in_processes

#: Uneven parts, a part that is empty, a vector, and several matrices.
SHAPES = {"w": (7, 5), "b": (6,), "tall": (12, 4), "thin": (1, 3), "batch": (3, 4, 6)}

#: Functions of blocks of two rows, or of one where the rows are odd.
BLOCKS = """
name: Blocks
view: {flatten: rest}
applies_to: ndim >= 2
otherwise: sgd
state: {left: {init: 0, shape: [rows, "2 - rows % 2"]}}
step: |
  left = left/2 + matmul(g, transpose(g, per=block(2 - rows % 2)), per=block(2 - rows % 2))
  root = inverse_root(left, 4, eps=0.5, per=block(2 - rows % 2))
  direction = newton_schulz(g, per=block(1)) + matmul(root, g, per=block(2 - rows % 2))
"""

QUANTILES = """
name: Quantiles
state: {m: 0, limit: {init: 0, per: tensor}, r: {init: 0, per: row}, c: {init: 0, per: col}}
step: |
  m = 0.5*m + g
  limit = quantile(abs(m), 0.9)
  r = r + median(m, per="row")
  c = c + quantile(p, 0.3, per="col", interpolation="higher")
  direction = clip(m, -limit, limit) + r*c + median(norm(g, per="row"))
"""

ORDERS = """
name: Orders
state: {m: 0, r: {init: 0, per: row}, c: {init: 0, per: tensor}}
step: |
  m = 0.5*m + g
  r = r + sort(max(p, per="row"), per="matrix")
  c = c + take(p, numel//2)
  direction = sort(m, per="col") + take(m, argsort(g)) + take(g, argsort(r, per="matrix"), axis=0) + c*argsort(p)
"""

COMPOSED = {
    "orders": lambda: rulec.parse(ORDERS),
    "quantiles": lambda: rulec.parse(QUANTILES),
    "blocks": lambda: rulec.parse(BLOCKS),
    "clip >> lamb": lambda: rulec.load("clip_by_global_norm") >> rulec.load("lamb"),
    "lamb + decay": lambda: rulec.load("lamb") + rulec.load("decay"),
    "clip >> adafactor": lambda: rulec.load("clip_by_global_norm") >> rulec.load("adafactor"),
    "skip >> lars": lambda: rulec.load("skip_not_finite") >> rulec.load("lars"),
    "clip >> soap": lambda: rulec.load("clip_by_global_norm") >> rulec.load("soap"),
    "soap + decay": lambda: rulec.load("soap") + rulec.load("decay"),
    "skip >> soap": lambda: rulec.load("skip_not_finite") >> rulec.load("soap"),
    "soap >> clip": lambda: rulec.load("soap") >> rulec.load("clip_by_global_norm"),
    "lookahead(soap)": lambda: rulec.load("lookahead")(rulec.load("soap")),
    "noise >> adam": lambda: rulec.load("noise") >> rulec.load("adam"),
    "low_rank(clip >> adam)": lambda: rulec.load("low_rank")(rulec.load("clip_by_global_norm") >> rulec.load("adam")),
}

#: Rules of each kind of reduction, and how many messages a step takes at most: on a mesh of one dimension.
MESSAGES = {
    "adamw": 0, "lamb": 1, "prodigy": 1, "clip >> lamb": 2, "adafactor": 3, "came": 5, "sm3": 4, "adam_mini": 1,
    "cautious_adamw": 1, "skip >> lars": 2, "muon": 2, "normuon": 6, "clip >> soap": 5, "apollo": 4,
}  # fmt: skip

#: Rules with matrices of other shapes than their parameters.
FACTORED = ("soap", "shampoo", "galore", "apollo", "apollo_mini")

#: Hyper-parameters for matrices with one row.
SETTINGS = {"galore": {"rank": 1}, "apollo": {"rank": 1}, "fira": {"rank": 1}}

#: Rules of matrices, that are not given vectors here.
OF_MATRICES = ("muon", "normuon")

#: Rules with more messages than others: as sums depend on one another, or follow exchanges.
ROUNDS = {
    "adalite": 18, "lbfgs_direction": 10, "dash": 7, "kron": 8, "nordion2": 8, "scalableshampoo": 7, "soap >> clip": 8,
    "mano": 9, "aurora": 7, "nanochat_muon": 12, "cosmos": 11, "muonh": 8, "muon_hr": 8, "dash_axes": 7, "kron_axes": 8,
    "scalableshampoo_axes": 7,
}  # fmt: skip


def rule_of(name: str) -> rulec.Rule:
    return COMPOSED[name]() if name in COMPOSED else rulec.load(name)


def kind_of(name: str) -> Any:
    return rulec.torch.optimizer(rule_of(name))


def rate_of(name: str) -> dict[str, float]:
    return {"lr": 0.01} if "lr" in rule_of(name).hyper else {}


def draws(seed: int) -> dict[str, torch.Tensor]:
    made = torch.Generator().manual_seed(seed)
    return {name: torch.randn(shape, generator=made) for name, shape in SHAPES.items()}


@contextmanager
def check_refused(kind: type[Exception], words: str) -> Iterator[None]:
    with pytest.raises(kind, match=words):
        yield


class Twins:
    """The same parameters whole, and as DTensors, each with an optimizer."""

    def __init__(self, name: str, mesh: Any, placements: Sequence[Any], **keywords: Any) -> None:
        self.mesh, self.placements = mesh, placements
        self.names = [n for n, shape in SHAPES.items() if len(shape) == 2 or name not in OF_MATRICES]
        self.whole = {n: nn.Parameter(draws(0)[n]) for n in self.names}
        self.parts = {n: nn.Parameter(self.place(draws(0)[n])) for n in self.names}
        keywords = {**rate_of(name), "backend": "c", **SETTINGS.get(name, {}), **keywords}
        self.alone = kind_of(name)([*self.whole.items()], **keywords)
        self.optimizer = kind_of(name)([*self.parts.items()], **keywords)

    def place(self, tensor: torch.Tensor) -> DTensor:
        dims = tensor.dim()
        cut = [Shard(min(p.dim, dims - 1) if p.dim >= 0 else dims - 1) if p.is_shard() else p for p in self.placements]
        return distribute_tensor(tensor.detach().clone(), self.mesh, cut)

    def give(self, seed: int) -> None:
        for name, grad in ((name, draws(seed)[name]) for name in self.names):
            self.whole[name].grad, self.parts[name].grad = grad, self.place(grad)

    def step(self, seed: int) -> None:
        self.give(seed)
        self.alone.step()
        self.optimizer.step()

    def check(self) -> None:
        """Parameters and states, put together of their parts, are those of one process."""
        for name, param in self.whole.items():
            torch.testing.assert_close(self.parts[name].full_tensor(), param.detach(), rtol=1e-6, atol=1e-7)  # type: ignore[attr-defined]
            ours, theirs = self.optimizer.state[self.parts[name]], self.alone.state[param]
            assert ours.keys() == theirs.keys()
            for state, value in theirs.items():
                got = ours[state].full_tensor() if isinstance(ours[state], DTensor) else ours[state]
                torch.testing.assert_close(
                    got, value, rtol=1e-6, atol=1e-7, msg=lambda text, at=f"{state} of {name}": f"{at}: {text}"
                )


@contextmanager
def counted() -> Iterator[list[tuple[str, bool]]]:
    """The messages that are reduced over processes: of which group, and whether of words alone, without sums."""
    sent: list[tuple[str, bool]] = []
    reduce = MeshGroup.reduce

    def counting(self: MeshGroup, op: Any, numbers: Any, of_host: bool = False) -> Any:
        sent.append((self.label, of_host))
        return reduce(self, op, numbers, of_host)

    MeshGroup.reduce = counting  # type: ignore[method-assign]
    try:
        yield sent
    finally:
        MeshGroup.reduce = reduce  # type: ignore[method-assign]


def words_between(sent: Sequence[tuple[str, bool]]) -> int:
    """How many words groups with sums get for rounds with sums of other groups alone, at most one for each round.

    Where rows are cut along one dimension of a mesh and columns along another, a round of one has no sums of the other.
    """
    count = 0
    for group in {group for group, alone in sent if not alone}:
        begins = [k for k, message in enumerate(sent) if message == (group, True)]
        rounds = [{g for g, alone in sent[a:b] if not alone} for a, b in pairwise([*begins, len(sent)])]
        count += sum(bool(groups) and group not in groups for groups in rounds)
    return count


def refusal_of(name: str, placed: Sequence[Any]) -> str:
    """What a rule says of parameters that are placed so; nothing where it takes steps."""
    rule, cuts = rule_of(name), [p.dim for p in placed if p.is_shard()]
    levels = {state.per for state in rule.state.values()}
    if "axis" in levels and cuts:  # of a tensor with three dimensions, which are more than two apart
        return "is not computed of its parts"
    joined = "flatten" in rule.view and levels & {"row", "col"} and name not in OF_MATRICES
    return "joins with others, so that its states would be no even parts" if joined and min(cuts, default=0) < 0 else ""


def mesh_of(shape: Sequence[int]) -> Any:
    return init_device_mesh("cpu", tuple(shape), mesh_dim_names=("a", "b")[: len(shape)])


def steps_of(rank: int, names: Sequence[str], placements: Sequence[Sequence[Any]], shape: Sequence[int]) -> None:
    mesh = mesh_of(shape)
    for name in names:
        for placed in placements:
            check_steps(name, mesh, placed)


def check_steps(name: str, mesh: Any, placed: Sequence[Any]) -> None:
    """Three steps have the numbers of one process and few messages; or the parameters are refused."""
    if words := refusal_of(name, placed):
        with check_refused(TensorError, words):
            Twins(name, mesh, placed)
        return
    twins = Twins(name, mesh, placed)
    for seed in (1, 2, 3):
        with counted() as sent:
            twins.step(seed)
    twins.check()
    cut = sum(not p.is_replicate() for p in placed)
    # Replicas send one another their agreement alone.
    replicas = sum(p.is_replicate() for p in placed) if cut else 0
    count = len(sent) - words_between(sent)
    assert count <= {**ROUNDS, **MESSAGES}.get(name, 6) * (cut + replicas), (name, placed, sent)


@contextmanager
def exchanged() -> Iterator[list[int]]:
    """The number of elements that this process sends to others, in each exchange."""
    sent: list[int] = []
    exchange = MeshGroup.exchange

    def counting(self: MeshGroup, message: Any, counts: Sequence[int], received: Sequence[int], dtype: str) -> Any:
        sent.append(sum(counts) - counts[self.rank])
        assert dtype == "bfloat16"  # that of newton_schulz
        return exchange(self, message, counts, received, dtype)

    MeshGroup.exchange = counting  # type: ignore[method-assign]
    try:
        yield sent
    finally:
        MeshGroup.exchange = exchange  # type: ignore[method-assign]


def exchanges(rank: int) -> None:
    """Two exchanges for all matrices, and no element is sent that its owner has."""
    mesh = init_device_mesh("cpu", (2,))
    for name, placed in (("muon", Shard(0)), ("normuon", Shard(0)), ("muon", Shard(1))):
        twins = Twins(name, mesh, [placed])
        twins.step(1)
        with exchanged() as sent:
            twins.step(2)
        twins.check()
        parts = [twins.parts[n].to_local().numel() for n in twins.names]  # type: ignore[attr-defined]
        wholes = [twins.whole[n].numel() for n in twins.names]
        costs = [matrix_view(x.shape).work for x in twins.whole.values()]
        own = [owner == rank for owner in owners_of(costs, 2)]
        out = sum(part for part, mine in zip(parts, own, strict=True) if not mine)
        back = sum(whole - part for whole, part, mine in zip(wholes, parts, own, strict=True) if mine)
        assert sent == [out, back]


def test_matrices_go_to_their_owners_and_back() -> None:
    check_in_processes(exchanges)


def test_the_busiest_owner_has_little_more_work_than_the_others() -> None:
    """By the longest first, it has at most a third more than in the best schedule (Graham, 1969)."""
    numbers = np.random.default_rng(0)
    for size in (1, 2, 7, 64):
        costs = [float(x) for x in numbers.integers(1, 1000, 300)]
        chosen = owners_of(costs, size)
        loads = np.bincount(chosen, weights=costs, minlength=size)
        best = max(sum(costs) / size, max(costs))
        assert loads.max() <= best * (4 / 3)
    assert owners_of([3.0, 3.0, 2.0, 2.0, 2.0], 2) == [0, 1, 0, 1, 0]
    assert owners_of([], 3) == []


LINES = ([Shard(0)], [Shard(-1)], [Replicate()])


#: Elements, sums of tensors and of the model, rows and columns, matrices.
EVERYDAY = ("adamw", "clip >> lamb", "adafactor", "muon")


def test_two_processes_have_the_numbers_of_one() -> None:
    check_in_processes(partial(steps_of, names=EVERYDAY, placements=LINES, shape=(2,)))


@pytest.mark.slow
def test_two_processes_have_the_numbers_of_one_for_rules_of_each_kind() -> None:
    check_in_processes(
        partial(steps_of, names=[name for name in MESSAGES if name not in EVERYDAY], placements=LINES, shape=(2,))
    )


def others() -> list[str]:
    """The rules of the library, and compositions, that are none of each kind."""
    return [name for name in (*single(), *COMPOSED) if "/" not in name and name not in MESSAGES]


@pytest.mark.parametrize("names", by_share(others(), "two processes"))
def test_every_rule_on_two_processes(names: list[str]) -> None:
    check_in_processes(partial(steps_of, names=names, placements=LINES, shape=(2,)))


GRID = ([Shard(0), Shard(0)], [Shard(0), Shard(1)], [Shard(1), Shard(0)], [Replicate(), Shard(0)])


#: Of each kind, compositions, and the rule with the most rounds: those that run on every mesh of two dimensions.
KINDS = list(dict.fromkeys([*MESSAGES, *COMPOSED, *FACTORED, "adalite"]))


@pytest.mark.parametrize("names", by_share(KINDS, "meshes of two dimensions"))
def test_four_processes_in_a_mesh_of_two_dimensions(names: list[str]) -> None:
    """Nested uneven parts, parts cut both ways, and replicas."""
    check_in_processes(partial(steps_of, names=names, placements=GRID, shape=(2, 2)), 4)


def by_digest(rank: int, names: Sequence[str]) -> None:
    mesh = mesh_of((2, 2))
    for name in names:
        check_steps(name, mesh, GRID[zlib.crc32(name.encode()) % len(GRID)])


@pytest.mark.parametrize("names", by_share([n for n in others() if n not in KINDS], "four processes"))
def test_every_rule_on_four_processes(names: list[str]) -> None:
    """Each placed in one of these ways, by a digest of its name: a new rule moves no other."""
    check_in_processes(partial(by_digest, names=names), 4)


# Agreement


def disagreements(rank: int) -> None:
    """What goes wrong in one process is an error in all of them, and nothing is written."""
    mesh = init_device_mesh("cpu", (2,))
    for name in ("lamb", "clip >> lamb", "muon"):
        first_error(rank, name, mesh)
        twins = Twins(name, mesh, [Shard(0)])
        twins.step(1)
        for seed in (2, 3):
            before = memory(twins)
            twins.give(seed)
            kept, twins.parts["w"].grad = twins.parts["w"].grad, None if rank else twins.parts["w"].grad
            with check_refused(RulecError, "gradients of other tensors, or other rules"):
                twins.optimizer.step()
            twins.parts["w"].grad = kept
            twins.optimizer.param_groups[0]["lr"] = 0.01 if rank else -1.0
            with check_refused(RulecError, "another process takes no step" if rank else "lr=-1.0"):
                twins.optimizer.step()
            twins.optimizer.param_groups[0]["lr"] = 0.01
            assert all(map(torch.equal, before, memory(twins)))
            twins.step(seed)
        for name_of in ("w", "tall"):  # another step, in all processes
            twins.give(4)
            twins.parts[name_of].grad = twins.whole[name_of].grad = None
            with counted() as sent:
                twins.alone.step()
                twins.optimizer.step()
            # A message before each round, and one before all write, as the later messages are not known yet.
            assert len(sent) == MESSAGES[name] + 2 + (name != "muon") * (MESSAGES[name] + 1)
        twins.step(5)
        twins.check()


def one_skips_or_fails(rank: int) -> None:
    """A step that one process has to skip is skipped by all; an error before another rule's step is known to all."""
    mesh = init_device_mesh("cpu", (2,))
    twins = Twins("skip >> lars", mesh, [Shard(0)])
    twins.step(1)
    twins.give(2)
    twins.whole["tall"].grad[0] = torch.nan  # type: ignore[index]
    twins.parts["tall"].grad = twins.place(twins.whole["tall"].grad)  # type: ignore[arg-type]
    before = memory(twins)
    with pytest.warns(RuntimeWarning, match="skipped the step of"):
        twins.optimizer.step()
    assert all(map(torch.equal, before, memory(twins)))
    twins.step(3)
    params = [(name, nn.Parameter(twins.place(tensor))) for name, tensor in draws(0).items()]
    entries = {"b": rulec.part("momentum", momentum=0.9), "...": rulec.part("lamb")}
    both = rulec.torch.Partitioned(rulec.partition(entries), params, lr=0.01)
    for _, param in params:
        param.grad = torch.ones_like(param)
    both.step()
    both.param_groups[0]["lr"] = 0.01 if rank else -1.0
    with check_refused(RulecError, "another process takes no step" if rank else "lr=-1.0"):
        both.step()


def scaled(rank: int) -> None:
    """An overflow in the part of one process is one of all: with numbers on the host, and on a device, as it were."""
    plain, mesh = registry.get, init_device_mesh("cpu", (2,), mesh_dim_names=("dp",))
    with mock.patch.object(registry, "get", lambda name: Elsewhere() if name == "elsewhere" else plain(name)):
        for words in ({}, {"backend": "elsewhere", "capturable": True}):
            for name in ("clip >> lamb", "normuon", "skip >> lars"):
                twins = Twins(name, mesh, [Shard(0)], **words)
                scalers = [torch.amp.GradScaler("cpu", init_scale=64.0) for _ in range(2)]
                for seed in (1, 2, 3):
                    before, scale = memory(twins), scalers[1].get_scale() if seed > 1 else 64.0
                    scaled_step(rank, twins, scalers, seed, scale)
                    assert [s.get_scale() for s in scalers] == [64.0 if seed == 1 else 32.0] * 2
                    assert seed != 2 or all(map(torch.equal, before, memory(twins)))
                twins.check()
        overflow_of_one(rank, mesh)


def scaled_step(rank: int, twins: Twins, scalers: Sequence[Any], seed: int, scale: float) -> None:
    """A step with gradients scaled, and in the second an infinity in the last process alone."""
    twins.give(seed)
    for grad in (p.grad for p in (*twins.whole.values(), *twins.parts.values())):
        (grad.to_local() if isinstance(grad, DTensor) else grad).mul_(scale)  # type: ignore[union-attr]
    if seed == 2:
        twins.whole["tall"].grad[-1] = torch.inf  # type: ignore[index]
        if rank == 1:
            twins.parts["tall"].grad.to_local()[-1] = torch.inf  # type: ignore[union-attr]
    for scaler, optimizer in zip(scalers, (twins.alone, twins.optimizer), strict=True):
        scaler.scale(torch.ones(()))
        scaler.step(optimizer)
        scaler.update()


def overflow_of_one(rank: int, mesh: Any) -> None:
    """torch reduces what GradScaler finds over the mesh dimensions that cut the first gradient: here over none."""
    whole = nn.Parameter(distribute_tensor(torch.ones(4, 3), mesh, [Replicate()]))
    part = nn.Parameter(distribute_tensor(torch.ones(4, 3), mesh, [Shard(0)]))
    optimizer = kind_of("lamb")([whole, part], lr=0.1, backend="elsewhere", capturable=True)
    scaler = torch.amp.GradScaler("cpu", init_scale=64.0)
    for overflows in (False, True):
        for p in (whole, part):
            p.grad = distribute_tensor(torch.ones(4, 3), mesh, p.placements)  # type: ignore[attr-defined]
        scaler.scale(torch.ones(()))
        if not overflows:
            scaler.step(optimizer)
            scaler.update()
            continue
        before = part.to_local().clone()  # type: ignore[attr-defined]
        if rank:
            part.grad.to_local()[0] = torch.inf  # type: ignore[union-attr]
        with check_refused(RulecError, "infinities in the scaled gradients of some"):
            scaler.step(optimizer)
        assert torch.equal(part.to_local(), before)  # type: ignore[attr-defined]


def skips_and_scales(rank: int) -> None:
    one_skips_or_fails(rank)
    scaled(rank)


def test_one_process_that_skips_or_fails_is_all() -> None:
    check_in_processes(skips_and_scales)


def first_error(rank: int, name: str, mesh: Any) -> None:
    twins = Twins(name, mesh, [Shard(0)])
    twins.give(1)
    twins.optimizer.param_groups[0]["lr"] = 0.01 if rank else -1.0
    with check_refused(RulecError, "another process takes no step" if rank else "lr=-1.0"):
        twins.optimizer.step()
    twins.optimizer.param_groups[0]["lr"] = 0.01
    twins.step(1)
    twins.check()


def memory(twins: Twins) -> list[torch.Tensor]:
    """Copies of the parameters' parts here and of their states."""
    states = [s for p in twins.parts.values() for s in twins.optimizer.state[p].values()]
    tensors = [*(p.detach() for p in twins.parts.values()), *states]
    return [(t.to_local() if isinstance(t, DTensor) else t).clone() for t in tensors]


def test_processes_agree_on_every_step() -> None:
    check_in_processes(disagreements)


# Models and checkpoints


def net() -> nn.Sequential:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(5)
        return nn.Sequential(nn.Linear(5, 7), nn.Tanh(), nn.Linear(7, 3))


def trained(model: Any, optimizer: Any, steps: Sequence[int]) -> None:
    for step in steps:
        inputs = torch.randn(4, 5, generator=torch.Generator().manual_seed(step))
        optimizer.zero_grad()
        (model(inputs) - 1).square().mean().backward()
        optimizer.step()


def models(rank: int, folder: str) -> None:
    """FSDP's shards of a model, with a checkpoint of torch's in the middle."""
    for name in ("lamb", "adafactor"):
        whole = net()
        alone = kind_of(name)(whole.named_parameters(), lr=0.01)
        trained(whole, alone, range(4))
        model = fully_shard(net())
        optimizer = kind_of(name)(model.named_parameters(), lr=0.01)
        trained(model, optimizer, range(2))
        saved = {"model": model.state_dict(), "optim": get_optimizer_state_dict(model, optimizer)}
        dcp.save(saved, checkpoint_id=f"{folder}/{name}")
        full = get_optimizer_state_dict(model, optimizer, options=StateDictOptions(full_state_dict=True))
        fresh = fully_shard(net())
        other = kind_of(name)(fresh.named_parameters(), lr=0.01)
        trained(fresh, other, [9])
        read = {"model": fresh.state_dict(), "optim": get_optimizer_state_dict(fresh, other)}
        dcp.load(read, checkpoint_id=f"{folder}/{name}")
        fresh.load_state_dict(read["model"])
        set_optimizer_state_dict(fresh, other, read["optim"])
        trained(fresh, other, range(2, 4))
        for p, q in zip(whole.parameters(), fresh.parameters(), strict=True):
            torch.testing.assert_close(q.full_tensor(), p.detach(), rtol=2e-6, atol=1e-7)  # type: ignore[attr-defined]
        assert all(isinstance(v, torch.Tensor) and not isinstance(v, DTensor) for s in full["state"].values()
                   for v in s.values() if torch.is_tensor(v))  # fmt: skip
    refusals()


def refusals() -> None:
    mesh = init_device_mesh("cpu", (2,))
    with check_refused(HyperError, "of reduce_over has the same DTensors, whose values would be counted again"):
        Twins("clip >> lamb", mesh, [Shard(0)], reduce_over=dist.group.WORLD)
    weight = nn.Parameter(distribute_tensor(torch.ones(4, 3, 3, 3), mesh, [Shard(1)]))
    with check_refused(TensorError, "weight is a DTensor cut along dimension 1, which Adafactor joins with others"):
        rulec.torch.optimizer(flattened())([("weight", weight)])
    with check_refused(RuleError, "needs a value of the whole model for the update of one tensor"):
        rulec.torch.EagerUpdate(fully_shard(net()), COMPOSED["clip >> lamb"]())
    plain, early = fully_shard(net()), fully_shard(net())
    eager = rulec.torch.EagerUpdate(early, "lamb", lr=0.01, contributions=1)
    with eager.backward():
        early(torch.ones(4, 5)).square().mean().backward()
    eager.step()
    plain(torch.ones(4, 5)).square().mean().backward()
    rulec.torch.LAMB(plain.parameters(), lr=0.01).step()
    for p, q in zip(early.parameters(), plain.parameters(), strict=True):
        assert torch.equal(p.to_local(), q.to_local())  # type: ignore[attr-defined]


def flattened() -> Any:
    return rulec.parse(
        "name: Adafactor\nsummary: Rows of what is joined.\nhyper: {lr: 0.1}\nview: {flatten: rest}\n"
        "state: {r: {init: 0, per: row}}\nstep: |\n  r = mean(g**2, per='row')\n  direction = g/sqrt(r + 1)\n"
    )


def test_models_of_shards_and_their_checkpoints(tmp_path: Any) -> None:
    check_in_processes(partial(models, folder=str(tmp_path)))
