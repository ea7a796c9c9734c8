"""Classes: one for each rule, with torch's keywords, a signature and a docstring made from the rule."""

from __future__ import annotations

import inspect
import subprocess
import sys
import typing
from collections import UserList
from pathlib import Path
from typing import Any

import pytest
import torch

import rulec
import rulec.torch
from rulec.errors import HyperError, RuleError
from rulec.language.library.load import interop_entries, titles
from rulec.torch.classes import class_named, class_names, torch_classes
from tests.torch.twins import difference, give_gradients, parameters

TORCH = [
    "ASGD",
    "Adadelta",
    "Adafactor",
    "Adagrad",
    "Adam",
    "AdamW",
    "Adamax",
    "NAdam",
    "RAdam",
    "RMSprop",
    "Rprop",
    "SGD",
]


def test_the_index_says_what_the_rules_say() -> None:
    names, classes = {}, {}
    for file in rulec.rules():
        if not file.startswith("transforms/"):
            rule = rulec.load(file)
            names[rule.name] = file
            for entry in interop_entries(rule, "torch"):
                classes.setdefault(entry["class"], []).append(file)
    assert titles() == names
    assert torch_classes() == {kind: tuple(dict.fromkeys(files)) for kind, files in classes.items()}


def test_every_rule_has_a_class() -> None:
    assert set(TORCH) <= set(class_names())
    assert {rulec.load(file).name for file in rulec.rules() if "/" not in file} <= set(class_names())
    for name in class_names():
        kind = getattr(rulec.torch, name)
        assert kind.__name__ == name
        assert issubclass(kind, torch.optim.Optimizer)
        assert kind is class_named(name)
    assert set(dir(rulec.torch)) >= set(class_names())
    with pytest.raises(AttributeError, match="no attribute 'AdamX'"):
        _ = rulec.torch.AdamX


@pytest.mark.parametrize("name", TORCH)
def test_keywords_are_those_of_torch(name: str) -> None:
    ours = inspect.signature(getattr(rulec.torch, name)).parameters
    theirs = inspect.signature(getattr(torch.optim, name)).parameters
    assert [k for k in ours if k in theirs and ours[k].kind == theirs[k].kind] == list(
        inspect.Signature(sorted(theirs.values(), key=lambda p: p.kind)).parameters
    )
    assert set(ours) - set(theirs) - {"capturable"} == {
        "state_dtype",
        "weights",
        "backend",
        "seed",
        "watch",
        "watch_every",
        "offload",
        "offload_buffer",
        "offload_pinned",
    }
    assert all(ours[k].default == theirs[k].default for k in theirs)
    defaults = getattr(torch.optim, name)(parameters()).defaults
    assert getattr(rulec.torch, name)(parameters()).defaults == defaults


def test_docstrings_give_mathematics_ranges_and_sources() -> None:
    text = rulec.torch.AdamW.__doc__
    assert text is not None
    assert "m_hat = m/(1 - beta1**t)" in text
    assert "AMSGrad (amsgrad=True) computes" in text
    assert "https://arxiv.org/abs/1711.05101" in text
    assert "beta2 at least 0 and below 1" in text
    for name in class_names():
        kind = getattr(rulec.torch, name)
        assert kind.__doc__
        keywords = inspect.signature(kind).parameters
        assert all(f"    {keyword}: " in kind.__doc__ for keyword in keywords)
        assert keywords.keys() <= typing.get_type_hints(kind.__init__).keys()


def test_positional_arguments() -> None:
    optimizer = rulec.torch.SGD(parameters(), 0.5, 0.9)
    assert (optimizer.defaults["lr"], optimizer.defaults["momentum"]) == (0.5, 0.9)
    with pytest.raises(HyperError, match="too many positional arguments"):
        rulec.torch.SGD(parameters(), 0.5, 0.9, 0, 0, False, True)


def test_betas_are_one_tuple() -> None:
    assert list(inspect.signature(rulec.torch.Adan).parameters)[:3] == ["params", "lr", "betas"]
    assert rulec.torch.Adan(parameters()).defaults["betas"] == (0.98, 0.92, 0.99)
    # so that this scheduler can cycle them
    torch.optim.lr_scheduler.OneCycleLR(rulec.torch.Lion(parameters()), 0.1, total_steps=5)


def test_a_class_of_a_rule() -> None:
    assert rulec.torch.optimizer("adamw") is rulec.torch.AdamW
    assert rulec.torch.optimizer("lion") is rulec.torch.Lion
    rule = rulec.load("adam") + rulec.load("decay").bind(weight_decay=0.5)
    kind = rulec.torch.optimizer(rule)
    assert kind is rulec.torch.optimizer(rulec.parse(rule.to_yaml()))
    ours, theirs = parameters(torch.float64), parameters(torch.float64)
    give_gradients(ours, 0)
    give_gradients(theirs, 0)
    optimizer = kind(ours, lr=0.1, betas=(0.8, 0.9))
    optimizer.step()
    torch.optim.AdamW(theirs, lr=0.1, betas=(0.8, 0.9), weight_decay=0.5).step()
    assert difference(ours, theirs) <= 8
    assert set(optimizer.state[ours[0]]) == {"step", "m", "v"}


def test_a_class_of_a_file_and_of_a_function(tmp_path: Path) -> None:
    file = tmp_path / "signed.yaml"
    file.write_text("name: Signed\nhyper: {lr: 0.5}\nstep: |\n  direction = sign(g)\n")
    params = [torch.nn.Parameter(torch.zeros(2))]
    params[0].grad = torch.tensor([3.0, -2.0])
    rulec.torch.optimizer(file)(params).step()
    assert params[0].tolist() == [-0.5, 0.5]
    rulec.torch.optimizer(str(file))(params, lr=0.25).step()
    assert params[0].tolist() == [-0.75, 0.75]

    @rulec.rule(state={"m": 0})
    def slow(g, t, s, *, lr=0.5, beta=0.5):  # type: ignore[no-untyped-def]
        """Half of the mean."""
        s.m = beta * s.m + (1 - beta) * g
        return s.m / 2

    rulec.torch.optimizer(slow)(params).step()
    assert params[0].tolist() == [-0.75 - 0.5 * 0.75, 0.75 + 0.5 * 0.5]


def test_a_default_may_be_an_expression() -> None:
    rule = rulec.parse("name: R\nhyper: {lr: 0.5, a: 0.25, b: sqrt(a)}\nstep: |\n  direction = b*g")
    for keywords, moved in (({}, 0.25), ({"a": 1.0}, 0.5), ({"a": 1.0, "b": 0.1}, 0.05)):
        params = [torch.nn.Parameter(torch.zeros(1, dtype=torch.float64))]
        params[0].grad = torch.ones(1, dtype=torch.float64)
        rulec.torch.optimizer(rule)(params, **keywords).step()
        assert params[0].item() == -moved


def test_the_last_of_a_tuple_may_follow_from_the_others() -> None:
    found = []
    for betas in ((0.8, 0.81), (0.8, 0.81, None), (0.8, 0.81, 0.9), (0.8, 0.81, 0.5)):
        params = parameters(torch.float64)
        optimizer = rulec.torch.Prodigy(params, betas=betas, d0=0.1)
        for number in range(3):
            give_gradients(params, number)
            optimizer.step()
        found.append([optimizer.state[p]["s"] for p in params])
    assert difference(found[0], found[1]) == difference(found[0], found[2]) == 0
    assert difference(found[0], found[3]) > 1
    with pytest.raises(HyperError, match=r"betas=\(0.9,\) of Prodigy must be 3 numbers"):
        rulec.torch.Prodigy(params, betas=(0.9,))


def test_rules_that_cannot_run_say_so_when_a_class_is_asked_for() -> None:
    with pytest.raises(RuleError, match="Lookahead wraps another rule and has none here"):
        rulec.torch.optimizer("lookahead")
    with pytest.raises(RuleError, match="there is no rule 'adamv'"):
        rulec.torch.optimizer("adamv")


TAKEN = [
    "params", "self", "param_names", "initial_lr", "maximize", "capturable", "fused", "foreach", "differentiable",
    "state_dtype", "backend", "tags", "seed", "train_mode", "updates", "model_updates",
]  # fmt: skip


@pytest.mark.parametrize("name", TAKEN)
def test_a_hyper_parameter_called_as_a_keyword_or_entry_of_groups_is_refused(name: str) -> None:
    """It may be renamed, and then steps read it."""
    rule = rulec.parse(f"name: R\nhyper: {{{name}: 2}}\nstep: |\n  direction = {name}*g\n")
    says = (
        f"^R has a hyper-parameter '{name}', which torch's optimizers have for something else: call it otherwise, as "
        f"{name}_, in the rule or by bind\\({name}='{name}_'\\)$"
    )
    with pytest.raises(RuleError, match=says):
        rulec.torch.optimizer(rule)
    param = torch.nn.Parameter(torch.ones(2))
    opt = rulec.torch.optimizer(rule.bind(**{name: f"{name}_"}))([param], lr=0.5, **{f"{name}_": 3})
    param.grad = torch.ones(2)
    opt.step()
    assert param.tolist() == [-0.5, -0.5]


@pytest.mark.parametrize("called", ["step", "n"])
def test_no_two_states_have_one_name_in_torch(called: str) -> None:
    text = f"name: R\ninterop: {{torch: {{class: R, state: {{m: {called}}}}}}}\nstate: {{m: 0, n: 0}}\n"
    rule = rulec.parse(text + "step: |\n  m = m + g\n  n = n + m\n  direction = n\n")
    with pytest.raises(RuleError, match=f"the interop section of R calls a state '{called}', as another value is"):
        rulec.torch.optimizer(rule)


@pytest.mark.slow
def test_importing_it_imports_torch_and_nothing_else_that_is_heavy() -> None:
    """What is imported with it, tests/test_layering.py reads every day."""
    program = """
import sys, torch, numpy
before = set(sys.modules)
import rulec.torch
parameter = torch.nn.Parameter(torch.ones(2))
parameter.grad = torch.ones(2)
optimizer = rulec.torch.SGD([parameter], lr=0.1)
optimizer.step()
optimizer.zero_grad()
print([m for m in ("sympy", "numba", "jax", "triton", "optax", "torch._dynamo") if m in set(sys.modules) - before])
"""
    first = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    again = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert first.stderr == again.stderr == ""
    assert again.stdout == "[]\n"


@pytest.mark.parametrize(("name", "keyword"), [("AdamW", "betas"), ("Lion", "betas"), ("AggMo", "betas")])
def test_a_sequence_of_another_package_is_kept_as_a_tuple(name: str, keyword: str) -> None:
    """A list of a configuration, as hydra gives it, would be in every checkpoint."""
    params = [torch.nn.Parameter(torch.ones(3))]
    optimizer = getattr(rulec.torch, name)(params, lr=0.1, **{keyword: UserList([0.5, 0.75])})
    assert optimizer.state_dict()["param_groups"][0][keyword] == (0.5, 0.75)
    twin = getattr(rulec.torch, name)([torch.nn.Parameter(torch.ones(3))], lr=0.1, **{keyword: (0.5, 0.75)})
    for each in (optimizer, twin):
        each.param_groups[0]["params"][0].grad = torch.ones(3)
        each.step()
    assert torch.equal(params[0], twin.param_groups[0]["params"][0])


@pytest.mark.parametrize(
    ("keywords", "betas"),
    [
        ({}, (0.9, 0.999, 0.999)),
        ({"ema_rate": 0.7}, (0.9, 0.999, 0.7)),
        ({"betas": (0.8, 0.9)}, (0.8, 0.9, 0.999)),
        ({"betas": (0.8, 0.9), "ema_rate": 0.7}, (0.8, 0.9, 0.7)),
        ({"betas": (0.8, 0.9, 0.6)}, (0.8, 0.9, 0.6)),
    ],
)
def test_a_word_of_a_namesake_may_be_the_end_of_a_tuple(keywords: dict[str, Any], betas: tuple[float, ...]) -> None:
    params = [torch.nn.Parameter(torch.zeros(4, 4))]
    assert rulec.torch.SPlus(params, **keywords).param_groups[0]["betas"] == betas
    group = {"params": params, **keywords}
    of_group = rulec.torch.SPlus([group], betas=(0.1, 0.2, 0.3)).param_groups[0]["betas"]
    expected = {(): (0.1, 0.2, 0.3), ("ema_rate",): (0.1, 0.2, 0.7), ("betas",): (*keywords.get("betas", ()), 0.3)[:3]}
    assert of_group == expected.get(tuple(keywords), betas)
