"""Our hyper-parameters as other libraries' keywords."""

from __future__ import annotations

import torch

import rulec
from rulec.runtime.engine import default_hyper
from rulec.tools.compare.target import entry_for, translate


def test_an_entry_is_followed() -> None:
    rule = rulec.load("rprop").standalone()
    entry = entry_for(rule, "torch", "Rprop")
    found = translate(default_hyper(rule, {"eta_plus": 1.5}), torch.optim.Rprop, entry, {})
    assert found.keywords == {"lr": 0.01, "etas": (0.5, 1.5), "step_sizes": (1e-6, 50.0)}
    assert found.states == {"prev": "prev", "delta": "step_size"}
    assert found.left_out == ()


def test_given_keywords_win() -> None:
    rule = rulec.load("adam").standalone()
    entry = entry_for(rule, "torch", "Adam")
    found = translate(default_hyper(rule, {}), torch.optim.Adam, entry, {"lr": 7.0, "amsgrad": True})
    assert (found.keywords["lr"], found.keywords["amsgrad"]) == (7.0, True)


def test_without_an_entry_names_decide() -> None:
    def theirs(params: object, learning_rate: float, b1: float, b2: float, betas: tuple[float, float] = (0, 0)) -> None:
        """Stands for a library of which rules say nothing."""

    found = translate({"lr": 1.0, "beta1": 0.1, "beta2": 0.2, "rho": 0.5}, theirs, {}, {})
    assert found.keywords == {"learning_rate": 1.0, "b1": 0.1, "b2": 0.2, "betas": (0.1, 0.2)}
    assert found.left_out == ("rho",)


def test_betas_that_cannot_all_be_told_are_left_to_theirs() -> None:
    found = translate({"lr": 1.0, "beta": 0.9}, torch.optim.Adam, {}, {})
    assert found.keywords == {"lr": 1.0}
    assert found.left_out == ("beta",)


def test_a_rule_without_a_section_has_no_entry() -> None:
    assert entry_for(rulec.load("lion"), "torch", "Lion") == {}


def test_whole_numbers_are_whole_where_theirs_are() -> None:
    rule = rulec.load("muon").standalone()
    found = translate(default_hyper(rule, {}), torch.optim.Muon, entry_for(rule, "torch", "Muon"), {})
    assert type(found.keywords["ns_steps"]) is int
    assert type(found.keywords["lr"]) is float
