"""Where a program is cut, and what stands on which side of a cut."""

from __future__ import annotations

import pytest

import rulec
from rulec.compiler.ir import Program
from rulec.compiler.layout import kernel_buffers
from rulec.compiler.pipeline import compile as compile_rule
from rulec.language.expr.node import Kind, Op, walk
from rulec.runtime.buckets.plan import Plan
from rulec.testing.cases import loaded
from tests.library import by_kind

CUTTING = (Kind.REDUCE, Kind.MATRIX, Kind.RANDOM)


def program_of(step: str, head: str = "") -> Program:
    lines = "".join(f"  {line}\n" for line in step.split("\n"))
    return compile_rule(rulec.parse(f"name: R\n{head}step: |\n{lines}"))


def chain(*names: str) -> Program:
    first, *others = (rulec.load(name) for name in names)
    for other in others:
        first = first >> other
    return compile_rule(first)


@pytest.mark.parametrize(
    "names",
    [("clip_by_global_norm", "adamw"), ("lamb",), ("cautious_adamw",), ("adamw", "cautious"), ("adam", "trust_ratio")],
    ids=" >> ".join,
)
def test_a_reduction_fused_with_all_around_it_is_two_stages(names: tuple[str, ...]) -> None:
    program = chain(*names)
    assert len(program.stages) == 2
    assert all(not s.reduces for s in program.stages[1:])
    assert "p" in {s.buffer for s in program.stages[1].stores}


@pytest.mark.parametrize("name", by_kind(rulec.rules()))
def test_kernels_have_only_elementwise_work_and_every_state_is_stored_once(name: str) -> None:
    rule = loaded(name)
    whole, program = compile_rule(rule, whole=True), compile_rule(rule)
    inside = {n for stage in program.stages for n in walk(stage.roots)}
    assert not [n for n in inside if n.op.kind in CUTTING]
    assert all(r.value.op.kind is Kind.REDUCE for stage in program.stages for r in stage.reduces)
    scratch = {b.name for b in program.buffers if b.role == "scratch"}
    stored = [s.buffer for stage in program.stages for s in stage.stores] + [s.buffer for s in program.finish]
    assert sorted(set(stored) - scratch) == sorted(s.buffer for s in whole.stages[0].stores)
    assert len(stored) == len(set(stored))
    wide = {b.name for b in kernel_buffers(program)}
    assert {s.buffer for stage in program.stages for s in stage.stores} <= wide
    assert not {s.buffer for s in program.finish} & wide


@pytest.mark.parametrize("name", by_kind(rulec.rules()))
def test_a_stage_is_given_all_that_its_kernel_reads_before_it_runs(name: str) -> None:
    program = compile_rule(loaded(name))
    known, late, vectors = len(program.scalars.columns), set(), set()
    written: set[str] = set()
    reduced: set[str] = set()
    plan = Plan(program)
    for stage, gap in zip(program.stages, plan.gaps, strict=False):
        # What is worked out before a stage reads only what earlier stages have made.
        read = {n for n in gap.values if n.op is Op.RESULT}
        assert {n.arg for n in read} <= reduced
        late |= set(stage.columns)
        vectors |= set(stage.vectors)
        values = list(walk(stage.roots))
        assert {n.arg for n in values if n.op is Op.SCALAR} <= {*range(known), *late}
        assert {n.arg for n in values if n.op is Op.RESULT} == set(stage.reads) <= vectors
        scratch = {b.name for b in program.buffers if b.role == "scratch"}
        assert {n.arg for n in values if n.op is Op.LOAD} & scratch <= written
        written |= {s.buffer for s in stage.stores}
        reduced |= {r.name for r in stage.reduces}


@pytest.mark.parametrize(
    ("step", "stages"),
    [
        ("direction = g", 1),
        ("direction = g/norm(g)", 2),
        ("a = norm(g)\nb = norm(p)\ndirection = g*b/a", 2),
        ("a = norm(g)\nb = norm(g/a)\nc = max(g*b)\ndirection = g/c", 4),
        ("a = sum(sum(g*g, per=\"row\"))\ndirection = g*a", 2),
        ("o = newton_schulz(g)\ndirection = o", 1),
        ("o = newton_schulz(g + p)\ndirection = o", 2),
        ("o = newton_schulz(g)\ndirection = o/norm(o)", 2),
        ("o = matmul(matmul(g, transpose(g)), g)\ndirection = o*max(g)", 2),
    ],
)  # fmt: skip
def test_how_many_stages(step: str, stages: int) -> None:
    assert len(program_of(step).stages) == stages


def test_the_same_reduction_is_made_once() -> None:
    program = program_of(
        'a = sum(g*g)\nb = sqrt(sum(g*g, per="model"))\nc = sum(g*g, per="group")\ndirection = g/(a + b + c)'
    )
    assert [len(s.reduces) for s in program.stages] == [1, 0]
    assert [(n.op, n.arg) for n in program.joins] == [(Op.SUM, "model"), (Op.SUM, "group")]


def test_what_is_narrow_leaves_the_kernel_and_reductions_of_it_cost_no_stage() -> None:
    program = program_of(
        'r = 0.9*r + sum(g*g, per="row")\nm = mean(r, per="tensor")\ndirection = g/sqrt(r/m)',
        "state: {r: {init: 0, per: row}}\n",
    )
    assert [len(s.reduces) for s in program.stages] == [1, 0]
    assert [s.buffer for s in program.finish] == ["r"]
    (vector,) = program.vectors
    assert vector.axes.letters == "knbi"


def test_operands_of_matrix_functions_are_memory_of_their_own() -> None:
    """A buffer is read where it lies, an expression is spilled once, and both before the last stage overwrites them."""
    program = program_of(
        "m = 0.9*m + g\na = matmul(m, transpose(m))\nb = matmul(a, m)\nc = matmul(a, p)\ndirection = b + c",
        "state: {m: 0}\n",
    )
    scratch = [b.name for b in program.buffers if b.role == "scratch"]
    assert len(scratch) == 1
    assert [s.buffer for s in program.stages[0].stores] == scratch
    last = {s.buffer for s in program.stages[-1].stores}
    assert last == {"m", "p"}


def test_what_is_read_beside_the_last_reductions_is_worked_out_before_the_last_kernel() -> None:
    program = program_of(
        "old = p\np = p - 0.1*matmul(L, g)\nL = 0.5*L + matmul(norm(p)*L + 1, matmul(old, transpose(g)))",
        "state: {L: {init: 0, shape: [rows, rows]}}\n",
    )
    plan = Plan(program)
    wide = {b.name for b in kernel_buffers(program)}
    reads = [n for n in plan.gaps[-1].values if any(a.op is Op.LOAD and a.arg in wide for a in n.args)]
    assert not [n for n in reads if not set(n.args) & set(plan.held)]
    assert any(n.op is Op.MATMUL for n in plan.gaps[-2].values)


def test_joins_are_the_same_for_tensors_of_every_shape() -> None:
    rule = rulec.parse(
        'name: J\nstep: |\n  a = sum(g*g, per="model")\n  if ndim >= 2:\n    u = g/norm(g)\n  else:\n    u = g\n'
        '  direction = u*a*sum(abs(p), per="group")\n'
    )
    found = [compile_rule(rule, {"ndim": d, "numel": 6, "rows": 2, "cols": 3}) for d in (1, 2)]
    assert found[0] is not found[1]
    assert [(n.op, n.arg) for n in found[0].joins] == [(n.op, n.arg) for n in found[1].joins]


def test_a_long_rule_is_cut_in_no_time() -> None:
    lines = ["x0 = g"] + [f"x{i + 1} = x{i}*norm(x{i}) + x{i}*max(x{i})" for i in range(30)]
    program = program_of("\n".join([*lines, "direction = x30"]))
    assert len(program.stages) == 31
    assert all(len(s.reduces) == 2 for s in program.stages[:-1])


@pytest.mark.parametrize("first", [True, False])
def test_a_state_of_reductions_is_no_column_in_the_steps_that_only_read_it(first: bool) -> None:
    """What is made of a reduction is on the device: a column of it would wait for the kernels of the step before."""
    rule = rulec.parse(
        "name: R\nstate: {s: {init: 0, per: tensor}, k: {init: 0, per: tensor}}\nstep: |\n"
        "  if t == 1:\n    s = norm(g)\n  k = k + 1\n  direction = k*s*g\n"
    )
    place = compile_rule(rule).predicates[0][0]
    program = compile_rule(rule, assumed={place: first})
    read = {str(n.arg) for n in walk([c.value for c in program.scalars.columns]) if n.op is Op.LOAD}
    assert read == {"k"}
    assert program.late
