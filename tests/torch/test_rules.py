"""Every rule of the library as an optimizer of torch: some steps of two groups, the last of them from a checkpoint."""

from __future__ import annotations

import io
from typing import Any

import pytest
import torch
from torch import Tensor

import rulec
import rulec.torch
from rulec.language.rule import Rule
from tests.library import by_kind, single
from tests.torch.twins import QUICK, difference, give_gradients, parameters

#: What models have: a matrix each way, a convolution, biases, a single number.
SHAPES = ((6, 8), (8,), (), (4, 3, 2, 2), (12, 6), (5,))

WRAPPERS = [name for name in rulec.rules() if rulec.load(name).wraps]


def rule_named(name: str) -> Rule:
    """A rule of the library; of a wrapper, what it makes of Adam, which all of them take."""
    rule = rulec.load(name)
    return rule(*[rulec.load("adam")] * len(rule.wraps)) if rule.wraps else rule  # type: ignore[no-any-return]


def groups_of(params: list[Tensor], **options: Any) -> list[dict[str, Any]]:
    """Two groups with hyper-parameters of their own; tags, so that every class routes what its rule does not take."""
    return [{"params": params[:3], "tags": []}, {"params": params[3:], "tags": ["embedding"], **options}]


#: What rules are made with, so that every tensor moves in ten steps: small matrices, a short history, all weights.
SMALL = {"rank": 2, "keep": 3, "cutoff": 10}


def make(name: str, params: list[Tensor]) -> torch.optim.Optimizer:
    kind = rulec.torch.optimizer(name if name not in WRAPPERS else rule_named(name))
    whole = rule_named(name).standalone()
    keywords = {key: value for key, value in SMALL.items() if key in whole.all_hyper}
    own = {"lr": 0.02} if "lr" in whole.hyper else {}
    return kind(groups_of(params, **own), backend=QUICK, **keywords)


def advance(optimizer: torch.optim.Optimizer, params: list[Tensor], steps: range) -> None:
    for number in steps:
        give_gradients(params, number)
        optimizer.step()


def through_a_file(state: dict[str, Any]) -> dict[str, Any]:
    file = io.BytesIO()
    torch.save(state, file)
    file.seek(0)
    return torch.load(file, weights_only=True)  # type: ignore[no-any-return]


#: Rules of elements with and without states, of norms, of matrices, of the model, a wrapper, one that draws numbers,
#: one whose groups remember, one that is evaluated elsewhere.
KINDS = ["adamw", "sgd", "lamb", "muon", "prodigy", "transforms/lookahead", "apollo", "nadam", "schedule_free_adamw"]


@pytest.mark.parametrize(
    ("name", "dtype"),
    [*by_kind((name, torch.float32) for name in single()), *((name, torch.bfloat16) for name in KINDS)],
)
def test_a_checkpoint_goes_on_bit_for_bit(name: str, dtype: torch.dtype) -> None:
    params = parameters(dtype, SHAPES)
    before = [p.detach().clone() for p in params]
    optimizer = make(name, params)
    advance(optimizer, params, range(5))
    saved = through_a_file(optimizer.state_dict())
    others = [torch.nn.Parameter(p.detach().clone()) for p in params]
    again = make(name, others)
    again.load_state_dict(saved)
    advance(optimizer, params, range(5, 10))
    advance(again, others, range(5, 10))
    assert all(p.isfinite().all() for p in params)
    assert difference(others, params) == 0
    if dtype is torch.float32:  # the first steps of some rules are below what bfloat16 can add
        assert any((p != b).any() for p, b in zip(params, before, strict=True))
    one, two = optimizer.state_dict(), again.state_dict()
    assert one["param_groups"] == two["param_groups"]
    for index, states in one["state"].items():
        assert all(torch.equal(value, two["state"][index][key]) for key, value in states.items())


def test_every_rule_has_its_class_or_is_made_by_composition() -> None:
    for name in rulec.rules():
        if "/" not in name:
            kind = rulec.torch.optimizer(name)
            assert kind is getattr(rulec.torch, rulec.load(name).name)
