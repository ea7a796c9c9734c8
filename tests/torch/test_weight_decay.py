"""Weight decay in every class: taken and composed, or refused; beside pytorch_optimizer; and keys of groups."""

from __future__ import annotations

import inspect
import warnings
from collections.abc import Mapping
from typing import Any

import pytest
import pytorch_optimizer
import torch

import rulec
import rulec.torch
from rulec.compiler.routing import Router
from rulec.errors import HyperError
from rulec.language.inputs import InputKind, Matrix, per_tensor
from rulec.torch.classes import class_names
from rulec.torch.groups import interface as interfaces

#: Classes without weight decay, and why.
WITHOUT = {
    **dict.fromkeys(("A2Grad", "A2GradExp", "A2GradInc"), "dual averaging from the first parameter"),
    **dict.fromkeys(
        ("AdGD", "AdaptiveSGD", "COCOB", "SGDHD", "AdamHD"),
        "the step size comes from gradients that are not to be changed",
    ),
    **dict.fromkeys(("AliG", "PolyakSGD", "AEGD", "AEGDM"), "the step size comes from the loss, which has no penalty"),
    **dict.fromkeys(
        ("Amos", "FTRL", "FTRLProximal", "ProximalSGD", "ProximalAdagrad", "AdagradDA", "RDA"),
        "the rule has a decay of its own by another name",
    ),
    **dict.fromkeys(("Fromage", "Nero", "AdamHR", "MuonHR", "MuonSphere"), "the rule keeps norms"),
    **dict.fromkeys(("Madam", "ExponentiatedGradient"), "weights are multiplied"),
    **dict.fromkeys(("Gravity", "SRMM", "LBFGSDirection", "Rprop", "SparseAdam"), "as in the authors' code"),
}


#: Values with which the parameters of `made` are moved at all.
_ACTIVE = {"SaRA": {"cutoff": 10.0}}


def made(name: str, group: Mapping[str, Any] | None = None, **keywords: Any) -> Any:
    """An optimizer of that class over a matrix and a vector in one group with these keys."""
    torch.manual_seed(0)
    params = [torch.nn.Parameter(torch.randn(6, 4, dtype=torch.float64)), torch.nn.Parameter(torch.randn(5).double())]
    keywords = (_ACTIVE.get(name, {}) if group is not None else {}) | keywords
    tags = {"tags": ()} if "tags" in getattr(rulec.torch, name).interface.fixed else {}
    groups = [{"params": params, **tags, **(group or {})}]
    return getattr(rulec.torch, name)(groups, **keywords)


def trained(optimizer: Any, steps: int = 8, seed: int = 1) -> torch.Tensor:
    """The parameters after some steps with the same gradients for everyone."""
    generator = torch.Generator().manual_seed(seed)
    params = [p for group in optimizer.param_groups for p in group["params"]]
    for _ in range(steps):
        for p in params:
            p.grad = torch.randn(p.shape, generator=generator, dtype=torch.float64)
        inputs = getattr(type(optimizer), "interface", None)
        if inputs is not None and inputs.inputs:
            values = {key: [given(kind, p) for p in params] for key, kind in inputs.inputs.items()}
            optimizer.step(inputs={k: x if per_tensor(inputs.inputs[k]) else 1.0 for k, x in values.items()})
        else:
            optimizer.step()
    return torch.cat([p.detach().flatten().clone() for p in params])


def given(kind: InputKind, param: torch.Tensor) -> torch.Tensor | None:
    """An input for a parameter: like it, or a positive matrix of its rows or columns, of which a vector has none."""
    if not isinstance(kind, Matrix):
        return torch.rand_like(param)
    if param.dim() < 2:
        return None
    size = {"rows": param.shape[0], "cols": param.shape[1]}[str(kind.extents[0].arg)]
    root = torch.rand(size, size, dtype=param.dtype)
    return root @ root.mT


@pytest.mark.parametrize("name", [name for name in class_names() if name not in WITHOUT])
def test_a_group_decays_in_every_class(name: str) -> None:
    kind = getattr(rulec.torch, name)
    if kind.interface.passes.count:
        pytest.skip("its step is several passes, which other tests run")
    torch.manual_seed(3)
    plain, zero = trained(made(name)), trained(made(name, {"weight_decay": 0.0}))
    default = inspect.signature(kind).parameters["weight_decay"].default
    torch.manual_seed(3)
    decayed = trained(made(name, {"weight_decay": 0.5}))
    assert default != 0 or torch.equal(plain, zero)
    assert not torch.allclose(zero, decayed, rtol=1e-9, atol=0)


#: Classes that decay only the tensors that their own rule leaves out: it keeps the norms of matrices.
OF_OTHERS = ("HyperballAdam", "Iso", "MuonH")


@pytest.mark.parametrize("name", [name for name in class_names() if name not in WITHOUT])
def test_every_rule_that_a_class_routes_tensors_to_decays(name: str) -> None:
    for entry in getattr(rulec.torch, name).interface.entries:
        routed = Router(entry.composed(entry.decays.get("default", ""))).rules
        decaying = [bool({"weight_decay", "adamw_wd"} & {*rule.hyper}) for rule in routed]
        assert all(decaying[name in OF_OTHERS :])


@pytest.mark.parametrize("name", [name for name in class_names() if name not in WITHOUT])
def test_decay_adds_no_stage_and_no_state(name: str) -> None:
    for entry in getattr(rulec.torch, name).interface.entries:
        plain = Router(entry.composed("")).rules
        for transform in {*entry.decays.values()}:
            for before, after in zip(plain, Router(entry.composed(transform)).rules, strict=True):
                programs = rulec.compile(before), rulec.compile(after)
                assert {*after.state} == {*before.state}
                # A product with the gradient reads it from memory, so the gradient with the decay in it is written.
                written = transform == "l2" and any(sign in before.step_text() for sign in ("@", "gram("))
                assert len(programs[1].stages) <= len(programs[0].stages) + written


@pytest.mark.parametrize("name", WITHOUT)
def test_a_class_without_decay_refuses_it_in_groups_and_constructor(name: str) -> None:
    params = [torch.nn.Parameter(torch.zeros(3, 2))]
    with pytest.raises(HyperError, match=rf"^{name} has no keyword 'weight_decay': weight decay has no meaning for"):
        getattr(rulec.torch, name)(params, weight_decay=0.1)
    with pytest.raises(HyperError, match=rf"^a group of {name} has weight_decay=0\.1: weight decay has no meaning"):
        getattr(rulec.torch, name)([{"params": params, "weight_decay": 0.1}])
    getattr(rulec.torch, name)([{"params": params, "weight_decay": 0.0}])  # as trainers write for biases


#: Classes that compute what pytorch_optimizer's class of that name does, to 2e-6, at the same values of the keywords.
COMPARED = [
    "AccSGD", "AdEMAMix", "AdaBelief", "AdaBound", "AdaGC", "AdaMod", "AdaNorm", "AdaPNM", "AdaSmooth", "AdaTAM",
    "Adai", "Adalite", "AdamC", "AdamG", "AdamP", "AdamS", "Adan", "AggMo", "Aida", "Ano", "AvaGrad", "CAME",
    "Conda", "DAdaptAdaGrad", "DAdaptAdam", "DAdaptAdan", "DAdaptLion", "DAdaptSGD", "DualAdam", "EXAdam",
    "EmoFact", "EmoLynx", "EmoNavi", "Grams", "KATE", "LaProp", "Lion", "MADGRAD", "NovoGrad", "PNM", "Prodigy",
    "ROSE", "SGDP", "SGDSaI", "SGDW", "SPAM", "SWATS", "SaRA", "ScalableShampoo", "ScheduleFreeAdamW",
    "ScheduleFreeRAdam", "ScheduleFreeSGD", "StableAdamW", "StableSPAM", "TAM", "Tiger", "VSGD", "Yogi", "diffGrad",
]  # fmt: skip

#: Where pytorch_optimizer puts the decay elsewhere in its step, so that the numbers differ.
ELSEWHERE = {
    ("AdaSmooth", "decoupled"): "before the way since the last step is measured, and so in it",
    ("AdaSmooth", "fixed"): "before the way since the last step is measured, and so in it",
    ("Conda", "plain"): "after the move",
    ("LaProp", "decoupled"): "after the move",
    ("LaProp", "fixed"): "after the move",
    ("LaProp", "coupled"): "in the gradient after its last use",
    ("TAM", "coupled"): "in the gradient after its last use",
    ("AdaGC", "coupled"): "in the gradient of the first steps alone",
    ("AdamP", "coupled"): "in the gradient after its last use",
    ("SGDP", "coupled"): "in the gradient after its last use",
    ("SGDSaI", "coupled"): "in the gradient after its last use",
    ("Grams", "coupled"): "in the gradient after its last use",
    ("AdamS", "fixed"): "with a factor of its own",
}
FLAGS = {
    "plain": {"weight_decay": 0.3},
    "decoupled": {"weight_decay": 0.3, "weight_decouple": True},
    "coupled": {"weight_decay": 0.3, "weight_decouple": False},
    "fixed": {"weight_decay": 0.01, "weight_decouple": True, "fixed_decay": True},
}
_CLASSES = {name.casefold(): name for name in dir(pytorch_optimizer) if name[:1].isupper()}


def difference(name: str, keywords: Mapping[str, Any]) -> float:
    """The largest difference of our parameters and theirs after some steps, relative to the largest parameter."""
    theirs = getattr(pytorch_optimizer, _CLASSES[name.casefold()])
    ours = inspect.signature(getattr(rulec.torch, name)).parameters
    known = inspect.signature(theirs).parameters
    same = {key: known[key].default for key in ("betas", "eps", "momentum", "d0") if key in known and key in ours}
    if "betas" in same and len(same["betas"]) != len(ours["betas"].default):
        del same["betas"]
    params = [p for group in made(name).param_groups for p in group["params"]]
    optimizer = theirs(params, lr=0.02, **same, **keywords)
    if hasattr(optimizer, "train"):
        optimizer.train()
    expected = trained(optimizer, steps=3)
    actual = trained(made(name, lr=0.02, **same, **keywords), steps=3)
    return float((actual - expected).abs().max() / expected.abs().max())


def _keywords(kind: Any) -> set[str]:
    return {*inspect.signature(kind).parameters}


CASES = [
    (name, flags)
    for name in COMPARED
    for theirs in [_keywords(getattr(pytorch_optimizer, _CLASSES[name.casefold()]))]
    for flags, keywords in FLAGS.items()
    if {*keywords} <= theirs & _keywords(getattr(rulec.torch, name))
    and (flags != "plain" or not {"weight_decouple", "decoupled_weight_decay"} & theirs)
]


@pytest.mark.parametrize(("name", "flags"), CASES)
def test_decay_beside_pytorch_optimizer(name: str, flags: str) -> None:
    found = difference(name, FLAGS[flags])
    if (name, flags) in ELSEWHERE:
        assert found > 1e-5, "it agrees: take the case out of ELSEWHERE"
    else:
        assert found < 2e-6 if flags != "coupled" else found < 1e-5  # theirs adds eps elsewhere in some classes


@pytest.mark.parametrize("name", ["SOAP", "AdaBelief", "MADGRAD", "AdaMod", "Lion"])
def test_states_go_from_a_run_with_decay_to_one_without_and_back(name: str) -> None:
    def switched(before: float, after: float, through_file: bool) -> torch.Tensor:
        optimizer = made(name, weight_decay=before)
        trained(optimizer)
        if through_file:
            saved = optimizer.state_dict()
            for group in saved["param_groups"]:
                for key in ("weight_decouple", "fixed_decay", "foreach", "fused"):
                    group.pop(key, None)  # as written before classes had these keys
            other = made(name, weight_decay=after)
            for mine, theirs in zip(other.param_groups[0]["params"], optimizer.param_groups[0]["params"], strict=True):
                mine.data.copy_(theirs.data)
            other.load_state_dict(saved)
            optimizer = other
        for group in optimizer.param_groups:
            group["weight_decay"] = after
        return trained(optimizer, seed=2)

    for before, after in ((0.0, 0.3), (0.3, 0.0)):
        assert torch.equal(switched(before, after, True), switched(before, after, False))


def test_a_group_of_biases_without_decay_beside_one_with_it() -> None:
    torch.manual_seed(0)
    weight, bias = (torch.nn.Parameter(torch.randn(n, dtype=torch.float64)) for n in (6, 3))
    groups = [{"params": [weight], "weight_decay": 0.5}, {"params": [bias], "weight_decay": 0.0}]
    alone = [torch.nn.Parameter(p.detach().clone()) for p in (weight, bias)]
    together = rulec.torch.AdaBelief(groups, lr=0.02)
    apart = [
        pytorch_optimizer.AdaBelief([alone[0]], lr=0.02, weight_decay=0.5, rectify=False),
        pytorch_optimizer.AdaBelief([alone[1]], lr=0.02, weight_decay=0.0, rectify=False),
    ]
    for side in ([together], apart):
        torch.manual_seed(1)
        for _ in range(4):
            for optimizer in side:
                for p in (p for group in optimizer.param_groups for p in group["params"]):
                    p.grad = torch.randn_like(p)
            for optimizer in side:
                optimizer.step()
    torch.testing.assert_close(weight, alone[0], rtol=1e-12, atol=0)
    torch.testing.assert_close(bias, alone[1], rtol=1e-12, atol=0)


# Keys of groups


def test_a_key_of_a_group_that_nothing_reads_warns_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(interfaces, "_warned", set())
    params = [torch.nn.Parameter(torch.zeros(3, 2))]
    with pytest.warns(
        UserWarning, match=r"^a group of SOAP has 'evry', which SOAP does not read; did you mean 'every'\?$"
    ):
        rulec.torch.SOAP([{"params": params, "evry": 3}])
    with pytest.warns(
        UserWarning, match=r"^a group of Lion has 'kind', which Lion does not read: remove it, if nothing"
    ):
        rulec.torch.Lion([{"params": params, "kind": "head"}])
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        rulec.torch.SOAP([{"params": params, "evry": 3}])


def test_keys_of_schedulers_and_trainers_pass(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(interfaces, "_warned", set())
    layer = torch.nn.Linear(3, 2)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        optimizer = rulec.torch.SGDW(
            [{"params": [*layer.named_parameters()], "lr_scale": 0.5, "name": "head", "_mine": object()}], momentum=0.9
        )
        schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=0.1, total_steps=5)
        layer(torch.ones(1, 3)).sum().backward()
        optimizer.step()
        schedule.step()
        again = rulec.torch.SGDW([{**optimizer.param_groups[0], "params": [*layer.parameters()]}])
    assert again.param_groups[0]["max_lr"] == 0.1
