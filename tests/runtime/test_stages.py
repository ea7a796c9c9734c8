"""Steps of several stages through the runtime, beside the reference, which knows no stages, buckets or launches."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tracemalloc
import warnings
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import pytest

import rulec
from rulec import Rule
from rulec.array import Optimizer
from rulec.array.arrays import NumpyArrays
from rulec.array_api.numpy import NUMPY_MATRIX, NumpyLibrary
from rulec.compiler.reference import ReferenceOptimizer
from rulec.errors import HyperError, PartialUpdate, RuleError, TensorError
from rulec.language.expr.node import Op, walk
from rulec.runtime.engine import Engine, default_hyper, run
from rulec.testing.cases import loaded
from rulec.testing.whole import tolerance
from tests.library import by_kind, single

Array = np.ndarray[Any, Any]

#: Of no to four dimensions, empty ones too, alike and not, in two groups by turns.
SHAPES = [(), (7,), (6, 5), (0,), (6, 5), (3, 4, 5), (2, 3, 4, 2), (5, 6), (0, 3)]

#: The same for rules with eigenvectors, which only matrices of full rank determine: square, flattened ones too.
SQUARE_SHAPES = [(), (7,), (5, 5), (0,), (5, 5), (6, 2, 3), (4, 2, 2), (6, 6), (0, 3)]

#: Which tensors have a gradient in each step: some join late, some pause, one group pauses, all fire.
FIRED: list[list[int]] = [[0, 1, 2, 5], [0, 1, 2, 3, 5, 6], [*range(9)], [1, 3, 5, 7], [2, 4, 6], [*range(9)]]


def random_arrays(seed: int, shapes: Sequence[tuple[int, ...]] = SHAPES, dtype: str = "float64") -> list[Array]:
    rng = np.random.default_rng(seed)
    return [np.asarray(rng.normal(size=s), dtype) for s in shapes]


def rule_of(step: str, head: str = "") -> Rule:
    lines = "".join(f"  {line}\n" for line in step.split("\n"))
    return rulec.parse(f"name: R\n{head}step: |\n{lines}")


class Run:
    """An engine with its tensors and the hyper-parameters of each group."""

    def __init__(
        self, rule: Rule, params: Sequence[Array], groups: Sequence[int] | None = None,
        hyper: Sequence[Mapping[str, float]] = ({},), backend: str = "numpy", **options: Any,
    ) -> None:  # fmt: skip
        self.params = [p.copy(order="K") for p in params]
        self.engine = Engine(rule, NumpyArrays(), backend, **options)
        own = groups or [0] * len(params)
        self.ids = [self.engine.add(p, g, f"tensor {i}") for i, (p, g) in enumerate(zip(self.params, own, strict=True))]
        self.set(*hyper)

    def set(self, *hyper: Mapping[str, float]) -> None:
        """Other hyper-parameters, one dict for each group."""
        self.table = self.engine.hyper_table([default_hyper(self.engine.rule, h, "float64") for h in hyper])

    def step(self, grads: Sequence[Array | None], inputs: Mapping[str, Any] | None = None) -> None:
        """One step; None is no gradient."""
        fired = tuple(i for i in self.ids if grads[i] is not None)
        self.engine.step(fired, [grads[i] for i in fired], self.table, inputs)

    def counts(self) -> list[int]:
        """How often each tensor was updated."""
        return [int(self.engine.state(i).get("step", 0)) for i in self.ids]

    def everything(self) -> list[bytes]:
        """All that a step may change."""
        states = [np.asarray(v) for i in self.ids for _, v in sorted(self.engine.state(i).items())]
        shared = self.engine.shared
        levels = [shared.group_t, shared.model_t, np.array(shared.waiting)]
        numbers = [v for _, v in sorted(shared.values.items())]
        return [a.tobytes() for a in (*self.params, *states, *numbers, *levels)]

    def call(self, bucket: int, call: Any) -> Any:
        """Puts another kernel in the place of a bucket's; gives the one that was there."""
        version = list(self.engine.buckets.values())[bucket].version()
        before, version.call = version.call, call
        return before


def check_near(rule: Rule, found: Sequence[Array], wanted: Sequence[Array]) -> None:
    for ours, theirs in zip(found, wanted, strict=True):
        size = np.max(np.abs(theirs), initial=0.0)
        np.testing.assert_allclose(ours, theirs, rtol=0, atol=tolerance(rule) * size)


def inputs_of(rule: Rule, seed: int, fired: Sequence[int] | None = None) -> dict[str, Any]:
    made = random_arrays(seed)
    chosen = made if fired is None else [made[i] for i in fired]
    return {name: chosen if kind == "like p" else 1.0 / (1 + seed) for name, kind in rule.inputs.items()}


def check_follows(rule: Rule, backend: str, fired: Sequence[Sequence[int]] = FIRED) -> None:
    """Steps a rule in two groups of other learning rates, and the reference beside it."""
    low_rank = any(state.shape for state in rule.state.values()) and "rank" in rule.hyper
    shapes = SQUARE_SHAPES if any(n.op is Op.EIGH for n in walk(rule.expressions)) else SHAPES
    groups = [i % 2 for i in range(len(shapes))]
    rate = rule.settings.get("lr")
    shared = any(s.per == "model" for s in rule.standalone().state.values())
    other = {} if rate is None or not isinstance(rate.default, float) or shared else {"lr": rate.default / 2}
    params = random_arrays(1, shapes)
    reference = ReferenceOptimizer(rule, params, [{}, other], groups=groups)
    ours = Run(rule, params, groups, [{}, other], backend)
    # A matrix without rows has no rank.
    fired = [[i for i in now if i != 8 or not low_rank] for now in fired]
    for step, now in enumerate(fired):
        made = random_arrays(10 + step, shapes)
        grads = [g if i in now else None for i, g in enumerate(made)]
        reference.step(grads, inputs=inputs_of(rule, step))
        ours.step(grads, inputs_of(rule, step, now))
        check_near(rule, ours.params, reference.params)
    assert ours.counts() == [sum(i in now for now in fired) for i in range(len(SHAPES))]


RULES = single()
SOME = [
    "adam_mini",
    "adafactor",
    "muon",
    "lamb",
    "prodigy",
    "soap",
    "transforms/schedule_free",
    "transforms/accumulate",
]


@pytest.mark.parametrize("name", by_kind(RULES))
def test_tensors_join_late_and_pause(name: str) -> None:
    check_follows(loaded(name), "numpy")


@pytest.mark.parametrize("name", SOME)
def test_tensors_join_late_and_pause_with_compiled_kernels(name: str) -> None:
    check_follows(loaded(name), "cpu")


@pytest.mark.another
@pytest.mark.parametrize("name", sorted({*RULES} - {*SOME}))
def test_tensors_of_all_rules_join_late_and_pause_with_compiled_kernels(name: str) -> None:
    check_follows(loaded(name), "cpu")


# Joins: what several tensors share

PLAIN = rule_of("direction = newton_schulz(g)", "applies_to: ndim >= 2\notherwise: adam\n")


def test_a_norm_is_one_over_dtypes_groups_and_engines() -> None:
    rule = rulec.load("clip_by_global_norm") >> rulec.load("sgd")
    half = {"lr": 0.5, "max_norm": 2.0}
    one = Run(rule, [np.ones(3), np.ones((2, 2), np.float32)], [0, 1], [half, half], "cpu")
    other = Run(rule, [np.ones(4, np.float16)], hyper=[half])
    grads = [np.full(3, 3.0), np.full((2, 2), 3.0, np.float32)], [np.full(4, 3.0, np.float16)]
    launches = []
    for side, own in zip((one, other), grads, strict=True):
        side.engine.begin()
        launches += side.engine.ready(tuple(side.ids), own, side.table)
    run(launches)
    for side in (one, other):
        side.engine.end()
    moved = 0.5 * 3 * 2 / (np.sqrt(11 * 9) + 1e-6)  # as torch clips
    for param, precision in zip(one.params + other.params, (1e-15, 1e-7, 1e-3), strict=True):
        np.testing.assert_allclose(param.astype(float), 1 - moved, rtol=precision)
    assert (one.counts(), other.counts()) == ([1, 1], [1])


def test_launches_that_wait_for_each_other_have_scratch_of_their_own() -> None:
    """Two buckets of one shape: what one left for its next stage must be there after the other's first."""
    rule = rule_of(
        'y = m + 0.1*p*g\nm = 0.9*m + g\no = matmul(y, transpose(y))\nz = sum(o, per="matrix")\n'
        'direction = matmul(o, y)/(1 + sum(z*z, per="model"))',
        "hyper: {lr: 1.0}\nstate: {m: 0}\n",
    )
    params = random_arrays(0, [(3, 4), (3, 4)], "float32")
    reference = ReferenceOptimizer(rule, [p.astype(float) for p in params])
    ours = Run(rule, params)
    for step in range(3):
        grads = [
            g.round(2).astype(d)
            for g, d in zip(random_arrays(step, [(3, 4)] * 2), (np.float32, np.float16), strict=True)
        ]
        ours.step(grads)
        reference.step([g.astype(float) for g in grads])
    assert len(ours.engine.buckets) == 2
    for found, wanted in zip(ours.params, reference.params, strict=True):
        np.testing.assert_allclose(found, wanted, rtol=2e-5, atol=1e-6)


@pytest.mark.parametrize("op", ["sum", "min", "max", "mean"])
@pytest.mark.parametrize("level", ["group", "model"])
@pytest.mark.parametrize("backend", ["numpy", "cpu"])
def test_reductions_of_groups_and_of_the_model(op: str, level: str, backend: str) -> None:
    rule = rule_of(f'a = {op}(g, per="{level}")\nb = {op}(norm(p), per="{level}")\ndirection = g*a + b')
    groups = [i % 3 for i in range(len(SHAPES))]
    params = random_arrays(1)
    reference = ReferenceOptimizer(rule, params, [{}] * 3, groups=groups)
    ours = Run(rule, params, groups, [{}] * 3, backend)
    for step in range(2):
        grads = [g if (i + step) % 4 else None for i, g in enumerate(random_arrays(20 + step))]
        ours.step(grads)
        reference.step(grads)
        check_near(rule, ours.params, reference.params)


@pytest.mark.parametrize("op", ["sum", "min", "max"])
def test_a_nan_reaches_all_that_share_a_value_and_no_others(op: str) -> None:
    rule = rule_of(f'direction = g + {op}(g, per="group")')
    ours = Run(rule, [np.ones(2), np.ones(3), np.ones(2, np.float32)], [0, 1, 0], [{}, {}])
    ours.step([np.array([np.nan, 1.0]), np.ones(3), np.ones(2, np.float32)])
    assert np.isnan(ours.params[0]).all()
    assert np.isnan(ours.params[2]).all()
    assert np.isfinite(ours.params[1]).all()


def test_a_state_of_a_group_begins_with_the_hyper_parameters_of_its_group() -> None:
    rule = rule_of(
        "w = w + 1\ndirection = g*w", "hyper: {lr: 1.0, start: 1.0}\nstate: {w: {init: start, per: group}}\n"
    )
    hyper = [{"start": 1.0}, {"start": 5.0}, {"start": 9.0}]
    ours = Run(rule, [np.zeros(2)] * 3, [0, 1, 2], hyper)
    one = np.ones(2)
    ours.step([None, one, None])
    ours.set({"start": 2.0}, {"start": 6.0}, {"start": 10.0})
    ours.step([one, one, None])
    ours.step([one, one, one])
    np.testing.assert_array_equal([p[0] for p in ours.params], [-3 - 4, -6 - 7 - 8, -11])
    np.testing.assert_array_equal(ours.engine.shared.group_t, [2, 3, 1])


def test_the_step_count_of_a_group_is_its_own_whoever_has_a_gradient() -> None:
    """Not that of the tensors that have one now: one of them may have joined late."""
    rule = rule_of(
        "w = w + t\nu = u + t**2\ndirection = g*(w + u)/100",
        "state: {w: {init: 0, per: group}, u: {init: 0, per: model}}\n",
    )
    params, groups = random_arrays(0, [(2,), (2,), (3,)]), [0, 0, 1]
    ours, reference = Run(rule, params, groups, [{}, {}]), ReferenceOptimizer(rule, params, [{}, {}], groups=groups)
    for step, fired in enumerate(([0], [0, 2], [0], [0, 1], [1], [2], [1, 2], [0, 1])):
        grads = [g if i in fired else None for i, g in enumerate(random_arrays(step + 1, [(2,), (2,), (3,)]))]
        ours.step(grads)
        reference.step(grads)
        check_near(rule, ours.params, reference.params)
    assert (ours.engine.shared.values["w"].tolist(), ours.engine.shared.values["u"].tolist()) == ([28.0, 6.0], [204.0])


@pytest.mark.parametrize("wrapper", ["schedule_free", "mechanic"])
def test_what_a_wrapper_keeps_of_groups_and_the_model_is_one_for_both_rules_of_a_route(wrapper: str) -> None:
    rule = rulec.load(wrapper)(PLAIN)
    shapes = [(3, 4), (5,), (4, 2), (2,)]
    params = random_arrays(0, shapes)
    ours, reference = Run(rule, params), ReferenceOptimizer(rule, params)
    for step in range(5):
        grads = random_arrays(step + 1, shapes)
        ours.step(grads)
        reference.step(grads)
        check_near(rule, ours.params, reference.params)


def test_rules_of_a_route_that_keep_other_things_under_one_name_are_refused() -> None:
    head = "applies_to: ndim >= 2\notherwise: schedule_free_adamw\nstate: {weight_sum: {init: 0, per: group}}\n"
    rule = rule_of("weight_sum = weight_sum + 5\ndirection = g*weight_sum", head)
    with pytest.raises(
        RuleError, match="R and ScheduleFreeAdamW, which gets the other tensors, both keep weight_sum per"
    ):
        Run(rule, [np.ones(3)])


@pytest.mark.parametrize("order", [[(2, 3), (4,)], [(4,), (2, 3)]])
def test_branches_on_the_shape_with_other_values_of_the_model_are_refused(order: list[tuple[int, ...]]) -> None:
    rule = rule_of(
        'm = m + g\nif ndim >= 2:\n  u = m/sum(g*g, per="model")\nelse:\n  u = m*max(g, per="model")\ndirection = u',
        "state: {m: 0}\n",
    )
    ours = Run(rule, random_arrays(0, order))
    grads = random_arrays(1, order)
    for alone in (0, 1):
        ours.step([g if i == alone else None for i, g in enumerate(grads)])
    before = ours.everything()
    with pytest.raises(RuleError, match="reduce per group and per model outside of branches on the shape"):
        ours.step(grads)
    assert ours.everything() == before


def test_a_branch_that_shares_nothing_goes_beside_one_that_does() -> None:
    rule = rule_of('u = g\nif ndim >= 2:\n  u = g/sum(g*g, per="model")\ndirection = u', "hyper: {lr: 1.0}\n")
    shapes = [(2, 3), (4,), (1, 2)]
    ours, grads = Run(rule, [np.zeros(s) for s in shapes]), [np.ones(s) for s in shapes]
    ours.step(grads)
    for p, wanted in zip(ours.params, (-1 / 8, -1, -1 / 8), strict=True):
        np.testing.assert_allclose(p, wanted)


# What is read between the stages


@pytest.mark.parametrize("backend", ["numpy", "cpu"])
@pytest.mark.parametrize(
    "step",
    [
        # What a matrix function reads beside a reduction of the new parameter is the old one.
        "old = p\np = p - 0.1*matmul(L, g) - 0.1*g\nL = 0.5*L + 0.1*matmul(old, transpose(old))*norm(p)",
        "old = p\np = p - 0.1*matmul(L, g) - 0.1*g\nL = 0.5*L + 0.1*matmul(norm(p)*L + 1, matmul(old, transpose(g)))",
        "old = p\np = p - 0.1*matmul(L, g) - 0.1*g\nL = 0.1*matmul(old, transpose(old)*norm(p))",
        # A state that takes another's old value, turned or not, whichever is written first.
        "old = L\nL = 0.5*L + matmul(g, transpose(p))\nM = transpose(old)\np = p - 0.1*matmul(M, g)",
        "old = M\nM = 0.5*M + matmul(g, transpose(p))\nL = old\np = p - 0.1*matmul(M + L, g)",
        "old = L\nL = transpose(M) + matmul(g, transpose(g))\nM = old\np = p - 0.1*matmul(M, p) - 0.1*matmul(L, g)",
    ],
)
def test_values_are_read_before_they_are_overwritten(step: str, backend: str) -> None:
    states = ", ".join(f"{name}: {{init: 0, shape: [rows, rows]}}" for name in "LM" if f"{name} =" in step)
    rule = rule_of(step, f"state: {{{states}}}\n")
    shapes = [(3, 4), (2, 4, 3), (3, 4)]
    params = random_arrays(3, shapes)
    reference, ours = ReferenceOptimizer(rule, params), Run(rule, params, backend=backend)
    for seed in range(4):
        grads = random_arrays(30 + seed, shapes)
        reference.step(grads)
        ours.step(grads)
        check_near(rule, ours.params, reference.params)
        for i in ours.ids:
            for key, value in reference.state(i).items():
                own = ours.engine.state(i)[key]
                np.testing.assert_allclose(own, value.reshape(own.shape), rtol=1e-11, atol=1e-12)


# Branches decided before a step


@pytest.mark.parametrize("backend", ["numpy", "cpu"])
@pytest.mark.parametrize(
    ("rule", "name"),
    [(rulec.load("accumulate")(rulec.load("adam")), "every"), (rulec.load("lookahead")(rulec.load("lamb")), "k")],
    ids=["accumulate", "lookahead"],
)
def test_tensors_of_one_bucket_take_other_arms_in_one_step(rule: Rule, name: str, backend: str) -> None:
    """Their counts differ, and so does `every`: between groups, and from one step to the next."""
    groups, shapes = [0, 1, 0, 1], [(5,), (5,), (2, 3), (5,)]
    params = random_arrays(4, shapes)
    ours = Run(rule, params, groups, [{name: 2}, {name: 3}], backend)
    reference = ReferenceOptimizer(rule, params, [{name: 2}, {name: 3}], groups=groups)
    for step in range(14):
        if step == 6:
            ours.set({name: 4}, {name: 2})
            for part in reference._parts.values():
                part.hyper[0][name], part.hyper[1][name] = 4.0, 2.0
        fired = [0, 3] if step in (1, 2) else [0, 1, 2] if step == 5 else ours.ids
        grads = [g if i in fired else None for i, g in enumerate(random_arrays(40 + step, shapes))]
        ours.step(grads)
        reference.step(grads)
        check_near(rule, ours.params, reference.params)
    assert len({*ours.counts()}) > 1


def test_a_bucket_keeps_its_compiled_arms() -> None:
    ours = Run(rulec.load("accumulate")(rulec.load("adam")), [np.ones(3)], hyper=[{"every": 2}])
    for _ in range(6):
        ours.step([np.ones(3)])
    (bucket,) = ours.engine.buckets.values()
    assert len(bucket.versions) == 2
    assert ours.counts() == [6]


# Skipped steps

EVERY_LEVEL = """
name: Levels
hyper: {lr: 1.0}
state:
  m: 0
  r: {init: 0, per: row}
  s: {init: 1, per: tensor}
  n: {init: 1, per: tensor}
  k: {init: 0, per: group}
  w: {init: 0, per: model}
skip: SKIP
step: |
  m = 0.5*m + g
  r = r + sum(g, per="row")
  s = s*0.5
  n = n + norm(m)
  k = k + sum(g, per="group")
  w = w + t
  direction = m*s + r + 0.1*n + k + w
"""
BY_TENSOR = rulec.parse(EVERY_LEVEL.replace("SKIP", "not isfinite(sum(g))").replace('sum(g, per="group")', "1"))
BY_MODEL = rulec.parse(EVERY_LEVEL.replace("SKIP", 'not isfinite(sum(g, per="model"))'))


@pytest.mark.parametrize("backend", ["numpy", "cpu"])
def test_a_skipped_step_changes_nothing_of_the_model(backend: str) -> None:
    shapes, groups = [(3,), (2, 3), (0,), (4,)], [0, 1, 0, 0]
    ours = Run(BY_MODEL, random_arrays(0, shapes), groups, [{}, {}], backend)
    straight = Run(BY_MODEL, random_arrays(0, shapes), groups, [{}, {}], backend)
    for step in range(4):
        grads = random_arrays(step + 1, shapes)
        if step == 2:
            before = ours.everything()
            broken = [g.copy() for g in grads]
            broken[1][1, 1] = np.nan
            with pytest.warns(RuntimeWarning, match=r"Levels skipped the step of tensor .*: its skip was true"):
                ours.step(broken)
            assert ours.everything() == before
        ours.step(grads)
        straight.step(grads)
    assert ours.everything() == straight.everything()
    assert (ours.engine.skipped, straight.engine.skipped) == (4, 0)


@pytest.mark.parametrize("backend", ["numpy", "cpu"])
def test_a_tensor_skips_alone_and_its_group_goes_on(backend: str) -> None:
    shapes, groups = [(3,), (2, 3), (3,)], [0, 1, 0]
    params = random_arrays(0, shapes)
    ours, reference = (
        Run(BY_TENSOR, params, groups, [{}, {}], backend),
        ReferenceOptimizer(BY_TENSOR, params, [{}, {}], groups=groups),
    )
    for step in range(5):
        grads = random_arrays(step + 1, shapes)
        bad = {0: [], 1: [0], 2: [1], 3: [0, 1], 4: []}[step]
        for i in bad:
            grads[i].reshape(-1)[-1] = np.inf
        kept = [[v.tobytes() for v in (ours.params[i], *map(np.asarray, ours.engine.state(i).values()))] for i in bad]
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            ours.step(grads)
        assert sum("skipped the step of" in str(w.message) for w in caught) == bool(bad)
        reference.step(grads)
        check_near(BY_TENSOR, ours.params, reference.params)
        now = [[v.tobytes() for v in (ours.params[i], *map(np.asarray, ours.engine.state(i).values()))] for i in bad]
        assert now == kept
    assert ours.counts() == [3, 3, 5]
    assert ours.engine.skipped == 4


def test_a_warning_that_is_an_error_leaves_counts_right() -> None:
    ours = Run(BY_TENSOR, [np.ones(3), np.ones(3, np.float32)])
    ours.step([np.ones(3), np.ones(3, np.float32)])
    grads = [np.full(3, np.nan), np.ones(3, np.float32)]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with pytest.raises(RuntimeWarning, match="skipped"):
            ours.step(grads)
    assert ours.counts() == [1, 2]
    ours.step([np.ones(3), np.ones(3, np.float32)])
    assert ours.counts() == [2, 3]


# Inputs

INPUTS = """
name: Weighted
hyper: {lr: 1.0}
inputs: {loss: scalar, h: like p}
state: {m: 0}
step: |
  m = m + g*h*loss
  direction = m/(1 + norm(h))
"""


@pytest.mark.parametrize("backend", ["numpy", "cpu"])
def test_inputs_reach_kernels_and_reductions(backend: str) -> None:
    rule = rulec.parse(INPUTS)
    params = random_arrays(0)
    ours, reference = Run(rule, params, backend=backend), ReferenceOptimizer(rule, params)
    for step in range(3):
        fired = [i for i in ours.ids if (i + step) % 3]
        grads = [g if i in fired else None for i, g in enumerate(random_arrays(step + 1))]
        h, loss = random_arrays(step + 70), 0.5 + step
        ours.step(grads, {"loss": np.array(loss), "h": [h[i] for i in fired]})
        reference.step(grads, inputs={"loss": loss, "h": h})
        check_near(rule, ours.params, reference.params)


@pytest.mark.parametrize(
    ("inputs", "message"),
    [
        ({"h": [np.ones(3), np.ones(2)]}, "Weighted needs the input 'loss' at every step"),
        ({"loss": 1.0}, "Weighted needs the input 'h' at every step"),
        ({"loss": 1.0, "h": [np.ones(3), np.ones(2)], "los": 2}, "no input 'los'; did you mean 'loss'"),
        ({"loss": 1.0, "h": [np.ones(3)]}, "the input 'h' has 1 arrays for 2 parameters"),
        ({"loss": 1.0, "h": [np.ones(3), np.ones(3)]}, r"tensor 1 \(its h\) has shape \(3,\), its parameter \(2,\)"),
        ({"loss": 1.0, "h": [np.ones(3), np.ones(2, np.float32)]}, r"tensor 1 \(its h\) has dtype float32"),
        ({"loss": 1.0, "h": [np.ones(3), [1.0, 2.0]]}, r"tensor 1 \(its h\) is a list"),
        ({"loss": np.ones(3), "h": [np.ones(3), np.ones(2)]}, "the input 'loss' must be one number, not ndarray"),
        ({"loss": "low", "h": [np.ones(3), np.ones(2)]}, "the input 'loss' must be one number, not str 'low'"),
        ({"loss": np.nan, "h": [np.ones(3), np.ones(2)]}, "'loss' of Weighted is NaN, and nothing was changed: leave"),
    ],
)
def test_inputs_that_do_not_fit_are_refused_and_nothing_is_written(inputs: dict[str, Any], message: str) -> None:
    ours, grads = Run(rulec.parse(INPUTS), [np.ones(3), np.ones(2)]), [np.ones(3), np.ones(2)]
    ours.step(grads, {"loss": 1.0, "h": grads})
    before = ours.everything()
    with pytest.raises(TensorError, match=message):
        ours.step(grads, inputs)
    assert ours.everything() == before


def test_a_rule_that_asks_for_it_is_given_a_loss_that_is_no_number() -> None:
    rule = rulec.parse("name: R\ninputs: {loss: scalar}\nstep: |\n  p = p - where(isfinite(loss), loss, 0)*g\n")
    ours = Run(rule, [np.ones(3)])
    for loss in (np.nan, 0.5):
        ours.step([np.ones(3)], {"loss": loss})
    np.testing.assert_array_equal(ours.params[0], np.full(3, 0.5))


# What cannot be


def test_tensors_join_all_or_none() -> None:
    """A rank larger than one of the matrices: the others have no states of a step that was not taken."""
    rule = rulec.parse(rulec.load("galore").to_yaml().replace("minimum(rank, rows)", "rank"))
    ours = Run(rule, random_arrays(0, [(20, 20), (2, 3), (5,)]), hyper=[{"rank": 4}])
    for _ in range(2):
        with pytest.raises(RuleError, match="from 1 to 2, not rank = 4 for a matrix of 2 by 3: choose another rank"):
            ours.step(random_arrays(1, [(20, 20), (2, 3), (5,)]))
        assert not any(ours.engine.state(i) for i in ours.ids)
        assert not ours.engine.buckets


def test_a_matrix_without_rows_has_no_rank() -> None:
    ours = Run(rulec.load("galore"), [np.zeros((0, 3))])
    with pytest.raises(RuleError, match="for a matrix of 0 by 3: leave a tensor without elements out"):
        ours.step([np.zeros((0, 3))])


@pytest.mark.parametrize("name", ["d0", "beta1"])
def test_a_hyper_parameter_of_the_model_s_state_that_differs_is_refused_before_anything_begins(name: str) -> None:
    rule = rulec.load("prodigy")
    value = {"d0": 1e-2, "beta1": 0.5}[name]
    ours = Run(rule, [np.ones(3), np.ones(3)], [0, 1], [{}, {name: value}])
    if name == "beta1":
        ours.step([np.ones(3), np.ones(3)])  # each group's own: it is in no state of the model
        return
    with pytest.raises(HyperError, match=f"{name} of Prodigy is part of a state of the whole model"):
        ours.step([np.ones(3), np.ones(3)])
    assert not ours.engine.shared.values
    ours.set({name: value}, {name: value})
    straight = Run(rule, [np.ones(3), np.ones(3)], [0, 1], [{name: value}] * 2)
    for side in (ours, straight):
        side.step([np.ones(3), np.ones(3)])
    assert ours.everything() == straight.everything()


def test_the_first_value_of_a_model_s_state_must_be_one() -> None:
    rule = rule_of(
        'w = w + sum(g, per="model")\ndirection = g*w',
        "hyper: {lr: 1.0, start: 1.0}\nstate: {w: {init: start, per: model}}\n",
    )
    ours = Run(rule, [np.ones(3), np.ones(3)], [0, 1], [{}, {"start": 2.0}])
    with pytest.raises(HyperError, match="start of R is part of a state of the whole model"):
        ours.step([np.ones(3), np.ones(3)])
    assert not ours.engine.shared.values


def test_a_matrix_function_of_a_vector_names_the_tensor_and_the_way_out() -> None:
    rule = rule_of("m = m + g\ndirection = newton_schulz(m)", "state: {m: 0}\n")
    ours = Run(rule, [np.ones((2, 3)), np.ones(4)])
    with pytest.raises(RuleError, match="needs a matrix, and tensor 1 has 1 dimensions: give R applies_to: ndim >= 2"):
        ours.step([np.ones((2, 3)), np.ones(4)])
    assert not any(ours.engine.state(i) for i in ours.ids)


@pytest.mark.parametrize("name", ["lamb", "lars", "clip_by_norm", "clip_by_global_norm", "normalize", "trust_ratio"])
def test_a_norm_of_zero_is_no_division_by_zero(name: str) -> None:
    rule = rulec.load(name)
    rule = rule if "lr" in rule.hyper else rule >> rulec.load("sgd")
    ours = Run(rule, [np.zeros(3), np.ones((2, 2)), np.zeros(0)])
    ours.step([np.zeros(p.shape) for p in ours.params])
    assert all(np.isfinite(p).all() for p in ours.params)


def test_an_empty_tensor_in_a_mean_is_nan_of_its_own_alone() -> None:
    rule = rule_of("s = mean(g)\ndirection = g*s", "hyper: {lr: 1.0}\nstate: {s: {init: 0, per: tensor}}\n")
    ours = Run(rule, [np.zeros(0), np.zeros(2), np.zeros((3, 0))])
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        ours.step([np.ones(p.shape) for p in ours.params])
    np.testing.assert_array_equal(ours.params[1], -1.0)
    assert [float(ours.engine.state(i)["s"]) for i in (0, 2)] == pytest.approx([np.nan] * 2, nan_ok=True)


def test_a_mean_over_the_model_does_not_count_what_is_empty() -> None:
    rule = rule_of('direction = g*mean(g, per="model")', "hyper: {lr: 1.0}\n")
    ours = Run(rule, [np.zeros(0), np.zeros(2), np.zeros(1)])
    ours.step([np.ones(0), np.ones(2), np.full(1, 4.0)])
    np.testing.assert_allclose(ours.params[1], -2.0)


# Failures on the way


def failing(*args: Any, **options: Any) -> Any:
    raise OSError("device lost")


def clipped(rate: float = 0.5) -> Run:
    rule = rulec.load("clip_by_global_norm") >> rulec.load("adamw")
    ours = Run(rule, [np.ones(3), np.ones(3, np.float32)], hyper=[{"lr": rate}])
    ours.step([np.ones(3), np.ones(3, np.float32)])
    return ours


@pytest.mark.parametrize("bucket", [0, 1])
def test_a_first_kernel_that_fails_takes_all_counts_back_at_once(bucket: int) -> None:
    """The other bucket has come as far as the shared norm, and has written nothing."""
    ours, straight = clipped(), clipped()
    grads = [np.ones(3), np.ones(3, np.float32)]
    before, working = ours.everything(), ours.call(bucket, failing)
    with pytest.raises(OSError, match="device lost") as caught:
        ours.step(grads)
    assert ours.everything() == before  # while the error, and all that it holds, is still there
    del caught
    ours.call(bucket, working)
    ours.step(grads)
    straight.step(grads)
    assert ours.everything() == straight.everything()


class FailsLater:
    """A kernel that fails in its last stage."""

    def __init__(self, call: Any, last: int) -> None:
        self.call, self.last = call, last

    def __call__(self, stage: int, *args: Any, **options: Any) -> Any:
        if stage == self.last:
            raise OSError("device lost")
        return self.call(stage, *args, **options)


def test_a_last_kernel_that_fails_says_what_was_written() -> None:
    ours = clipped()
    before = ours.params[0].copy()
    ours.call(1, FailsLater(ours.call(1, None), 1))
    with pytest.raises(PartialUpdate, match=r"after 1 tensors were updated \(tensor 0\.\.\.\) and some of tensor 1"):
        ours.step([np.ones(3), np.ones(3, np.float32)])
    assert ours.counts() == [2, 1]
    assert (ours.params[0] != before).all()


def test_a_state_stored_early_by_another_launch_is_told() -> None:
    """In float16 the state is no dtype of arithmetic: nothing of that launch is written when it fails."""
    rule = rule_of('m = 0.9*m + g\ndirection = m/(1 + sum(m*m, per="model"))', "state: {m: 0}\n")
    ours = Run(rule, [np.ones(3), np.ones(3, np.float16)])
    grads = [np.ones(3), np.ones(3, np.float16)]
    ours.step(grads)
    (early, *_), late = [next(iter(b.versions.values())).program.stages for b in ours.engine.buckets.values()]
    assert [s.buffer for s in early.stores] == ["m"]
    assert not late[0].stores
    ours.call(1, failing)
    with pytest.raises(PartialUpdate, match="after some of tensor 0 were updated: device lost"):
        ours.step(grads)
    assert ours.counts() == [1, 1]


@pytest.mark.parametrize(
    ("rule", "shapes", "written"),
    [
        (PLAIN, [(3, 4), (5,), (4, 2)], ""),
        (PLAIN, [(5,), (3, 4), (4, 2)], "1 tensors were updated (tensor 0...)"),
        (rulec.load("muon"), [(3, 4), (5,), (4, 2)], "some of tensor 0, tensor 2 were updated"),
    ],
)
def test_a_matrix_function_that_fails(
    monkeypatch: pytest.MonkeyPatch, rule: Rule, shapes: list[tuple[int, ...]], written: str
) -> None:
    """The error says what was written before: another rule's tensors, or Muon's momentum, which is stored early."""
    ours, straight = (Run(rule, random_arrays(0, shapes)) for _ in range(2))
    grads = random_arrays(1, shapes)
    ours.step(grads)
    straight.step(grads)
    before = ours.everything()
    broken = {**NUMPY_MATRIX, Op.NEWTON_SCHULZ: failing}
    with monkeypatch.context() as patch:
        patch.setattr(NumpyLibrary, "matrix", broken)
        kind, words = (PartialUpdate, f"after {written}: device lost") if written else (OSError, "device lost")
        with pytest.raises(kind, match=re.escape(words)):
            ours.step(grads)
    assert ours.counts() == [1 + (len(s) == 1 and written.startswith("1 ")) for s in shapes]
    if not written:
        assert ours.everything() == before
        ours.step(grads)
        straight.step(grads)
        assert ours.everything() == straight.everything()


def test_portions_that_were_done_stay_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    from rulec.runtime.stages import run as staged

    monkeypatch.setattr(staged, "LARGE", 12)
    shapes = [(3, 4), (3, 4), (3, 4)]
    ours = Run(rulec.load("muon"), random_arrays(0, shapes))
    ours.step(random_arrays(1, shapes))
    kept = [p.copy() for p in ours.params]
    calls: list[int] = []
    working = ours.call(0, None)

    def third(stage: int, *args: Any, **options: Any) -> Any:
        calls.append(stage)
        if options["tensors"] == [2]:
            raise OSError("device lost")
        return working(stage, *args, **options)

    ours.call(0, third)
    with pytest.raises(PartialUpdate, match="some of tensor 0, tensor 1, tensor 2 were updated: device lost"):
        ours.step(random_arrays(2, shapes))
    assert ours.counts() == [2, 2, 1]
    assert [bool((p == k).all()) for p, k in zip(ours.params, kept, strict=True)] == [False, False, True]


def test_gradients_that_do_not_fit_in_one_bucket_stop_all_of_them() -> None:
    ours = clipped()
    before = ours.everything()
    with pytest.raises(TensorError, match="tensor 1 has shape"):
        ours.step([np.ones(3), np.ones(4, np.float32)])
    assert ours.everything() == before


# Memory


def peak_of(ours: Run, grads: Sequence[Array]) -> int:
    ours.step(grads)
    tracemalloc.start()
    ours.step(grads)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    return peak


@pytest.mark.parametrize("name", ["lamb", "cautious_adamw", "adafactor", "prodigy"])
def test_a_step_of_stages_allocates_nothing_that_grows(name: str) -> None:
    params, grads = [np.ones((1000, 1000), np.float32)], [np.full((1000, 1000), 0.5, np.float32)]
    assert peak_of(Run(rulec.load(name), params, backend="cpu"), grads) < 400_000


def test_scratch_is_that_of_the_largest_tensors_and_not_of_all(monkeypatch: pytest.MonkeyPatch) -> None:
    from rulec.runtime.stages import run as staged

    monkeypatch.setattr(staged, "LARGE", 1 << 14)
    shape, size = (128, 128), 128 * 128 * 4
    peaks = []
    for count in (2, 12):
        ours = Run(rulec.load("muon"), [np.ones(shape, np.float32)] * count, backend="cpu")
        tracemalloc.start()
        ours.step([np.ones(shape, np.float32)] * count)
        held = sum(a.nbytes for a in ours.engine._common._scratch.values())
        tracemalloc.stop()
        peaks.append(peak_of(ours, [np.ones(shape, np.float32)] * count))
        assert held == size
    assert peaks[1] - peaks[0] < size


# The same bits

STEPS = """
import hashlib
import numpy as np
import rulec
from rulec.array import Optimizer

rng = np.random.default_rng(0)
shapes = [(700, 300), (7,), (300, 700), (), (90001,)]
for name in {names!r}:
    params = [np.asarray(rng.normal(size=s), np.float32) for s in shapes]
    optimizer = Optimizer(rulec.load(name), params)
    for _ in range(2):
        optimizer.step([np.asarray(rng.normal(size=s), np.float32) for s in shapes])
    states = [v for n in optimizer.names for _, v in sorted(optimizer.state(n).items())]
    print(name, hashlib.sha256(b"".join(np.asarray(a).tobytes() for a in params + states)).hexdigest())
"""


@pytest.mark.slow
def test_bits_do_not_depend_on_threads() -> None:
    found = []
    for threads in ("1", "2", "8"):
        program = STEPS.format(names=["lamb", "adafactor", "cautious_adamw", "prodigy"])
        environment = {**os.environ, "RULEC_NUM_THREADS": threads}
        done = subprocess.run(
            [sys.executable, "-c", program], env=environment, capture_output=True, text=True, check=True
        )
        found.append(done.stdout)
    assert found[0].count("\n") == 4
    assert found[0] == found[1] == found[2]


@pytest.mark.parametrize(
    ("name", "backend"),
    [
        ("lamb", "cpu"), ("adafactor", "numpy"), ("cautious_adamw", "cpu"), ("muon", "numpy"), ("soap", "numpy"),
        ("shampoo", "numpy"), ("galore", "numpy"), ("came", "numpy"),
        *(pytest.param(name, "cpu", marks=pytest.mark.slow) for name in ("adafactor", "muon", "soap", "came")),
    ],
)  # fmt: skip
def test_bits_do_not_depend_on_neighbours(name: str, backend: str) -> None:
    rule, shapes = rulec.load(name), [(6, 9), (11,), (6, 9), (9, 6), (2, 6, 9), ()]
    params = random_arrays(0, shapes, "float32")
    together = Run(rule, params, backend=backend)
    for step in range(3):
        together.step(random_arrays(step + 1, shapes, "float32"))
    for i, param in enumerate(params):
        alone = Run(rule, [param], backend=backend)
        alone.engine.tensors[0].number = i
        for step in range(3):
            alone.step([random_arrays(step + 1, shapes, "float32")[i]])
        np.testing.assert_array_equal(alone.params[0], together.params[i])


@pytest.mark.parametrize("backend", ["numpy", "cpu"])
def test_tensors_that_skip_still_take_part_in_what_is_reduced_over_the_model(backend: str) -> None:
    rule = rulec.parse(
        "name: R\nstate: {n: {init: 0, per: model}}\nskip: norm(g) > 10\nstep: |\n"
        '  d = g/norm(g)\n  n = n + sum(d, per="model")\n  direction = d\n'
    )
    assert not rulec.compile(rule).stages[-1].reduces
    grads = [np.array([3.0, 4.0]), np.array([30.0, 40.0])]
    params, reference = [np.ones(2), np.ones(2)], ReferenceOptimizer(rule, [np.ones(2)] * 2)
    optimizer = Optimizer(rule, params, backend)
    with pytest.warns(RuntimeWarning, match="skipped the step of 1:"):
        optimizer.step(grads)
    reference.step(grads)
    np.testing.assert_array_equal(params, reference.params)
    np.testing.assert_array_equal(params[1], 1.0)
    np.testing.assert_allclose(optimizer.state_dict()["shared"]["n"], 2.8)


@pytest.mark.parametrize("backend", ["numpy", "cpu"])
def test_what_a_group_has_counts_once_in_the_model_however_many_buckets_the_group_has(backend: str) -> None:
    rule = rulec.parse('name: R\nstep: |\n  direction = g*sum(norm(g, per="group"), per="model")\n')
    grads = [np.array([3.0]), np.array([4.0], np.float32), np.array([12.0])]
    params = [np.zeros_like(g) for g in grads]
    engine = Engine(rule, NumpyArrays(), backend)
    ids = tuple(engine.add(p, group, str(i)) for i, (p, group) in enumerate(zip(params, (0, 0, 1), strict=True)))
    engine.step(ids, grads, engine.hyper_table([{"lr": 1.0}] * 2))
    assert len(engine.buckets) == 2
    np.testing.assert_array_equal(np.concatenate(params), [-3 * 17, -4 * 17, -12 * 17])
