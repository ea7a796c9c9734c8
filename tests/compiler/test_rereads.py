"""What a later stage does with what an earlier one has computed: every way gives the same numbers."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from itertools import product
from typing import Any

import numpy as np
import pytest

import rulec
from rulec.array import Optimizer
from rulec.compiler import layout as layout_module
from rulec.compiler import layout as rereads
from rulec.compiler.ir import Program, verify
from rulec.compiler.layout import (
    ITEM_SIZE,
    Layout,
    _apply,
    _choices,
    choose_rereads,
    kernel_for,
    layout_for,
    moved,
    scheduled,
    traffic,
)
from rulec.compiler.pipeline import compile as compile_rule
from rulec.compiler.reference import ReferenceOptimizer
from rulec.errors import InternalError
from rulec.language.expr.node import Op, walk
from rulec.runtime.buckets import bucket as bucket_module
from rulec.testing.cases import loaded
from tests.library import by_kind

DTYPES = ("float32", "float64", "bfloat16")

#: Rules with something to decide: states that an earlier stage can store, and values that are long to compute.
TEXTS = {
    "joined": """
state: {m: 0, v: 0}
step: |
  m = 0.9*m + 0.1*g
  v = 0.99*v + 0.01*g**2
  u = m/(sqrt(v) + 0.1) + tanh(p)
  direction = u/(1 + sqrt(sum(u*u, per="model")))
""",
    "three": """
state: {m: 0, a: p}
step: |
  m = 0.9*m + g
  u = m*tanh(m + a)
  s = norm(u)
  w = u/s + m
  a = a + w
  direction = w*max(abs(w))
""",
    "exchange": """
state: {a: p, b: 1}
step: |
  old = a
  a = b + g
  b = old*g
  direction = (a + b)/(1 + norm(a*b))
""",
    "matrix": """
applies_to: ndim >= 2
otherwise: sgd
state: {m: 0, v: 0}
step: |
  m = 0.9*m + g
  v = 0.9*v + g*g
  o = matmul(matmul(m, transpose(m)), m/(1 + v))
  direction = o/(1 + norm(o)) + m/(1 + norm(m))
""",
}
RULES = {name: rulec.parse(f"name: {name.title()}\n{text}") for name, text in TEXTS.items()}
RULES |= {name: rulec.load(name) for name in ("lamb", "cautious_adamw", "stable_adamw")}


def sizes_of(layout: Layout) -> tuple[dict[str, int], int]:
    return {buffer: ITEM_SIZE[dtype] for buffer, dtype in layout.dtypes}, ITEM_SIZE[layout.compute]


def ways(program: Program, layout: Layout) -> list[Program]:
    """The program by every choice that may be taken."""
    made = [_apply(program, choice) for choice in _choices(program, *sizes_of(layout))]
    return [p for p in made if p is not None]


def states_in(program: Program, dtype: str) -> dict[str, str]:
    return {b.name: dtype for b in program.states}


def check_follows(monkeypatch: pytest.MonkeyPatch, rule: rulec.Rule, backend: str, way: int) -> None:
    """Three steps with every program scheduled that way, against the reference, which knows no stages."""

    def one_way(program: Program, layout: Layout, early: bool = True) -> tuple[Program, Layout]:
        found = ways(program, layout)
        chosen = verify(found[min(way, len(found) - 1)], "choose_rereads")
        return chosen, layout.of(chosen)

    monkeypatch.setattr(bucket_module, "scheduled", one_way)
    rng = np.random.default_rng(2)
    shapes = [(5, 4), (5, 4), (7,), ()]
    params = [np.asarray(rng.normal(size=s)) for s in shapes]
    now = [p.copy() for p in params]
    optimizer, reference = Optimizer(rule, now, backend), ReferenceOptimizer(rule, params)
    for _ in range(3):
        grads = [np.asarray(rng.normal(size=s)) for s in shapes]
        optimizer.step(grads)
        reference.step(grads)
        for ours, theirs in zip(now, reference.params, strict=True):
            np.testing.assert_allclose(ours, theirs, rtol=1e-10, atol=1e-12)
    for i, name in enumerate(optimizer.names):
        for key, value in reference.state(i).items():
            np.testing.assert_allclose(
                optimizer.state(name)[key], value.reshape(optimizer.state(name)[key].shape), rtol=1e-10, atol=1e-12
            )


def each_way() -> Iterator[Any]:
    """Every way of every rule: a fifth of them every day, the others when slow."""
    for name, rule in RULES.items():
        program = compile_rule(rule)
        for way in range(len(ways(program, layout_for(program, "float64")))):
            yield pytest.param(name, way, id=f"{name}-{way}", marks=[pytest.mark.slow] if way % 5 else [])


@pytest.mark.parametrize(("name", "way"), list(each_way()))
def test_every_way_gives_the_same_numbers(monkeypatch: pytest.MonkeyPatch, name: str, way: int) -> None:
    check_follows(monkeypatch, RULES[name], "numpy", way)


@pytest.mark.parametrize(
    ("name", "way"),
    [
        ("joined", 3), ("exchange", 1),
        *(pytest.param(*case, marks=pytest.mark.slow) for case in [("joined", 0), ("three", 4), ("matrix", 6)]),
    ],
)  # fmt: skip
def test_some_ways_by_compiled_kernels(monkeypatch: pytest.MonkeyPatch, name: str, way: int) -> None:
    check_follows(monkeypatch, RULES[name], "cpu", way)


def test_there_are_ways_of_every_kind() -> None:
    program = compile_rule(RULES["joined"])
    layout = layout_for(program, "float32")
    found = list(_choices(program, *sizes_of(layout)))
    assert {len(choice.early) for choice in found} == {0, 1, 2}
    assert {choice.spill is None for choice in found} == {True, False}
    decisions = [
        scheduled(compile_rule(rulec.load(name)), layout_for(compile_rule(rulec.load(name)), "float32"))[0].decisions[0]
        for name in ("cautious_adamw", "muon")
    ]
    assert "spills" in decisions[0]
    assert "which later stages read back" in decisions[0]
    assert decisions[0] != decisions[1]


@pytest.mark.parametrize("name", by_kind(rulec.rules()))
def test_what_is_chosen_moves_the_fewest_bytes_as_the_layout_counts_them(name: str) -> None:
    program = compile_rule(loaded(name))
    for param, state in product(("float32", "float16", "float64"), DTYPES):
        layout = layout_for(program, param, states=states_in(program, state))
        best, own = scheduled(program, layout)
        assert moved(best, *sizes_of(own)) == sum(traffic(best, own)), (param, state)
        assert moved(program, *sizes_of(layout)) == sum(traffic(program, layout)), (param, state)
        least = min(sum(traffic(way, layout.of(way))) for way in [program, *ways(program, layout)])
        assert sum(traffic(best, own)) == least, (param, state)
        assert len(best.decisions) == (len(program.stages) > 1), (param, state)


@pytest.mark.parametrize("name", by_kind(rulec.rules()))
def test_no_rounded_state_is_read_back(name: str) -> None:
    """A state in 16 bits under float32 arithmetic, or in float32 under float64, is stored in the last stage alone."""
    program = compile_rule(loaded(name))
    for param, state in (("float32", "bfloat16"), ("float32", "float16"), ("float64", "float32")):
        layout = layout_for(program, param, states=states_in(program, state))
        for way in ways(program, layout):
            states = {b.name for b in way.states}
            assert not [s for stage in way.stages[:-1] for s in stage.stores if s.buffer in states]


def test_narrow_states_are_rounded_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """In float32 with states in bfloat16, every way gives the bits of the one that computes all again."""
    ml_dtypes = pytest.importorskip("ml_dtypes")
    found = []
    for way in range(3):
        monkeypatch.setattr(
            bucket_module,
            "scheduled",
            lambda p, l, way=way, **_: (q := ways(p, l)[way], l.of(q)),  # noqa: E741
        )
        now = [np.random.default_rng(0).normal(size=(6, 5)).astype(np.float32)]
        optimizer = Optimizer(RULES["joined"], now, "numpy", state_dtype="bfloat16")
        for step in range(3):
            optimizer.step([np.random.default_rng(step + 1).normal(size=(6, 5)).astype(np.float32)])
        assert optimizer.state("0")["m"].dtype == ml_dtypes.bfloat16
        found.append((now[0], np.asarray(optimizer.state("0")["m"], np.float32)))
    for params, states in found[1:]:
        np.testing.assert_array_equal(params, found[0][0])
        np.testing.assert_array_equal(states, found[0][1])


@pytest.mark.parametrize("name", by_kind(rulec.rules()))
def test_what_is_read_between_stages_is_not_overwritten_first(name: str) -> None:
    program = compile_rule(loaded(name))
    between = [c.value for c in program.late] + [v.value for v in program.vectors] + [s.value for s in program.finish]
    read = {n.arg for n in walk(between) if n.op is Op.LOAD}
    states = {b.name for b in program.states}
    for way in ways(program, layout_for(program, "float32")):
        early = {s.buffer for stage in way.stages[:-1] for s in stage.stores} & states
        assert not early & read
        for index, stage in enumerate(way.stages):
            before = {s.buffer for earlier in way.stages[:index] for s in earlier.stores} & states
            after = {n.arg for n in walk(stage.roots) if n.op is Op.LOAD} & before
            # What is read after its store is the new value: the old one is nowhere to be had.
            new = {s.buffer: s.value for s in program.stages[-1].stores}
            assert all(new[b] not in walk(stage.roots) for b in after)


def test_nothing_is_stored_before_it_is_known_whether_the_step_is_skipped() -> None:
    guarded = compile_rule(rulec.load("skip_not_finite") >> RULES["joined"])
    best = choose_rereads(guarded, *sizes_of(layout_for(guarded, "float32")))
    states = {b.name for b in best.states}
    assert len(best.stages) > 1
    assert not [s for stage in best.stages[:-1] for s in stage.stores if s.buffer in states | {"p"}]


def test_a_program_of_one_stage_is_left_as_it_is() -> None:
    program = compile_rule(rulec.load("adamw"))
    assert choose_rereads(program, *sizes_of(layout_for(program, "float32"))) is program


def test_deciding_takes_no_time_for_many_states() -> None:
    states = ", ".join(f"s{i}: 0" for i in range(7))
    lines = "".join(f"  s{i} = 0.9*s{i} + g**{i % 4 + 1}\n" for i in range(7))
    total = " + ".join(f"s{i}" for i in range(7))
    rule = rulec.parse(f"name: Many\nstate: {{{states}}}\nstep: |\n{lines}  u = {total}\n  direction = u/norm(u)\n")
    program = compile_rule(rule)
    layout = layout_for(program, "float32")
    assert len(list(_choices(program, *sizes_of(layout)))) <= 2**rereads._MOST * (2 * rereads._MOST + 1)
    best, own = scheduled(program, layout)
    assert sum(traffic(best, own)) <= sum(traffic(program, layout))


def test_what_runs_is_scheduled_and_verified(monkeypatch: pytest.MonkeyPatch) -> None:
    """The pass is judged as the others are: one that loses a store's buffer is named."""
    program = compile_rule(rulec.load("lamb"))
    assert kernel_for(program, "float32") == scheduled(program, layout_for(program, "float32"))
    assert kernel_for(program, "float32").program != program
    monkeypatch.setattr(layout_module, "choose_rereads", lambda p, *_: replace(p, buffers=p.buffers[:1]))
    with pytest.raises(InternalError, match="after choose_rereads, LAMB"):
        kernel_for(program, "float32")
