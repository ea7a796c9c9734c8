"""Every wrapper beside an implementation that is not ours, in float64."""

from __future__ import annotations

import numpy as np
import pytest

import rulec
from rulec.compiler.reference import ReferenceOptimizer
from rulec.language.eval_point import to_evaluation
from rulec.language.rule import Rule
from tests.language.test_evaluation import move
from tests.rules.measure import ALL_DIMENSIONS, Trial, largest_difference
from tests.rules.runs import OracleRun
from tests.rules.wrappers import WRAPPERS, ScheduleFreeRun, WrapperPeer

pytestmark = pytest.mark.peer


def test_every_wrapper_has_a_peer() -> None:
    named = {f"transforms/{row.composed.partition('(')[0].rpartition(' ')[2]}" for row in WRAPPERS}
    wrappers = set(rulec.rules()) - set(rulec.rules(wrappers=False))
    others = {name for name in wrappers if rulec.load(name).passes or rulec.load(name).inputs}
    assert named == wrappers - others  # for those see test_passes.py and test_inputs.py


@pytest.mark.each
@pytest.mark.parametrize("row", WRAPPERS, ids=str)
def test_agrees_with_its_peer(row: WrapperPeer) -> None:
    trial = Trial("float64", shapes=row.shapes)
    found = largest_difference(row.ours(trial.params), row.start(trial.params, row.hyper), trial, row.hyper)
    assert found.relative < 1e-12


class EvaluatedRun(OracleRun):
    """A rule of ours by the reference; compared is the point that the model is evaluated at."""

    def __init__(self, rule: Rule, trial: Trial) -> None:
        super().__init__(rule, trial.params, "float64")
        self.rule = rule

    def params(self) -> list[np.ndarray]:
        kept = [t.value.copy() for t in self.optimizer.tensors]
        move(self.optimizer, to_evaluation(self.rule))
        found = super().params()
        for tensor, value in zip(self.optimizer.tensors, kept, strict=True):
            tensor.value = value
        return found


def test_schedule_free_is_evaluated_where_pytorch_optimizer_evaluates_it() -> None:
    hyper = {"lr": 0.03, "beta1": 0.5, "beta2": 0.95, "eps": 1e-6, "beta": 0.85, "weight_lr_power": 1.5, "r": 0.5}
    trial = Trial("float64", shapes=ALL_DIMENSIONS)
    ours = EvaluatedRun(rulec.load("schedule_free(adam)"), trial)
    assert largest_difference(ours, ScheduleFreeRun(trial.params, hyper), trial, hyper).relative < 1e-12


def test_schedule_free_around_adam_without_momentum_is_the_published_rule() -> None:
    """Its one line for p is our lines for x, z and y; warmup apart, which a schedule of the learning rate gives."""
    trial = Trial("float64", shapes=ALL_DIMENSIONS)
    hyper = {"lr": 0.03, "beta2": 0.95, "eps": 1e-6, "r": 0.5, "weight_lr_power": 1.5, "weight_decay": 0.07}
    wrapped = OracleRun(rulec.load("schedule_free(adamw(beta1=0), beta=0.85)"), trial.params, "float64")
    published = OracleRun(rulec.load("schedule_free_adamw(beta1=0.85)"), trial.params, "float64")
    assert largest_difference(wrapped, published, trial, hyper).relative < 1e-12


def test_accumulation_changes_nothing_in_between() -> None:
    rule, rng = rulec.load("accumulate(adamw, every=3)"), np.random.default_rng(0)
    optimizer = ReferenceOptimizer(rule, [rng.normal(size=(3, 4))])
    for t in range(1, 13):
        before, kept = optimizer.params[0].copy(), optimizer.state(0)
        optimizer.step([rng.normal(size=(3, 4))])
        changed = [key for key in ("m", "v") if kept and not np.array_equal(optimizer.state(0)[key], kept[key])]
        if t % 3:
            np.testing.assert_array_equal(optimizer.params[0], before)
            assert not changed
        else:
            assert not np.array_equal(optimizer.params[0], before)
            assert changed == ["m", "v"]
            assert not optimizer.state(0)["total"].any()


def test_low_rank_states_have_the_projection_s_shape() -> None:
    optimizer = ReferenceOptimizer(rulec.load("low_rank(adam, rank=2)"), [np.ones((6, 5)), np.ones((3, 7)), np.ones(4)])
    optimizer.step([np.ones((6, 5)), np.ones((3, 7)), np.ones(4)])
    shapes = [{key: state.shape[-2:] for key, state in optimizer.state(i).items()} for i in range(3)]
    assert shapes == [{"m": (2, 6), "v": (2, 6)}, {"m": (2, 7), "v": (2, 7)}, {"m": (4,), "v": (4,)}]
