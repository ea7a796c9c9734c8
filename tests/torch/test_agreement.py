"""Every class of torch.optim that we have, with every flag, computes what torch's own computes."""

from __future__ import annotations

import inspect
import itertools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.optim.lr_scheduler import LambdaLR

import rulec.torch
from tests.torch.twins import QUICK, Twins, difference, give_gradients, parameters

pytestmark = pytest.mark.peer

#: (class, keywords): every flag that chooses a rule, and hyper-parameters away from their defaults.
CASES: list[tuple[str, dict[str, Any]]] = [
    ("SGD", {"lr": 0.1}),
    ("SGD", {"lr": 0.1, "weight_decay": 0.1, "maximize": True}),
    ("SGD", {"lr": 0.1, "momentum": 0.9}),
    ("SGD", {"lr": 0.1, "momentum": 0.8, "dampening": 0.3, "weight_decay": 0.1}),
    ("SGD", {"lr": 0.1, "momentum": 0.8, "nesterov": True, "weight_decay": 0.1, "maximize": True}),
    ("Adam", {"lr": 0.1}),
    ("Adam", {"lr": 0.1, "betas": (0.8, 0.95), "weight_decay": 0.1, "maximize": True}),
    ("Adam", {"lr": 0.1, "amsgrad": True, "weight_decay": 0.1}),
    ("Adam", {"lr": 0.1, "weight_decay": 0.1, "decoupled_weight_decay": True}),
    ("Adam", {"lr": 0.1, "amsgrad": True, "weight_decay": 0.1, "decoupled_weight_decay": True}),
    ("AdamW", {"lr": 0.1}),
    ("AdamW", {"lr": 0.1, "amsgrad": True, "weight_decay": 0.1, "maximize": True}),
    ("NAdam", {"lr": 0.1, "momentum_decay": 0.02}),
    ("NAdam", {"lr": 0.1, "weight_decay": 0.1, "decoupled_weight_decay": True}),
    ("NAdam", {"lr": 0.1, "weight_decay": 0.1}),
    ("RAdam", {"lr": 0.1, "betas": (0.8, 0.95), "weight_decay": 0.1}),
    ("RAdam", {"lr": 0.1, "weight_decay": 0.1, "decoupled_weight_decay": True}),
    ("Adagrad", {"lr": 0.1, "lr_decay": 0.1, "weight_decay": 0.1, "initial_accumulator_value": 0.2}),
    ("Adadelta", {"lr": 0.7, "rho": 0.8, "weight_decay": 0.1}),
    ("RMSprop", {"lr": 0.05, "alpha": 0.9, "weight_decay": 0.1}),
    ("RMSprop", {"lr": 0.05, "momentum": 0.9}),
    ("RMSprop", {"lr": 0.05, "centered": True}),
    ("RMSprop", {"lr": 0.05, "centered": True, "momentum": 0.9, "weight_decay": 0.1}),
    ("Rprop", {"lr": 0.05, "etas": (0.4, 1.3), "step_sizes": (1e-3, 0.2)}),
    ("ASGD", {"lr": 0.1, "lambd": 0.01, "t0": 5, "weight_decay": 0.1}),
    ("Adamax", {"lr": 0.1, "weight_decay": 0.1}),
    ("Adafactor", {"lr": 0.1}),
    (
        "Adafactor",
        {"lr": 0.1, "beta2_decay": -0.5, "eps": (1e-4, 1e-2), "d": 1.5, "weight_decay": 0.1},
    ),
]

IDS = [f"{name}-{'-'.join(map(str, keywords))}" for name, keywords in CASES]


@contextmanager
def wide_scalars() -> Iterator[None]:
    """torch with float64 as its default: NAdam's mu_product, ASGD's eta and mu are otherwise rounded to float32."""
    torch.set_default_dtype(torch.float64)
    try:
        yield
    finally:
        torch.set_default_dtype(torch.float32)


def maker(keywords: dict[str, Any]) -> Callable[[Any, list[Tensor]], torch.optim.Optimizer]:
    """Two groups, of which the second has a learning rate and a weight decay of its own."""

    def make(kind: Any, params: list[Tensor]) -> torch.optim.Optimizer:
        extra = {"weight_decay": 0.0} if "weight_decay" in keywords else {}
        # torch's sum of a single tensor's update is what its formula says; foreach and fused round elsewhere.
        groups = [{"params": params[:2]}, {"params": params[2:], "lr": keywords["lr"] * 0.3, **extra}]
        quick = {} if kind is getattr(torch.optim, kind.__name__) else {"backend": QUICK}
        return kind(groups, foreach=False, **quick, **keywords)  # type: ignore[no-any-return]

    return make


def run(name: str, keywords: dict[str, Any], dtype: torch.dtype, steps: int = 20) -> list[list[Tensor]]:
    """The parameters of ours and of torch's after some steps under a schedule."""
    twins = Twins([getattr(rulec.torch, name), getattr(torch.optim, name)], maker(keywords), dtype)
    schedules = [LambdaLR(o, lambda k: 1 / (1 + 0.1 * k)) for o in twins.optimizers]
    for number in range(steps):
        twins.step(number)
        for schedule in schedules:
            schedule.step()
    return twins.params


@pytest.mark.parametrize(("name", "keywords"), CASES, ids=IDS)
def test_float64(name: str, keywords: dict[str, Any]) -> None:
    with wide_scalars():
        ours, theirs = run(name, keywords, torch.float64)
    assert difference(ours, theirs) * torch.finfo(torch.float64).eps < 1e-12


@pytest.mark.parametrize(("name", "keywords"), CASES, ids=IDS)
def test_float32(name: str, keywords: dict[str, Any]) -> None:
    """A few ulp after twenty steps."""
    ours, theirs = run(name, keywords, torch.float32)
    assert difference(ours, theirs) <= 8


@pytest.mark.parametrize(("case", "dtype"), [*zip(CASES, itertools.cycle([torch.bfloat16, torch.float16]))], ids=IDS)
def test_half_precision_rounds_what_is_stored_and_nothing_else(
    case: tuple[str, dict[str, Any]], dtype: torch.dtype
) -> None:
    """The same as torch in float32 with parameters and states rounded after every step."""
    name, keywords = case
    ours = parameters(dtype)
    theirs = [torch.nn.Parameter(p.detach().float()) for p in parameters(dtype)]
    optimizers = [
        maker(keywords)(getattr(rulec.torch, name), ours),
        maker(keywords)(getattr(torch.optim, name), theirs),
    ]
    round_states(optimizers[1], dtype)
    for number in range(20):
        give_gradients(ours, number)
        for p, q in zip(ours, theirs, strict=True):
            assert p.grad is not None
            q.grad = p.grad.float()
        for optimizer in optimizers:
            optimizer.step()
        round_states(optimizers[1], dtype)
    assert difference(ours, [q.to(dtype) for q in theirs]) <= 2


def round_states(optimizer: torch.optim.Optimizer, dtype: torch.dtype) -> None:
    """Rounds parameters and states to what a narrower dtype can hold; what is counted or scalar stays."""
    for group in optimizer.param_groups:
        for param in group["params"]:
            param.data.copy_(param.data.to(dtype))
            for key, value in optimizer.state[param].items():
                if key not in ("step", "mu_product", "eta", "mu"):
                    value.copy_(value.to(dtype))


def test_the_epsilon_of_adafactor_is_that_of_each_dtype() -> None:
    """In groups of their own: torch keeps that of a group's first tensor for all of it."""
    dtypes = (torch.bfloat16, torch.float32, torch.float64)
    sides = [[parameters(dtype, [(4, 6)])[0] for dtype in dtypes] for _ in range(2)]
    optimizers = [
        library.Adafactor([{"params": [p]} for p in side], foreach=False)
        for library, side in zip((rulec.torch, torch.optim), sides, strict=True)
    ]
    for number in range(5):
        for side, optimizer in zip(sides, optimizers, strict=True):
            give_gradients(side, number)
            for p in side:
                p.grad.mul_(1e-9)  # type: ignore[union-attr]
            optimizer.step()
    assert difference(*sides) <= 4


#: One of each class, on the default's backend.
FUSED = [case for case in dict(CASES).items() if "fused" in inspect.signature(getattr(torch.optim, case[0])).parameters]


@pytest.mark.parametrize(("name", "keywords"), FUSED, ids=str)
def test_fused_half_precision(name: str, keywords: dict[str, Any]) -> None:
    """Where torch has a fused kernel, it rounds as we do: to bfloat16 once a step."""
    kinds = [getattr(rulec.torch, name), getattr(torch.optim, name)]
    twins = Twins(kinds, lambda kind, params: kind(params, fused=True, **keywords), torch.bfloat16)
    for number in range(20):
        twins.step(number)
    assert twins.ulps() <= 4


def test_a_network_trains_alike() -> None:
    """Fifty steps of a perceptron: each side's own gradients, so that a difference would grow."""
    models = []
    for _ in range(2):
        torch.manual_seed(0)
        models.append(torch.nn.Sequential(torch.nn.Linear(10, 32), torch.nn.Tanh(), torch.nn.Linear(32, 3)))
    x, y = torch.randn(64, 10), torch.randn(64, 3)
    optimizers = [
        rulec.torch.AdamW(models[0].parameters(), lr=1e-2),
        torch.optim.AdamW(models[1].parameters(), lr=1e-2),
    ]
    losses: list[list[float]] = [[], []]
    for _ in range(50):
        for model, optimizer, seen in zip(models, optimizers, losses, strict=True):
            optimizer.zero_grad()
            loss = torch.nn.functional.mse_loss(model(x), y)
            loss.backward()
            optimizer.step()
            seen.append(loss.item())
    assert losses[0][-1] < 0.8 * losses[0][0]
    assert difference(list(models[0].parameters()), list(models[1].parameters())) <= 64
