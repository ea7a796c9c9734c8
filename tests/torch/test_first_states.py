"""A step with `lr=0` and gradients of zeros, as torch takes it to make states: nothing moves and nothing is counted.

The oracles are the same run without such a step, and torch's own optimizers.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict, set_optimizer_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

import rulec
import rulec.torch
from rulec.errors import RulecError
from tests.library import by_kind
from tests.torch.eager.processes import check_in_processes

WRAPPED = (
    "lookahead(muon)", "ema(adam)", "sam(adam)", "accumulate(adam)", "mechanic(adam)", "schedule_free(sgd)",
    "hyperball(muon)", "oblique(sgd)", "graft(adam, sgd)", "corrected_decay(adam)",
)  # fmt: skip

#: Everyday: second learning rates, projections, a state that begins at lr, no value at lr = 0, numbers of groups,
#: inputs, no states.
TELLING = ("muon", "spel", "nero", "rprop", "ftrl", "prodigy", "sophia", "sgd")


def network() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Embedding(5, 8), nn.Linear(8, 8), nn.LayerNorm(8))


def draw(model: nn.Module, seed: int) -> None:
    random = torch.Generator().manual_seed(seed)
    for p in model.parameters():
        p.grad = torch.randn(p.shape, generator=random)


def step(model: nn.Module, optimizer: Any, seed: int) -> None:
    """A step with all that the optimizer's rule may ask for."""
    draw(model, seed)
    kinds = optimizer.interface.inputs.items() if hasattr(optimizer, "interface") else ()
    asked = {name: kind for name, kind in kinds if not name.endswith(".g")}
    likes = {p: torch.ones_like(p) for p in model.parameters()}
    inputs: dict[str, Any] = {name: likes if kind == "like p" else 1.5 for name, kind in asked.items()}
    if isinstance(optimizer, rulec.torch.RuleOptimizer):
        while optimizer.next_pass(inputs=inputs or None):
            draw(model, seed + 100)
    optimizer.step(**({"inputs": inputs} if inputs else {}))


def alike(a: nn.Module, b: nn.Module) -> bool:
    return all(torch.equal(p, q) for p, q in zip(a.parameters(), b.parameters(), strict=True))


def shapes(model: nn.Module, optimizer: Any) -> dict[str, dict[str, Any]]:
    return {
        name: {key: getattr(value, "shape", ()) for key, value in optimizer.state[p].items()}
        for name, p in model.named_parameters()
    }


def check(make: Callable[[nn.Module], Any], advance: Callable[..., None] = step) -> None:
    """Fresh optimizers are asked for states, and given states."""
    model, straight = network(), network()
    optimizer, other = make(model), make(straight)
    get_optimizer_state_dict(model, optimizer)
    assert alike(model, straight)
    first = shapes(model, optimizer)
    for seed in range(2):
        advance(model, optimizer, seed)
        advance(straight, other, seed)
    assert alike(model, straight)
    assert first == shapes(straight, other)
    saved = copy.deepcopy(get_optimizer_state_dict(straight, other))
    model = copy.deepcopy(straight)
    optimizer = make(model)
    set_optimizer_state_dict(model, optimizer, saved)
    assert alike(model, straight)
    for seed in range(2, 4):
        advance(model, optimizer, seed)
        advance(straight, other, seed)
    assert alike(model, straight)


@pytest.mark.parametrize("name", TELLING)
def test_states_are_made_and_nothing_else(name: str) -> None:
    check(lambda model: rulec.torch.optimizer(name)(rulec.torch.tagged_groups(model)))


@pytest.mark.parametrize("name", by_kind([n for n in rulec.rules(wrappers=False) if n not in TELLING]))
def test_states_of_every_class_are_made(name: str) -> None:
    check(lambda model: rulec.torch.optimizer(name)(rulec.torch.tagged_groups(model)))


@pytest.mark.parametrize("text", [pytest.param(t, marks=[pytest.mark.another] * (t in WRAPPED[2:])) for t in WRAPPED])
def test_states_of_wrappers_are_made(text: str) -> None:
    check(lambda model: rulec.torch.optimizer(text)(rulec.torch.tagged_groups(model)))


KEYWORDS: dict[str, dict[str, Any]] = {
    "a tensor": {"lr": torch.tensor(0.01)}, "codes": {"state_dtype": "int8"}, "random": {"state_dtype": "bfloat16_sr"},
    "capturable": {"capturable": True}, "c": {"backend": "c"},
}  # fmt: skip


@pytest.mark.parametrize("keywords", KEYWORDS.values(), ids=KEYWORDS)
def test_states_are_made_whatever_the_keywords(keywords: dict[str, Any]) -> None:
    check(lambda model: rulec.torch.AdamW(rulec.torch.tagged_groups(model), **keywords))


def backward(model: nn.Module, optimizer: Any, seed: int) -> None:
    with optimizer.backward():
        (model(torch.arange(5)) * (1 + seed)).square().sum().backward()
    optimizer.step()


@pytest.mark.parametrize("name", ["muon", "spel", "ftrl"])
def test_an_eager_optimizer_makes_them_too(name: str) -> None:
    check(lambda model: rulec.torch.EagerUpdate(rulec.torch.tagged_groups(model), name), backward)


def test_a_partition_makes_them_too() -> None:
    partition = rulec.partition({"1/weight": "spel", "0/**": "ftrl", "**": "nero"})
    check(lambda model: rulec.torch.Partitioned(partition, model.named_parameters()))


def test_an_lbfgs_without_a_closure_is_asked_for_nothing() -> None:
    model = network()
    optimizer = rulec.torch.LBFGS(model.parameters())
    get_optimizer_state_dict(model, optimizer)
    assert alike(model, network())
    draw(model, 0)
    with pytest.raises(RulecError, match="closure"):
        optimizer.step()


def test_group_numbers_are_there_before_the_first_step() -> None:
    """Numbers of a group are among its entries, as flattened states need them."""
    model, straight = network(), network()
    optimizer, other = (rulec.torch.Prodigy(m.parameters()) for m in (model, straight))
    get_optimizer_state_dict(model, optimizer)
    step(straight, other, 0)
    assert optimizer.param_groups[0].keys() == other.param_groups[0].keys()


@pytest.mark.parametrize("case", ["numbers", "a rate", "states", "a closure"])
def test_any_other_step_is_counted(case: str) -> None:
    """torch's AdamW counts the same steps: those with a gradient, with a learning rate, after others."""
    results = []
    for kind in (torch.optim.AdamW, rulec.torch.AdamW):
        p = nn.Parameter(torch.linspace(-1, 1, 7, dtype=torch.float64))
        optimizer: Any = kind([p], lr=0.1 if case in ("a rate", "states") else 0.0)
        grad = torch.linspace(1, -1, 7, dtype=torch.float64)
        if case == "states":
            p.grad = grad
            optimizer.step()
            optimizer.param_groups[0]["lr"] = 0.0
        p.grad = grad * 0 if case in ("a rate", "states", "a closure") else grad
        optimizer.step(*([lambda: 1.0] if case == "a closure" else []))
        optimizer.param_groups[0]["lr"] = 0.1
        p.grad = grad
        optimizer.step()
        results.append((p.detach(), float(optimizer.state[p]["step"])))
    assert results[0][1] == results[1][1]
    torch.testing.assert_close(results[0][0], results[1][0], rtol=0, atol=1e-15)


def test_states_begin_at_the_rate_of_the_group() -> None:
    model = network()
    optimizer = rulec.torch.Rprop(model.parameters(), lr=0.25)
    get_optimizer_state_dict(model, optimizer)
    assert all(bool((optimizer.state[p]["step_size"] == 0.25).all()) for p in model.parameters())
    assert optimizer.param_groups[0]["lr"] == 0.25


@pytest.mark.parametrize("name", ["nero", "muon", "ftrl", "ftrl_proximal"])
def test_a_step_at_no_rate_moves_nothing_in_the_middle(name: str) -> None:
    model = network()
    optimizer = rulec.torch.optimizer(name)(rulec.torch.tagged_groups(model))
    for seed in range(2):
        step(model, optimizer, seed)
    before = copy.deepcopy(model)
    for group in optimizer.param_groups:
        group["lr"] = 0.0
    for p in model.parameters():
        p.grad = torch.zeros_like(p)
    optimizer.step()
    assert alike(model, before)


def local(tensor: Tensor) -> Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def sharded(rank: int, name: str) -> None:
    """One process has no element of some parameters, and none but it has gradients at the first step."""
    ranks = torch.distributed.get_world_size()
    models = [network(), network()]
    for model in models:
        fully_shard(model, mesh=init_device_mesh("cpu", (ranks,)))
    optimizers: list[Any] = [rulec.torch.optimizer(name)(rulec.torch.tagged_groups(m)) for m in models]
    before = [local(p).clone() for p in models[0].parameters()]
    get_optimizer_state_dict(models[0], optimizers[0])
    for p, q in zip(models[0].parameters(), before, strict=True):
        assert torch.equal(local(p), q)
        assert optimizers[0].state[p]
    for seed in range(3):
        for model, optimizer in zip(models, optimizers, strict=True):
            for p in model.parameters():
                p.grad = torch.full_like(p, float(rank == 1) if seed == 0 else 1.0)
            for group in optimizer.param_groups:
                group["lr"] = 0.01 * seed
            optimizer.step()
    for p, q in zip(models[0].parameters(), models[1].parameters(), strict=True):
        assert torch.equal(local(p), local(q))
        assert optimizers[1].state[q].get("step", 3) == 3


@pytest.mark.slow
@pytest.mark.parametrize("name", ["adamw", "lamb", "muon"])
def test_processes_answer_alike(name: str) -> None:
    check_in_processes(partial(sharded, name=name), 3)
