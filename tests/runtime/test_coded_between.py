"""States in codes that are read between the stages, by products of matrices and the like: the values, not the codes.

Every reader reads the state before its update in the step, after it, or where the step does not update it. NumPy works
out the step in float64 from the decoded state.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pytest

import rulec
from rulec.array import Optimizer
from rulec.compiler.decoded import decoded_between
from rulec.compiler.ir import verify
from rulec.compiler.layout import layout_for, scale_name, scheduled
from rulec.compiler.text import program_text
from rulec.errors import InternalError
from rulec.formats import decode, parse
from tests.backends.here import BACKENDS
from tests.pairs import paired

Array = np.ndarray[Any, Any]

SHAPE = (64, 72)
RATE, BETA = 1e-2, 0.9
FORMATS = ["int8", "dynamic8", "softsign8", "float8_e4m3", "float8_e5m2", "dynamic4"]

RULE = """
name: Trial
hyper: {{lr: 1e-2, beta: 0.9}}
state: {{m: 0{states}}}
view: {{flatten: rest}}
applies_to: ndim >= 2
step: |
  {lines}
  direction = n
"""

UPDATE = "m = beta*m + (1 - beta)*g"


@dataclass(frozen=True)
class Reader:
    """Lines from `m` to `n`, and the same in NumPy: functions of `m`, `g` and the state `L`, for `n` and for `L`."""

    lines: str
    direction: Callable[[Array, Array, Array], Array]
    factor: Callable[[Array, Array, Array], Array] | None = None
    states: str = ""


_FACTOR = ", L: {init: 0, shape: [rows, rows]}"


def _total(x: Array) -> Array:
    return np.asarray((x * x).sum() / 1000)


READERS = {
    "left": Reader("n = m @ transpose(m) @ g", lambda m, g, _: m @ m.T @ g),
    "right": Reader("n = g @ transpose(m) @ m", lambda m, g, _: g @ m.T @ m),
    "transposed": Reader("n = transpose(transpose(m) @ (g @ transpose(m)))", lambda m, g, _: (m.T @ (g @ m.T)).T),
    "elsewhere": Reader("n = m + (m @ transpose(g)) @ m", lambda m, g, _: m + (m @ g.T) @ m),
    "number": Reader(
        'n = g*sum((m @ transpose(m))*(m @ transpose(m)), per="tensor")/1000', lambda m, g, _: g * _total(m @ m.T)
    ),
    "model": Reader(
        'n = g*sum((m @ transpose(m))*(m @ transpose(m)), per="model")/1000', lambda m, g, _: g * _total(m @ m.T)
    ),
    "rows": Reader(
        'n = g*sum((m @ transpose(m))*(m @ transpose(m)), per="row")',
        lambda m, g, _: g * ((m @ m.T) ** 2).sum(1, keepdims=True),
    ),
    "factor": Reader("L = beta*L + m @ transpose(m)\n  n = g", lambda m, g, _: g, lambda m, g, f: BETA * f + m @ m.T,
                     _FACTOR),
    "factor first": Reader(
        "n = L @ g + m\n  L = beta*L + m @ transpose(m)", lambda m, g, f: f @ g + m,
        lambda m, g, f: BETA * f + m @ m.T, _FACTOR,
    ),
    "qr": Reader(
        "z = qr(g @ transpose(g))\n  n = z @ (transpose(z) @ m)", lambda m, g, _: m
    ),
    "root": Reader(
        "n = inverse_root(L + eye(rows), 2) @ m\n  L = beta*L + g @ transpose(g)",
        lambda m, g, f: _root(f + np.eye(len(f))) @ m, lambda m, g, f: BETA * f + g @ g.T, _FACTOR,
    ),
    "ordered": Reader(
        'n = take(sort(m, per="row"), argsort(g, per="col"), axis=0)',
        lambda m, g, _: np.take_along_axis(np.sort(m, 1), np.argsort(g, 0, kind="stable"), 0),
    ),
    "tiles": Reader(
        'r = normal([4, rows], at=1) @ m\n  n = g*(1 + sum(r*r, per="col"))',
        lambda m, g, _: g * (1 + ((_draw() @ m) ** 2).sum(0, keepdims=True)),
    ),
}  # fmt: skip


def _root(x: Array) -> Array:
    values, vectors = np.linalg.eigh(x)
    root: Array = (vectors / np.sqrt(values)) @ vectors.T
    return root


def _draw() -> Array:
    """The random matrix of the rule, as a rule that only stores it has it."""
    rule = rulec.parse(
        "name: Draw\nstate: {q: {init: 0, shape: [4, rows]}}\nview: {flatten: rest}\napplies_to: ndim >= 2\n"
        "step: |\n  q = 0*q + normal([4, rows], at=1)\n  p = p\n"
    )
    optimizer = Optimizer(rule, {"p": np.ones(SHAPE, np.float32)}, "numpy")
    optimizer.step({"p": np.ones(SHAPE, np.float32)})
    return np.asarray(optimizer.state("p")["q"], np.float64)


#: Lines with the reader and the update, and whether a step of this number updates, and reads the new value.
TIMES: Mapping[str, tuple[str, Callable[[int], bool], bool]] = {
    "before": ("READER\n  UPDATE", lambda t: True, False),
    "after": ("UPDATE\n  READER", lambda t: True, True),
    "in some steps": ("if t % 2 == 0:\n    UPDATE\n  READER", lambda t: t % 2 == 0, True),
    "in some steps, late": ("READER\n  if t % 2 == 0:\n    UPDATE", lambda t: t % 2 == 0, False),
    "in the first step": ("if t == 1:\n    UPDATE\n  READER", lambda t: t == 1, True),
}


def rule_of(reader: Reader, time: str) -> rulec.Rule:
    lines = TIMES[time][0].replace("UPDATE", UPDATE).replace("READER", reader.lines)
    return rulec.parse(RULE.format(states=reader.states, lines=lines))


def values(optimizer: Optimizer, state: str) -> Array:
    """A state in float64, decoded where it is in codes."""
    held, form = optimizer.state("p"), optimizer._engine.formats(optimizer._engine.ids["p"]).get(state)
    array = held[state] if form is None else decode(form, held[state], held[scale_name(state)], SHAPE)
    return np.asarray(array, np.float64)


def check_near(ours: Array, theirs: Array, share: float) -> None:
    assert np.abs(ours - theirs).max() <= share * max(np.abs(theirs).max(), 1e-30)


def check_steps(reader: str, time: str, step: Callable[[Array], Array], decoded: Callable[[str], Array]) -> None:
    """Five steps: `step` takes a gradient and returns the update, `decoded` the values of a state after it."""
    read, (_, updates, new) = READERS[reader], TIMES[time]
    draws, m, factor = np.random.default_rng(1), np.zeros(SHAPE), np.zeros((64, 64))
    for t in range(1, 6):
        g = draws.standard_normal(SHAPE).astype(np.float32) / 4
        update = step(g)
        after = BETA * m + (1 - BETA) * g if updates(t) else m
        read_m, wide = (after if new else m), g.astype(np.float64)
        check_near(update, -RATE * read.direction(read_m, wide, factor), 1e-3)
        if read.factor is not None:
            check_near(decoded("L"), read.factor(read_m, wide, factor), 1e-5)
            factor = decoded("L")
        # The codes of the new value are near to it; the next step begins with them.
        check_near(decoded("m"), after, 0.2)
        m = decoded("m")


@pytest.mark.parametrize(("reader", "time", "form", "backend"), paired([*READERS], [*TIMES], FORMATS, BACKENDS))
def test_a_step_is_that_of_the_decoded_state(reader: str, time: str, form: str, backend: str) -> None:
    params = {"p": np.zeros(SHAPE, np.float32)}
    optimizer = Optimizer(rule_of(READERS[reader], time), params, backend, state_dtype={"m": form})

    def step(grad: Array) -> Array:
        params["p"][...] = 0  # so that the update is all there is
        optimizer.step({"p": grad})
        return params["p"]

    check_steps(reader, time, step, lambda state: values(optimizer, state))
    assert scale_name("m") in optimizer.state("p")


@pytest.mark.parametrize("reader", ["left", "number", "factor", "tiles"])
def test_a_kernel_decodes_what_is_read_between_the_stages(reader: str) -> None:
    program = rulec.compile(rule_of(READERS[reader], "before"))
    coded = decoded_between(program, {"m"})
    assert decoded_between(program, {"p"}) is program
    assert decoded_between(coded, {"m"}) is coded, "nothing is left to decode"
    assert "store m_decoded = m" in program_text(coded)
    layout = layout_for(program, "float32", formats={"m": parse("int8").for_state(signed=True, floor=False)})
    kernel = scheduled(program, layout)
    assert kernel.layout.dtype("m_decoded") == "float32"
    assert scheduled(program, layout.decoded).program.buffers == program.buffers


def test_a_stage_that_reads_the_codes_anyway_decodes_them() -> None:
    rule = rulec.parse(RULE.format(states="", lines=f"n = (m*2 + g) @ transpose(g) @ m\n  {UPDATE}"))
    program = rulec.compile(rule)
    assert len(decoded_between(program, {"m"}).stages) == len(program.stages) == 2


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_state_of_a_shape_of_its_own_may_alone_read_a_computed_operand(backend: str) -> None:
    """The kernel writes the operand before the product reads it, in the same step."""
    lines = "L = beta*L + (2*g) @ transpose(2*g)\n  n = g"
    rule = rulec.parse(RULE.format(states=_FACTOR, lines=f"{lines}\n  {UPDATE}"))
    optimizer, factor = Optimizer(rule, {"p": np.ones(SHAPE, np.float32)}, backend), np.zeros((64, 64))
    for seed in range(3):
        g = np.random.default_rng(seed).standard_normal(SHAPE).astype(np.float32)
        optimizer.step({"p": g})
        factor = BETA * factor + 4 * g.astype(np.float64) @ g.T
        check_near(np.asarray(optimizer.state("p")["L"], np.float64), factor, 1e-5)


def test_scratch_memory_that_nothing_has_written_is_no_operand() -> None:
    program = rulec.compile(rule_of(READERS["elsewhere"], "after"))
    late = replace(program, stages=tuple(replace(s, stores=()) for s in program.stages))
    assert verify(program, "a pass") is program
    with pytest.raises(InternalError, match="before a stage writes it"):
        verify(late, "a pass")
