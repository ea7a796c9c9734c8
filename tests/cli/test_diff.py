"""`rulec diff`."""

from __future__ import annotations

from pathlib import Path

import pytest

import rulec
from rulec.cli.diff import keywords
from rulec.errors import RulecError
from tests.cli.running import error, run, run_json


@pytest.mark.parametrize(
    ("rule", "theirs"),
    [
        ("adam", "torch.optim.Adam"),
        ("lion", "optax.lion"),
        ("l2 >> momentum", "torch.optim:SGD"),
        ("adamw", "adam + decay"),
    ],
)
def test_equal_rules_are_equal(rule: str, theirs: str) -> None:
    report = run_json("diff", rule, "--against", theirs, "--steps", "5")
    assert report["equal"]
    assert report["first"] is None
    assert max(report["largest"].values()) < 1e-12
    assert report["not_given"] == []


def test_states_are_compared_by_the_names_of_the_interop_section() -> None:
    report = run_json("diff", "adam", "--against", "torch.optim.Adam", "--steps", "3")
    assert set(report["largest"]) == {"m", "v", "p"}


def test_the_first_value_to_part_is_found() -> None:
    """torch keeps NAdam's product of momenta in float32: its first step shows it, before the parameter does."""
    report = run_json("diff", "nadam", "--against", "torch.optim.NAdam", "--steps", "5", code=1)
    assert not report["equal"]
    assert (report["first"]["step"], report["first"]["value"]) == (1, "mu_product")
    assert report["first"]["line"].startswith("mu_product = mu_product*mu (")
    assert report["largest"]["m"] < 1e-12 < report["largest"]["p"] < 1e-9
    run("diff", "nadam", "--against", "torch.optim.NAdam", "--steps", "5", "--tolerance", "1e-6")


def test_a_changed_rule_parts_where_it_was_changed(tmp_path: Path) -> None:
    changed = rulec.load("adam").to_yaml().replace("sqrt(v)/sqrt", "sqrt(v + eps)/sqrt")
    (tmp_path / "changed.yaml").write_text(changed)
    shown = run("diff", str(tmp_path / "changed.yaml"), "--against", "adam", "--steps", "2", code=1)
    assert "they part at step 1, first in p of tensor 0, element [0, 0]" in shown
    assert "\n  p = p - lr*direction\n  p            from 50 digits: ours " in shown


def test_the_side_nearer_to_50_digits_is_said() -> None:
    """torch keeps NAdam's product of momenta in float32, whose rounding is about 1e-8."""
    given = ("diff", "nadam", "--against", "torch.optim.NAdam", "--steps", "3")
    exact = run_json(*given, code=1)["exact"]
    assert list(exact) == ["mu_product", "p"]
    assert exact["mu_product"]["ours"] < 1e-15 < 1e-9 < exact["mu_product"]["theirs"] < 1e-7
    assert run(*given, code=1).endswith("beside NAdam's formulas in 50 digits, ours is nearer in mu_product and p\n")
    assert run_json("diff", "adam", "--against", "adam", "--steps", "1") | {"exact": {}, "verdict": None} == run_json(
        "diff", "adam", "--against", "adam", "--steps", "1"
    )


def test_other_formulas_are_told_from_rounding_and_missing_digits_are_said(tmp_path: Path) -> None:
    other = run_json("diff", "adabelief", "--against", "adam", "--steps", "2", code=1)["verdict"]
    assert "of theirs is more than float32 rounds: theirs has other formulas" in other
    file = tmp_path / "turned.yaml"
    head = "name: Turned\nhyper: {lr: 1}\napplies_to: ndim == 2\notherwise: sgd"
    file.write_text(f"{head}\nstep: |\n  direction = eigh(eye(rows)) @ (2*g)\n")
    missing = run_json("diff", str(file), "--against", "sgd", "--steps", "1", code=1)
    assert missing["exact"] == {}
    assert missing["verdict"].startswith("which is nearer to the exact values is not known: eigh of a matrix of 4 rows")


def test_values_of_hyper_parameters_reach_both_sides() -> None:
    run("diff", "adam", "--against", "torch.optim.Adam", "--hyper", "lr=0.3", "--hyper", "beta1=0.5", "--steps", "3")
    given = ("--theirs", "lr=0.2", "--hyper", "lr=0.1", "--steps", "3")
    assert run_json("diff", "sgd", "--against", "torch.optim.SGD", *given, code=1)["first"]["value"] == "p"


def test_every_backend_and_the_reference_can_be_ours() -> None:
    for backend in ("reference", "numpy", "cpu"):
        text = run("diff", "radam", "--against", "torch.optim.RAdam", "--backend", backend, "--steps", "3")
        assert "they agree within" in text


@pytest.mark.parametrize("backend", ["reference", "numpy", "cpu"])
@pytest.mark.parametrize(
    ("rule", "theirs"),
    [
        ("lamb", "optax.lamb"),
        ("adafactor", "torch.optim.Adafactor"),
        ("adamw >> trust_ratio", "lamb"),
        ("soap", "soap"),
        ("clip_by_global_norm >> muon", "clip_by_global_norm >> muon"),
    ],
)
def test_rules_with_reductions_and_matrices_are_compared(rule: str, theirs: str, backend: str) -> None:
    given = ("--hyper", "eps=1e-6") if theirs == "lamb" else ()
    report = run_json("diff", rule, "--against", theirs, "--backend", backend, "--steps", "4", *given)
    assert report["equal"]


def test_a_routed_rule_is_held_against_a_class_on_the_tensors_that_are_for_it() -> None:
    given = ("--against", "torch.optim.Muon", "--steps", "2", "--tolerance", "1e-3")
    assert run_json("diff", "muon", *given)["shapes"] == [[4, 6]]
    assert "on a tensor of shape (4, 6), which Muon applies to" in run("diff", "muon", *given)
    assert run_json("diff", "muon", "--against", "muon", "--steps", "2")["shapes"] == [[4, 6], [5]]


def test_jax_follows_a_rule_of_several_stages() -> None:
    assert run_json("diff", "lamb", "--against", "lamb", "--backend", "jax", "--steps", "2")["equal"]


def test_what_is_left_out_is_said() -> None:
    shown = run("diff", "yogi", "--against", "torch.optim.SGD", "--steps", "2", code=1)
    assert "not given to theirs, which has no such keyword: beta1, beta2, eps" in shown
    assert "not compared, because no state of theirs matches: m, v" in shown


def test_keywords() -> None:
    given = ["betas=0.9,0.99", "amsgrad=true", "foreach=none", "steps=3", "mode=fast"]
    assert keywords(given) == {"betas": (0.9, 0.99), "amsgrad": True, "foreach": None, "steps": 3, "mode": "fast"}
    for text in ("lr", "lr=", "=3", "a b=1"):
        with pytest.raises(RulecError, match="is not KEYWORD=VALUE"):
            keywords([text])


@pytest.mark.parametrize(
    ("theirs", "message"),
    [
        ("torch.optim.Adm", "torch.optim has no 'Adm'; did you mean 'Adam'?"),
        ("nowhere.Adam", "there is no module 'nowhere' here"),
        ("numpy.float64", "is neither a torch.optim.Optimizer class nor an optax function, nor a rule"),
        ("adamm", "names nothing to compare with"),
    ],
)
def test_mistakes(theirs: str, message: str) -> None:
    assert message in error("diff", "adam", "--against", theirs)


def test_a_keyword_theirs_does_not_take_is_said() -> None:
    message = error("diff", "adam", "--against", "torch.optim.Adam", "--theirs", "speed=3")
    assert "cannot be made" in message
    assert "speed" in message


def test_a_dtype_without_a_tolerance_is_refused() -> None:
    assert "a comparison runs in float64 or float32" in error("diff", "adam", "--against", "adam", "--dtype", "float16")
