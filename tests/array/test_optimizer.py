"""`rulec.array.Optimizer`: in place, per layer, resumable, and refusing what it cannot do rightly."""

from __future__ import annotations

import copy
import tracemalloc
from typing import Any

import numpy as np
import pytest

import rulec
from rulec.array import GradStore, Optimizer
from rulec.array.es import Strategy
from rulec.compiler.reference import ReferenceOptimizer
from rulec.errors import BackendUnavailable, HyperError, RulecError, StateMismatch, TensorError
from rulec.es import Perturbation

SHAPES = [(5, 3), (7,), (), (2, 3, 4), (0,), (40000,)]


def arrays(seed: int = 0, dtype: str = "float32", shapes: list[tuple[int, ...]] = SHAPES) -> list[np.ndarray]:
    rng = np.random.default_rng(seed)
    return [np.asarray(rng.normal(size=s), dtype) for s in shapes]


@pytest.mark.parametrize("backend", ["cpu", "numpy"])
@pytest.mark.parametrize("rule", ["adamw", "lion", "nadam", "rprop", "ademamix"])
def test_agrees_with_the_reference(rule: str, backend: str) -> None:
    params = arrays(dtype="float64")
    opt = Optimizer(rule, params, backend)
    reference = ReferenceOptimizer(rulec.load(rule), params)
    for step in range(6):
        grads = arrays(step + 1, "float64")
        opt.step(grads)
        reference.step(grads)
    for ours, theirs in zip(params, reference.params, strict=True):
        np.testing.assert_allclose(ours, theirs, rtol=1e-13, atol=1e-15)


def test_updates_the_given_arrays_and_reads_gradients_in_place() -> None:
    params, grads = arrays(), arrays(1)
    kept = [g.copy() for g in grads]
    addresses = [p.__array_interface__["data"][0] for p in params]
    Optimizer("adamw", params).step(grads)
    assert [p.__array_interface__["data"][0] for p in params] == addresses
    assert all((g == k).all() for g, k in zip(grads, kept, strict=True))
    assert all((p != q).all() for p, q in zip(params, arrays(), strict=True))


def test_nested_parameters_have_names_and_states_of_their_own() -> None:
    params = {"dense1": {"weight": np.ones((3, 2)), "bias": np.ones(3)}, "dense2": [np.ones(4)]}
    opt = Optimizer("adam", params)
    opt.step({"dense1": {"weight": np.ones((3, 2)), "bias": np.full(3, 2.0)}, "dense2": [np.ones(4)]})
    assert opt.names == ["dense1/weight", "dense1/bias", "dense2/0"]
    weight, bias = opt.state("dense1/weight"), opt.state("dense1/bias")
    assert not np.shares_memory(weight["m"], bias["m"])
    np.testing.assert_allclose(weight["m"], 0.1)
    np.testing.assert_allclose(bias["m"], 0.2)
    assert weight["m"].__array_interface__["data"][0] % 64 == 0


def clashing(value: float = 1.0) -> list[dict]:
    """Trees in which two arrays have one name."""
    one, two = np.full((2, 2), value), np.full((2, 2), value)
    return [{"a": {"b": one}, "a/b": two}, {0: one, "0": two}, {"a": one, "a/": two}, {"": one, "param": two}]


@pytest.mark.parametrize(("place", "name"), [*enumerate(["a/b", "0", "a", "param"])])
def test_two_leaves_of_one_name_are_refused(place: int, name: str) -> None:
    """Neither is left out silently: of parameters, of gradients, of a store's, and of a strategy's."""
    says = f"^two leaves are called {name} by the keys on their paths: give each a name of its own$"
    own = np.ones((2, 2))
    opt, store = Optimizer("sgd", {name: own}), GradStore()
    for refused in (
        lambda: Optimizer("sgd", clashing()[place]),
        lambda: opt.step(clashing()[place]),
        lambda: store.extend(clashing()[place]),
        lambda: Strategy(clashing()[place], Perturbation("independent", directions=2, sigma=0.1)),
    ):
        with pytest.raises(TensorError, match=says):
            refused()
    assert (own == 1).all()
    assert not len(store)


def test_a_step_layer_by_layer_equals_a_whole_one() -> None:
    whole = {"a": {"w": np.ones((3, 2)), "b": np.ones(3)}, "c": {"w": np.ones(4)}}
    parts = {k: {n: x.copy() for n, x in v.items()} for k, v in whole.items()}
    grads = {"a": {"w": np.full((3, 2), 0.3), "b": np.full(3, -1.0)}, "c": {"w": np.arange(4.0)}}
    one, other = Optimizer("nadam", whole, lr=0.1), Optimizer("nadam", parts, lr=0.1)
    for _ in range(4):
        one.step(grads)
        with other.partial():
            for layer in ("c", "a"):
                other.update(layer, grads[layer])
    for layer in whole:
        for name in whole[layer]:
            np.testing.assert_array_equal(whole[layer][name], parts[layer][name])


def test_a_tensor_counts_its_own_updates() -> None:
    a, b = np.zeros(3), np.zeros(3)
    opt = Optimizer("adam", [a, b], lr=0.1)
    opt.step([np.ones(3), None])
    opt.step([np.ones(3), np.ones(3)])
    late = np.zeros(3)
    Optimizer("adam", [late], lr=0.1).step([np.ones(3)])
    np.testing.assert_array_equal(b, late)
    assert (int(opt.state("0")["step"]), int(opt.state("1")["step"])) == (2, 1)


def test_partial_steps_are_opened_closed_and_not_mixed() -> None:
    opt = Optimizer("sgd", {"a": np.ones(2), "b": np.ones(2)})
    with pytest.raises(RulecError, match="belongs inside"):
        opt.update("a", np.ones(2))
    with opt.partial():
        opt.update("a", np.ones(2))
        with pytest.raises(TensorError, match="a is updated twice in one step"):
            opt.update("a", np.ones(2))
        with pytest.raises(RulecError, match="inside partial"):
            opt.step({"a": np.ones(2)})
        with pytest.raises(RulecError, match="which is open"), opt.partial():
            pass
    opt.step({"a": np.ones(2), "b": np.ones(2)})


def test_resumes_bit_for_bit() -> None:
    for rule in ("adamw", "nadam", "asgd", "rprop"):
        straight, resumed = arrays(), arrays()
        one, two = Optimizer(rule, straight), Optimizer(rule, resumed)
        for step in range(3):
            one.step(arrays(step + 1))
            two.step(arrays(step + 1))
        three = Optimizer(rule, resumed)
        three.load_state_dict(two.state_dict())
        for step in range(3, 6):
            one.step(arrays(step + 1))
            three.step(arrays(step + 1))
        assert all((a == b).all() for a, b in zip(straight, resumed, strict=True)), rule


def test_a_saved_state_is_a_copy_and_must_fit() -> None:
    params = arrays()
    opt = Optimizer("adam", params)
    opt.step(arrays(1))
    saved = opt.state_dict()
    before = saved["state"]["0"]["m"].copy()
    opt.step(arrays(2))
    np.testing.assert_array_equal(saved["state"]["0"]["m"], before)
    with pytest.raises(StateMismatch, match="is of Adam, not of Lion"):
        Optimizer("lion", arrays()).load_state_dict(saved)
    other = arrays(shapes=[(3, 5), *SHAPES[1:]])
    with pytest.raises(StateMismatch, match=r"shape \(5, 3\), not \(3, 5\)"):
        Optimizer("adam", other).load_state_dict(saved)
    with pytest.raises(StateMismatch, match="no parameter here"):
        Optimizer("adam", arrays(shapes=SHAPES[:2])).load_state_dict(saved)


def test_state_dtypes_are_independent_of_the_parameters() -> None:
    ml_dtypes = pytest.importorskip("ml_dtypes")
    params = arrays()
    opt = Optimizer("adam", params, state_dtype={"v": "bfloat16"})
    opt.step(arrays(1))
    state = opt.state("0")
    assert state["v"].dtype == ml_dtypes.bfloat16
    assert state["m"].dtype == np.float32
    with pytest.raises(TensorError, match="no state 'w'"):
        Optimizer("adam", params, state_dtype={"w": "bfloat16"})
    with pytest.raises(TensorError, match="there is no state dtype 'int9'; did you mean 'int8'"):
        Optimizer("adam", params, state_dtype="int9")


def test_fortran_order_is_walked_as_it_lies() -> None:
    value, grad = arrays()[0], arrays(1)[0]
    c_order, f_order = value.copy(), np.asfortranarray(value)
    Optimizer("adamw", [c_order]).step([grad])
    opt = Optimizer("adamw", [f_order])
    opt.step([np.asfortranarray(grad)])
    np.testing.assert_array_equal(c_order, f_order)
    assert opt.state("0")["m"].flags.f_contiguous
    with pytest.raises(TensorError, match="memory order"):
        opt.step([grad])


def test_nan_and_infinity_pass_through_and_stay_where_they_are() -> None:
    p = np.ones(5, np.float32)
    g = np.array([1, np.nan, np.inf, -np.inf, 1], np.float32)
    Optimizer("sgd", [p], lr=0.5).step([g])
    np.testing.assert_array_equal(p, np.array([0.5, np.nan, -np.inf, np.inf, 0.5], np.float32))


def test_maximize_goes_uphill() -> None:
    up, down = np.ones(3), np.ones(3)
    Optimizer("adam", [up], maximize=True).step([np.ones(3)])
    Optimizer("adam", [down]).step([-np.ones(3)])
    np.testing.assert_array_equal(up, down)


def test_a_hyper_parameter_may_change_between_steps() -> None:
    p = np.zeros(2)
    opt = Optimizer("sgd", [p], lr=1.0)
    opt.step([np.ones(2)])
    opt.hyper["lr"] = 0.25
    opt.step([np.ones(2)])
    np.testing.assert_array_equal(p, -1.25)
    opt.hyper["lr"] = -1.0
    with pytest.raises(HyperError, match=r"lr=-1.0 of SGD must be at least 0"):
        opt.step([np.ones(2)])
    np.testing.assert_array_equal(p, -1.25)


@pytest.mark.parametrize(
    ("hyper", "message"),
    [
        ({"lr": "a"}, "lr='a' of Lion must be at least 0"),
        ({"lr": "1"}, "lr='1' of Lion must be at least 0"),
        ({"lr": None}, "lr=None of Lion must be at least 0"),
        ({"lr": [1.0, 2.0]}, r"lr=\[1.0, 2.0\] of Lion must be at least 0"),
        ({"lr": abs}, "lr of Lion is a function, where a number belongs: give its value anew before each step"),
        ({"learning_rate": 0.0}, "opt.hyper has 'learning_rate', which Lion has not; did you mean 'lr'[?]"),
        ({"lrr": 0.0}, "opt.hyper has 'lrr', which Lion has not; did you mean 'lr'[?]"),
        ({3: 0.0}, "opt.hyper has 3, which Lion has not"),
        ("lr", "opt.hyper has no 'lr', which Lion needs: give it a number"),
        (0.1, "opt.hyper is a float: it must be a dict of the numbers lr, beta1, beta2, weight_decay"),
    ],
)
def test_hyper_parameters_that_are_not_those_of_the_rule_are_refused(hyper: Any, message: str) -> None:
    """By every way that reads them, before anything is written."""
    params = {"w": np.ones(2)}
    opt = Optimizer("lion", params, lr=0.25)
    if isinstance(hyper, dict):
        opt.hyper |= hyper
    elif isinstance(hyper, str):
        del opt.hyper[hyper]
    else:
        opt.hyper = hyper
    with pytest.raises(HyperError, match=f"^{message}$"):
        opt.step({"w": np.ones(2)})
    with pytest.raises(HyperError, match=f"^{message}$"), opt.partial():
        opt.update("w", np.ones(2))
    strategy = Strategy(params, Perturbation("independent", directions=2, sigma=0.1))
    fitness = strategy.evaluate(lambda p: p["w"][0])
    with pytest.raises(HyperError, match=f"^{message}$"):
        strategy.step(fitness, opt)
    with pytest.raises(HyperError, match=f"^{message}$"):
        copy.deepcopy(opt)
    opt.hyper = {"weight_decay": np.float32(0), "beta2": 0.5, "beta1": 0, "lr": np.array(0.25)}
    opt.step({"w": np.ones(2)})
    np.testing.assert_array_equal(params["w"], 0.75)


@pytest.mark.parametrize(
    ("params", "message"),
    [
        ([[1.0, 2.0]], "parameter 0/0 is a float, not a NumPy array"),
        ([np.ones(3, np.int64)], "dtype int64 cannot be optimized"),
        ([np.ones(3, ">f4")], "foreign byte order"),
        ([np.ones((4, 4))[:, ::2]], "parameter 0 is not contiguous"),
        ([np.broadcast_to(np.ones(3), (2, 3))], "parameter 0 is read-only"),
    ],
)
def test_parameters_that_cannot_be_updated_are_refused(params: list[object], message: str) -> None:
    with pytest.raises(TensorError, match=message):
        Optimizer("sgd", params)


def test_shared_memory_is_refused() -> None:
    base = np.ones(10)
    with pytest.raises(TensorError, match="parameter 0 and parameter 1 share memory"):
        Optimizer("sgd", [base, base])
    with pytest.raises(TensorError, match="share memory"):
        Optimizer("sgd", [base[:6], base[5:]])
    Optimizer("sgd", [base[:5], base[5:]]).step([np.ones(5), np.ones(5)])
    other = np.ones(5)
    opt = Optimizer("adam", [other, base])
    with pytest.raises(TensorError, match="the gradient of 0 shares memory with parameter 1: pass a copy"):
        opt.step([base[:5], np.ones(10)])
    np.testing.assert_array_equal(base, np.array([1 - 1e-3] * 10))


@pytest.mark.parametrize(
    ("grads", "message"),
    [
        ([np.ones(3), np.ones(4)], r"the gradient of 1 has shape \(4,\), its parameter \(2,\)"),
        ([np.ones(3), np.ones(2, np.float32)], "the gradient of 1 has dtype float32, where float64 is expected"),
        ([np.ones(3), [1.0, 2.0]], "1/0, which is no parameter"),
        ([np.ones(3), np.ones(4)[::2]], "not contiguous"),
        ({"0": np.ones(3), "weight": np.ones(2)}, "weight, which is no parameter"),
    ],
)
def test_gradients_that_do_not_fit_are_refused_before_anything_is_written(grads: object, message: str) -> None:
    params = [np.ones(3), np.ones(2)]
    opt = Optimizer("adam", params)
    opt.step([np.ones(3), np.ones(2)])
    before = [p.copy() for p in params]
    with pytest.raises(TensorError, match=message):
        opt.step(grads)
    assert all((p == b).all() for p, b in zip(params, before, strict=True))
    assert int(opt.state("0")["step"]) == 1


def test_unknown_names_are_refused_with_the_nearest_known() -> None:
    with pytest.raises(HyperError, match="no hyper-parameter 'bta1'; did you mean 'beta1'"):
        Optimizer("adam", [np.ones(2)], bta1=0.8)
    with pytest.raises(rulec.RuleError, match="no rule 'adamm'; did you mean 'adam'"):
        Optimizer("adamm", [np.ones(2)])
    with pytest.raises(BackendUnavailable, match="no backend 'cpuu'; did you mean 'cpu'"):
        Optimizer("adam", [np.ones(2)], backend="cpuu").step([np.ones(2)])


def test_a_step_allocates_nothing_that_grows_with_the_parameters() -> None:
    params, grads = [np.ones(2_000_000, np.float32)], [np.ones(2_000_000, np.float32)]
    opt = Optimizer("adamw", params)
    opt.step(grads)
    tracemalloc.start()
    opt.step(grads)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < 100_000, f"{peak} bytes allocated in a step of 8 MB parameters"


def test_the_first_step_allocates_the_states_and_no_more() -> None:
    params, grads = [np.ones(1_000_000, np.float32)], [np.ones(1_000_000, np.float32)]
    Optimizer("adamw", [np.ones(3, np.float32)]).step([np.ones(3, np.float32)])
    tracemalloc.start()
    Optimizer("adamw", params).step(grads)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert 8_000_000 <= peak < 8_200_000
