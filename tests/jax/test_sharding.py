"""Steps over eight devices: shardings that stay, the collectives that XLA adds, and the numbers of one device."""

from __future__ import annotations

import json
import math
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import rulec

ROOT = Path(__file__).parents[2]

ELEMENTWISE = {"adamw": "step", "lion": "transform"}
REDUCING = {"lamb": "transform", "adafactor": "step", "transforms/clip_by_global_norm": "transform"}
MATRICES = {"muon": "step"}

#: Rules whose products, joined axes or factors JAX does not shard by types alone.
EXPLICIT = ("muon", "shampoo", "soap", "galore", "adafactor", "sgd")

#: Those that take longer to compile.
MORE = {
    "nadam": "step", "schedule_free_adamw": "transform", "prodigy": "step", "novograd": "step", "came": "step",
    "sm3": "step", "shampoo": "step",
}  # fmt: skip


def found_by_eight(**asked: Any) -> dict[str, Any]:
    command = [sys.executable, "-m", "tests.jax.sharded", json.dumps(asked)]
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    found = json.loads(done.stdout)
    assert found["devices"] == 8
    return dict(found)


@pytest.fixture(scope="module")
def found() -> dict[str, Any]:
    rules = {**ELEMENTWISE, **REDUCING, **MATRICES}
    return found_by_eight(
        rules=rules, eager=["adamw"], shard_map=["adamw", "nadam"], traced=EXPLICIT, runs=["muon", "sgd"]
    )


@pytest.mark.parametrize("rule", [*ELEMENTWISE, *REDUCING, *MATRICES])
def test_states_begin_and_stay_as_their_parameters_are_sharded(found: dict[str, Any], rule: str) -> None:
    assert found["rules"][rule]["first"] == []
    assert found["rules"][rule]["after"] == []


@pytest.mark.parametrize("rule", [*ELEMENTWISE, *REDUCING, *MATRICES])
def test_numbers_are_those_of_one_device(found: dict[str, Any], rule: str) -> None:
    assert found["rules"][rule]["apart"] == []


@pytest.mark.parametrize("rule", ELEMENTWISE)
def test_elementwise_rules_add_no_collective(found: dict[str, Any], rule: str) -> None:
    assert found["rules"][rule]["collectives"] == {}


@pytest.mark.parametrize(("rule", "sums"), [("lamb", 2), ("transforms/clip_by_global_norm", 1)])
def test_reductions_add_the_sums_of_numbers_that_they_need(found: dict[str, Any], rule: str, sums: int) -> None:
    """Of the eight parameters seven are sharded: one over both axes by each, so by two sums or one of both."""
    collectives = found["rules"][rule]["collectives"]
    assert list(collectives) == ["all-reduce"]
    assert len(collectives["all-reduce"]) <= 3  # along one axis of the mesh, along the other, and along both
    numbers = re.findall(r"f64\[\]", " ".join(collectives["all-reduce"]))
    assert 7 * sums <= len(numbers) <= 8 * sums
    assert set(re.findall(r"f\d+\[[^\]]*\]", " ".join(collectives["all-reduce"]))) == {"f64[]"}


def test_factors_are_sharded_along_the_axis_that_they_have(found: dict[str, Any]) -> None:
    factors = found["rules"]["adafactor"]["factors"]
    assert {n: factors["r"][n] for n in ("rows", "cols", "both")} == {
        "rows": "P('x',)",
        "cols": "P()",
        "both": "P('x',)",
    }
    assert [factors["c"][n] for n in ("rows", "cols", "both")] == ["P()", "P(None, 'y')", "P(None, 'y')"]


@pytest.mark.parametrize("rule", REDUCING)
def test_no_parameter_is_gathered_for_a_reduction(found: dict[str, Any], rule: str) -> None:
    for results in found["rules"][rule]["collectives"].values():
        for sides in re.findall(r"\[([\d,]*)\]", " ".join(results)):
            assert math.prod(int(x) for x in sides.split(",") if x) < 128


def test_steps_that_nobody_else_compiles_keep_shardings(found: dict[str, Any]) -> None:
    assert found["eager"] == {"adamw": []}


def test_each_device_may_step_its_own_part(found: dict[str, Any]) -> None:
    assert found["shard_map"] == {"adamw": [], "nadam": []}


@pytest.mark.parametrize("rule", EXPLICIT)
def test_parameters_updates_and_states_keep_their_types_on_explicit_axes(found: dict[str, Any], rule: str) -> None:
    assert found["traced"][rule] == []


@pytest.mark.parametrize("rule", ["muon", "sgd"])
def test_rules_run_on_both_kinds_of_mesh(found: dict[str, Any], rule: str) -> None:
    assert found["runs"][rule] == {"Auto": [], "Explicit": []}


#: Every rule that runs by itself, and what wraps one.
EVERY = [rule for rule in rulec.rules() if not rulec.load(rule).wraps] + [
    f"{rule.removeprefix('transforms/')}(adam)" for rule in rulec.rules() if rulec.load(rule).wraps
]


@pytest.mark.slow
def test_every_rule_runs_on_both_kinds_of_mesh() -> None:
    # What low_rank has of a small parameter is of its shape, and in another basis.
    found = found_by_eight(traced=[rule for rule in EVERY if "low_rank" not in rule], runs=EVERY)
    assert {rule: lost for rule, lost in found["traced"].items() if lost} == {}
    assert {rule: lost for rule, lost in found["runs"].items() if lost != {"Auto": [], "Explicit": []}} == {}
    assert len(EVERY) > 70


@pytest.mark.slow
def test_what_parts_devices_is_rounding_alone() -> None:
    """Muon rounds to bfloat16 on the way, and SOAP divides by what may be rounding: without that nothing is left."""
    apart = found_by_eight(rounding=True)["rounding"]
    assert apart["muon in float32"] < 1e-5
    assert apart["muon in bfloat16"] < 2**-7
    assert apart["soap of full rank"] < 1e-12
    assert apart["soap of less rank, covariances"] < 1e-12


@pytest.mark.slow
def test_more_rules_keep_shardings_and_numbers() -> None:
    found = found_by_eight(rules=MORE, eager=["lamb"], shard_map=["lion", "schedule_free_sgd"])
    for rule, report in found["rules"].items():
        assert (rule, report["first"], report["after"], report["apart"]) == (rule, [], [], [])
    assert [found["rules"][rule]["collectives"] for rule in ("nadam", "schedule_free_adamw")] == [{}, {}]
    assert found["eager"] == {"lamb": []}
    assert found["shard_map"] == {"lion": [], "schedule_free_sgd": []}
