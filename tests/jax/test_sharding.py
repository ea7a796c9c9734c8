"""Steps over eight devices: shardings that stay, the collectives that XLA adds, and the numbers of one device."""

from __future__ import annotations

import json
import math
import os
import re
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from jax.sharding import AxisType

from rulec.jax.step import pays
from rulec.language.expr.node import Op
from tests.jax.explicit import codes_layout, constraints, first_layout, traced

ROOT = Path(__file__).parents[2]

ELEMENTWISE = {"adamw": "step", "schedule_free_adamw": "transform"}
REDUCING = {"lamb": "transform", "adafactor": "step", "transforms/clip_by_global_norm": "transform"}
MORE = {
    "lion": "transform", "nadam": "step", "prodigy": "step", "novograd": "step", "came": "step", "sm3": "step",
    "shampoo": "step",
}  # fmt: skip

#: Rules whose products, joined axes or factors JAX does not shard by types alone, and others of each kind.
EXPLICIT = (
    "sgd", "adafactor", "muon", "shampoo", "soap", "galore", "apollo", "rprop", "schedule_free_adamw", "prodigy",
    "came", "sm3", "adam_mini", "adamp", "transforms/noise", "transforms/skip_not_finite", "transforms/adaptive_clip",
    "accumulate(adam)", "mechanic(adam)",
)  # fmt: skip

#: Formats of states: of eight bits, and with two codes in a byte.
CODED: tuple[dict[str, str] | str, ...] = ({"m": "int8", "v": "dynamic8"}, {"m": "dynamic4", "v": "dynamic4"})
MORE_CODED = ("float8_e4m3",)

#: Those that are run on both kinds of mesh; `make whole` runs more than three.
RUN = ("soap", "adafactor", "transforms/noise", "muon", "shampoo", "galore", "accumulate(adam)", "low_rank(adam)")

#: Quantiles of a tensor, of its rows and of its columns, which lie along several devices.
QUANTILES = """
name: QuantileClip
hyper: {lr: 0.1}
state: {m: 0, r: {init: 0, per: row}}
step: |
  m = 0.5*m + g
  limit = quantile(abs(m), 0.8)
  r = r + median(m, per="row")
  direction = clip(m, -limit, limit) + r*quantile(p, 0.3, per="col", interpolation="higher")
"""


@pytest.fixture
def quantiles(tmp_path: Path) -> str:
    """The file of a rule with quantiles."""
    file = tmp_path / "quantiles.yaml"
    file.write_text(QUANTILES)
    return str(file)


def test_quantiles_keep_the_types_of_explicit_axes(quantiles: str) -> None:
    assert traced(quantiles) == []


@pytest.mark.parametrize(
    "rule", [pytest.param(name, marks=pytest.mark.slow if i > 1 else []) for i, name in enumerate(EXPLICIT)]
)
def test_parameters_updates_and_states_keep_their_types_on_explicit_axes(rule: str) -> None:
    assert traced(rule) == []


#: A stack of equal matrices on its way to whole matrices, and back; U is what XLA chooses.
LINE = ["P(None, U, U)", "P('x', None, None)"]
PLANE = ["P(None, U, U)", "P('y', U, U)", "P(('y', 'x'), None, None)"]


@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit])
def test_devices_of_a_mesh_orthogonalize_whole_matrices(kind: AxisType) -> None:
    def asked(count: int, sides: tuple[int, ...], shape: tuple[int, ...] = (16, 8)) -> list[str]:
        return [spec.replace("UNCONSTRAINED", "U") for spec in constraints("muon", count, sides, kind, shape)]

    assert asked(8, (8,)) == LINE + LINE[::-1]
    assert asked(7, (4, 2)) == PLANE + PLANE[::-1]
    assert asked(8, (8, 1)) == LINE + LINE[::-1]
    assert asked(8, (1,)) == []
    assert asked(1, (8,)) == []


@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit])
def test_devices_of_a_mesh_decompose_whole_matrices_where_a_condition_holds(kind: AxisType) -> None:
    """SOAP's two bases are made by two functions, at the first step and at some later ones."""

    def asked(count: int) -> list[str]:
        return [spec.replace("UNCONSTRAINED", "U") for spec in constraints("soap", count, (8,), kind, (16, 8))]

    assert asked(8) == 4 * (LINE + LINE[::-1])
    assert asked(1) == []


def test_whole_matrices_pay_where_the_busiest_device_multiplies_no_more() -> None:
    """By products of a square of 64 for each iteration: 3 of a whole matrix; on 8 devices 2/8 and 1 of a part."""
    assert [pays(Op.NEWTON_SCHULZ, count, (64, 64), 8) for count in (1, 2, 3, 8)] == [False, False, True, True]
    assert [pays(Op.NEWTON_SCHULZ, count, (64, 4096), 8) for count in (7, 8, 9)] == [False, True, False]
    assert pays(Op.NEWTON_SCHULZ, 9, (64, 256), 8)
    assert [pays(Op.QR, count, (64, 8), 8) for count in (1, 2, 8)] == [False, True, True]


#: The step of equal matrices on each kind of mesh and layout, and its collectives: before whole matrices, eight by rows
#: cost 41 sums, and by rows and columns 196 collectives of three kinds.
EQUAL = {
    ("Auto", 8, "rows of 8"): {"all-to-all": 2},
    ("Explicit", 7, "rows of 8"): {"all-to-all": 2},
    ("Auto", 8, "rows of 4, 2"): {"all-to-all": 2, "all-gather": 1},
    ("Explicit", 8, "both of 4, 2"): {"all-to-all": 4},
}
MORE_EQUAL = {
    ("Auto", 20, "cols of 8"): {"all-to-all": 2},
    ("Auto", 8, "joined of 4, 2"): {"all-to-all": 4},
}


#: Each kind of mesh with a rule, and the calls of LAPACK in its step, each of one matrix.
DECOMPOSED = (
    ("Auto", "soap", {"dsyevd of 1": 2, "dgeqrf of 1": 2, "dorgqr of 1": 2}),
    ("Auto", "shampoo", {"dsyevd of 1": 2}),
)
MORE_DECOMPOSED = (("Explicit", "soap", {"dsyevd of 1": 2, "dgeqrf of 1": 2, "dorgqr of 1": 2}),)


def for_whole(few: Any, more: Any) -> Any:
    """Cases of a slow test with the devices of one process, and those that `make whole` runs in another."""
    return pytest.mark.parametrize(
        "cases",
        [
            pytest.param(few, marks=pytest.mark.slow, id="few"),
            pytest.param(more, marks=[pytest.mark.slow, pytest.mark.whole], id="more"),
        ],
    )


@for_whole(EQUAL, MORE_EQUAL)
def test_a_stack_of_equal_matrices_is_exchanged_twice(cases: dict[Any, dict[str, int]]) -> None:
    """Of three products in each of five iterations a device does those of its own matrices."""
    for (case, collectives), report in zip(cases.items(), found_by_eight(equal=[*cases])["equal"], strict=True):
        assert (case, report["collectives"], report["lost"]) == (case, collectives, [])
        assert report["products"] == 15
        assert report["distance"] < 1e-6


@for_whole(DECOMPOSED, MORE_DECOMPOSED)
def test_equal_matrices_are_decomposed_by_one_device_each(cases: Sequence[tuple[str, str, dict[str, int]]]) -> None:
    """Before, every device decomposed all eight: 32 times for SOAP, with 161 collectives in place of 57."""
    for (kind, rule, calls), report in zip(cases, found_by_eight(whole=[*cases])["whole"], strict=True):
        assert (kind, rule, report["calls"]) == (kind, rule, calls)
        assert report["lost"] == []
        assert report["distance"] < 1e-12  # of full rank, in float64
        assert sum(report["collectives"].values()) <= (57 if kind == "Auto" and rule == "soap" else 140)


#: What a rule keeps beside a matrix of 64 by 32 whose rows lie along x and whose columns lie along y.
FACTORS = {
    "soap": "m:x,y v:x,y l:x,- r:y,- ql:x,- qr:y,-",
    "shampoo": "l:x,- r:y,- pl:x,- pr:y,-",
    "galore": "P:y,- m:-,x v:-,x",
    "apollo": "m:-,x v:-,x",
}


#: How a matrix of 64 by 512 is sharded, and its state in each format, of codes and scales: blocks have 256 elements,
#: 128 and 32, and columns are cut in parts of 128 by x and of 256 by y.
CODES_LIE = {
    ("dynamic8", ("x", None)): ("x,-", "x,-"), ("dynamic8", (None, "y")): ("-,y", "-,y"),
    ("dynamic8", (None, "x")): ("-,x", "-,-"), ("dynamic8", ("y", "x")): ("y,x", "y,-"),
    ("dynamic4", ("x", None)): ("x,-", "x,-"), ("dynamic4", (None, "x")): ("-,x", "-,x"),
    ("dynamic4", ("x", "y")): ("x,y", "x,y"), ("int8", (None, ("x", "y"))): ("-,xy", "-,xy"),
    ("int8", (("x", "y"), None)): ("xy,-", "xy,-"), ("int8", ()): ("-,-", "-,-"), ("dynamic4", ()): ("-,-", "-,-"),
}  # fmt: skip


@pytest.mark.parametrize(("form", "spec"), CODES_LIE)
def test_codes_and_scales_lie_along_the_axes_of_their_parameter(form: str, spec: tuple[Any, ...]) -> None:
    found = codes_layout(form, spec, (64, 512))
    assert found == [CODES_LIE[form, spec]] * 2


@pytest.mark.parametrize("rule", FACTORS)
def test_factors_lie_along_the_sides_of_their_parameter(rule: str) -> None:
    assert first_layout(rule) == FACTORS[rule]


@for_whole(["soap", "galore"], ["shampoo", "apollo"])
def test_factors_stay_where_they_lie(cases: Sequence[str]) -> None:
    """SOAP's left covariance lacks rank here; it is compared in `RUN`."""
    found = found_by_eight(factors=cases)["factors"]
    for rule in cases:
        for kind in ("Auto", "Explicit"):
            first, after, differing = found[rule][kind]
            assert (rule, kind, first, after) == (rule, kind, FACTORS[rule], FACTORS[rule])
            assert rule == "soap" or differing == ""


@pytest.mark.slow
def test_steps_over_eight_devices(quantiles: str) -> None:
    """All in one: the process of eight devices is made once."""
    found = found_by_eight(
        rules={**ELEMENTWISE, **REDUCING, "muon": "step"}, eager=["lamb"], shard_map=["nadam"],
        runs=[*RUN[:3], quantiles], rounding=True, coded=CODED, unbiased=True,
    )  # fmt: skip
    rules_and_runs_are_those_of_one_device(found, [*RUN[:3], quantiles])
    for rule in ELEMENTWISE:
        assert found["rules"][rule]["collectives"] == {}, rule
    sums_are_of_numbers(found["rules"]["lamb"]["collectives"], 2)
    sums_are_of_numbers(found["rules"]["transforms/clip_by_global_norm"]["collectives"], 1)
    factors_are_sharded_along_the_axis_that_they_have(found["rules"]["adafactor"]["factors"])
    for rule in REDUCING:
        no_parameter_is_gathered(found["rules"][rule]["collectives"])
    assert found["eager"] == {"lamb": []}
    assert found["shard_map"] == {"nadam": []}
    what_parts_devices_is_rounding_alone(found["rounding"])
    assert found["unbiased"] == {"Auto": [], "Explicit": []}
    for report in found["coded"]:
        codes_are_those_of_one_device(report)


def rules_and_runs_are_those_of_one_device(found: dict[str, Any], runs: Sequence[str]) -> None:
    for rule, report in found["rules"].items():
        assert (rule, report["first"], report["after"], report["apart"]) == (rule, [], [], [])
    assert found["runs"] == {rule: {"Auto": [], "Explicit": []} for rule in runs}


@pytest.mark.slow
@pytest.mark.whole
def test_steps_of_more_rules_over_eight_devices() -> None:
    found = found_by_eight(rules=MORE, runs=RUN[3:], coded=MORE_CODED)
    rules_and_runs_are_those_of_one_device(found, RUN[3:])
    for rule in ("lion", "nadam"):
        assert found["rules"][rule]["collectives"] == {}, rule
    for report in found["coded"]:
        codes_are_those_of_one_device(report)


@for_whole(["adafactor", "soap"], ["adamw"])
def test_orbax_saves_on_eight_devices_and_loads_on_four_and_on_one(cases: Sequence[str]) -> None:
    assert found_by_eight(orbax=cases)["orbax"] == {rule: {"devices": [8, 4, 1], "apart": []} for rule in cases}


@for_whole(("false", 1e-6), ("true", 2**-7))
def test_whole_matrices_in_bfloat16_equal_those_of_one_device(cases: tuple[str, float]) -> None:
    """Left to itself XLA leaves out other roundings on eight devices than on one."""
    precise, most = cases
    # Where the processor multiplies bfloat16 itself, the order of sums follows from the shape.
    processor = Path("/proc/cpuinfo")
    most = max(most, 2**-9) if processor.exists() and "amx_bf16" in processor.read_text() else most
    assert found_by_eight(f"--xla_allow_excess_precision={precise}", bfloat16=True)["bfloat16"] < most


def found_by_eight(flags: str = "", **asked: Any) -> dict[str, Any]:
    command = [sys.executable, "-m", "tests.jax.sharded", json.dumps(asked)]
    environment = {**os.environ, "XLA_FLAGS": flags}
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, check=False, env=environment)
    assert done.returncode == 0, done.stderr[-3000:]
    found = json.loads(done.stdout)
    assert found["devices"] == 8
    return dict(found)


def sums_are_of_numbers(collectives: dict[str, list[str]], sums: int) -> None:
    """Of the eight parameters seven are sharded: one over both axes by each, so by two sums or one of both."""
    assert list(collectives) == ["all-reduce"]
    assert len(collectives["all-reduce"]) <= 3  # along one axis of the mesh, along the other, and along both
    numbers = re.findall(r"f64\[\]", " ".join(collectives["all-reduce"]))
    assert 7 * sums <= len(numbers) <= 8 * sums
    assert set(re.findall(r"f\d+\[[^\]]*\]", " ".join(collectives["all-reduce"]))) == {"f64[]"}


def codes_are_those_of_one_device(report: dict[str, dict[str, Any]]) -> None:
    """Codes and scales are sharded as their parameter, but for blocks that lie on several devices; on automatic axes
    nothing is sent for rows that lie on one device."""
    assert report["Auto"]["collectives"] == {}
    for found in report.values():
        assert (found["lost"], found["apart"]) == ([], [])
        assert found["unlike"] < 1e-3


def factors_are_sharded_along_the_axis_that_they_have(factors: dict[str, dict[str, str]]) -> None:
    assert [factors["r"][n] for n in ("rows", "cols", "both")] == ["P('x',)", "P()", "P('x',)"]
    assert [factors["c"][n] for n in ("rows", "cols", "both")] == ["P()", "P(None, 'y')", "P(None, 'y')"]


def no_parameter_is_gathered(collectives: dict[str, list[str]]) -> None:
    for results in collectives.values():
        for sides in re.findall(r"\[([\d,]*)\]", " ".join(results)):
            assert math.prod(int(x) for x in sides.split(",") if x) < 128


def what_parts_devices_is_rounding_alone(apart: dict[str, float]) -> None:
    """Muon rounds to bfloat16 on the way, and SOAP divides by what may be rounding: without that nothing is left."""
    assert apart["muon in float32"] < 1e-5
    assert apart["muon in bfloat16"] < 2**-7
    assert apart["soap of full rank"] < 1e-12
    assert apart["soap of less rank, covariances"] < 1e-12
