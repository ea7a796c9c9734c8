"""`rulec check`."""

from __future__ import annotations

from pathlib import Path

import pytest

from rulec.language.statistics import NORMS
from tests.cli.running import error, invoke, run, run_json

MATRIX = """\
name: Rooted
hyper: {lr: 1e-3, beta: 0.9}
state: {m: 0, size: {init: 0, per: tensor}}
step: |
  m = beta*m + (1 - beta)*g
  size = beta*size + (1 - beta)*norm(g)
  direction = m / (size + 1e-8)
"""


def test_what_a_step_moves_and_keeps() -> None:
    report = run_json("check", "adamw", "--steps", "3")
    (facts,) = report["programs"]
    assert facts["scope"] == "elementwise"
    assert facts["bytes_read"] == {"p": 4, "g": 4, "m": 4, "v": 4}
    assert facts["bytes_written"] == {"m": 4, "v": 4, "p": 4}
    assert facts["state_bytes"] == {"m": 4, "v": 4}
    assert facts["hoisted"]["sqrt_one_minus_beta2_t"] == "sqrt(1 - beta2**t)"
    assert facts["stores"] == 3
    assert facts["bytes_moved"] == 28 < facts["bytes_unfused"]


def test_exactness_is_of_the_reference_and_of_the_backend() -> None:
    sides = run_json("check", "adamw", "--steps", "3")["oracle"]["sides"]
    assert [(s["side"], s["dtype"]) for s in sides] == [("reference", "float64"), ("cpu", "float32")]
    for side in sides:
        assert set(side["ulps"]) == {"m", "v", "p"}
        assert 0 < max(side["ulps"].values()) < 8


def test_scalar_states_and_their_bytes() -> None:
    (facts,) = run_json("check", "nadam", "--steps", "2")["programs"]
    assert facts["narrow_states"] == {"mu_product": "per tensor"}
    assert set(facts["scalar_states"]) == {"mu_product"}
    assert sum(facts["state_bytes"].values()) == 8


def test_a_rule_with_a_reduction_runs_on_both_sides(tmp_path: Path) -> None:
    file = tmp_path / "rooted.yaml"
    file.write_text(MATRIX)
    report = run_json("check", str(file), "--steps", "3")
    (facts,) = report["programs"]
    assert (facts["scope"], facts["stages"]) == ("tensor", 2)
    assert facts["bytes_read"]["g"] == 8  # both stages read it
    reference, cpu = report["oracle"]["sides"]
    for side in (reference, cpu):
        assert set(side["ulps"]) == {"m", "size", "p"}
        assert 0 < max(side["ulps"].values()) < 8


@pytest.mark.parametrize("rule", ["adafactor", "prodigy", "lookahead(adamw)", "clip_by_global_norm >> adamw"])
def test_rows_the_model_and_compositions_are_as_exact_as_elementwise_rules(rule: str) -> None:
    report = run_json("check", rule, "--steps", "2")
    assert report["oracle"]["sides"][1]["side"] == "cpu"
    assert 0 < report["oracle"]["sides"][1]["ulps"]["p"] < 8


def test_a_routed_rule_shows_the_program_of_each_tensor() -> None:
    report = run_json("check", "muon", "--steps", "2")
    assert [p["rule"] for p in report["programs"]] == ["Muon", "AdamW"]
    assert [s["side"] for s in report["oracle"]["sides"] if "ulps" in s] == ["reference", "cpu"]


def test_what_cannot_be_held_against_50_digits_says_why(tmp_path: Path) -> None:
    file = tmp_path / "turned.yaml"
    head = "name: Turned\nhyper: {lr: 1}\napplies_to: ndim == 2\notherwise: sgd"
    file.write_text(f"{head}\nstep: |\n  direction = eigh(eye(rows)) @ g\n")
    for side in run_json("check", str(file), "--steps", "2")["oracle"]["sides"]:
        assert side["reason"].startswith("eigh of a matrix of 4 rows has no 50-digit form here: two of its eigenvalues")


def test_rules_with_eigenvectors_are_held_against_50_digits() -> None:
    for side in run_json("check", "soap", "--steps", "2")["oracle"]["sides"]:
        assert side["ulps"]["p"] < 4
        assert side["ulps"]["ql"] > 0


def test_jax_runs_several_stages() -> None:
    reference, jax = run_json("check", "lamb", "--steps", "2", "--backend", "jax")["oracle"]["sides"]
    assert "ulps" in reference
    assert "ulps" in jax


def test_a_rule_with_inputs_is_run_with_some(tmp_path: Path) -> None:
    file = tmp_path / "second.yaml"
    file.write_text("name: Second\ninputs: {curvature: like p}\nstep: |\n  direction = g/(abs(curvature) + 1e-3)\n")
    report = run_json("check", str(file), "--steps", "2")
    assert report["programs"][0]["bytes_read"] == {"p": 4, "g": 4, "curvature": 4}
    assert [side["ulps"].keys() for side in report["oracle"]["sides"]] == [{"p"}, {"p"}]
    assert "Second has inputs (curvature)" in error("diff", str(file), "--against", "torch.optim.SGD")


def test_each_rule_of_a_rule_with_passes_is_held_against_50_digits() -> None:
    sides = run_json("check", "sam(adam)", "--steps", "2")["oracle"]["sides"]
    assert [side["rule"] for side in sides] == ["SAMAdamClimb", "SAMAdamClimb", "SAMAdam", "SAMAdam"]
    assert all(0 < side["ulps"]["p"] < 8 for side in sides)


def test_a_rule_with_two_programs_shows_both(tmp_path: Path) -> None:
    file = tmp_path / "split.yaml"
    file.write_text("name: Split\nstep: |\n  if ndim >= 2:\n    direction = sign(g)\n  else:\n    direction = g\n")
    matrix, vector = run_json("check", str(file), "--steps", "2")["programs"]
    assert (matrix["shapes"], vector["shapes"]) == (["(4, 6)"], ["(5,)"])
    assert matrix["operations"] == vector["operations"] + 1
    assert "for tensors of shape (5,)" in run("check", str(file), "--steps", "2")


def test_the_text_has_every_part() -> None:
    shown = run("check", "nadam", "--dtype", "float64", "--steps", "2")
    assert shown.startswith("NAdam is a valid rule\n")
    for part in ("scope", "reads", "writes", "state", "hoisted", "fused", "exactness"):
        assert f"\n  {part} " in shown
    assert "mu_product per tensor" in shown
    assert "cpu in float64: m " in shown


def test_mistakes(tmp_path: Path) -> None:
    assert "there is no rule file" in error("check", str(tmp_path / "none.yaml"))
    assert "lr=-1.0 of Adam must be at least 0" in error("check", "adam", "--hyper", "lr=-1")
    assert "Adam has no hyper-parameter 'beta'" in error("check", "adam", "--hyper", "beta=0.5")


def test_scripts_get_all_mistakes_with_codes_and_places(tmp_path: Path) -> None:
    file = tmp_path / "wrong.yaml"
    file.write_text("name: A\nstep: |\n  x = h\n  direction = k\n")
    (first, second) = run_json("check", str(file), code=2)["mistakes"]
    assert {key: first[key] for key in ("code", "line", "column")} == {"code": "expression", "line": 3, "column": 7}
    assert (second["code"], second["line"]) == ("expression", 4)
    assert run_json("check", "nobody", code=2)["mistakes"][0]["code"] == "missing"


def test_a_wrapper_is_valid_by_itself(tmp_path: Path) -> None:
    file = tmp_path / "half.yaml"
    file.write_text("name: Half\nwraps: inner\nstep: |\n  direction = inner(g)/2\n")
    assert run("check", str(file)) == 'Half is a valid wrapper: check "half.yaml(adam)", or around another rule\n'
    assert run_json("check", str(file)) == {"rule": "Half", "wraps": "inner", "warnings": []}
    assert run_json("check", f"{file}(sgd)", "--steps", "2")["rule"] == "HalfSGD"
    file.write_text("name: Half\nwraps: inner\nstep: |\n  direction = inner.p\n")
    assert "'inner.p' has no value here: write inner(g) above this line" in error("check", str(file))


BRANCHED = """\
name: Branched
hyper: {lr: 1e-3, h: 0.25}
state: {m: 0}
step: |
  m = m + g
  if h > 0.2:
    a = 3
  else:
    a = g
  direction = sum(a) + 0*m
"""


def test_a_distance_beyond_the_bounds_is_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A compiler that forgets the other arm of a branch: the sum of a number is the number."""
    file = tmp_path / "branched.yaml"
    file.write_text(BRANCHED)
    assert run_json("check", str(file), "--steps", "2", "-b", "numpy")["oracle"]["beyond"] == []
    monkeypatch.setattr("rulec.compiler.lower.widened", lambda value, axes, inference: value)
    result = invoke("check", str(file), "--steps", "2", "-b", "numpy")
    assert result.exit_code == 1
    assert "numpy in float32: m 0.0, p " in result.stdout
    assert "numpy is wrong: p of Branched in float64 is " in result.stderr
    assert "ulps from 50 digits, and the bound is " in result.stderr
    (far,) = run_json("check", str(file), "--steps", "2", "-b", "numpy", code=1)["oracle"]["beyond"]
    assert (far["rule"], far["side"], far["name"]) == ("Branched", "numpy", "p")
    assert far["ulps"] > 1e12 > far["bound"]


def test_a_rule_that_cancels_digits_is_within_the_bounds(tmp_path: Path) -> None:
    file = tmp_path / "lossy.yaml"
    file.write_text("name: Lossy\nstate: {a: 0}\nstep: |\n  a = 1 - (1 - g*1e-14)\n  direction = a\n")
    oracle = run_json("check", str(file), "--steps", "2", "-b", "numpy")["oracle"]
    assert oracle["sides"][0]["ulps"]["a"] > 1e6
    assert oracle["beyond"] == []


def test_the_costs_of_statistics_stand_beside_those_of_the_step_without_them() -> None:
    arguments = ("check", "adamw", "--steps", "1", "--backend", "numpy")
    (facts,) = run_json(*arguments, "--watch", "norms", "--watch", "spread=rms(update - mean(update))")["programs"]
    (plain,) = run_json(*arguments)["programs"]
    costs = facts.pop("statistics")
    assert facts == plain
    assert costs["names"] == [*NORMS, "spread"]
    assert (costs["stages"], costs["bytes_moved"]) == (2, 36)
    assert costs["reductions"] == 8
    assert costs["without"] == {"bytes_moved": 28, "stages": 1, "reductions": 0}
    shown = run(*arguments, "--watch", "norms")
    assert "  statistics 28 bytes moved, 28 without; 1 stage, 1 without; 6 reductions, 0 without\n" in shown


def test_a_statistic_of_one_rule_of_two_costs_nothing_in_the_other() -> None:
    first, second = run_json("check", "racs", "--steps", "1", "--backend", "numpy", "--watch", "clip")["programs"]
    names = {each["rule"]: each["statistics"]["names"] for each in (first, second)}
    assert names == {"RACS": ["clip"], "Adam": []}
    assert "RACS has no statistic 'clap'" in error("check", "racs", "--watch", "clap")


def test_statistics_are_held_against_50_digits(monkeypatch: pytest.MonkeyPatch) -> None:
    arguments = ("check", "adamw", "--steps", "2", "--watch", "norms", "--watch", 'rows=max(update, per="row")')
    reference, cpu = run_json(*arguments)["oracle"]["sides"]
    for side in (reference, cpu):
        assert [*side["statistics"]] == [*NORMS, "rows"]
        assert side["statistics"]["param_norm"] < 4
        assert side["statistics"]["unchanged"] == 0
        assert 0 < side["statistics"]["update_norm"] < 1000
    assert "  statistics: grad_norm 0." in run(*arguments)
    assert "statistics" not in run_json(*arguments[:4])["oracle"]["sides"][0]
    monkeypatch.setattr("rulec.runtime.statistics._unless_skipped", lambda _, stays, numbers: numbers * (1 + 1e-6))
    result = invoke(*arguments, "-b", "numpy")
    assert result.exit_code == 1
    assert "numpy is wrong: grad_norm of AdamW in float64 is " in result.stderr


def test_statistics_of_a_narrow_dtype_are_of_the_numbers_in_memory() -> None:
    """Half the weights of a small rate stay as they are in bfloat16; the oracle counts the same."""
    arguments = ("--steps", "3", "--dtype", "bfloat16", "--hyper", "lr=1e-4", "--watch", "norms")
    (_, cpu) = run_json("check", "sgd", *arguments)["oracle"]["sides"]
    assert cpu["dtype"] == "bfloat16"
    assert cpu["statistics"]["unchanged"] == 0


def test_a_rule_with_passes_measures_at_its_last_point() -> None:
    sides = run_json("check", "sam(adam)", "--steps", "2", "--watch", "norms")["oracle"]["sides"]
    assert [(side["rule"], "statistics" in side) for side in sides] == [
        ("SAMAdamClimb", False), ("SAMAdamClimb", False), ("SAMAdam", True), ("SAMAdam", True),
    ]  # fmt: skip


def test_every_variant_is_checked(tmp_path: Path) -> None:
    """A static count decides how many states the rule has."""
    file = tmp_path / "varied.yaml"
    file.write_text("""\
name: Sums
hyper: {lr: 1e-3, n: {default: 2, static: true, whole: true}}
state: {m: {init: 0, count: n}}
variants: {n: [1, 3]}
step: |
  for i in range(n):
    m[i] = m[i] + g
  direction = m[0]
""")
    reports = run_json("check", str(file), "--steps", "1")["variants"]
    states = {name: [*each["programs"][0]["state_bytes"]] for name, each in reports.items()}
    assert states == {"Sums(n=1)": ["m_0"], "Sums(n=3)": ["m_0", "m_1", "m_2"]}
    assert all(each["oracle"]["sides"][1]["ulps"] for each in reports.values())
    valid = [line for line in run("check", str(file), "--steps", "1").splitlines() if "is a valid rule" in line]
    assert valid == ["Sums(n=1) is a valid rule", "Sums(n=3) is a valid rule"]
