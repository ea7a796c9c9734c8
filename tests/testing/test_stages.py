"""The suite names what is wrong with a backend's stages, and passes what is right."""

from __future__ import annotations

import numpy as np
import pytest

import rulec
from rulec.array import Optimizer
from rulec.compiler.layout import layout_for
from rulec.compiler.pipeline import compile
from rulec.compiler.reference import ReferenceOptimizer
from rulec.compiler.view import matrix_view
from rulec.language.expr.node import Op
from rulec.testing import IEEE, NumpyKind
from rulec.testing.cases import MATRIX_SHAPES, buckets_of, loaded, staged_rules
from rulec.testing.conformance import check_stages
from rulec.testing.interval import Range, point
from rulec.testing.judge import exact, reduced
from rulec.testing.trial import Subject
from rulec.testing.whole import SHAPES, check_against_reference, check_whole
from tests.testing import broken
from tests.testing import broken_stages as faults

RULES = {rule.name: rule for rule in staged_rules()}


def failure(backend: broken.BrokenBackend, rule: str) -> str:
    with pytest.raises(AssertionError) as caught:
        check_stages(Subject(backend, NumpyKind(), IEEE), RULES[rule], ["float32"])
    message = str(caught.value)
    assert "\n" not in message
    assert message.startswith(f"backend {backend.name!r}, {rule} in float32: ")
    return message


@pytest.mark.parametrize("rule", RULES)
def test_the_backend_without_a_fault_passes(rule: str) -> None:
    check_stages(Subject(broken.BrokenBackend(), NumpyKind(), IEEE), RULES[rule], ["float32"])


@pytest.mark.parametrize(
    ("backend", "rule", "message"),
    [
        (
            faults.RowsForColumns(),
            "Rows0",
            "sum_g_col of a tensor of shape (7,) has shape (1, 1, 1), not (1, 1, 7)",
        ),
        (faults.SkipsNan(), "Tensors", "where the reference has nan (largest difference inf; allowed is only NaN)"),
        (faults.Careless(), "Tensors", "sum_abs_bold became"),
        (faults.ForgetsScratch(), "Matrices0", "element 0 of m_new_plus_p became nan where the reference has"),
        (faults.InMemory(), "Rows2", "where the reference has"),
        (faults.Single(), "Rows0", "where the reference has"),
        (faults.NothingIsZero(), "Tensors", "became 0 where the reference has"),
        (faults.Neighbours(), "Last0", "the bits of a tensor's reductions depend on its neighbours"),
        (faults.Restless(), "Last0", "a second run gives other bits of a reduction"),
        (faults.Short(), "Rows0", "is not one of float64 for each tensor"),
        (
            faults.Nameless(),
            "Tensors",
            "returns the reductions [], not ['min_m_new_p', 'sum_m_new_squared', 'high']",
        ),
        (faults.Flat(), "Last0", "the reduction r_new of a tensor of shape () has shape (1,), not (1, 1, 1)"),
        (faults.OldColumns(), "Tensors", "where the reference has"),
        (faults.OldVectors(), "Rows1", "where the reference has"),
        (faults.WritesVectors(), "Rows0", "which it only reads"),
        (faults.StoresEarly(), "Words", "p is not stored by this stage, yet it changed"),
    ],
    ids=lambda x: getattr(x, "name", None),
)
def test_every_fault_is_caught(backend: broken.BrokenBackend, rule: str, message: str) -> None:
    assert message in failure(backend, rule)


def test_a_wrong_whole_step_is_caught() -> None:
    subject = Subject(broken.WrongConstant(), NumpyKind(), IEEE)
    with pytest.raises(
        AssertionError, match=r"after step 1 of the runtime, element \(.*\) of a tensor of shape"
    ) as caught:
        check_whole(subject, rulec.load("adamw"))
    assert str(caught.value).startswith("backend 'wrong-constant', AdamW in float64: ")
    check_whole(Subject(broken.BrokenBackend(), NumpyKind(), IEEE), rulec.load("adamw"))


@pytest.mark.parametrize("name", ["adafactor", "muon", "prodigy", "transforms/lookahead", "transforms/skip_not_finite"])
def test_whole_steps_of_reductions_matrices_and_wrappers_pass(name: str) -> None:
    check_whole(Subject(broken.BrokenBackend(), NumpyKind(), IEEE), loaded(name))


@pytest.mark.filterwarnings("ignore:.*skipped the step:RuntimeWarning")
@pytest.mark.parametrize(
    "text",
    [
        # Reductions that nothing is left to reduce in, at the level of a group, a matrix and the model.
        'hyper: {h: 0.7}\nstate: {k: {init: 0.3, per: group}}\nstep: |\n  y = sum(k + h, per="group")\n'
        '  k = 0.5*k + y\n  direction = g*y*max(g, per="row") + sum(h, per="matrix")*max(k, per="col")\n',
        # Reductions of the last stage, with some tensors skipped and with all of them.
        "skip: sum(abs(g)) > 1 and t != 2\nstate: {r: {init: 1, per: row}, n: {init: 0, per: tensor}}\nstep: |\n"
        '  p = p - 0.1*g*r - n\n  r = max(p, per="row")\n  n = 0.1*norm(p)\n',
        'skip: t != 2\nstate: {r: {init: 1, per: row}}\nstep: |\n  p = p - 0.1*g*r\n  r = max(p, per="row")\n',
        # An input that only one of the routed rules has.
        "inputs: {h: like p}\napplies_to: ndim >= 2\notherwise: sgd\nstep: |\n  direction = g*h\n",
    ],
)
def test_the_runtime_follows_the_reference_at_the_edges(text: str) -> None:
    rule = rulec.parse(f"name: Edge\n{text}")
    check_against_reference(Subject(broken.BrokenBackend(), NumpyKind(), IEEE), rule, [*SHAPES, (0, 3), (2, 0, 3)])


def test_every_shape_is_in_the_bucket_that_it_belongs_to() -> None:
    rule = RULES["Matrices2"]
    found = buckets_of(rule, MATRIX_SHAPES)
    assert sorted(s for b in found for s in b.shapes) == sorted(MATRIX_SHAPES)
    assert {b.rule.name for b in found if min(map(len, b.shapes)) < 2} == {"SGD"}
    transposed = [b for b in found if b.transposed]
    assert [s for b in transposed for s in b.shapes] == [s for s in MATRIX_SHAPES if len(s) > 1 and s[-2] > s[-1]]


def test_both_outcomes_of_a_branch_that_is_decided_before_a_step_are_run() -> None:
    rule = rulec.parse("name: Often\nhyper: {every: 2}\nstate: {m: 0}\nstep: |\n"
                       "  if t % every == 0:\n    m = m + g\n  else:\n    m = m - g\n  direction = m\n")  # fmt: skip
    stores = {str(b.program.stages[0].stores[0].value) for b in buckets_of(rule, [(3,)])}
    assert len(stores) == 2
    assert compile(rule).predicates


@pytest.mark.parametrize("op", [Op.SUM, Op.MIN, Op.MAX])
@pytest.mark.parametrize("level", ["row", "col", "tensor"])
def test_the_range_of_a_reduction_holds_it_whatever_the_order(op: Op, level: str) -> None:
    random = np.random.default_rng(0)
    view = matrix_view((5, 7, 3), {"short": "first"})
    values = random.standard_normal(105) * 10.0 ** random.uniform(-8, 8, 105)
    allowed = reduced(op, level, point(values), view)
    wanted = exact(op, level, values, view)
    assert np.all((allowed.low <= wanted) & (wanted <= allowed.high))
    for order in (np.arange(105)[::-1], np.argsort(values), np.argsort(np.abs(values))):
        if level == "tensor" and op is Op.SUM:
            total = float(np.cumsum(values[order])[-1])
            assert allowed.low.item() <= total <= allowed.high.item()
    if op is not Op.SUM:
        assert np.array_equal(allowed.low, allowed.high)


def test_what_is_not_a_number_is_reduced_as_ieee_says() -> None:
    view = matrix_view((3,))

    def total(*values: float) -> Range:
        return reduced(Op.SUM, "tensor", point(np.array(values)), view)

    assert total(1.0, np.nan, 2.0).surely_nan.all()
    assert total(np.inf, 1.0, -np.inf).surely_nan.all()
    assert (total(np.inf, 1.0, 2.0).low, total(np.inf, 1.0, 2.0).high) == (np.inf, np.inf)
    assert reduced(Op.MAX, "tensor", point(np.array([np.inf, np.nan, 0.0])), view).surely_nan.all()
    none = matrix_view((0,))
    for op, value in ((Op.SUM, 0.0), (Op.MIN, np.inf), (Op.MAX, -np.inf)):
        r = reduced(op, "tensor", point(np.zeros(0)), none)
        assert (r.low.item(), r.high.item()) == (value, value)
    maybe = Range(np.array([-np.inf, 0.0, 0.0]), np.array([0.0, 0.0, np.inf]), np.zeros(3, bool))
    assert reduced(Op.SUM, "tensor", maybe, view).nan.all()


def test_the_layout_of_a_bucket_says_that_its_matrices_are_transposed() -> None:
    from rulec.testing.conformance import layout_of

    bucket = next(b for b in buckets_of(RULES["Rows2"], MATRIX_SHAPES) if b.transposed)
    assert layout_of(bucket, "float32") == layout_for(bucket.program, "float32", transposed=True)


def test_sums_over_the_model_that_branches_reach_in_another_order_are_not_mixed_up() -> None:
    rule = rulec.parse(
        'name: Mix\nstate: {m: 0}\nstep: |\n  a = sum(g, per="model")\n  b = sum(g*g, per="model")\n'
        "  if ndim >= 2:\n    m = a\n  else:\n    m = b\n  p = p + m + 0*(a + b)\n"
    )
    params = [np.zeros((1, 2)), np.zeros(2)]
    grads = [np.array([[1.0, 2.0]]), np.array([3.0, 4.0])]
    reference = ReferenceOptimizer(rule, params)
    reference.step(grads)
    assert [p.tolist() for p in reference.params] == [[[10.0, 10.0]], [30.0, 30.0]]
    Optimizer(rule, params, "numpy").step(grads)
    assert [p.tolist() for p in params] == [[[10.0, 10.0]], [30.0, 30.0]]
