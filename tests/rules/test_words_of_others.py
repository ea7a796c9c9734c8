"""Keywords of pytorch_optimizer's classes mean the same in the classes here: both are stepped side by side."""

from __future__ import annotations

from typing import Any

import pytest
import pytorch_optimizer
import torch

import rulec.torch
from rulec.errors import HyperError

pytestmark = pytest.mark.peer

#: Class here, class of pytorch_optimizer, keywords of theirs, and how far the two may part in twelve steps. They part
#: by more than rounding where theirs sums in float32 (1e-9), or adds eps before the correction of the bias (1e-6).
CASES: tuple[tuple[str, str, dict[str, Any], float], ...] = (
    ("A2Grad", "A2Grad", {"variant": "inc", "lr": None}, 1e-12),
    ("A2Grad", "A2Grad", {"variant": "exp", "rho": 0.9}, 1e-12),
    ("AccSGD", "AccSGD", {"constant": 0.6, "lr": 0.1}, 1e-12),
    ("AdEMAMix", "AdEMAMix", {"t_alpha_beta3": 5, "lr": 0.1}, 1e-12),
    ("AdaBelief", "AdaBelief", {"ams_bound": True}, 1e-12),
    ("AdaBelief", "AdaBelief", {"rectify": True, "n_sma_threshold": 5}, 1e-12),
    ("AdaBound", "AdaBound", {"ams_bound": True, "lr": 0.1}, 1e-9),
    ("AdaPNM", "AdaPNM", {"ams_bound": False, "betas": (0.8, 0.99, 0.7)}, 1e-6),
    ("AdaShift", "AdaShift", {"keep_num": 4, "lr": 0.1}, 1e-12),
    ("Adai", "Adai", {"betas": (0.2, 0.9), "lr": 0.1}, 1e-12),
    ("Adai", "Adai", {"dampening": 0.9, "lr": 0.1, "use_gc": True}, 1e-12),
    ("AdamP", "AdamP", {"nesterov": True}, 1e-6),
    ("AdamS", "AdamS", {"ams_bound": True}, 1e-12),
    ("Adan", "Adan", {"max_grad_norm": 1.0, "lr": 0.1, "betas": (0.98, 0.92, 0.99)}, 1e-6),
    ("Aida", "Aida", {"ams_bound": True}, 1e-6),
    ("Ano", "Ano", {"logarithmic_schedule": True, "lr": 0.1}, 1e-12),
    ("BCOS", "BCOS", {"mode": "g", "weight_decay": 0.0}, 1e-12),
    ("BCOS", "BCOS", {"mode": "m", "weight_decay": 0.0}, 1e-12),
    ("DAdaptAdam", "DAdaptAdam", {}, 1e-8),
    ("DAdaptAdam", "DAdaptAdam", {"bias_correction": True, "growth_rate": 1.02}, 1e-8),
    ("LaProp", "LaProp", {"ams_bound": True}, 1e-9),
    ("Lion", "Lion", {"use_gc": True}, 1e-12),
    ("PID", "PID", {"dampening": 0.5, "momentum": 0.9}, 1e-12),
    ("PNM", "PNM", {"betas": (0.8, 0.7), "lr": 0.1}, 1e-12),
    ("Prodigy", "Prodigy", {"safeguard_warmup": True, "beta3": 0.99}, 1e-8),
    ("Prodigy", "Prodigy", {"bias_correction": True, "d_coef": 10.0}, 1e-8),
    ("ROSE", "ROSE", {"stabilize": False, "compute_dtype": torch.float64}, 1e-6),
    ("SGDP", "SGDP", {"dampening": 0.3, "momentum": 0.8, "lr": 0.1}, 1e-12),
    ("SGDP", "SGDP", {"nesterov": True, "dampening": 0.3, "momentum": 0.8, "lr": 0.1, "weight_decay": 0.1}, 1e-12),
    ("SGDW", "SGDW", {"nesterov": True, "momentum": 0.9, "lr": 0.01, "weight_decay": 0.0}, 1e-12),
    ("ScheduleFreeAdamW", "ScheduleFreeAdamW", {"decoupling_c": 200, "lr": 0.1}, 1e-12),
    ("diffGrad", "DiffGrad", {"ams_bound": True}, 1e-6),
    ("diffGrad", "DiffGrad", {"rectify": True, "lr": 0.1}, 1e-12),
    ("diffGrad", "DiffGrad", {"rectify": True, "degenerated_to_sgd": False, "n_sma_threshold": 7, "lr": 0.1}, 1e-12),
)


def stepped(kind: Any, keywords: dict[str, Any]) -> torch.Tensor:
    """A parameter after twelve steps of an optimizer."""
    numbers = torch.Generator().manual_seed(0)
    param = torch.nn.Parameter(torch.randn(5, 3, dtype=torch.float64, generator=numbers))
    optimizer = kind([param], **keywords)
    getattr(optimizer, "train", lambda: None)()
    for _ in range(12):
        param.grad = torch.randn(5, 3, dtype=torch.float64, generator=numbers)
        optimizer.step()
    return param.detach()


@pytest.mark.parametrize(
    ("ours", "theirs", "keywords", "close"), CASES, ids=lambda x: x if isinstance(x, str) else None
)
def test_their_keywords_mean_the_same(ours: str, theirs: str, keywords: dict[str, Any], close: float) -> None:
    mine = stepped(getattr(rulec.torch, ours), keywords)
    other = stepped(getattr(pytorch_optimizer, theirs), keywords)
    assert torch.linalg.norm(mine - other) <= close * torch.linalg.norm(other)
    plain = stepped(
        getattr(rulec.torch, ours), {k: v for k, v in keywords.items() if k in ("lr", "weight_decay") and v}
    )
    assert not keywords or not torch.equal(mine, plain)


def test_a_choice_or_a_value_without_a_rule_is_refused() -> None:
    param = torch.nn.Parameter(torch.ones(2, 2))
    with pytest.raises(HyperError, match="does not support weight_decay_type='stable': give 'l2' or 'decoupled'"):
        rulec.torch.ApolloDQN([param], weight_decay_type="stable")
    with pytest.raises(HyperError, match="GaLore has no rule for projection_type='full'"):
        rulec.torch.GaLore([param], projection_type="full")
    decoupled = rulec.torch.ApolloDQN([param], weight_decay_type="decoupled")
    assert decoupled.param_groups[0]["weight_decouple"] is True


@pytest.mark.parametrize("name", ["GaLore", "Fira", "Apollo"])
def test_a_rank_is_bounded_by_the_sides_of_a_matrix(name: str) -> None:
    params = [torch.nn.Parameter(torch.ones(*shape)) for shape in ((1, 2), (3, 1), (6, 5))]
    optimizer = getattr(rulec.torch, name)(params, lr=0.1)
    for param in params:
        param.grad = torch.linspace(1, 2, param.numel()).reshape(param.shape)
    optimizer.step()
    assert [min(optimizer.state[p]["m"].shape) for p in params] == [1, 1, 4]
    assert all(bool(torch.isfinite(p).all()) and not torch.equal(p, torch.ones_like(p)) for p in params)


def test_the_last_of_a_tuple_has_a_keyword() -> None:
    param = torch.nn.Parameter(torch.ones(2))
    groups = [rulec.torch.Prodigy([param], **kw).param_groups[0]["betas"] for kw in ({"beta3": 0.5}, {"beta3": None})]
    assert groups == [(0.9, 0.999, 0.5), (0.9, 0.999)]


def test_other_rules_of_a_class_leave_its_defaults() -> None:
    param = torch.nn.Parameter(torch.ones(2))
    assert rulec.load("cautious_laprop").hyper["weight_decay"].default != 0
    assert rulec.torch.LaProp([param]).param_groups[0]["weight_decay"] == 0


@pytest.mark.parametrize("adjusted", [False, True])
def test_a_function_of_the_user_runs_at_first_and_after_each_step(adjusted: bool) -> None:
    """AliG's projection and momentum, for gradients that are large beside the numbers under the quotient."""
    params = [torch.nn.Parameter(torch.full((5, 3), 2.0, dtype=torch.float64)) for _ in range(2)]
    for param, kind in zip(params, (rulec.torch.AliG, pytorch_optimizer.AliG), strict=True):

        def bounded(param: torch.nn.Parameter = param) -> None:
            with torch.no_grad():
                param.div_(param.norm())

        numbers = torch.Generator().manual_seed(0)
        optimizer = kind([param], max_lr=0.5, momentum=0.9, adjusted_momentum=adjusted, projection_fn=bounded)
        for _ in range(5):
            param.grad = 100 * torch.randn(5, 3, dtype=torch.float64, generator=numbers)
            optimizer.step(lambda: 300.0)
        assert abs(float(param.detach().norm()) - 1) < 1e-12
    assert torch.allclose(*params, rtol=1e-6)  # theirs sums squares in float32


def test_a_function_that_is_none_is_refused() -> None:
    param = torch.nn.Parameter(torch.ones(2))
    rulec.torch.AliG([param], projection_fn=None)
    with pytest.raises(HyperError, match="projection_fn of AliG must be a function without arguments, not 3"):
        rulec.torch.AliG([param], projection_fn=3)


def test_a_decay_after_the_moments_is_taken_where_it_is_decoupled() -> None:
    keywords = {"weight_decay": 0.1, "stable_weight_decay": True, "lr": 0.1}
    mine, other = (
        stepped(kind, {**keywords, "weight_decouple": True}) for kind in (rulec.torch.Adai, pytorch_optimizer.Adai)
    )
    assert torch.allclose(mine, other, rtol=1e-12)
    with pytest.raises(HyperError, match="Adai has no rule for dampening=1, stable_weight_decay=True"):
        rulec.torch.Adai([torch.nn.Parameter(torch.ones(2))], **keywords)
