"""The passes one by one: branches, levels, the scalar program, stages, and what each refuses."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import rulec
from rulec import RuleError
from rulec.compiler.foreseen import decide
from rulec.compiler.ir import Program, Stage, Store, verify
from rulec.compiler.pipeline import compile as compile_rule
from rulec.compiler.reference import ReferenceOptimizer
from rulec.compiler.scalars import ScalarTable
from rulec.compiler.simplify import fold_node
from rulec.compiler.text import program_text
from rulec.compiler.view import matrix_view
from rulec.errors import InternalError
from rulec.language.expr.node import Kind, Node, Op, const, name, node, walk
from rulec.language.parse.expression import parse_expression
from rulec.language.parse.located import Text
from rulec.language.source import Source
from tests.compiler.plain import PlainRun

FACTS = {"ndim": 2, "numel": 12, "rows": 3, "cols": 4}
VECTOR = {"ndim": 1, "numel": 12, "rows": 1, "cols": 12}


def rule_of(step: str, head: str = "") -> rulec.Rule:
    lines = "".join(f"  {line}\n" for line in step.split("\n"))
    return rulec.parse(f"name: R\n{head}step: |\n{lines}")


def stored(program: Program) -> dict[str, str]:
    stores = [*(s for stage in program.stages for s in stage.stores), *program.finish]
    return {s.buffer: repr(s.value)[1:-1] for s in (*program.scalars.stores, *stores)}


def columns(program: Program) -> dict[str, str]:
    return {c.name: repr(c.value)[1:-1] for c in program.scalars.columns}


# Branches


def test_a_branch_on_shape_facts_is_decided() -> None:
    rule = rule_of("if ndim >= 2:\n  direction = g\nelse:\n  direction = 2*g")
    assert not any(n.op is Op.WHERE for n in nodes(compile_rule(rule, FACTS)))
    assert stored(compile_rule(rule, FACTS)) != stored(compile_rule(rule, VECTOR))


def nodes(program: Program) -> list[Node]:
    roots = [root for stage in program.stages for root in stage.roots]
    return list(walk([*roots, *(c.value for c in program.scalars.columns)]))


@pytest.mark.parametrize("power", [2, 3, 4])
def test_small_powers_have_as_many_factors(power: int) -> None:
    g = np.array([0.5, -3.0])
    optimizer = ReferenceOptimizer(rule_of(f"direction = g**{power}"), [np.zeros(2)], {"lr": 1.0})
    optimizer.step([g])
    np.testing.assert_array_equal(optimizer.params[0], -(g**power))


def test_a_branch_on_a_local_that_stands_for_a_shape_fact() -> None:
    """Programs are shared by what their conditions decide; a condition on a local decides only within."""
    rule = rule_of("wide = ndim >= 2\nif wide:\n  direction = g\nelse:\n  direction = 2*g")
    assert stored(compile_rule(rule, FACTS)) != stored(compile_rule(rule, VECTOR))
    nested = rule_of("x = rows\nif ndim >= 2:\n  x = cols\nif x > 3:\n  direction = g\nelse:\n  direction = 2*g")
    assert stored(compile_rule(nested, FACTS)) != stored(compile_rule(nested, {**FACTS, "cols": 3}))


def test_facts_that_decide_alike_share_a_program() -> None:
    rule = rule_of("if ndim >= 2:\n  direction = g\nelse:\n  direction = 2*g")
    assert compile_rule(rule, FACTS) is compile_rule(rule, {**FACTS, "rows": 4})
    assert compile_rule(rule, FACTS) is not compile_rule(rule, VECTOR)


def test_static_hyper_parameters_decide() -> None:
    head = "hyper: {k: {default: 2, static: true}, j: {default: 1, static: true}}\n"
    rule = rule_of("if k > 1 and j > 0:\n  direction = g\nelse:\n  direction = 2*g", head)
    assert stored(compile_rule(rule)) == stored(compile_rule(rule, static={"k": 3}))
    assert stored(compile_rule(rule)) != stored(compile_rule(rule, static={"k": 1}))  # j keeps its default


def test_a_branch_that_is_not_decided_becomes_a_choice() -> None:
    rule = rule_of(
        "x = g\nif t > 10:\n  m = m + g\n  x = m\nelse:\n  y = 3*g\n  x = x + y\ndirection = x", "state: {m: 0}\n"
    )
    found = stored(compile_rule(rule))
    assert found["m"].startswith("where(")
    with pytest.raises(RuleError, match="the condition of an if is true or false: write a comparison") as caught:
        compile_rule(rule_of("if g:\n  direction = g\nelse:\n  direction = p"))
    assert caught.value.place == "<string>:3:6"


def test_a_state_that_does_not_exist_for_a_shape() -> None:
    rule = rule_of("m = m + g\ndirection = m", "state: {m: {init: 0, if: ndim >= 2}}\n")
    assert [b.name for b in compile_rule(rule, FACTS).states] == ["m"]
    with pytest.raises(
        RuleError, match="'m' of R has no value here: its state does not exist for this shape"
    ) as caught:
        compile_rule(rule, VECTOR)
    assert caught.value.place == "<string>:4:3"


@pytest.mark.parametrize(
    ("condition", "truth"),
    [
        ("ndim == 2", True), ("ndim > 2 or rows == 3", True), ("not rows < cols", False), ("numel % 5", True),
        ("k > 1", None), ("ndim == 2 and k > 1", None), ("rows/0 > 1", True), ("0/0 > ndim", False),
    ],
)  # fmt: skip
def test_decide(condition: str, truth: bool | None) -> None:
    assert decide(parse_expression(Text(condition, Source("", condition)), [*FACTS, "k"]), FACTS) is truth


# Truth values as numbers


@pytest.mark.parametrize(
    "expression",
    [
        "sqrt(g > 0)", "maximum(g > 0, g)", "abs(g > 0) - exp(g < 0)", "(g > 0)*(p > 0) + (g > 0)", "-(g > 0)",
        "sum(g > 0) + mean(g > 0) + norm(g > 0) + max(g > 0)", "(g > 0) < (p > 0)", "2**(g > 0)", "(g > 0) == 1",
        "where(g > 0, g > p, 0.5)", "where(g, 1, 2)", "where(g and not p, 1, 2)", "isfinite(g > 0)*1", "floor(g > 0)",
        "clip(g > 0, 0, 0.5)", "where(g > 0, g > 1, g < -1) + 0", "not g", "g > 0", "tanh(not g)",
    ],
)  # fmt: skip
def test_truth_values_count_as_numbers(expression: str) -> None:
    rule = rule_of(f"direction = {expression}")
    g, p = np.array([[[1.5, -0.5, 0.0, -2.0]]]), np.array([[[1.0, 0.0, 2.0, -3.0]]])
    wanted = np.asarray(PlainRun(rule, p, {}).step(g)["direction"], np.float64)
    for arithmetic in ("float64", "mpmath"):
        optimizer = ReferenceOptimizer(rule, [p], {"lr": 1.0}, arithmetic)
        optimizer.step([g])
        np.testing.assert_allclose(np.asarray(optimizer.params[0], np.float64), p - wanted, rtol=1e-14)


def test_a_truth_value_is_stored_as_a_number() -> None:
    rule = rule_of("m = g > 0\nn = ndim > 1\ndirection = m + n", "state: {m: ndim > 1, n: {init: 1, per: tensor}}\n")
    program = compile_rule(rule)
    assert stored(program)["m"] == "where(g > 0, 1, 0)"
    assert repr(program.buffer("m").init) == "<where(ndim > 1, 1, 0)>"


# Folding


X = node(Op.LOAD, "x")


@pytest.mark.parametrize(
    ("value", "folded"),
    [
        (node(Op.MUL, X, const(1)), X),
        (node(Op.MUL, const(1), X), X),
        (node(Op.DIV, X, const(1)), X),
        (node(Op.POW, X, const(1)), X),
        (node(Op.SUB, X, const(0)), X),
        (node(Op.NEG, node(Op.NEG, X)), X),
        (node(Op.POW, X, const(2)), node(Op.MUL, X, X)),
        (node(Op.ADD, const(2), const(3)), const(5)),
        (node(Op.DIV, const(1), const(0)), const(math.inf)),
        (node(Op.SQRT, const(4)), const(2)),
        (node(Op.MINIMUM, const(4), const(3)), const(3)),
        (node(Op.NEG, const(0)), const(-0.0)),
    ],
)
def test_fold(value: Node, folded: Node) -> None:
    assert fold_node(value) is folded


@pytest.mark.parametrize(
    "value",
    [
        node(Op.ADD, X, const(0)), node(Op.SUB, X, const(-0.0)), node(Op.MUL, X, const(0)), node(Op.SUB, X, X),
        node(Op.DIV, X, X), node(Op.SUB, const(0), X), node(Op.DIV, const(1), X), node(Op.POW, X, const(0.5)),
        node(Op.WHERE, node(Op.GT, X, const(0)), X, X), node(Op.WHERE, node(Op.GT, X, const(0)), const(1), const(1)),
        node(Op.LT, const(1), const(2)), node(Op.MUL, X, const(-1)),
    ],
)  # fmt: skip
def test_what_is_not_the_same_for_every_number_stays(value: Node) -> None:
    assert fold_node(value) is value


# Axes


@pytest.mark.parametrize(
    ("step", "says"),
    [
        (
            "n = g\ndirection = n",
            "n is kept per tensor but is assigned a value per element: "
            "reduce it with per='tensor', or declare the state per element",
        ),
        (
            "r = mean(g, per='col')\ndirection = r",
            "r is kept per row but is assigned a value per col: reduce it with per='row', or declare the state per col",
        ),
        (
            "n = mean(g, per='row')\ndirection = n",
            "n is kept per tensor but is assigned a value per row: "
            "reduce it with per='tensor', or declare the state per row",
        ),
        ("direction = g @ g", "the inner sides of 'g @ g' differ"),
        ("direction = norm(g) @ g", "@ needs a matrix, and 'norm(g, per=\"tensor\")' is none"),
        (
            "direction = g + transpose(g)",
            "shapes do not fit in 'g + transpose(g)': one part has rows as its rows and another cols as its rows",
        ),
        ("direction = normal([3, cols])", "shapes do not fit in "),
        ("p = normal([3, cols])", "p is rows by cols but is assigned a value of 3 by cols"),
        ("m = g @ transpose(g)\ndirection = m", "m is rows by cols but is assigned a value of rows by rows"),
    ],
)
def test_parts_that_do_not_fit(step: str, says: str) -> None:
    used = [key for key in "mnr" if any(line.startswith(f"{key} =") for line in step.split("\n"))]
    states = {"m": "m: 0", "n": "n: {init: 0, per: tensor}", "r": "r: {init: 0, per: row}"}
    head = f"state: {{{', '.join(states[key] for key in used)}}}\n" if used else ""
    with pytest.raises(RuleError) as caught:
        compile_rule(rule_of(step, head))
    assert caught.value.message.startswith(says)
    assert caught.value.place == f"<string>:{3 + bool(used)}:3"


def test_a_state_of_a_shape_of_its_own() -> None:
    head = "hyper: {k: {default: 2, static: true}}\nstate: {m: {init: 0, shape: [k, cols]}}\n"
    program = compile_rule(rule_of("m = normal([k, rows], at=0) @ g\ndirection = norm(m)*g", head))
    axes = program.buffer("m").axes
    assert (axes.letters, repr(axes.rows), repr(axes.cols)) == ("knbij", "<k>", "<cols>")
    with pytest.raises(RuleError, match="m is k by cols but is assigned a value of rows by cols"):
        compile_rule(rule_of("m = g\ndirection = norm(m)*g", head))
    with pytest.raises(RuleError, match="shapes do not fit in"):
        compile_rule(rule_of("m = 2*m\ndirection = m + g", head))


def test_skip_must_be_one_truth_for_a_tensor() -> None:
    with pytest.raises(RuleError, match="skip of R differs from element to element"):
        compile_rule(rule_of("direction = g", "skip: not isfinite(g)\n"))
    compile_rule(rule_of("direction = g", "skip: not isfinite(sum(g))\n"))


# The scalar program


def test_what_depends_on_hyper_parameters_and_t_alone_leaves_the_kernel() -> None:
    program = compile_rule(rulec.load("adam"))
    assert columns(program) == {
        "lr": "lr", "beta1": "beta1", "one_minus_beta1": "1 - beta1", "one_minus_beta1_t": "1 - beta1**t",
        "beta2": "beta2", "one_minus_beta2": "1 - beta2", "sqrt_one_minus_beta2_t": "sqrt(1 - beta2**t)", "eps": "eps",
    }  # fmt: skip
    left = [n for n in walk(program.stages[0].roots) if n.op.kind is Kind.LEAF]
    assert {n.op for n in left} == {Op.LOAD, Op.SCALAR}


def test_a_scalar_state_joins_the_scalar_program() -> None:
    program = compile_rule(rulec.load("nadam"))
    assert [s.buffer for s in program.scalars.stores] == ["mu_product"]
    assert "mu_product" not in {s.buffer for s in program.stages[0].stores}


def test_states_that_depend_on_each_other() -> None:
    """A narrow state stays in the kernel where its value needs the tensor, and so does what depends on it."""
    states = "state: {a: {init: 1, per: tensor}, b: {init: 1, per: tensor}, c: {init: 1, per: tensor}}\n"
    program = compile_rule(rule_of("a = a + norm(g)\nb = b + a\nc = c*t\ndirection = g*a*b*c", states))
    assert [s.buffer for s in program.scalars.stores] == ["c"]
    assert {s.buffer for s in program.finish} == {"a", "b"}
    # Read before it is assigned, a state's old value is scalar where the state is.
    program = compile_rule(rule_of("x = c\nc = c*t\ndirection = g*x*c", "state: {c: {init: 1, per: tensor}}\n"))
    assert [repr(s.value) for s in program.scalars.stores] == ["<c*t>"]
    assert all(n.op is not Op.LOAD or n.arg in ("g", "p") for n in walk(program.stages[0].roots))


def test_a_state_that_is_read_and_never_assigned() -> None:
    program = compile_rule(rule_of("direction = g*k", "hyper: {a: 2}\nstate: {k: {init: a, per: tensor}}\n"))
    assert not program.scalars.stores
    assert "k" in columns(program).values()


def test_names_of_columns_are_their_own() -> None:
    head = "hyper: {scalar_0: 2, k: 3}\nstate: {x: 0}\n"
    step = "m = scalar_0*k + t\ny = k**t + 2\nx = x*y*(1 - k)*(1 - scalar_0**t)\ndirection = g*m*y*x*scalar_0*k*(t + 7)"
    program = compile_rule(rule_of(step, head))
    names = [c.name for c in program.scalars.columns]
    assert len(set(names)) == len(names)
    assert not set(names) & {b.name for b in program.buffers}
    assert {"m", "y", "one_minus_k", "one_minus_scalar_0_t"} <= set(names)


def test_a_long_scalar_computation_is_hoisted_in_no_time() -> None:
    lines = ["a = t"] + ["a = a*a + a"] * 300 + ["direction = g*a"]
    program = compile_rule(rule_of("\n".join(lines)))
    assert len(program.scalars.columns) == 2
    assert len(program_text(program)) < 100_000


def test_scalar_table() -> None:
    program = compile_rule(rulec.load("nadam"))
    table = ScalarTable(program.scalars)
    hyper: dict[str, Any] = {k: h.default for k, h in program.hyper.items()}
    t, product = np.array([1.0, 5.0, 9.0]), np.array([1.0, 0.3, 0.1])
    rows, states = table.evaluate((3,), hyper, t, {}, {"mu_product": product})
    assert rows.shape == (3, len(program.scalars.columns))
    mu = 0.9 * (1 - 0.5 * 0.96 ** (t * 4e-3))
    np.testing.assert_allclose(states["mu_product"], product * mu, rtol=1e-15)
    where = {c.name: i for i, c in enumerate(program.scalars.columns)}
    np.testing.assert_allclose(rows[:, where["sqrt_one_minus_beta2_t"]], np.sqrt(1 - 0.999**t), rtol=1e-15)
    np.testing.assert_allclose(rows[:, where["lr"]], 2e-3)


# Stages


def test_stages_are_cut_at_reductions() -> None:
    program = compile_rule(rulec.load(Path(__file__).parent / "examples" / "lamb.yaml"))
    assert [(len(s.stores), len(s.reduces)) for s in program.stages] == [(0, 2), (3, 0)]
    nested = rule_of("a = norm(g)\nb = norm(g/a)\ndirection = g*b + a")
    assert [len(s.reduces) for s in compile_rule(nested).stages] == [1, 1, 0]
    matrix = compile_rule(rule_of("direction = newton_schulz(g/norm(g))"))
    assert [(len(s.reduces), len(s.stores), s.vectors) for s in matrix.stages] == [
        (1, 0, ()), (0, 1, ()), (0, 1, ("direction",))
    ]  # fmt: skip


def test_an_elementwise_rule_is_one_stage() -> None:
    for rule_name in ("sgd", "adamw", "nadam", "lion", "adan"):
        assert compile_rule(rulec.load(rule_name)).elementwise


# Verification


def broken(stages: tuple[Stage, ...]) -> Program:
    program = compile_rule(rulec.load("sgd"))
    return Program(program.name, program.rule, program.buffers, program.hyper, stages, program.scalars)


G = node(Op.LOAD, "g")


@pytest.mark.parametrize(
    ("stages", "says"),
    [
        ((Stage((Store("p", name("x")),)),), "the name 'x' is unresolved"),
        ((Stage((Store("p", node(Op.LOAD, "q")),)),), "loads 'q', which is no buffer"),
        ((Stage((Store("q", G),)),), "a store goes where it must not"),
        ((Stage((Store("g", G),)),), "a store goes where it must not"),
        ((Stage((Store("p", G), Store("p", G))),), "a buffer is stored twice in one stage"),
        ((Stage((Store("p", node(Op.SCALAR, 9)),)),), "reads past the scalar table"),
        ((Stage((Store("p", node(Op.RESULT, "sum_0")),)),), "a kernel reads 'sum_0', which is no vector"),
        ((Stage((Store("p", G),)), Stage((Store("p", node(Op.LOAD, "p")),))), "two stages store one buffer"),
        ((Stage(), Stage((Store("p", node(Op.SUM, G, "tensor")),))), "sum stands inside a stage"),
    ],
)
def test_verify(stages: tuple[Stage, ...], says: str) -> None:
    with pytest.raises(InternalError, match=f"after test, SGD: {says}"):
        verify(broken(stages), "test")


# The view


@pytest.mark.parametrize(
    ("shape", "view", "wanted"),
    [
        ((), {}, (1, 1, 1)), ((5,), {}, (1, 1, 5)), ((3, 4), {}, (1, 3, 4)), ((2, 3, 4), {}, (2, 3, 4)),
        ((2, 3, 4, 5), {}, (6, 4, 5)), ((2, 3, 4, 5), {"flatten": "rest"}, (1, 2, 60)),
        ((4, 3), {"short": "first"}, (1, 3, 4)), ((7, 2, 2), {"short": "first"}, (7, 2, 2)),
        ((3, 4), {"short": "first"}, (1, 3, 4)), ((5,), {"short": "first"}, (1, 1, 5)),
        ((9, 2, 2), {"flatten": "rest", "short": "first"}, (1, 4, 9)), ((0, 3), {}, (1, 0, 3)),
        ((3, 0), {"short": "first"}, (1, 0, 3)),
        ((2, 0, 3), {"flatten": "rest"}, (1, 2, 0)),
    ],
)  # fmt: skip
def test_view(shape: tuple[int, ...], view: dict[str, str], wanted: tuple[int, int, int]) -> None:
    found = matrix_view(shape, view)
    assert (found.batch, found.rows, found.cols) == wanted
    array = np.arange(math.prod(shape)).reshape(shape)
    assert found.matrices(array).shape == wanted
    np.testing.assert_array_equal(found.tensor(found.matrices(array)), array)
    dims = {f"dim{k}": n for k, n in enumerate(shape)}
    sides = {"rows": wanted[1], "cols": wanted[2]}
    assert found.facts == {"ndim": len(shape), "numel": math.prod(shape), **dims, **sides}


def test_view_transposes_and_joins() -> None:
    array = np.arange(6).reshape(3, 2)
    np.testing.assert_array_equal(matrix_view((3, 2), {"short": "first"}).matrices(array)[0], array.T)
    cube = np.arange(24).reshape(2, 3, 4)
    np.testing.assert_array_equal(matrix_view((2, 3, 4), {"flatten": "rest"}).matrices(cube)[0], cube.reshape(2, 12))
