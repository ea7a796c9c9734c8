"""Keywords of pytorch_optimizer's classes mean the same in the classes here: both are stepped side by side."""

from __future__ import annotations

import copy
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
def test_a_rank_is_bound_by_the_sides_of_a_matrix(name: str) -> None:
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

        def bound(param: torch.nn.Parameter = param) -> None:
            with torch.no_grad():
                param.div_(param.norm())

        numbers = torch.Generator().manual_seed(0)
        optimizer = kind([param], max_lr=0.5, momentum=0.9, adjusted_momentum=adjusted, projection_fn=bound)
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


#: Classes with timm's corrected weight decay, and the keywords that decouple it.
CORRECTED: dict[str, dict[str, Any]] = {
    "ADOPT": {"decoupled": True},
    "AdamW": {"caution": True},
    "Lion": {"caution": True},
    "NAdamW": {},
    "LaProp": {},
    "RMSpropTF": {"decoupled_decay": True},
    "SGDW": {"nesterov": True, "caution": True},
}


@pytest.mark.parametrize("name", CORRECTED)
def test_a_corrected_decay_falls_with_the_square_of_the_rate(name: str) -> None:
    def second(decay: float) -> tuple[torch.Tensor, torch.Tensor]:
        numbers = torch.Generator().manual_seed(0)
        param = torch.nn.Parameter(torch.randn(5, 3, dtype=torch.float64, generator=numbers))
        keywords = {"weight_decay": 0.0, "corrected_weight_decay": True, **CORRECTED[name]}
        optimizer = getattr(rulec.torch, name)([param], lr=0.5, **keywords)
        for rate, part in ((0.5, 0.0), (0.2, decay)):
            before = param.detach().clone()
            optimizer.param_groups[0].update(lr=rate, weight_decay=part)
            param.grad = torch.randn(5, 3, dtype=torch.float64, generator=numbers)
            optimizer.step()
        return before, param.detach()

    before, without = second(0.0)
    _, after = second(0.1)
    assert torch.allclose(without - after, 0.2**2 / 0.5 * 0.1 * before, rtol=1e-9)


def test_adamw_with_a_corrected_decay_is_adamc() -> None:
    params = [torch.nn.Parameter(torch.full((5, 3), 2.0, dtype=torch.float64)) for _ in range(2)]
    pair = (
        rulec.torch.AdamW([params[0]], lr=0.1, weight_decay=0.1, corrected_weight_decay=True),
        pytorch_optimizer.AdamC([{"params": params[1:], "normalized": True}], lr=0.1, weight_decay=0.1),
    )
    for step in range(5):
        for param, optimizer in zip(params, pair, strict=True):
            param.grad = torch.randn(5, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(step))
            optimizer.param_groups[0]["lr"] = 0.1 / (step + 1)
            optimizer.step()
    assert torch.allclose(*params, rtol=1e-6)  # theirs adds eps before the correction of the bias


@pytest.mark.parametrize("flag", ["", "trust_clip", "caution"])
def test_lamb_with_a_decoupled_decay_measures_what_it_has_decayed(flag: str) -> None:
    """timm's: the parameter decays first, and the ratio is of that one's norm and of the update without decay."""
    numbers = torch.Generator().manual_seed(0)
    start, grad = (torch.randn(5, 3, dtype=torch.float64, generator=numbers) for _ in range(2))
    param = torch.nn.Parameter(start.clone())
    param.grad = grad
    chosen = {flag: True} if flag else {}
    rulec.torch.LAMB([param], lr=0.1, eps=0.5, weight_decay=0.2, decoupled_decay=True, **chosen).step()
    update = grad / (grad.abs() + 0.5)  # all elements of the first update agree with the gradient
    bare = (1 - 0.1 * 0.2) * start
    ratio = bare.norm() / update.norm()
    ratio = ratio.clamp(max=1) if flag == "trust_clip" else ratio
    assert torch.allclose(param.detach(), bare - 0.1 * ratio * update, rtol=1e-9)


@pytest.mark.parametrize("name", ["RMSpropTF", "SGDW"])
def test_caution_leaves_out_the_elements_that_disagree(name: str) -> None:
    """The elements that move are those of the same class without caution whose step agrees with the gradient."""
    keywords = {"lr": 0.1, "momentum": 0.9, "weight_decay": 0.0} | ({"nesterov": True} if name == "SGDW" else {})
    moves, grad = [], torch.ones(0)
    for caution in (False, True):
        numbers = torch.Generator().manual_seed(1)
        param = torch.nn.Parameter(torch.zeros(50, dtype=torch.float64))
        optimizer = getattr(rulec.torch, name)([param], caution=caution, **keywords)
        for _ in range(3):
            before = param.detach().clone()
            grad = torch.randn(50, dtype=torch.float64, generator=numbers)
            param.grad = grad
            optimizer.step()
        moves.append(before - param.detach())
    keep = moves[0] * grad > 0
    assert 0 < int(keep.sum()) < 50
    assert torch.allclose(moves[1], torch.where(keep, moves[0], 0) / keep.double().mean(), rtol=1e-9)


@pytest.mark.parametrize(
    ("name", "theirs", "keywords"),
    [
        ("RAdam", "RAdam", {"degenerated_to_sgd": True, "lr": 0.1}),
        ("Adamax", "AdaMax", {"weight_decouple": True, "weight_decay": 0.1, "lr": 0.1}),
    ],
)
def test_classes_of_torch_take_words_of_namesakes(name: str, theirs: str, keywords: dict[str, Any]) -> None:
    mine = stepped(getattr(rulec.torch, name), keywords)
    other = stepped(getattr(pytorch_optimizer, theirs), keywords)
    assert torch.linalg.norm(mine - other) <= 1e-6 * torch.linalg.norm(other)


def test_a_class_of_torch_refuses_a_value_without_a_rule() -> None:
    with pytest.raises(HyperError, match="RAdam has no rule for degenerated_to_sgd=False"):
        rulec.torch.RAdam([torch.nn.Parameter(torch.ones(2))], degenerated_to_sgd=False)


def test_a_class_of_torch_has_the_words_of_namesakes_only_where_they_are_given() -> None:
    """Copies and checkpoints have them too, and torch's own checkpoint is taken."""
    params = [torch.nn.Parameter(torch.ones(3, 2)) for _ in range(3)]
    for param in params:
        param.grad = torch.randn(3, 2, generator=torch.Generator().manual_seed(0))
    plain, cautious = rulec.torch.AdamW(params[:1]), rulec.torch.AdamW(params[1:2], caution=True)
    assert "caution" not in plain.param_groups[0]
    theirs = torch.optim.AdamW(params[2:])
    theirs.step()
    cautious.load_state_dict(theirs.state_dict())
    assert cautious.param_groups[0]["caution"] is True
    cautious.step()
    assert copy.deepcopy(cautious).interface is not rulec.torch.AdamW.interface
    plain.load_state_dict(cautious.state_dict())
    assert plain.param_groups[0]["caution"] is True
    params[0].data.copy_(params[1])
    for optimizer in (plain, cautious):
        optimizer.step()
    assert torch.equal(params[0], params[1])
    plain.add_param_group({"params": [torch.nn.Parameter(torch.ones(2))]})
    theirs.load_state_dict(cautious.state_dict())
