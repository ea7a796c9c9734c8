"""Parameters of which each of several processes has a part: steps are those of one process, or refused."""

from __future__ import annotations

import copy
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.distributed.optim import ZeroRedundancyOptimizer

import rulec
import rulec.torch
from rulec.errors import HyperError, RulecError, TensorError
from rulec.formats import Format, decode
from rulec.torch.distributed.cross_process import Across
from rulec.torch.distributed.traffic import Traffic
from rulec.torch.tensors.dtensor import flat_start, is_flat
from tests.torch.eager.processes import COUNT, check_in_processes

STEPS = 3

#: One number of each group, one of the model that it remembers, and the extremes.
PER_GROUP = rulec.parse("""
name: PerGroup
hyper: {lr: 0.1}
state: {seen: {init: 0, per: model}}
step: |
  seen = maximum(seen, max(abs(g), per="model"))
  direction = g/(norm(g, per="group") + mean(g**2, per="model") + seen)
""")


def clipped() -> Any:
    return rulec.torch.optimizer(rulec.load("clip_by_global_norm") >> rulec.load("momentum"))


KEYWORDS: dict[str, Any] = {"max_norm": 0.05, "lr": 0.1, "backend": "c"}


def net() -> nn.Sequential:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(5)
        return nn.Sequential(nn.Linear(5, 7), nn.Tanh(), nn.Linear(7, 3))


def loss_of(model: Any, step: int) -> Any:
    made = torch.Generator().manual_seed(step)
    return (model(torch.randn(4, 5, generator=made)) - 1).square().mean()


def groups_of(params: Any) -> list[dict[str, Any]]:
    first, *rest = params
    return [{"params": [first], "lr": 0.2}, {"params": rest}]


def trained(model: Any, opt: Any) -> Any:
    for step in range(STEPS):
        opt.zero_grad()
        loss_of(model, step).backward()
        opt.step()
    return model


def check_near(ours: Any, alone: Any) -> None:
    for a, b in zip(ours.parameters(), alone.parameters(), strict=True):
        torch.testing.assert_close(a.detach(), b.detach(), rtol=2e-6, atol=2e-7)


@contextmanager
def check_refused(kind: type[Exception], words: str) -> Iterator[None]:
    with pytest.raises(kind, match=words):
        yield


def flat_parameters(rank: int) -> None:
    """FullyShardedDataParallel: what looks beyond an element is refused, or taken over all processes."""
    world = dist.group.WORLD
    alone, plain = net(), net()
    trained(alone, clipped()(alone.parameters(), **KEYWORDS))
    trained(plain, rulec.torch.SGD(plain.parameters(), lr=0.1, momentum=0.9, backend="c"))
    for kept in (False, True):
        model = FullyShardedDataParallel(net(), use_orig_params=kept, device_id=torch.device("cpu"))
        assert all(map(is_flat, model.parameters()))
        for name in ("Lamb", "Adafactor", "LARS", "GaLore"):
            kind = rulec.torch.optimizer(name.lower())
            with check_refused(TensorError, "is a part of a flat parameter of FullyShardedDataParallel, and "):
                kind(model.parameters())
        with check_refused(TensorError, "flat parameter"):
            rulec.torch.Muon([{"params": [*model.parameters()], "tags": []}])
        with check_refused(TensorError, "give reduce_over= the process group that its parts are in"):
            clipped()(model.parameters(), **KEYWORDS)
        trained(model, clipped()(model.parameters(), reduce_over=world, **KEYWORDS))
        with FullyShardedDataParallel.summon_full_params(model):
            check_near(model.module, alone)
        model = FullyShardedDataParallel(net(), use_orig_params=kept, device_id=torch.device("cpu"))
        trained(model, rulec.torch.SGD(model.parameters(), lr=0.1, momentum=0.9, backend="c"))
        with FullyShardedDataParallel.summon_full_params(model):
            check_near(model.module, plain)


def flat_bits(rank: int) -> None:
    """Random bits follow from the place in the flat parameter; what torch does not say of one is refused."""
    words = {"lr": 1e-3, "weights": "stochastic", "state_dtype": "bfloat16_sr", "seed": 70000, "backend": "c"}
    alone = net().bfloat16()
    flat = nn.Parameter(torch.cat([p.detach().flatten() for p in alone.parameters()]))
    model = FullyShardedDataParallel(net().bfloat16(), use_orig_params=False, device_id=torch.device("cpu"))
    theirs, ours = (rulec.torch.AdamW(params, **words) for params in ([flat], model.parameters()))
    for step in range(STEPS):
        nn.utils.vector_to_parameters(flat, alone.parameters())
        grads = torch.autograd.grad(narrow_loss(alone, step), [*alone.parameters()])
        flat.grad = torch.cat([grad.flatten() for grad in grads])
        theirs.step()
        ours.zero_grad()
        narrow_loss(model, step).backward()
        ours.step()
    (part,) = model.parameters()
    start, last = flat_start(part), flat.numel()
    assert start == rank * part.numel()
    for name in ("exp_avg", "exp_avg_sq"):
        here, there = ours.state[part][name], theirs.state[flat][name][start : start + part.numel()]
        assert here.dtype is torch.bfloat16
        assert torch.equal(here[: last - start], there)
    with FullyShardedDataParallel.summon_full_params(model):
        assert torch.equal(torch.cat([p.flatten() for p in model.module.parameters()]), flat)
    whole = FullyShardedDataParallel.optim_state_dict(model, ours)["state"]
    assert torch.equal(whole["0.weight"]["exp_avg_sq"], theirs.state[flat]["exp_avg_sq"][:35].view(7, 5))
    views = FullyShardedDataParallel(net().bfloat16(), use_orig_params=True, device_id=torch.device("cpu"))
    for wrong in ({"weights": "stochastic"}, {"state_dtype": "bfloat16_sr"}, {"state_dtype": "int8"}):
        with check_refused(
            TensorError, "torch does not tell the place of, for .*give FullyShardedDataParallel use_orig_p"
        ):
            rulec.torch.AdamW(views.parameters(), **wrong).storage()


def flat_codes(rank: int) -> None:
    """States in codes of a flat parameter, which torch gathers and parts: the same codes after it."""

    def sharded() -> Any:
        torch.manual_seed(0)
        layer = nn.Sequential(nn.Linear(128, 72))
        return FullyShardedDataParallel(layer, use_orig_params=False, device_id=torch.device("cpu"))

    model, words = (
        sharded(),
        {"lr": 1e-3, "state_dtype": {"exp_avg": "dynamic8", "exp_avg_sq": "dynamic4"}, "backend": "c"},
    )
    (part,) = model.parameters()
    alone = nn.Parameter(part.detach().clone())
    ours, theirs = (rulec.torch.AdamW(params, **words) for params in (model.parameters(), [alone]))
    for step in range(2):
        ours.zero_grad()
        model(torch.randn(4, 128, generator=torch.Generator().manual_seed(step))).square().sum().backward()
        alone.grad = part.grad.clone()
        ours.step()
        theirs.step()
    whole = FullyShardedDataParallel.optim_state_dict(model, ours)
    again = sharded()
    other = rulec.torch.AdamW(again.parameters(), **words)
    other.load_state_dict(FullyShardedDataParallel.optim_state_dict_to_load(again, other, copy.deepcopy(whole)))
    for optimizer, (param,) in ((ours, [part]), (other, again.parameters())):
        for name, state in theirs.state[alone].items():
            assert torch.equal(optimizer.state[param][name], state), name
    form = Format("dynamic8", 256)
    values = decode(
        form, *(theirs.state[alone][name].numpy() for name in ("exp_avg::codes", "exp_avg::scale")), part.shape
    )
    gathered = torch.cat([whole["state"][name]["exp_avg"].flatten() for name in ("0.weight", "0.bias")])
    assert np.array_equal(gathered.chunk(COUNT)[rank], values)


def narrow_loss(model: Any, step: int) -> Any:
    inputs = torch.randn(4, 5, generator=torch.Generator().manual_seed(step)).bfloat16()
    return (model(inputs).float() - 1).square().mean()


def whole_parameters(rank: int) -> None:
    """ZeroRedundancyOptimizer: each process has some of the parameters."""
    alone, model = net(), net()
    trained(alone, clipped()(groups_of(alone.parameters()), **KEYWORDS))
    params = groups_of(model.parameters())
    trained(model, ZeroRedundancyOptimizer(params, clipped(), reduce_over=dist.group.WORLD, **KEYWORDS))
    check_near(model, alone)


Make = Callable[..., Any]


def halves(rank: int, make: Make) -> None:
    """Each process with a half of every group, and what goes wrong in one of them."""
    kind = rulec.torch.optimizer(PER_GROUP)
    both = [nn.Parameter(torch.linspace(-1, 1, n)) for n in (3, 4, 5, 6)]
    for param in both:
        param.grad = torch.linspace(0, 1, param.numel()) ** param.numel()
    own = [copy.deepcopy(p) for p in both[rank::COUNT]]
    for param, source in zip(own, both[rank::COUNT], strict=True):
        assert source.grad is not None
        param.grad = source.grad.clone()
    alone = kind([{"params": both[:2]}, {"params": both[2:], "lr": 0.3}], backend="c")
    opt = make(kind, [{"params": own[:1]}, {"params": own[1:], "lr": 0.3}], backend="c")
    for _ in range(STEPS):
        alone.step()
        opt.step()
    for param, other in zip(own, both[rank::COUNT], strict=True):
        torch.testing.assert_close(param, other, rtol=1e-6, atol=1e-7)
    assert opt.param_groups[0]["seen"] == alone.param_groups[0]["seen"]
    before = [p.detach().clone() for p in own]
    good = own[0].grad
    assert good is not None
    own[0].grad = good if rank else good.to_sparse()
    with check_refused(RulecError, "is sparse" if rank == 0 else "process 0 of reduce_over takes no step"):
        opt.step()
    own[0].grad = good if rank else None
    with check_refused(RulecError, "a process of reduce_over has gradients in other groups than another"):
        opt.step()
    opt.param_groups[0]["lr"] = 0.1 if rank else -1.0
    with check_refused(RulecError, "lr=-1.0" if rank == 0 else "process 0 of reduce_over takes no step"):
        opt.step()
    assert all(torch.equal(a, b) for a, b in zip(before, own, strict=True))
    clip = make(clipped(), own, **KEYWORDS)
    for param in own if rank else []:
        param.grad = None
    clip.step()  # a process without gradients takes part all the same
    with check_refused(RulecError, "belongs to its processes: copy its state_dict"):
        copy.deepcopy(clip)


def everything(rank: int) -> None:
    flat_parameters(rank)
    flat_bits(rank)
    flat_codes(rank)
    whole_parameters(rank)
    halves(rank, lambda kind, params, **keywords: kind(params, reduce_over=dist.group.WORLD, **keywords))


class Between(Across):
    """Two threads in the place of two processes."""

    def __init__(self, rank: int, meeting: threading.Barrier, said: list[Any]) -> None:
        self.size, self._rank, self._meeting, self._said = COUNT, rank, meeting, said
        self.traffic, self._on_their_way = Traffic(), []

    def _gathered(self, here: Any, device: Any) -> list[Any]:
        self._said[self._rank] = here.clone()
        self._meeting.wait(60)
        found = [*self._said]
        self._meeting.wait(60)
        return found


def test_parts_of_groups_are_reduced_together_or_refused_everywhere() -> None:
    meeting, said = threading.Barrier(COUNT), [None] * COUNT
    problems: list[BaseException] = []

    def work(rank: int) -> None:
        def make(kind: Any, params: Any, **keywords: Any) -> Any:
            opt = kind(params, **keywords)
            opt._options = replace(opt._options, across=Between(rank, meeting, said))
            return opt

        try:
            halves(rank, make)
        except BaseException as problem:  # noqa: BLE001 - whatever it is, the other thread waits for this one
            problems.append(problem)
            meeting.abort()

    threads = [threading.Thread(target=work, args=(rank,)) for rank in range(COUNT)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert not problems


@pytest.mark.slow
def test_two_processes_have_parts() -> None:
    check_in_processes(everything)


def test_a_flat_parameter_is_known_by_its_mark() -> None:
    param = nn.Parameter(torch.zeros(6))
    param._fsdp_flattened = True  # type: ignore[attr-defined]
    with pytest.raises(TensorError, match="parameter 0 is a part of a flat parameter"):
        rulec.torch.LAMB([param])
    rulec.torch.AdamW([param])
    for words in ({"state_dtype": "int8"}, {"weights": "stochastic"}):
        part = nn.Parameter(torch.zeros(6, dtype=torch.bfloat16))
        part._fsdp_flattened = True  # type: ignore[attr-defined]
        with pytest.raises(TensorError, match=r"parameter 0 is a part of a flat .* use fully_shard, whose parameters"):
            rulec.torch.AdamW([part], **words).storage()


def test_a_group_of_processes_is_one() -> None:
    with pytest.raises(HyperError, match=r"reduce_over needs processes: call torch\.distributed"):
        clipped()([nn.Parameter(torch.zeros(2))], reduce_over="world")
    with pytest.raises(HyperError, match="AdamW has no keyword 'reduce_over'"):
        rulec.torch.AdamW([nn.Parameter(torch.zeros(2))], reduce_over=None)


def split_shards(rank: int) -> None:
    """FSDP's shards of bfloat16 weights in two parts are those of whole parameters."""

    def trained(shard: bool) -> tuple[nn.Module, Any]:
        model = net().bfloat16()
        model = fully_shard(model) if shard else model
        optimizer = rulec.torch.AdamW(model.named_parameters(), lr=1e-4, weights="split")
        for step in range(STEPS):
            inputs = torch.randn(4, 5, generator=torch.Generator().manual_seed(step)).bfloat16()
            (model(inputs) - 1).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
        return model, optimizer

    (whole, first), (sharded, second) = trained(False), trained(True)
    for p, q in zip(whole.parameters(), sharded.parameters(), strict=True):
        assert torch.equal(q.full_tensor(), p)
        low = second.state[q]["param::low"]
        assert low.dtype is torch.int16
        # Gloo gathers no int16.
        assert torch.equal(low.float().full_tensor(), first.state[p]["param::low"].float())


def test_split_weights_of_shards_are_those_of_whole_ones() -> None:
    check_in_processes(split_shards)
