"""The reference as an optimizer: groups, levels beyond the tensor, late tensors, skips, inputs, routing."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

import rulec
from rulec import RuleError
from rulec.compiler.interpreter import arithmetic
from rulec.compiler.reference import ReferenceOptimizer
from rulec.errors import HyperError, RulecError, TensorError

EXAMPLES = Path(__file__).parent / "examples"


def rule_of(step: str, head: str = "") -> rulec.Rule:
    lines = "".join(f"  {line}\n" for line in step.split("\n"))
    return rulec.parse(f"name: R\n{head}step: |\n{lines}")


#: Three tensors of two groups: norms 5, 13 and 17.
PARAMS = [np.zeros(2), np.zeros((2, 1)), np.zeros(2)]
GRADS = [np.array([3.0, 4.0]), np.array([[5.0], [12.0]]), np.array([8.0, 15.0])]
GROUPS = [0, 0, 1]


def moved(step: str, head: str = "", how: str = "float64") -> list[Any]:
    """Where the tensors are after one step with a learning rate of -1 in the first group and -2 in the second."""
    rule = rule_of(step, "hyper: {lr: {default: 1, min: -.inf}}\n" + head)
    optimizer = ReferenceOptimizer(rule, PARAMS, [{"lr": -1.0}, {"lr": -2.0}], how, groups=GROUPS)
    optimizer.step(GRADS)
    return [np.asarray(p, np.float64) for p in optimizer.params]


@pytest.mark.parametrize("how", ["float64", "mpmath"])
@pytest.mark.parametrize(
    ("reduction", "by_group"),
    [
        ('norm(g, per="tensor")', [5, 13, 17]),
        ('norm(g, per="group")', [np.sqrt(194), np.sqrt(194), 17]),
        ('norm(g, per="model")', [np.sqrt(483)] * 3),
        ('sum(g, per="model")', [47] * 3),
        ('sum(g, per="group")', [24, 24, 23]),
        ('mean(g, per="group")', [6, 6, 11.5]),
        ('mean(g, per="model")', [47 / 6] * 3),
        ('rms(g, per="model")', [np.sqrt(483 / 6)] * 3),
        ('min(g, per="model")', [3] * 3),
        ('max(g, per="group")', [12, 12, 15]),
        ('count_nonzero(g - 4, per="model")', [5] * 3),
        ('sum(norm(g), per="model")', [35] * 3),
        ('mean(norm(g), per="model")', [35 / 3] * 3),
        ('mean(norm(g), per="group")', [9, 9, 17]),
        ('rms(norm(g), per="model")', [np.sqrt(483 / 3)] * 3),
        ('mean(norm(g, per="group"), per="model")', [(np.sqrt(194) + 17) / 2] * 3),
        ('max(sum(g, per="group"), per="model")', [24] * 3),
        ('mean(mean(g, per="row"), per="model")', [(3.5 + 5 + 12 + 11.5) / 4] * 3),
        ('sum(lr, per="model")', [-3] * 3),
        ('mean(norm(g)/norm(g), per="model")', [1] * 3),
        ('norm(norm(g), per="tensor")', [5, 13, 17]),
        ("mean(lr)", [-1, -1, -2]),
    ],
)  # fmt: skip
def test_reductions_beyond_the_tensor(reduction: str, by_group: list[float], how: str) -> None:
    found = moved(f"p = p + {reduction}", how=how)
    for value, wanted in zip(found, by_group, strict=True):
        np.testing.assert_allclose(value, wanted, rtol=1e-14)


def test_states_of_a_group_and_of_the_model() -> None:
    head = "state: {a: {init: lr, per: group}, b: {init: 1, per: model}, c: {init: 0, per: tensor}}\n"
    step = 'a = a + sum(g, per="group")\nb = b + sum(g, per="model")\nc = c + a + b\np = p + c'
    found = moved(step, head)
    for value, wanted in zip(found, [(-1 + 24) + 48, (-1 + 24) + 48, (-2 + 23) + 48], strict=True):
        np.testing.assert_allclose(value, wanted)


def test_a_group_counts_its_own_steps() -> None:
    rule = rule_of("a = t\nb = t\nc = t\np = 0*p + 100*a + 10*b + c", "state: {a: {init: 0, per: model}, "
                   "b: {init: 0, per: group}, c: {init: 0, per: tensor}}\n")  # fmt: skip
    optimizer = ReferenceOptimizer(rule, PARAMS, [{}, {}], groups=GROUPS)
    optimizer.step([GRADS[0], None, None])
    optimizer.step([GRADS[0], None, GRADS[2]])
    optimizer.step(GRADS)
    # The first tensor's third step, the second's first, the third's second.
    assert [p.reshape(-1)[0] for p in optimizer.params] == [333, 331, 322]


def test_a_model_state_needs_one_value_of_a_hyper_parameter() -> None:
    rule = rule_of(
        'a = a + k*sum(g, per="model")\ndirection = a*g', "hyper: {k: 1}\nstate: {a: {init: 0, per: model}}\n"
    )
    optimizer = ReferenceOptimizer(rule, PARAMS, [{"k": 1.0}, {"k": 2.0}], groups=GROUPS)
    with pytest.raises(
        HyperError, match="k of R is part of a state of the whole model, so every group needs the same value"
    ):
        optimizer.step(GRADS)


def test_a_model_state_in_a_branch() -> None:
    head = "state: {a: {init: 1, per: model}}\n"
    rule = rule_of('if t > 1:\n  a = a + sum(g, per="model")\nelse:\n  a = 2*a\np = a + 0*p', head)
    optimizer = ReferenceOptimizer(rule, PARAMS)
    optimizer.step(GRADS)
    assert [p.reshape(-1)[0] for p in optimizer.params] == [2, 2, 2]
    optimizer.step(GRADS)
    assert [p.reshape(-1)[0] for p in optimizer.params] == [49, 49, 49]


def test_a_tensor_that_joins_late_counts_its_own_steps() -> None:
    rng = np.random.default_rng(0)
    p = rng.normal(size=(2, 3))
    grads = [rng.normal(size=p.shape) for _ in range(4)]
    adam = rulec.load("adam")
    late, early = ReferenceOptimizer(adam, [p, p]), ReferenceOptimizer(adam, [p])
    late.step([grads[0], None])
    late.step([grads[1], None])
    for g in grads[2:]:
        late.step([grads[0], g])
        early.step([g])
    np.testing.assert_array_equal(late.params[1], early.params[0])


@pytest.mark.parametrize("how", ["float64", "mpmath"])
def test_a_skipped_step_leaves_everything_as_it_is(how: str) -> None:
    rule = rule_of("m = m + g\nn = n + t\nu = u*2\ndirection = m*t*u",
                   "state: {m: 0, n: {init: 0, per: tensor}, u: {init: 1, per: tensor}}\n"
                   "skip: not isfinite(sum(g)) or norm(g) > 100\n")  # fmt: skip
    good, bad = np.array([1.0, 2.0]), [np.array([np.nan, 1.0]), np.array([1e3, 0.0]), np.array([np.inf, -np.inf])]
    skipping = ReferenceOptimizer(rule, [np.ones(2), np.ones(2)], arithmetic=how)
    plain = ReferenceOptimizer(rule, [np.ones(2)], arithmetic=how)
    for i in range(3):
        skipping.step([good, bad[i]])
        before = skipping.params[1].copy()
        skipping.step([bad[i], good])
        assert not (skipping.params[1] == before).all()
        plain.step([good])
    for index in range(2):
        assert (skipping.params[index] == plain.params[0]).all()
        for key, value in skipping.state(index).items():
            assert (value == plain.state(0)[key]).all()


def test_a_step_is_skipped_for_the_whole_model() -> None:
    rule = rule_of("direction = g*t", 'skip: not isfinite(sum(g, per="model"))\n')
    optimizer = ReferenceOptimizer(rule, [np.ones(2), np.ones(3)])
    optimizer.step([np.ones(2), np.full(3, np.nan)])
    assert all((p == 1).all() for p in optimizer.params)
    optimizer.step([np.ones(2), np.ones(3)])
    assert all((p == 1 - 1e-3).all() for p in optimizer.params)


def test_inputs() -> None:
    rule = rule_of("direction = g*loss + h", "inputs: {loss: scalar, h: like p}\n")
    optimizer = ReferenceOptimizer(rule, [np.zeros((2, 2)), np.zeros(3)], {"lr": 1.0})
    h = [np.full((2, 2), 5.0), np.arange(3.0)]
    optimizer.step([np.ones((2, 2)), np.ones(3)], inputs={"loss": 2.0, "h": h})
    np.testing.assert_array_equal(optimizer.params[0], -7)
    np.testing.assert_array_equal(optimizer.params[1], [-2, -3, -4])
    with pytest.raises(TensorError, match="R needs the input 'h' at every step"):
        optimizer.step([np.ones((2, 2)), np.ones(3)], inputs={"loss": 2.0})


def test_hyper_parameters() -> None:
    adam = rulec.load("adam")
    with pytest.raises(HyperError, match="Adam has no hyper-parameter 'beta3'; did you mean 'beta2'\\?"):
        ReferenceOptimizer(adam, PARAMS, {"beta3": 0.5})
    with pytest.raises(HyperError, match=r"beta1=1\.0 of Adam must be at least 0 and below 1"):
        ReferenceOptimizer(adam, PARAMS, {"beta1": 1.0})
    with pytest.raises(RuleError, match="hyper-parameter 'k' of R has no default: bind it to a number"):
        ReferenceOptimizer(rule_of("direction = k*g", "hyper: {k: {default: null}}\n"), PARAMS)


def test_defaults_that_depend_on_others() -> None:
    rule = rule_of("p = p*0 + b + 10*eps", "hyper: {a: 4, b: sqrt(a), eps: machine_eps}\n")
    optimizer = ReferenceOptimizer(rule, [np.zeros(1), np.zeros(1, np.float32)], {"a": 9.0})
    optimizer.step([np.zeros(1)] * 2)
    np.testing.assert_allclose(optimizer.params[0], 3 + 10 * 2.0**-52, rtol=1e-16)
    np.testing.assert_allclose(optimizer.params[1], 3 + 10 * 2.0**-23, rtol=1e-16)


def test_routing() -> None:
    muon = rulec.load(EXAMPLES / "muon.yaml")
    params = [np.eye(3), np.ones(3), np.ones((3, 3))]
    optimizer = ReferenceOptimizer(muon, params, {"lr": 0.5, "adamw_lr": 0.25}, tags=[set(), set(), {"embedding"}])
    grads = [np.ones((3, 3)), np.ones(3), np.ones((3, 3))]
    # What both have is one hyper-parameter, with Muon's default.
    adamw = ReferenceOptimizer(rulec.load("adamw"), params[1:], {"lr": 0.25, "weight_decay": 0.1})
    for _ in range(2):
        optimizer.step(grads)
        adamw.step(grads[1:])
    assert [set(optimizer.state(i)) for i in range(3)] == [{"m"}, {"m", "v"}, {"m", "v"}]
    np.testing.assert_allclose(optimizer.params[1], adamw.params[0], rtol=1e-15)
    np.testing.assert_allclose(optimizer.params[2], adamw.params[1], rtol=1e-15)
    without = rule_of("direction = g", "applies_to: ndim == 2\n")
    with pytest.raises(RuleError, match=r"R does not apply to .*\(3,\), and names no rule"):
        ReferenceOptimizer(without, [np.ones(3)])


@pytest.mark.parametrize("how", ["float64", "mpmath"])
def test_nothing_to_reduce(how: str) -> None:
    step = "a = sum(g)\nb = min(g)\nc = max(g)\nd = norm(g)\np = p + a + b + c + d"
    optimizer = ReferenceOptimizer(rule_of(step), [np.zeros((0, 3)), np.zeros(2)], arithmetic=how)
    optimizer.step([np.zeros((0, 3)), np.ones(2)])
    assert optimizer.params[0].shape == (0, 3)
    wide = rule_of('p = 0*p + min(g, per="model") + 10*max(g, per="model") + 100*sum(g, per="model")')
    optimizer = ReferenceOptimizer(wide, [np.zeros((0, 3)), np.zeros(2)], arithmetic=how)
    optimizer.step([np.zeros((0, 3)), np.array([1.0, 2.0])])
    assert (optimizer.params[1] == 321).all()


def test_values_that_are_not_finite_stay_in_their_element() -> None:
    for rule_name in ("adamw", "lion", "nadam"):
        p = np.ones(4)
        optimizer = ReferenceOptimizer(rulec.load(rule_name), [p])
        optimizer.step([np.array([1.0, np.nan, np.inf, -1.0])])
        assert np.isfinite(optimizer.params[0][[0, 3]]).all()
        assert np.isnan(optimizer.params[0][1])


def test_arithmetic_by_name() -> None:
    with pytest.raises(ValueError, match="arithmetic is 'float64' or 'mpmath', not 'float32'"):
        arithmetic("float32")
    optimizer = ReferenceOptimizer(
        rule_of("direction = g*sum(eigh(g @ transpose(g)))"), [np.eye(2)], arithmetic="mpmath"
    )
    with pytest.raises(RulecError, match="eigh of a matrix of 2 rows has no 50-digit form here: two of its"):
        optimizer.step([np.eye(2)])


def test_matrix_functions() -> None:
    rng = np.random.default_rng(0)
    g = rng.normal(size=(2, 4, 3))
    rule = rule_of("a = qr(g)\np = a @ (transpose(a) @ p)")
    optimizer = ReferenceOptimizer(rule, [g])
    optimizer.step([g])
    np.testing.assert_allclose(optimizer.params[0], g, rtol=1e-12, atol=1e-12)  # g lies in its own column space
    square = rng.normal(size=(3, 3))
    gram = square @ square.T
    root = ReferenceOptimizer(rule_of("l = g @ transpose(g)\nr = inverse_root(l, 2)\np = r @ r @ l @ p"), [np.eye(3)])
    root.step([square])
    np.testing.assert_allclose(root.params[0], np.eye(3), atol=1e-9)
    vectors = ReferenceOptimizer(
        rule_of("l = g @ transpose(g)\nv = eigh(l)\np = transpose(v) @ l @ v @ p"), [np.eye(3)]
    )
    vectors.step([square])
    np.testing.assert_allclose(vectors.params[0], np.diag(np.linalg.eigvalsh(gram)), atol=1e-12)
    u, _, vt = np.linalg.svd(square)
    near = ReferenceOptimizer(rule_of("p = newton_schulz(g, steps=5)"), [np.zeros((3, 3))])
    near.step([square])
    assert np.abs(np.linalg.svd(near.params[0])[1] - 1).max() < 0.4
    assert np.sum(near.params[0] * (u @ vt)) > 2


_SUMS = 'a = sum(g, per="model")\nb = sum(g*g, per="model")\nif ndim >= 2:\n  m = {}\nelse:\n  m = {}\ndirection = g*m'


def _branching(then: str, otherwise: str) -> rulec.Rule:
    lines = _SUMS.format(then, otherwise).replace("\n", "\n  ")
    return rulec.parse(f"name: R\nstep: |\n  {lines}\n")


def test_model_wide_sums_are_matched_by_their_lines_whatever_branches_read_them_first() -> None:
    grads = [np.array([[1.0, 2.0], [3.0, 4.0]]), np.array([1.0, 2.0, 3.0])]
    optimizer = ReferenceOptimizer(_branching("a + 2*b", "3*b + a"), [g * 0 for g in grads], {"lr": 1.0})
    optimizer.step(grads)
    np.testing.assert_array_equal(optimizer.params[0], -grads[0] * (16 + 2 * 44))
    np.testing.assert_array_equal(optimizer.params[1], -grads[1] * (3 * 44 + 16))


def test_a_model_wide_sum_that_some_tensors_alone_read_is_refused() -> None:
    grads = [np.ones((2, 2)), np.ones(3)]
    optimizer = ReferenceOptimizer(_branching("a", "b"), grads)
    with pytest.raises(RuleError, match="do not all have the same values across the model"):
        optimizer.step(grads)


def test_a_copy_goes_on_by_itself() -> None:
    rule = rule_of(
        'm = 0.9*m + g\nw = w + sum(g, per="group")\nd = d + sum(w*t, per="model")\ndirection = m + w + d',
        "hyper: {lr: 1.0}\nstate: {m: 0, w: {init: 0, per: group}, d: {init: 0, per: model}}\n",
    )
    one = ReferenceOptimizer(rule, PARAMS, [{}, {}], groups=GROUPS)
    one.step(GRADS)
    before, other = [p.copy() for p in one.params], one.copy()
    other.step(GRADS, {"lr": 0.5})
    for p, old, new in zip(one.params, before, other.params, strict=True):
        np.testing.assert_array_equal(p, old)
        assert not np.array_equal(new, old)
    straight = ReferenceOptimizer(rule, PARAMS, [{}, {}], groups=GROUPS)
    straight.step(GRADS)
    for run in (one, other, straight):
        run.step(GRADS, {"lr": 1.0})
    for ours, wanted in zip(one.params, straight.params, strict=True):
        np.testing.assert_array_equal(ours, wanted)
