"""Optimizers by the text of their rule, a class's name, or a file."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn

import rulec
import rulec.torch
from rulec.errors import HyperError, RuleError
from rulec.integrations.from_rule import class_and_keywords, from_rule


def net() -> nn.Module:
    return nn.Sequential(nn.Linear(4, 8), nn.Linear(8, 8), nn.Linear(8, 3))


def test_it_is_the_class_of_the_rule() -> None:
    params = [*net().parameters()]
    clipped = from_rule(params, "clip_by_global_norm >> adamw", lr=0.1, hyper={"max_norm": 2.0})
    assert type(clipped).__name__ == "ClipByGlobalNormThenAdamW"
    assert (clipped.param_groups[0]["lr"], clipped.param_groups[0]["max_norm"]) == (0.1, 2.0)
    assert type(from_rule(params, "adamw")) is rulec.torch.AdamW
    assert type(from_rule(params, "ScheduleFreeAdamW")) is rulec.torch.ScheduleFreeAdamW
    assert from_rule(params, "adamw").param_groups[0]["lr"] == rulec.torch.AdamW(params).param_groups[0]["lr"]


def test_it_may_be_a_file(tmp_path: Path) -> None:
    file = tmp_path / "mine.yaml"
    file.write_text("name: Mine\nhyper: {lr: 0.5}\nstep: |\n  direction = sign(g)\n")
    param = nn.Parameter(torch.ones(3))
    optimizer = from_rule([param], str(file))
    param.grad = torch.tensor([1.0, -1.0, 0.0])
    optimizer.step()
    assert param.tolist() == [0.5, 1.5, 1.0]


def test_rules_for_hidden_matrices_tag_parameters_unless_they_are_told_not_to() -> None:
    params = [*net().parameters()]
    routing = from_rule(params, "muon").routing()  # type: ignore[attr-defined]
    assert [route.rule.name for route in routing if route.param.dim() == 2] == ["AdamW", "Muon", "AdamW"]
    assert from_rule(params[::2], "normuon", auto=False).routing()[0].rule.name == "NorMuon"  # type: ignore[attr-defined]
    assert class_and_keywords("lion", {"lr": 1.0}) == (rulec.torch.Lion, {"lr": 1.0})


def test_mistakes_are_one_sentence() -> None:
    with pytest.raises(HyperError, match=r"Lion has no keyword 'auto'"):
        from_rule(net().parameters(), "lion", auto=True)
    with pytest.raises(HyperError, match=r"Lion has no keyword 'beta1': give betas=\(beta1, beta2\)"):
        from_rule(net().parameters(), "lion", hyper={"beta1": 0.5})
    with pytest.raises(RuleError, match="there is no rule 'lionn'; did you mean 'lion'"):
        from_rule(net().parameters(), "lionn")


def test_words_of_namesakes_are_keywords() -> None:
    params = [torch.nn.Parameter(torch.zeros(4, 4))]
    assert from_rule(params, "SOAP", hyper={"precondition_frequency": 3}).param_groups[0]["every"] == 3
