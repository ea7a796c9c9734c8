"""Sums that statistics alone read: where they are, their error, and their machine code."""

from __future__ import annotations

import math
import re
from typing import Any

import numpy as np
import pytest

import rulec
from rulec.compiler.ir import Program
from rulec.compiler.layout import layout_for, scheduled
from rulec.language.statistics import Watch, watched
from rulec_backends.cpu.partial import BLOCK
from rulec_backends.cpu.print import kernel_source
from tests.backends.test_cpu_work import assembly_of, widest
from tests.backends.vectors import wide_register
from tests.library import by_kind

#: The spacing of float32 below 1, half of which is the error of one addition to a sum below 1.
UNIT = 2.0**-24


def program_of(rule: str, watch: Watch = "norms") -> Program:
    loaded = rulec.load(rule).standalone()
    return rulec.compile(loaded, watch=watched(loaded, watch))


def printed(program: Program, dtype: str = "float32") -> str:
    return kernel_source(*scheduled(program, layout_for(program, dtype)))


def in_blocks(source: str) -> list[str]:
    """The names of the functions with partial sums."""
    functions = re.split(r"^def (\w+)", source, flags=re.MULTILINE)
    return [name for name, body in zip(functions[1::2], functions[2::2], strict=True) if "for block in" in body]


# Where they are


#: Rules that multiply a direction by a number of the tensor which is known later, as a trust ratio.
SCALED = {"cautious_lamb", "dash", "dash_axes", "lamb", "lambc", "muon_hr", "sign_laprop"}


@pytest.mark.parametrize("rule", by_kind(n for n in rulec.rules() if not rulec.load(n).wraps))
def test_stages_before_the_last_are_those_of_the_rule(rule: str) -> None:
    """What they store and reduce then has the same bits with statistics.

    Some have sums for statistics, beside those of the rule: sums of a value that a later number multiplies.
    """
    plain, program = program_of(rule, ()), program_of(rule)
    before, stages = (scheduled(each, layout_for(each, "float32")).program.stages for each in (plain, program))
    assert len(before) == len(stages)
    for old, new in zip(before[:-1], stages[:-1], strict=True):
        assert [s.buffer for s in new.stores] == [s.buffer for s in old.stores]
        names = [r.name for r in new.reduces if r.name not in program.measured]
        assert names == [r.name for r in old.reduces]
    early = [r.name for stage in stages[:-1] for r in stage.reduces if r.name in program.measured]
    assert program.skip is not None or bool(early) == (rule in SCALED)


@pytest.mark.parametrize(
    ("rule", "functions"),
    [
        ("adamw", ["stage_0"]), ("lamb", ["stage_0", "stage_1"]), ("prodigy", ["stage_1"]), ("adafactor", ["stage_2"]),
        ("clip_by_global_norm >> adamw", ["stage_1"]),
    ],
)  # fmt: skip
def test_the_last_stage_has_partial_sums_in_float32(rule: str, functions: list[str]) -> None:
    assert in_blocks(printed(program_of(rule))) == functions
    assert in_blocks(printed(program_of(rule, ()))) == []
    assert in_blocks(printed(program_of(rule), "float64")) == []


def test_a_stage_with_a_sum_of_the_rule_has_no_partial_sums() -> None:
    """Blocks would add up the sum of the rule in another order."""
    rule = rulec.parse(
        "name: Tested\nhyper: {lr: 0.1}\nstate: {n: {init: 0, per: tensor}}\nstep: |\n  n = sum(g*g)\n  direction = g\n"
    )
    program = rulec.compile(rule, watch=watched(rule, {"size": "norm(update)"}))
    assert len(program.stages) == 1
    assert in_blocks(printed(program)) == []


# Their error


def sums(values: np.ndarray[Any, Any], text: str = "sum(g)") -> float:
    """A statistic of the gradient, by the cpu backend."""
    params = {"w": np.zeros(values.shape, np.float32)}
    optimizer = rulec.array.Optimizer("sgd", params, backend="cpu", watch={"x": text})
    optimizer.step({"w": values.astype(np.float32)})
    return optimizer.statistics().numbers()["x/w"]


@pytest.mark.parametrize("size", [1, 7, BLOCK - 1, BLOCK, BLOCK + 1, 3 * BLOCK + 5, 300_001])
@pytest.mark.parametrize("spread", [0, 12])
def test_a_sum_differs_by_one_unit_for_each_addition_of_a_block(size: int, spread: int) -> None:
    drawn = np.random.default_rng(size + spread)
    values = (drawn.random(size) * 10.0 ** drawn.uniform(-spread, spread, size)).astype(np.float32)
    exact = math.fsum(values.tolist())
    assert abs(sums(values) - exact) <= (BLOCK - 1) * UNIT * exact
    squares = math.fsum((values.astype(float) ** 2).tolist())
    assert abs(sums(values, "sum(g*g)") - squares) <= BLOCK * UNIT * squares
    signed = values * np.where(drawn.random(size) < 0.5, -1, 1).astype(np.float32)
    assert abs(sums(signed) - math.fsum(signed.tolist())) <= (BLOCK - 1) * UNIT * exact


@pytest.mark.parametrize("shape", [(40 * BLOCK,), (40, BLOCK), (3, 4 * BLOCK + 3)])
def test_the_error_does_not_grow_with_the_number_of_elements(shape: tuple[int, ...]) -> None:
    """Each number after the first of a lane is half of the spacing of the sum so far: a sum in float32 stays at 1."""
    values = np.full(shape, UNIT, np.float32)
    values.ravel()[0] = 1
    exact = math.fsum(values.ravel().tolist())
    assert abs(sums(values) - exact) <= (BLOCK - 1) * UNIT
    assert exact - 1 > 2 * (BLOCK - 1) * UNIT
    rows = [float(x) for x in np.ravel(vector_of(values))] if len(shape) == 2 else []
    wanted = [math.fsum(row.tolist()) for row in values] if rows else []
    assert rows == pytest.approx(wanted, rel=BLOCK * UNIT)


def vector_of(values: np.ndarray[Any, Any]) -> Any:
    params = {"w": np.zeros(values.shape, np.float32)}
    optimizer = rulec.array.Optimizer("sgd", params, backend="cpu", watch={"x": 'sum(g, per="row")'})
    optimizer.step({"w": values})
    return optimizer.statistics()["x"]["w"]


@pytest.mark.parametrize("size", [1, 5 * BLOCK, 300_001])
def test_counts_are_exact(size: int) -> None:
    values = np.random.default_rng(0).normal(size=size).astype(np.float32)
    assert sums(values, "sum(where(g > 0, 1, 0))") == np.count_nonzero(values > 0)
    values[::3] = np.nan
    assert sums(values, "sum(where(isfinite(g), 0, 1))") == len(values[::3])
    assert math.isnan(sums(values, "sum(g*g)"))


@pytest.mark.parametrize("size", [1e18, 5e18, 1.8e19])
@pytest.mark.parametrize(
    "text", ["sum(g*g)", "norm(g)", "sum(abs(g*1.8e19))", "sum(where(isfinite(g), 0, 1)) + rms(g)"]
)
def test_a_sum_that_float32_has_no_room_for_is_finite(size: float, text: str) -> None:
    """Of gradients that have squares in float32. So it is of the sums of rules, such as the norm that a rule clips."""
    values = np.full(3 * BLOCK + 5, size, np.float32)
    values[BLOCK : 2 * BLOCK] = 1
    exact = values.astype(np.float64)
    wanted = {
        "sum(g*g)": np.sum(exact**2), "norm(g)": np.linalg.norm(exact), "sum(abs(g*1.8e19))": np.sum(exact) * 1.8e19,
    }  # fmt: skip
    assert sums(values, text) == pytest.approx(wanted.get(text, np.sqrt(np.mean(exact**2))), rel=BLOCK * UNIT)
    values[-1] = -np.inf
    assert not math.isfinite(sums(values, text))


# Machine code


@pytest.mark.parametrize("rule", ["adamw", "lion"])
def test_sums_keep_the_width_of_vectors(rule: str) -> None:
    """Sums in float64 would have twice as many registers, or all numbers half the lanes. Blocks that float32 has no
    room for are added up again in a loop of their own, which stores nothing."""
    register = wide_register()
    loop = widest(assembly_of(printed(program_of(rule))), stores=True)
    assert not any("pd\t" in line for line in loop)
    plain = widest(assembly_of(printed(program_of(rule, ()))), stores=True)
    lanes = [sum(bool(re.match(rf"vmovups\t{register}\d+, [^%]*\(%", line)) for line in each) for each in (loop, plain)]
    assert all(lanes)
    assert len(loop) / lanes[0] - len(plain) / lanes[1] < 25
