"""States of libraries with layouts of their own: they go on with the numbers there, or a sentence names the layout."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers.optimization import Adafactor

import rulec.torch as rt
from rulec.errors import StateMismatch

SHAPE = (6, 8)

#: Class here -> the library's, its keywords, and how often it steps.
CASES: Mapping[str, tuple[str, Mapping[str, Any]]] = {
    "ScheduleFreeAdamW": ("AdamWScheduleFree", {"lr": 0.01, "warmup_steps": 5, "weight_decay": 0.1, "r": 0.5}),
    "ScheduleFreeSGD": ("SGDScheduleFree", {"lr": 0.1, "warmup_steps": 4, "weight_decay": 0.1, "momentum": 0.8}),
    "ScheduleFreeRAdam": ("RAdamScheduleFree", {"lr": 0.01, "weight_decay": 0.1, "betas": (0.8, 0.99)}),
}


def normal(seed: int) -> Tensor:
    return torch.randn(SHAPE, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def steps(optimizer: Any, param: nn.Parameter, which: range) -> None:
    for step in which:
        param.grad = normal(step)
        optimizer.step()


def average(lr: float, k: int) -> dict[str, Any]:
    """What schedulefree 1.4 saves of SGD with this rate after `k` steps of gradients of 1, from weights of 0."""
    z, y, total = torch.zeros(SHAPE, dtype=torch.float64), torch.zeros(SHAPE, dtype=torch.float64), 0.0
    for _ in range(k):
        total += lr**2
        c = lr**2 / total
        y = y + c * (z - y) + lr * (0.9 * (1 - c) - 1)
        z = z - lr
    group = {
        "lr": lr, "momentum": 0.9, "r": 0.0, "k": k, "warmup_steps": 0, "train_mode": True, "weight_sum": total,
        "lr_max": lr, "scheduled_lr": lr, "weight_lr_power": 2, "weight_decay": 0, "foreach": True, "params": [0],
    }  # fmt: skip
    return {"param": y, "state": {0: {"z": z}}, "param_groups": [group]}


def test_counts_of_a_group_of_schedulefree_are_those_of_its_parameters() -> None:
    """Beside the formulas of its step, written out."""
    before, after = average(0.1, 3), average(0.1, 5)
    param = nn.Parameter(before.pop("param"))
    optimizer = rt.ScheduleFreeSGD([param])
    optimizer.load_state_dict(before)
    assert optimizer.state[param]["step"] == optimizer.param_groups[0]["updates"] == 3
    for _ in range(2):
        param.grad = torch.ones(SHAPE, dtype=torch.float64)
        optimizer.step()
    assert torch.allclose(param, after["param"], rtol=1e-13)
    assert torch.allclose(optimizer.state[param]["z"], after["state"][0]["z"], rtol=1e-13)
    assert optimizer.param_groups[0]["weight_sum"] == pytest.approx(after["param_groups"][0]["weight_sum"])
    again = rt.ScheduleFreeSGD([param])
    again.load_state_dict(optimizer.state_dict())
    assert again.state[param]["step"] == 5


@pytest.mark.parametrize("evaluated", [False, True])
@pytest.mark.parametrize("kind", CASES)
def test_a_run_of_schedulefree_goes_on(kind: str, evaluated: bool) -> None:
    library = pytest.importorskip("schedulefree")
    name, keywords = CASES[kind]
    theirs = nn.Parameter(normal(99))
    there = getattr(library, name)([theirs], **keywords)
    there.train()
    steps(there, theirs, range(8))
    if evaluated:
        there.eval()
    ours = nn.Parameter(theirs.detach().clone())
    here = getattr(rt, kind)([ours])
    here.load_state_dict(copy.deepcopy(there.state_dict()))
    if evaluated:
        there.train()
        here.train()
    for optimizer, param in ((there, theirs), (here, ours)):
        steps(optimizer, param, range(8, 12))
    assert (ours - theirs).abs().max() <= 1e-12 * theirs.abs().max()


def check_refused(optimizer: Any, saved: dict[str, Any], words: str) -> None:
    before = copy.deepcopy(optimizer.state_dict())
    with pytest.raises(StateMismatch, match=words):
        optimizer.load_state_dict(saved)
    assert optimizer.state_dict()["param_groups"] == before["param_groups"]
    assert optimizer.state_dict()["state"].keys() == before["state"].keys()


def test_states_of_schedulefree_go_to_no_other_rule() -> None:
    saved = average(0.1, 3)
    saved.pop("param")
    check_refused(rt.AdamW([nn.Parameter(normal(0))]), saved, "are of schedulefree, and AdamW computes otherwise")
    loud = copy.deepcopy(saved)
    loud["param_groups"][0]["silent_sgd_phase"] = False
    check_refused(rt.ScheduleFreeRAdam([nn.Parameter(normal(0))]), loud, "silent_sgd_phase=False")
    for count in ("3", -1, None):
        saved["param_groups"][0]["k"] = count
        check_refused(
            rt.ScheduleFreeSGD([nn.Parameter(normal(0))]), saved, "k of a saved group is .* no count of steps"
        )


@pytest.mark.parametrize("keywords", [{}, {"lr": 1e-2, "relative_step": False, "beta1": 0.9}], ids=str)
@pytest.mark.parametrize("kind", ["Adafactor", "CAME", "AdamW"])
def test_the_layout_of_transformers_is_named(kind: str, keywords: dict[str, Any]) -> None:
    param = nn.Parameter(normal(0).float())
    there = Adafactor([param], **keywords)
    param.grad = torch.ones(SHAPE)
    there.step()
    check_refused(
        getattr(rt, kind)([param]), there.state_dict(), "an Adafactor of transformers, whose layout is not read"
    )


def test_the_layout_of_prodigyopt_is_named() -> None:
    group = {"lr": 1.0, "betas": (0.9, 0.999), "beta3": None, "d_numerator": 0.1, "growth_rate": 2.0, "params": [0]}
    state = {"step": 3, "s": torch.ones(48), "p0": torch.ones(48), "exp_avg": normal(0), "exp_avg_sq": normal(0)}
    words = "of prodigyopt, whose layout is not read"
    for saved in ({"state": {0: state}, "param_groups": [group]}, {"state": {}, "param_groups": [group]}):
        check_refused(rt.Prodigy([nn.Parameter(normal(0))]), saved, words)


def test_a_state_of_prodigyopt_is_refused_by_its_name() -> None:
    library = pytest.importorskip("prodigyopt")
    param = nn.Parameter(normal(0))
    there = library.Prodigy([param])
    steps(there, param, range(2))
    check_refused(rt.Prodigy([param]), there.state_dict(), "of prodigyopt, whose layout is not read")
