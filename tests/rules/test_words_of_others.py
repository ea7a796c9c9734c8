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

#: Keywords of Shampoo whose values are the same beside another keyword.
_SHAMPOO = {
    "lr": 0.1, "betas": (0.9, 0.99), "use_svd": True, "shape_interpretation": False, "start_preconditioning_step": 5,
    "preconditioning_compute_steps": 4,
}  # fmt: skip

#: Class here, class of pytorch_optimizer, keywords of theirs, and how far the two may part in twelve steps. They part
#: by more than rounding where theirs sums in float32 (1e-9), adds eps before the correction of the bias (1e-6), or has
#: a step in bfloat16 (2e-3).
CASES: tuple[tuple[str, str, dict[str, Any], float], ...] = (
    ("A2Grad", "A2Grad", {"variant": "inc", "lr": None}, 1e-12),
    ("A2Grad", "A2Grad", {"variant": "exp", "rho": 0.9}, 1e-12),
    ("AccSGD", "AccSGD", {"constant": 0.6, "lr": 0.1}, 1e-12),
    ("AdEMAMix", "AdEMAMix", {"t_alpha_beta3": 5, "lr": 0.1}, 1e-12),
    ("AdEMAMix", "AdEMAMix", {"cautious": True, "lr": 0.1}, 1e-12),
    ("AdEMAMix", "AdEMAMix", {"stable_adamw": True, "lr": 0.1}, 1e-12),
    ("AdEMAMix", "AdEMAMix", {"cautious": True, "stable_adamw": True, "lr": 0.1}, 1e-12),
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
    ("ApolloDQN", "ApolloDQN", {"rebound": "belief", "warmup_steps": 0, "weight_decay": 0.1}, 1e-12),
    (
        "ApolloDQN",
        "ApolloDQN",
        {"weight_decay_type": "stable", "warmup_steps": 0, "weight_decay": 0.1},
        1e-12,
    ),
    (
        "ApolloDQN",
        "ApolloDQN",
        {"rebound": "belief", "weight_decay_type": "stable", "warmup_steps": 0, "weight_decay": 0.1},
        1e-12,
    ),
    ("BCOS", "BCOS", {"mode": "g", "weight_decay": 0.0}, 1e-12),
    ("BCOS", "BCOS", {"mode": "m", "weight_decay": 0.0}, 1e-12),
    ("DAdaptAdam", "DAdaptAdam", {}, 1e-8),
    ("DAdaptAdam", "DAdaptAdam", {"bias_correction": True, "growth_rate": 1.02}, 1e-8),
    ("LaProp", "LaProp", {"ams_bound": True}, 1e-9),
    ("Fromage", "Fromage", {"p_bound": 1.1, "lr": 0.5}, 1e-12),
    ("LaProp", "LaProp", {"centered": True, "steps_before_using_centered": 3}, 1e-9),
    ("Nero", "Nero", {"constraints": False}, 1e-12),
    ("SM3", "SM3", {"beta": 0.9, "momentum": 0.9}, 1e-12),
    ("Lion", "Lion", {"use_gc": True}, 1e-12),
    ("PID", "PID", {"dampening": 0.5, "momentum": 0.9}, 1e-12),
    ("PID", "PID", {"dampening": 0.5, "momentum": 0.0, "integral": 2.0, "derivative": 3.0, "lr": 0.1}, 1e-12),
    ("PNM", "PNM", {"betas": (0.8, 0.7), "lr": 0.1}, 1e-12),
    ("Prodigy", "Prodigy", {"safeguard_warmup": True, "beta3": 0.99}, 1e-8),
    ("Prodigy", "Prodigy", {"bias_correction": True, "d_coef": 10.0}, 1e-8),
    ("ROSE", "ROSE", {"stabilize": False, "compute_dtype": torch.float64}, 1e-6),
    ("SGDP", "SGDP", {"dampening": 0.3, "momentum": 0.8, "lr": 0.1}, 1e-12),
    ("SGDP", "SGDP", {"nesterov": True, "dampening": 0.3, "momentum": 0.8, "lr": 0.1, "weight_decay": 0.1}, 1e-12),
    ("SGDW", "SGDW", {"momentum": 0.0, "dampening": 0.3, "lr": 0.1, "weight_decay": 0.0}, 1e-12),
    ("SGDW", "SGDW", {"nesterov": True, "momentum": 0.9, "lr": 0.01, "weight_decay": 0.0}, 1e-12),
    ("Scion", "SCION", {"constraint": True, "lr": 0.1}, 2e-3),
    ("Shampoo", "Shampoo", {"momentum": 0.3, "preconditioning_compute_steps": 1, "matrix_eps": 1e-3, "lr": 0.1}, 1e-12),
    ("ScheduleFreeAdamW", "ScheduleFreeAdamW", {"decoupling_c": 200, "lr": 0.1}, 1e-12),
    ("ScalableShampoo", "ScalableShampoo", {**_SHAMPOO, "nesterov": False}, 1e-12),
    ("ScalableShampoo", "ScalableShampoo", {**_SHAMPOO, "moving_average_for_momentum": True}, 1e-12),
    ("ScalableShampoo", "ScalableShampoo", {**_SHAMPOO, "decoupled_learning_rate": False}, 1e-12),
    ("ScalableShampoo", "ScalableShampoo", {**_SHAMPOO, "pre_conditioner_type": 1}, 1e-12),
    ("ScalableShampoo", "ScalableShampoo", {**_SHAMPOO, "pre_conditioner_type": 2}, 1e-12),
    ("ScalableShampoo", "ScalableShampoo", {**_SHAMPOO, "inverse_exponent_override": 2}, 1e-12),
    ("ScalableShampoo", "ScalableShampoo", {**_SHAMPOO, "graft_type": 0}, 1e-12),
    ("ScalableShampoo", "ScalableShampoo", {**_SHAMPOO, "graft_type": 2}, 1e-12),
    ("ScalableShampoo", "ScalableShampoo", {**_SHAMPOO, "graft_type": 3, "diagonal_eps": 0.1}, 1e-12),
    ("ScalableShampoo", "ScalableShampoo", {**_SHAMPOO, "graft_type": 4}, 1e-12),
    ("ScalableShampoo", "ScalableShampoo", {**_SHAMPOO, "decoupled_weight_decay": True, "weight_decay": 0.1}, 1e-12),
    ("StableSPAM", "StableSPAM", {"t_max": 7, "eta_min": 0.3, "update_proj_gap": 5}, 1e-12),
    ("diffGrad", "DiffGrad", {"ams_bound": True}, 1e-6),
    ("diffGrad", "DiffGrad", {"rectify": True, "lr": 0.1}, 1e-12),
    ("diffGrad", "DiffGrad", {"rectify": True, "degenerated_to_sgd": False, "n_sma_threshold": 7, "lr": 0.1}, 1e-12),
)

#: Keywords for the tensors that Muon and its kin orthogonalize.
_NORMED = {"lr": 0.1, "eps": 1e-8, "weight_decay": 0.1}

#: As `CASES`, for classes whose groups say `use_muon`. AdaGO's step is held at eps, for theirs has no root. AdaMuon's
#: division is in bfloat16 there.
MUONS: tuple[tuple[str, dict[str, Any], float], ...] = (
    ("AdaGO", {"nesterov": True, "eps": 0.1, "weight_decay": 0.0}, 1e-12),
    ("AdaMuon", {"use_adjusted_lr": False, "betas": (0.9, 0.95), **_NORMED}, 2e-3),
    ("Muon", {"use_adjusted_lr": True, "lr": 0.1, "weight_decay": 0.1}, 1e-12),
    ("Muon", {"nesterov": False, "lr": 0.1, "weight_decay": 0.1}, 1e-12),
    ("Muon", {"nesterov": False, "use_adjusted_lr": True, "lr": 0.1, "weight_decay": 0.1}, 1e-12),
    ("NorMuon", {"nesterov": True, "update_scale": "match_rms", **_NORMED}, 1e-12),
    ("NorMuon", {"nesterov": False, "update_scale": "preserve_norm", **_NORMED}, 1e-12),
    ("NorMuon", {"nesterov": False, "update_scale": "preserve_norm", "use_adjusted_lr": True, **_NORMED}, 1e-12),
    ("NorMuon", {"nesterov": True, "update_scale": "preserve_norm", **_NORMED}, 1e-12),
    ("NorMuon", {"nesterov": True, "update_scale": "preserve_norm", "use_adjusted_lr": True, **_NORMED}, 1e-12),
)


#: As `CASES`, for classes whose groups have a rank. Theirs takes singular vectors in float32, and what is left of the
#: zeros of a matrix between its own singular vectors is as large as its eps lets it be.
RANKS: tuple[tuple[str, dict[str, Any], float], ...] = (
    *(("GaLore", {"projection_type": kind}, 1e-6) for kind in ("random", "reverse_std", "right", "left", "full")),
    ("Fira", {"projection_type": "random", "scale": 1.0}, 1e-6),
    ("Fira", {"projection_type": "full"}, 1e-6),
)


def stepped(kind: Any, keywords: dict[str, Any], shape: tuple[int, ...] = (5, 3), **group: Any) -> torch.Tensor:
    """A parameter after twelve steps of an optimizer."""
    numbers = torch.Generator().manual_seed(0)
    param = torch.nn.Parameter(torch.randn(*shape, dtype=torch.float64, generator=numbers))
    optimizer = kind([{"params": [param], **group}], **keywords)
    getattr(optimizer, "train", lambda: None)()
    for _ in range(12):
        param.grad = torch.randn(*shape, dtype=torch.float64, generator=numbers)
        optimizer.step()
    return param.detach()


@pytest.mark.parametrize(
    ("ours", "theirs", "keywords", "close"), CASES, ids=lambda x: x if isinstance(x, str) else None
)
def test_their_keywords_mean_the_same(ours: str, theirs: str, keywords: dict[str, Any], close: float) -> None:
    mine = stepped(getattr(rulec.torch, ours), keywords)
    other = stepped(getattr(pytorch_optimizer, theirs), keywords)
    assert torch.linalg.norm(mine - other) <= close * torch.linalg.norm(other)
    kept = {"lr", "weight_decay"} | (_SHAMPOO.keys() if ours == "ScalableShampoo" else set())
    plain = stepped(getattr(rulec.torch, ours), {k: v for k, v in keywords.items() if k in kept and v})
    assert not keywords or not torch.equal(mine, plain)


@pytest.mark.parametrize("name", ["Amos", "DAdaptSGD", "PID", "SGD", "SGDP", "SGDSaI", "SGDW", "SM3", "TAM"])
def test_without_momentum_other_keywords_mean_what_they_mean_there(name: str) -> None:
    """Some classes of theirs leave the whole line of the momentum out, with the keywords in it."""
    kinds = getattr(rulec.torch, name), getattr(pytorch_optimizer, name)
    more = {"dampening": 0.3, "weight_decay": 0.1} if name in ("PID", "SGD", "SGDP", "SGDW") else {}
    for momentum in (0.9, 0.0):
        mine, other = (stepped(kind, {"lr": 0.05, "momentum": momentum, **more}) for kind in kinds)
        assert torch.linalg.norm(mine - other) <= 1e-8 * torch.linalg.norm(other)


@pytest.mark.parametrize("shape", [(5, 3), (3, 5), (4, 3, 2)])
@pytest.mark.parametrize(("name", "keywords", "close"), MUONS, ids=lambda x: x if isinstance(x, str) else None)
def test_their_keywords_of_matrices_mean_the_same(
    name: str, keywords: dict[str, Any], close: float, shape: tuple[int, ...]
) -> None:
    mine = stepped(getattr(rulec.torch, name), keywords, shape, use_muon=True)
    other = stepped(getattr(pytorch_optimizer, name), keywords, shape, use_muon=True)
    assert torch.linalg.norm(mine - other) <= close * torch.linalg.norm(other)
    plain = {key: value for key, value in keywords.items() if key in (*_NORMED, "betas")}
    assert not torch.equal(mine, stepped(getattr(rulec.torch, name), plain, shape, use_muon=True))


@pytest.mark.parametrize("shape", [(5, 3), (3, 5)])
@pytest.mark.parametrize(("name", "group", "close"), RANKS, ids=lambda x: x if isinstance(x, str) else None)
def test_their_projections_mean_the_same(
    name: str, group: dict[str, Any], close: float, shape: tuple[int, ...]
) -> None:
    group = {"rank": 2, "update_proj_gap": 200, "scale": 0.5, **group}
    kinds = getattr(rulec.torch, name), getattr(pytorch_optimizer, name)
    mine, other = (stepped(kind, {"lr": 0.1, "eps": 1e-2}, shape, **group) for kind in kinds)
    assert torch.linalg.norm(mine - other) <= close * torch.linalg.norm(other)


@pytest.mark.parametrize("scale_type", ["channel", "tensor"])
def test_apollo_projects_the_side_that_is_asked_for(scale_type: str) -> None:
    keywords = {"lr": 0.1, "rank": 2, "update_proj_gap": 5, "scale_type": scale_type}
    shapes = (5, 3), (3, 5)
    short, right = (
        [stepped(rulec.torch.Apollo, keywords | more, shape) for shape in shapes]
        for more in ({}, {"projection_type": "right"})
    )
    assert torch.allclose(short[0], right[0], rtol=1e-12)
    assert not torch.allclose(short[1], right[1], rtol=1e-3)


@pytest.mark.parametrize("group", [{}, {"lr": 0.3, "eps": 1e-3, "weight_decay": 0.3}])
@pytest.mark.parametrize("decay", [{}, {"adamw_wd": 0.5}, {"adamw_wd": 0.0, "weight_decay": 0.4}])
@pytest.mark.parametrize("name", ["AdaGO", "Muon", "NorMuon"])
def test_a_group_without_muon_has_the_keywords_of_adamw(
    name: str, decay: dict[str, float], group: dict[str, float]
) -> None:
    keywords = {"adamw_lr": 0.1, "adamw_eps": 1e-8, "adamw_betas": (0.8, 0.9), "weight_decay": 0.0, **decay}
    kinds = getattr(rulec.torch, name), getattr(pytorch_optimizer, name)
    mine, other = (stepped(kind, keywords, use_muon=False, **group) for kind in kinds)
    assert torch.linalg.norm(mine - other) <= 1e-12 * torch.linalg.norm(other)


def test_a_keyword_of_the_other_tensors_is_for_them_alone() -> None:
    params = [torch.nn.Parameter(torch.ones(2, 2)), torch.nn.Parameter(torch.ones(2))]
    for param in params:
        param.grad = torch.zeros_like(param)
    rulec.torch.NorMuon(params, lr=0.1, weight_decay=0.0, adamw_lr=0.1, adamw_wd=0.5).step()
    assert params[0].tolist() == [[1, 1], [1, 1]]
    assert params[1].tolist() == pytest.approx([0.95, 0.95])


def test_the_first_beta_warms_up_in_half_life() -> None:
    """Theirs takes a mean where the paper, its authors' code and optax take a sum: the schedule alone is theirs."""
    schedule = pytorch_optimizer.SimplifiedAdEMAMix.linear_hl_warmup_scheduler
    numbers = torch.Generator().manual_seed(0)
    param = torch.nn.Parameter(torch.randn(3, dtype=torch.float64, generator=numbers))
    keywords = {"betas": (0.99, 0.95), "beta1_warmup": 8, "min_beta1": 0.8, "alpha": 0.5, "lr": 0.1}
    optimizer = rulec.torch.SimplifiedAdEMAMix([param], **keywords)
    want, m, v = param.detach().clone(), torch.zeros(3), torch.zeros(3)
    for t in range(1, 13):
        param.grad = torch.randn(3, dtype=torch.float64, generator=numbers)
        optimizer.step()
        m = schedule(t, beta_end=0.99, beta_start=0.8, warmup=8) * m + param.grad
        v = 0.95 * v + 0.05 * param.grad**2
        want -= 0.1 * (m + 0.5 * param.grad) / ((v / (1 - 0.95**t)).sqrt() + 1e-8)
    assert torch.allclose(param.detach(), want, rtol=1e-6)


def test_a_choice_or_a_value_without_a_rule_is_refused() -> None:
    param = torch.nn.Parameter(torch.ones(2, 2))
    with pytest.raises(HyperError, match="does not support weight_decay_type='cosine': give 'l2' or 'decoupled' or"):
        rulec.torch.ApolloDQN([param], weight_decay_type="cosine")
    with pytest.raises(HyperError, match=r"Fira has no rule for projection_type='std', scale=0\.5"):
        rulec.torch.Fira([param], scale=0.5)
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
