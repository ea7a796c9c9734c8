"""`rulec.array.Optimizer` with rules of several stages: routing, seeds, inputs, evaluation, states."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import rulec
from rulec import Rule
from rulec.array import Optimizer
from rulec.compiler.reference import ReferenceOptimizer
from rulec.errors import HyperError, RulecError, RuleError, StateMismatch, TensorError
from rulec.testing.cases import loaded
from tests.library import by_kind, single

SHAPES: list[tuple[int, ...]] = [(6, 5), (5,), (), (3, 4, 5), (0,), (5, 6)]


def arrays(seed: int = 0, dtype: str = "float32", shapes: list[tuple[int, ...]] = SHAPES) -> list[np.ndarray]:
    rng = np.random.default_rng(seed)
    return [np.asarray(rng.normal(size=s), dtype) for s in shapes]


def inputs_of(rule: Rule, seed: int) -> dict[str, Any]:
    return {k: arrays(seed + 90) if kind == "like p" else 0.5 + seed for k, kind in rule.inputs.items()}


def same(one: list[np.ndarray], other: list[np.ndarray]) -> bool:
    return all(a.tobytes() == b.tobytes() for a, b in zip(one, other, strict=True))


# Routing

MIXED = {"embed": np.ones((4, 3)), "hidden": np.ones((3, 3)), "bias": np.ones(3), "filter": np.ones((2, 3, 3))}


def model() -> dict[str, np.ndarray]:
    return {name: array.copy() for name, array in MIXED.items()}


def test_tags_send_arrays_elsewhere_and_routing_says_where() -> None:
    opt = Optimizer("muon", model(), tags={"embed": {"embedding"}})
    assert opt.routing["embed"] == opt.routing["bias"] == "AdamW"
    assert opt.routing["hidden"] == "Muon"
    assert Optimizer("muon", model()).routing["embed"] == "Muon"
    assert list(opt.routing) == opt.names


def test_each_rule_has_its_own_rate() -> None:
    params, grads = model(), {name: np.ones(array.shape) for name, array in MIXED.items()}
    Optimizer("muon", params, lr=0.0, adamw_lr=0.25, weight_decay=0.0).step(grads)
    np.testing.assert_array_equal(params["hidden"], 1.0)
    np.testing.assert_allclose(params["bias"], 0.75, rtol=1e-6)


@pytest.mark.parametrize(
    ("tags", "message"),
    [
        ({"embd": {"embedding"}}, "tags are given for 'embd', which is no parameter; did you mean 'embed'"),
        ({"embed": "embedding"}, r"the tags of embed are a text: give a set of words, \{'embedding'\}"),
    ],
)
def test_tags_are_words_of_parameters(tags: Any, message: str) -> None:
    with pytest.raises(TensorError, match=message):
        Optimizer("muon", model(), tags=tags)


def test_an_array_that_no_rule_applies_to_is_refused_at_once() -> None:
    rule = rulec.parse("name: Matrices\napplies_to: ndim == 2\nstep: |\n  direction = g\n")
    with pytest.raises(RuleError, match=r"Matrices does not apply to bias, of shape \(3,\), and names no rule for it"):
        Optimizer(rule, model())


@pytest.mark.parametrize(
    ("extent", "found"),
    [("rows - 100", "-98"), ("0 - rows", "-2"), ("rows/0", "inf"), ("rows/0 - rows/0", "nan"), ("rows/4", "0.5")],
)
def test_an_extent_that_is_none_for_a_shape_is_refused(extent: str, found: str) -> None:
    shape = f"{{m: {{init: 0, shape: [{extent}, cols]}}}}"
    rule = rulec.parse(f"name: R\nstate: {shape}\nstep: |\n  m = m*2\n  direction = g\n")
    param = np.ones((2, 3))
    with pytest.raises(RuleError, match=rf"from 0, not .*{found} for a matrix of 2 by 3: say under applies_to"):
        Optimizer(rule, [param], "numpy").step([param + 1])
    assert (param == 1).all()


@pytest.mark.parametrize("k", [float("inf"), 9, 0, -1, 1.5])
def test_an_extent_that_is_chosen_is_no_more_than_there_is(k: float) -> None:
    text = "name: R\nhyper: {k: {default: 2, static: true}}\nstate: {m: {init: 0, shape: [k, cols]}}\n"
    rule = rulec.parse(text + "step: |\n  m = m*2\n  direction = g\n")
    with pytest.raises(RuleError, match=rf"from 1 to 8, not k = {k:g} for a matrix of 8 by 8: choose another k"):
        Optimizer(rule, [np.ones((8, 8))], "numpy", k=k).step([np.ones((8, 8))])


def test_a_condition_of_a_tag_or_of_the_shape() -> None:
    def sent(condition: str, **options: Any) -> dict[str, str]:
        text = f"name: First\napplies_to: {condition}\notherwise: sgd\nstep: |\n  direction = 4*g\n"
        return Optimizer(rulec.parse(text), model(), **options).routing

    tags = {"bias": ["head"], "hidden": ["head", "last"]}
    assert [k for k, v in sent('tagged("head")', tags=tags).items() if v == "First"] == ["hidden", "bias"]
    assert [k for k, v in sent('tagged("head") and not tagged("last")', tags=tags).items() if v == "First"] == ["bias"]
    assert sent("ndim == 1") == {"embed": "SGD", "hidden": "SGD", "bias": "First", "filter": "SGD"}


@pytest.mark.parametrize("backend", ["numpy", pytest.param("cpu", marks=pytest.mark.slow)])
def test_clipping_before_muon_is_one_norm_over_both_rules(backend: str) -> None:
    rule = rulec.load("clip_by_global_norm") >> rulec.load("muon")
    params = arrays(0, "float64")
    now = [p.copy() for p in params]
    opt, reference = Optimizer(rule, now, backend, max_norm=0.5), ReferenceOptimizer(rule, params, {"max_norm": 0.5})
    assert len({*opt.routing.values()}) == 2
    for step in range(3):
        grads = arrays(step + 1, "float64")
        opt.step(grads)
        reference.step(grads)
        for ours, theirs in zip(now, reference.params, strict=True):
            np.testing.assert_allclose(ours, theirs, rtol=1e-6, atol=1e-8)
    # What of the gradient only the matrices have bounds the vector's update, too.
    vector = [np.zeros(2), np.zeros((2, 2))]
    plain = rulec.load("clip_by_global_norm") >> rulec.parse(
        "name: Two\nhyper: {lr: 1.0}\napplies_to: ndim >= 2\notherwise: sgd\nstep: |\n  direction = 2*g\n"
    )
    Optimizer(plain, vector, backend, lr=1.0, max_norm=1.0).step([np.zeros(2) + 3.0, np.full((2, 2), 3.0)])
    np.testing.assert_allclose(vector[0], -3 / np.sqrt(54), rtol=1e-6)
    np.testing.assert_allclose(vector[1], -6 / np.sqrt(54), rtol=1e-6)


# Seeds, inputs


@pytest.mark.parametrize("name", ["galore", "apollo", "apollo_mini"])
def test_a_seed_is_the_whole_of_what_is_random(name: str) -> None:
    found = []
    for seed in (0, 0, 7):
        params = arrays()
        opt = Optimizer(name, params, "numpy", seed=seed, **({"rank": 2} if "rank" in rulec.load(name).hyper else {}))
        for step in range(3):
            opt.step(arrays(step + 1))
        found.append(params)
    assert same(found[0], found[1])
    random = "apollo" in name
    assert same(found[0], found[2]) != random


WEIGHTED = rulec.parse(
    "name: Weighted\nhyper: {lr: 1.0}\ninputs: {loss: scalar, h: like p}\nstep: |\n  direction = g*h*loss\n"
)


def test_inputs_are_keywords_of_a_step() -> None:
    params = {"a": np.zeros(2), "b": [np.zeros(3)]}
    opt = Optimizer(WEIGHTED, params)
    grads, weights = {"a": np.ones(2), "b": [np.ones(3)]}, {"a": np.full(2, 2.0), "b": [np.full(3, 3.0)]}
    opt.step(grads, loss=0.5, h=weights)
    opt.step({"a": None, "b": [np.ones(3)]}, loss=np.float32(2.0), h=weights)
    np.testing.assert_array_equal(params["a"], -1.0)
    np.testing.assert_array_equal(params["b"][0], -1.5 - 6.0)
    with opt.partial():
        opt.update("a", np.ones(2), loss=1.0, h=np.full(2, 4.0))
        opt.update("b", [np.ones(3)], loss=1.0, h=[np.full(3, 1.0)])
    np.testing.assert_array_equal(params["a"], -5.0)
    np.testing.assert_array_equal(params["b"][0], -8.5)


@pytest.mark.parametrize(
    ("inputs", "message"),
    [
        ({"loss": 1.0}, "Weighted needs the input 'h' at every step"),
        ({"loss": 1.0, "h": {"a": np.ones(2)}}, "the input 'h' has nothing for b, which has a gradient"),
        ({"loss": 1.0, "h": {"a": np.ones(2), "c": np.ones(3)}}, "the input h has c, which is no parameter"),
        ({"loss": 1.0, "h": 2.0}, "the input h has param, which is no parameter"),
        ({"loss": None, "h": {"a": np.ones(2), "b": np.ones(3)}}, "the input 'loss' must be one number, not NoneType"),
        ({"los": 1.0, "h": {"a": np.ones(2), "b": np.ones(3)}}, "has no input 'los'; did you mean 'loss'?"),
    ],
)
def test_inputs_that_do_not_fit(inputs: dict[str, Any], message: str) -> None:
    params = {"a": np.zeros(2), "b": np.zeros(3)}
    with pytest.raises(TensorError, match=message):
        Optimizer(WEIGHTED, params).step({"a": np.ones(2), "b": np.ones(3)}, **inputs)
    assert not params["a"].any()


def test_an_array_whose_rule_reads_no_matrix_needs_none() -> None:
    rule = rulec.parse(
        "name: Turned\nhyper: {lr: 1.0}\ninputs: {c: {shape: [cols, cols]}}\napplies_to: ndim == 2\notherwise: sgd\n"
        "step: |\n  direction = g @ c\n"
    )
    params, matrix = {"a": np.zeros((2, 3)), "b": np.zeros(3)}, np.arange(9.0).reshape(3, 3)
    opt = Optimizer(rule, params)
    opt.step({"a": np.ones((2, 3)), "b": np.ones(3)}, c={"a": matrix})
    np.testing.assert_array_equal(params["a"], -np.ones((2, 3)) @ matrix)
    np.testing.assert_array_equal(params["b"], -np.ones(3))
    with pytest.raises(TensorError, match=r"'c' of a has shape \(2, 2\), where \(3, 3\) is expected"):
        opt.step({"a": np.ones((2, 3))}, c={"a": np.eye(2)})
    with pytest.raises(TensorError, match="the input 'c' of a is missing"):
        opt.step({"a": np.ones((2, 3))}, c={"b": matrix})
    opt.step({"b": np.ones(3)}, c={})


# Layer by layer


@pytest.mark.parametrize("name", ["lamb", "adafactor", "muon", "soap", "schedule_free_adamw", "cautious_adamw"])
def test_what_needs_no_other_array_may_go_layer_by_layer(name: str) -> None:
    whole, parts = arrays(), arrays()
    one, other = Optimizer(name, whole, "numpy"), Optimizer(name, parts, "numpy")
    for step in range(3):
        grads = arrays(step + 1)
        one.step(grads)
        with other.partial():
            for i in reversed(range(len(SHAPES))):
                other.update(i, grads[i])
    assert same(whole, parts)


@pytest.mark.parametrize("params", [[np.ones((2, 2)), np.ones(3)], [np.ones(3), np.ones((2, 2))]])
def test_a_value_of_all_arrays_cannot_go_layer_by_layer(params: list[np.ndarray]) -> None:
    rule = rulec.parse('name: R\nstep: |\n  u = g\n  if ndim >= 2:\n    u = g/sum(g*g, per="model")\n  direction = u\n')
    for which in (rule, rulec.load("clip_by_global_norm") >> rulec.load("adam"), rulec.load("prodigy")):
        opt = Optimizer(which, params)
        with (
            pytest.raises(RulecError, match="has a value of all arrays together, so no layer can be updated alone"),
            opt.partial(),
        ):
            pass
        opt.step([np.ones(p.shape) for p in params])


# Evaluation


@pytest.mark.parametrize("name", ["schedule_free_sgd", "schedule_free_adamw", "transforms/schedule_free"])
def test_evaluation_is_there_and_back(name: str) -> None:
    rule = loaded(name)
    params, reference = arrays(0, "float64"), ReferenceOptimizer(rule, arrays(0, "float64"))
    opt = Optimizer(rule, params, "numpy")
    opt.eval()
    opt.train()
    for step in range(4):
        grads = arrays(step + 1, "float64")
        opt.step(grads)
        reference.step(grads)
        before = [p.copy() for p in params]
        opt.eval()
        moved = [p.copy() for p in params]
        opt.eval()
        assert same(params, moved)
        with pytest.raises(RulecError, match=r"call train\(\) before a step"):
            opt.step(grads)
        with pytest.raises(RulecError, match=r"call train\(\) before a step"), opt.partial():
            pass
        other = arrays(0, "float64")
        for target, value in zip(other, params, strict=True):
            target[...] = value
        again = Optimizer(rule, other, "numpy")
        again.load_state_dict(opt.state_dict())
        again.train()
        opt.train()
        assert same(params, other)
        for now, there in zip(params, before, strict=True):
            np.testing.assert_allclose(now, there, rtol=1e-12, atol=1e-13)
        for now, wanted in zip(params, reference.params, strict=True):
            np.testing.assert_allclose(now, wanted, rtol=1e-10, atol=1e-12)
        assert step == 0 or any((m != b).any() for m, b in zip(moved, before, strict=True))
    assert [int(opt.state(n)["step"]) for n in opt.names] == [4] * len(SHAPES)


def test_a_rule_without_another_point_says_so() -> None:
    opt = Optimizer("adam", arrays())
    for way in (opt.eval, opt.train):
        with pytest.raises(RuleError, match="Adam is evaluated where it is trained: it has no evaluate"):
            way()


# Going on


def steps(opt: Optimizer, first: int, last: int) -> None:
    for step in range(first, last):
        opt.step([g if (i + step) % 4 else None for i, g in enumerate(arrays(step + 1))], **inputs_of(opt.rule, step))


@pytest.mark.parametrize("name", by_kind(single()))
def test_a_loaded_state_goes_on_bit_for_bit(name: str) -> None:
    rule = loaded(name)
    hyper = {"rank": 2} if "rank" in rule.settings else {}
    straight, resumed = arrays(), arrays()
    one = Optimizer(rule, straight, "numpy", seed=3, **hyper)
    two = Optimizer(rule, resumed, "numpy", seed=3, **hyper)
    steps(one, 0, 6)
    steps(two, 0, 3)
    three = Optimizer(rule, resumed, "numpy", **hyper)
    three.load_state_dict(two.state_dict())
    steps(three, 3, 6)
    assert same(straight, resumed)
    wanted, found = one.state_dict(), three.state_dict()
    assert found["hyper"] == wanted["hyper"]
    assert found["seed"] == 3
    assert found["counts"]["group"].tolist() == wanted["counts"]["group"].tolist()
    assert found["counts"]["model"] == wanted["counts"]["model"]
    for key, value in wanted["shared"].items():
        np.testing.assert_array_equal(found["shared"][key], value)
    for array, states in wanted["state"].items():
        for key, value in states.items():
            np.testing.assert_array_equal(found["state"][array][key], value)


LEVELS = rulec.parse("""
name: Levels
hyper: {lr: 0.1}
state: {w: {init: 0, per: group}, u: {init: 0, per: model}, r: {init: 0, per: row}}
step: |
  w = w + t
  u = u + t**2
  r = r + sum(g, per="row")
  direction = g*w/u + r
""")


def test_steps_of_groups_and_of_the_model_are_counted_on() -> None:
    straight, resumed = arrays(), arrays()
    one, two = Optimizer(LEVELS, straight, "numpy"), Optimizer(LEVELS, resumed, "numpy")
    steps(one, 0, 5)
    steps(two, 0, 2)
    saved = two.state_dict()
    assert (saved["counts"]["group"].tolist(), saved["counts"]["model"]) == ([2.0], 2.0)
    three = Optimizer(LEVELS, resumed, "numpy")
    three.load_state_dict(saved)
    steps(three, 2, 5)
    assert same(straight, resumed)
    np.testing.assert_array_equal(three.state_dict()["shared"]["w"], [15.0])
    np.testing.assert_array_equal(three.state_dict()["shared"]["u"], [55.0])


@pytest.mark.parametrize("state_dtype", ["float64", "bfloat16"])
def test_states_of_other_dtypes_go_on(state_dtype: str) -> None:
    pytest.importorskip("ml_dtypes")
    straight, resumed = arrays(), arrays()
    one = Optimizer("adafactor", straight, "numpy", state_dtype=state_dtype)
    two = Optimizer("adafactor", resumed, "numpy", state_dtype=state_dtype)
    steps(one, 0, 4)
    steps(two, 0, 2)
    three = Optimizer("adafactor", resumed, "numpy", state_dtype=state_dtype)
    three.load_state_dict(two.state_dict())
    steps(three, 2, 4)
    assert same(straight, resumed)


def test_a_state_that_does_not_fit_is_refused_before_anything_is_written() -> None:
    donor = Optimizer(LEVELS, arrays())
    steps(donor, 0, 2)
    saved = donor.state_dict()
    opt = Optimizer(LEVELS, arrays())
    steps(opt, 0, 3)
    before = opt.state_dict()
    wrong = {**saved["state"], "0": {**saved["state"]["0"], "r": np.zeros((5, 1))}}
    states, no_counts = saved["state"]["0"], (-5, 2.5, float("nan"), float("inf"))
    for change, message in (
        ({"state": wrong}, r"r of 0 was saved with shape \(5, 1\), not \(6, 1\)"),
        ({"shared": {"w": np.zeros(1)}}, r"the saved state of all arrays has \['w'\], where the rule has \['u', 'w'\]"),
        ({"shared": {"w": np.zeros(2), "u": np.zeros(1)}}, r"w of all arrays was saved with shape \(2,\), not \(1,\)"),
        ({"state": None}, "the saved state has no dict of its state: give all that state_dict"),
        ({"hyper": [1]}, "the saved state has no dict of its hyper: give all"),
        ({"shared": 3}, "the saved state has no dict of its shared: give all"),
        ({"counts": None}, "the saved state has no dict of its counts: give all"),
        ({"state": {**saved["state"], "0": [1]}}, "the saved state has no dict of its state of 0: give all"),
        ({"counts": {"group": np.array([2.5]), "model": 2}}, "the count of updates of the group was saved as"),
        ({"counts": {"group": np.array([2]), "model": -1}}, "the count of updates of the model was saved as -1, which"),
        *(({"state": {"0": {**states, "step": n}}}, f"step of 0 was saved as {n}, which is no c") for n in no_counts),
        ({"state": {"0": {**states, "step": "five"}}}, "step of 0 was saved as 'five', which is no number"),
        ({"state": [1]}, "the saved state has no dict of its state: give all"),
    ):
        with pytest.raises(StateMismatch, match=message):
            opt.load_state_dict({**saved, **change})
    for damaged, message in (([1], "is a list: give the dict"), ({}, "of None"), ({"rule": "Levels"}, "no dict of")):
        with pytest.raises(StateMismatch, match=message):
            opt.load_state_dict(damaged)
    with pytest.raises(HyperError, match="seed='a' must be a whole number"):
        opt.load_state_dict({**saved, "seed": "a"})
    with pytest.raises(HyperError, match=r"lr=-1\.0 of Levels"):
        opt.load_state_dict({**saved, "hyper": {"lr": -1.0}})
    after = opt.state_dict()
    assert {k: v for k, v in after.items() if k not in ("state", "shared", "counts")} == {
        k: v for k, v in before.items() if k not in ("state", "shared", "counts")
    }
    for array, states in before["state"].items():
        for key, value in states.items():
            np.testing.assert_array_equal(after["state"][array][key], value)
    np.testing.assert_array_equal(after["shared"]["u"], before["shared"]["u"])
