"""Steps taken layer by layer: exact where gradients are summed, and never half of one in silence."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import rulec
from rulec.array import GradStore, Optimizer
from rulec.array.arrays import numpy_dtype
from rulec.errors import HyperError, PartialUpdate, RulecError, TensorError
from rulec.language.library.load import parse

SHAPES = {"embed": (6, 4), "hidden": (4, 4), "head": (3,)}

FADING = """
name: Fading
summary: Gradient descent whose steps get smaller by a factor that the model remembers.
hyper: {lr: 0.1, fade: 0.5}
state: {weight: {init: 1, per: model}}
step: |
  weight = weight*fade
  direction = weight*g
"""

#: Beside tensors they remember nothing, a number for each tensor, factors, and a number for the model.
RULES = ("adam", "nadam", "adafactor", "fading")


def parameters() -> dict[str, Any]:
    rng = np.random.default_rng(3)
    return {"embed": rng.normal(size=(6, 4)), "body": {k: rng.normal(size=SHAPES[k]) for k in ("hidden", "head")}}


def gradients(seed: int) -> dict[str, Any]:
    rng = np.random.default_rng(seed)
    made = {k: rng.normal(size=s) for k, s in SHAPES.items()}
    return {"embed": made["embed"], "body": {"hidden": made["hidden"], "head": made["head"]}}


def optimizer(rule: str, params: Any) -> Optimizer:
    return Optimizer(parse(FADING) if rule == "fading" else rule, params, lr=0.01)


def leaves(opt: Optimizer) -> dict[str, np.ndarray]:
    """Every array and state, as bytes can be compared."""
    states = {f"{n}.{k}": v for n in opt.names for k, v in opt.state(n).items()}
    return {k: np.array(v) for k, v in {**opt._engine.params, **states}.items()}


def same(one: Optimizer, other: Optimizer) -> bool:
    a, b = leaves(one), leaves(other)
    return a.keys() == b.keys() and all(a[k].tobytes() == b[k].tobytes() for k in a)


def twins(rule: str = "adam") -> tuple[Optimizer, Optimizer]:
    return optimizer(rule, parameters()), optimizer(rule, parameters())


@pytest.mark.parametrize("rule", RULES)
def test_shared_weights_take_one_step_from_the_sum(rule: str) -> None:
    whole, eager = twins(rule)
    for step in range(5):
        grads, again = gradients(step), gradients(100 + step)["embed"]
        whole.step({**grads, "embed": grads["embed"] + again})
        with eager.partial(uses={"embed": 2}):
            eager.update("embed", grads["embed"])
            eager.update("body", grads["body"])
            assert int(whole.state("body/head")["step"]) == int(eager.state("body/head")["step"])
            eager.update("embed", again)
    assert same(whole, eager)


def test_of_fewer_gradients_than_expected_there_is_the_sum_at_exit() -> None:
    whole, eager = twins()
    grads, again = gradients(1), gradients(2)["embed"]
    whole.step({**grads, "embed": grads["embed"] + again})
    with eager.partial(uses={"embed": 3}):
        eager.update("embed", grads["embed"])
        eager.update("embed", again)
        eager.update("body", grads["body"])
        assert eager.state("embed") == {}
    assert same(whole, eager)


def test_more_gradients_than_expected_are_refused_and_so_are_uses_of_nothing() -> None:
    opt, _ = twins()
    grads = gradients(1)
    with opt.partial(uses={"embed": 1}):
        opt.update("embed", grads["embed"])
        with pytest.raises(TensorError, match="embed is updated twice in one step: give it its whole gradient once"):
            opt.update("embed", grads["embed"])
    for uses, error, message in (
        ({"emb": 2}, TensorError, "uses has emb, which is no layer here"),
        ({"embed": 0}, HyperError, "uses of embed must be a whole number of gradients, at least 1, not 0"),
    ):
        with pytest.raises(error, match=message), opt.partial(uses=uses):
            pass
    opt.step(grads)


SCALED = """
name: Scaled
summary: Gradient descent by a factor for each element and one for all.
inputs: {factor: like p, loss: scalar}
step: "direction = loss*factor*g**2"
"""


def test_a_layer_used_twice_has_the_inputs_that_came_last() -> None:
    rule, start = parse(SCALED), {"a": [np.ones(3), np.ones(2)], "b": np.ones(2)}
    whole, eager = Optimizer(rule, start), Optimizer(rule, {"a": [np.ones(3), np.ones(2)], "b": np.ones(2)})
    factor = {"a": [np.arange(3.0), np.arange(2.0)], "b": np.full(2, 5.0)}
    whole.step({"a": [np.full(3, 0.75), np.full(2, 0.5)], "b": np.ones(2)}, factor=factor, loss=2.0)
    with eager.partial(uses={"a": 2, "b": 2}):
        eager.update("a", [np.full(3, 0.5), None])
        eager.update("a", [np.full(3, 0.25), np.full(2, 0.5)], factor=factor["a"], loss=2.0)
        eager.update("b", np.ones(2), factor=factor["b"], loss=2.0)
    assert same(whole, eager)


def test_hyper_parameters_are_read_when_the_step_opens() -> None:
    whole, eager = twins()
    grads = gradients(1)
    whole.step(grads)
    with eager.partial():
        eager.update("embed", grads["embed"])
        eager.hyper["lr"] = 10.0
        eager.update("body", grads["body"])
    assert same(whole, eager)


def break_off(opt: Optimizer, grads: dict[str, Any], journal: bool = False) -> None:
    """A step in which something fails after these updates."""
    with opt.partial(journal=journal):
        for layer, grad in grads.items():
            opt.update(layer, grad)
        raise ZeroDivisionError


def broken(rule: str, journal: bool) -> tuple[Optimizer, Optimizer]:
    """Optimizers after two steps, and in the second of them the third broke off after the first of its layers."""
    whole, eager = twins(rule)
    for step in range(2):
        whole.step(gradients(step))
        eager.step(gradients(step))
    with pytest.raises(ZeroDivisionError):
        break_off(eager, {"body": gradients(2)["body"]}, journal)
    return whole, eager


def test_a_step_that_breaks_off_is_in_the_way_of_everything() -> None:
    _, opt = broken("adam", journal=False)
    for call in (
        lambda: opt.step(gradients(3)), opt.state_dict, lambda: opt.partial().__enter__(),
        lambda: opt.load_state_dict({}),
    ):  # fmt: skip
        with pytest.raises(PartialUpdate, match=r"after body/hidden, body/head and before embed were updated") as error:
            call()
        assert (error.value.updated, error.value.pending) == (["body/hidden", "body/head"], ["embed"])
    with pytest.raises(RulecError, match="partial\\(\\) had no journal=True"):
        opt.rollback()


@pytest.mark.parametrize("rule", RULES)
def test_rolled_back_it_goes_on_as_if_nothing_had_been(rule: str) -> None:
    whole, opt = broken(rule, journal=True)
    opt.rollback()
    assert same(whole, opt)
    for step in range(2, 5):
        whole.step(gradients(step))
        opt.step(gradients(step))
    assert same(whole, opt)


@pytest.mark.parametrize("rule", RULES)
def test_every_layer_that_was_updated_is_rolled_back(rule: str) -> None:
    whole, opt = twins(rule)
    whole.step(gradients(1))
    opt.step(gradients(1))
    grads = gradients(2)
    with pytest.raises(ZeroDivisionError):
        break_off(opt, {"embed": grads["embed"], "body/hidden": grads["body"]["hidden"]}, journal=True)
    assert not same(whole, opt)
    opt.rollback()
    assert same(whole, opt)


@pytest.mark.parametrize("rule", RULES)
def test_accepted_it_goes_on_from_what_was_updated(rule: str) -> None:
    whole, opt = broken(rule, journal=False)
    opt.accept_partial()
    whole.step({"body": gradients(2)["body"]})
    assert same(whole, opt)
    opt.step(gradients(3))
    with pytest.raises(RulecError, match="none did"):
        opt.accept_partial()


def test_the_first_step_rolled_back_leaves_no_trace_in_what_follows() -> None:
    whole, opt = twins("nadam")
    with pytest.raises(ZeroDivisionError):
        break_off(opt, {"embed": gradients(0)["embed"]}, journal=True)
    opt.rollback()
    for step in range(3):
        whole.step(gradients(step))
        opt.step(gradients(step))
    assert same(whole, opt)


@pytest.mark.parametrize("when", ["before", "after"])
def test_an_exception_before_the_first_or_after_the_last_update_breaks_nothing(when: str) -> None:
    whole, opt = twins()
    with pytest.raises(ZeroDivisionError):
        break_off(opt, gradients(0) if when == "after" else {})
    if when == "after":
        whole.step(gradients(0))
    whole.step(gradients(1))
    opt.step(gradients(1))
    assert same(whole, opt)


def test_nothing_but_updates_happens_inside_a_step() -> None:
    opt = Optimizer("schedule_free_adamw", parameters())
    opt.step(gradients(0))
    with opt.partial():
        for call in (opt.state_dict, opt.eval, lambda: opt.step(gradients(1)), lambda: opt.load_state_dict({})):
            with pytest.raises(RulecError, match="inside partial"):
                call()
    opt.eval()


# The store


def test_a_store_sums_and_never_writes_to_what_it_was_given() -> None:
    store = GradStore()
    given = [gradients(i) for i in range(3)]
    kept = [g["embed"].copy() for g in given]
    for grads in given:
        store.extend(grads)
    np.testing.assert_array_equal(store["embed"], (kept[0] + kept[1]) + kept[2])
    assert all((g["embed"] == k).all() for g, k in zip(given, kept, strict=True))
    assert sorted(store) == ["body/head", "body/hidden", "embed"]
    assert store.nbytes == 8 * (24 + 16 + 3)
    store.extend(GradStore({"head": np.ones(3)}), layer="body")
    np.testing.assert_array_equal(store.pop("body/head"), _head(given) + 1)
    assert store.pop("body/head") is None
    assert "body/head" not in store
    assert (len(store), store.nbytes, store.peak_nbytes) == (2, 8 * 40, 8 * 43)


def _head(given: list[dict[str, Any]]) -> np.ndarray:
    first, second, third = (g["body"]["head"] for g in given)
    return (first + second) + third


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32", "float64"])
@pytest.mark.parametrize("order", ["C", "F"])
def test_an_array_that_the_next_gradient_is_written_to_has_no_say(dtype: str, order: Any) -> None:
    """The gradient of a recurrent weight: a layer has one array for it, and writes all steps' gradients there."""
    buffer = np.zeros((3, 2), numpy_dtype(dtype), order)
    weight = np.zeros_like(buffer)
    opt, store = Optimizer("sgd", {"w": weight}, "numpy", lr=1.0), GradStore()
    with opt.partial(uses={"w": 3}):
        for value in (1.0, 10.0, 100.0):
            buffer[...] = value
            store.extend({"w": buffer})
            opt.update("w", buffer)
    buffer[...] = 0
    assert (store["w"] == 111).all()
    assert (weight == -111).all()
    assert store["w"].flags.f_contiguous == buffer.flags.f_contiguous
    weight[...] = 0
    store.step(opt)
    assert (weight == -111).all()


def test_inputs_that_wait_for_the_end_of_a_step_are_copied() -> None:
    weight = np.ones(3)
    opt, buffer = Optimizer(parse(SCALED), {"a": weight}, "numpy"), np.full(3, 2.0)
    with opt.partial(uses={"a": 2}):
        opt.update("a", np.ones(3), factor=buffer, loss=0.25)
        buffer[...] = 1000.0
    np.testing.assert_allclose(weight, 1 - 1e-3 * 0.25 * 2, rtol=1e-12)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_sums_of_16_bits_are_rounded_once(dtype: str) -> None:
    kind = numpy_dtype(dtype)
    grads = [np.array([1.0, 1.0 + seed % 3, -(2.0**-4)]).astype(kind) for seed in range(300)]
    exact = np.stack(grads).astype(np.float64).sum(0)
    weight = np.zeros(3, kind)
    opt, store = Optimizer("sgd", {"w": weight}, "numpy", lr=1.0), GradStore()
    with opt.partial(uses={"w": 300}):
        for grad in grads:
            store.extend({"w": grad})
            opt.update("w", grad)
    for total in (store["w"], -weight):
        assert total.dtype == kind
        np.testing.assert_array_equal(total, exact.astype(kind))
    whole = GradStore({"w": np.ones(3, kind)})
    whole.extend(store)
    np.testing.assert_array_equal(whole.pop("w"), (exact + 1).astype(kind))
    assert (store.nbytes, len(whole)) == (12, 0)
    weight[...] = 0
    store.step(opt)
    np.testing.assert_array_equal(-weight, exact.astype(kind))


def test_a_store_refuses_gradients_that_cannot_be_added_and_adds_nothing() -> None:
    store = GradStore({"a": np.ones(3), "b": np.ones((3, 1))})
    for wrong, message in (
        (np.ones((3, 3)), r"a gradient of b has shape \(3, 3\), where the store has one of \(3, 1\)"),
        (np.ones((3, 1), np.float32), "a gradient of b has dtype float32, where the store has one of float64"),
    ):
        with pytest.raises(TensorError, match=message):
            store.extend({"a": np.ones(3), "b": wrong})
    with pytest.raises(TensorError, match="the gradient of b is a float, and a store has arrays"):
        store.extend({"a": np.ones(3), "b": 1.0})
    np.testing.assert_array_equal(store["a"], 1.0)


@pytest.mark.parametrize("rule", RULES)
def test_segments_by_hand_equal_the_whole_step(rule: str) -> None:
    whole, eager = twins(rule)
    for step in range(5):
        grads, again = gradients(step), gradients(50 + step)["embed"]
        whole.step({**grads, "embed": grads["embed"] + again})
        store = GradStore()
        with eager.partial():
            store.extend(grads)
            store.step(eager, "body")
            assert [*store] == ["embed"]
            store.extend(again, "embed")
            store.step(eager)
        assert len(store) == 0
    assert same(whole, eager)


def test_a_store_takes_a_whole_step_of_any_rule() -> None:
    rule = rulec.load("clip_by_global_norm") >> rulec.load("adam")
    whole, other = Optimizer(rule, parameters(), "numpy"), Optimizer(rule, parameters(), "numpy")
    store = GradStore(gradients(1))
    whole.step(gradients(1))
    store.step(other)
    assert same(whole, other)
    assert len(store) == 0
    store.extend(gradients(2))
    with pytest.raises(RulecError, match="call it inside `with opt"):
        store.step(other, "embed")
    store.extend({"other": np.ones(2)})
    with pytest.raises(TensorError, match="other, which is no parameter"):
        store.step(other)
    assert len(store) == 4, "what could not be used is still there"
