"""What users get wrong in JAX: an error of one sentence that says what, where, and what to do."""

from __future__ import annotations

import re
from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import torch

import rulec
import rulec.jax
from rulec.errors import HyperError, RulecError, StateMismatch, TensorError
from rulec.jax.refused import explained
from tests.jax.training import gradients, params

ADAM = rulec.jax.transform("adam", lr=0.1)

INFORMED = rulec.parse("""
name: Informed
inputs: {loss: scalar, h: like p}
step: |
  direction = loss*g/h
""")


def check_refused(kind: type[RulecError], message: str, call: Callable[[], Any]) -> None:
    """The call fails with exactly this message, or one that begins so where it ends in dots; plainly or under jit."""
    for run in (call, jax.jit(lambda: call())):
        with pytest.raises(RulecError) as found:
            run()
        text = str(found.value)
        assert type(found.value) is kind
        assert text.startswith(message.removesuffix("...")) if message.endswith("...") else text == message
        assert "\n" not in text
        assert run is not call or not hasattr(found.value, "__notes__")


# Leaves


@pytest.mark.parametrize(
    ("leaf", "message"),
    [
        (
            jnp.arange(3),
            "is of int32, and only float32, float64, bfloat16, float16, complex64, complex128 can be updated: leave it "
            "out, as with optax.masked, or cast it",
        ),
        (jnp.ones(3, bool), "is of bool, and only ..."),
        (jnp.ones(3, jnp.float8_e4m3fn), "is of float8_e4m3fn, and only ..."),
        (jax.random.key(0), "is of key<fry>, and only ..."),
        (
            torch.ones(3),
            "is a torch.Tensor, which is no array of JAX: convert it with jnp.asarray, or leave it out of the tree",
        ),
        ("text", "is a str, which is no array of JAX: ..."),
        (jnp.tanh, "is a ..."),
        (np.array([None]), "is a NumPy array of objects, which ..."),
    ],
)
def test_leaves_that_no_rule_can_update(leaf: Any, message: str) -> None:
    good, grads = params(), gradients(params(), 0)
    bad, state = {**good, "b": {"c": leaf}}, ADAM.init(good)
    check_refused(TensorError, f"the parameter b/c {message}", lambda: ADAM.init(bad))
    check_refused(TensorError, f"the parameter b/c {message}", lambda: rulec.jax.step("adam", bad, grads, state))
    check_refused(TensorError, f"the gradient of b/c {message}", lambda: ADAM.update(bad, state, good))
    check_refused(TensorError, f"the parameter {message}", lambda: ADAM.init(leaf))


def test_64_bits_where_jax_has_32() -> None:
    """A NumPy array of float64 would otherwise lose half of its digits without a word."""
    advice = (
        "is of float64, and JAX is kept to 32 bits: allow it 64 with jax.config.update('jax_enable_x64', True) before "
        "arrays are made, or cast to float32"
    )
    good = params()
    bad = {**good, "a": np.ones((3, 4))}
    state = ADAM.init(good)
    check_refused(TensorError, f"the parameter a {advice}", lambda: ADAM.init(bad))
    check_refused(TensorError, f"the gradient of a {advice}", lambda: ADAM.update(bad, state, good))
    check_refused(TensorError, f"the gradient of a {advice}", lambda: rulec.jax.step("adam", good, bad, state))
    with jax.enable_x64(True):
        wide = {**good, "a": jnp.ones((3, 4))}
        ADAM.init(wide)
    check_refused(TensorError, f"the parameter a {advice}", lambda: ADAM.init(wide))
    check_refused(
        HyperError,
        "state_dtype='float64' needs 64-bit JAX: jax.config.update('jax_enable_x64', True) before arrays are made",
        lambda: rulec.jax.init("adam", good, state_dtype="float64"),
    )
    assert ADAM.init({"number": 1.5}).m["number"].dtype == jnp.float32


@pytest.mark.parametrize("rule", ["adam", rulec.partition({"a/b": "adam", "...": "sgd"})], ids=["rule", "partition"])
def test_leaves_of_one_name(rule: Any) -> None:
    """A mask, a pattern or a tag that means one of them would be the other's as well."""
    tree: dict[str, Any] = {"a/b": jnp.ones(3), "a": {"b": jnp.ones(3)}, "c": jnp.ones(2)}
    message = "two leaves are called a/b by the keys on their paths: give each a name of its own"
    mask = {"a/b": True, "a": {"b": False}, "c": True}
    check_refused(TensorError, message, lambda: rulec.jax.transform(rule).init(tree))
    check_refused(TensorError, message, lambda: rulec.jax.init(rule, tree))
    check_refused(TensorError, message, lambda: rulec.jax.step(rule, tree, tree, None, donate=False))
    check_refused(TensorError, message, lambda: rulec.jax.adamw(0.1, mask=mask).init(tree))
    check_refused(TensorError, message, lambda: rulec.jax.transform("muon", tags={"a/b": {"embedding"}}).init(tree))


def test_gradients_that_are_not_there() -> None:
    good, state = params(), ADAM.init(params())
    missing = (
        "the gradient of b/c is missing (None, or no leaf): every parameter needs one; leave those that are not "
        "trained out of the tree, as with optax.masked"
    )
    for grads in ({"a": good["a"], "b": {"c": None}}, {"a": good["a"], "b": {}}, {"a": good["a"]}):
        check_refused(TensorError, missing, partial(ADAM.update, grads, state, good))
        check_refused(TensorError, missing, partial(rulec.jax.step, "adam", good, grads, state))
    more = {**good, "more": good["a"]}
    check_refused(
        TensorError,
        "the gradient of more is given, and there is no such parameter: leave it out, or set it None",
        lambda: ADAM.update(more, state, good),
    )
    listed = [1.0 * good["a"], 1.0 * good["a"]]
    check_refused(
        TensorError,
        "the containers of the parameters are ...",
        lambda: ADAM.update(tuple(listed), ADAM.init(listed), listed),
    )


def test_gradients_of_another_shape() -> None:
    good, state = params(), ADAM.init(params())
    bad = {**good, "a": good["a"].T}
    message = "the gradient of a has shape (4, 3), its parameter (3, 4)"
    check_refused(TensorError, message, lambda: ADAM.update(bad, state, good))
    check_refused(TensorError, message, lambda: rulec.jax.step("adam", good, bad, state))
    one = jnp.ones(3)
    check_refused(
        TensorError,
        "the gradient of the parameter has shape (2,), its parameter (3,)",
        lambda: ADAM.update(one[:2], ADAM.init(one), one),
    )


def test_a_rule_that_reads_parameters_needs_them() -> None:
    made = rulec.jax.transform("adamw")
    check_refused(
        TensorError,
        "AdamW reads the parameters: call update(grads, state, params)",
        lambda: made.update(params(), made.init(params())),
    )
    ADAM.update(params(), ADAM.init(params()))


# States


def test_states_of_other_parameters() -> None:
    good, state = params(), ADAM.init(params())
    changed = "the parameters or the rule may have changed since init"
    wider = {**good, "a": jnp.ones((3, 5))}
    check_refused(
        StateMismatch,
        f"m of a in the state of Adam has shape (3, 4) and not (3, 5): {changed}",
        lambda: ADAM.update(wider, state, wider),
    )
    more = {**good, "more": jnp.ones(2)}
    check_refused(
        StateMismatch,
        "m of the state of Adam does not have the structure of the parameters, which may have changed since init: ...",
        lambda: rulec.jax.step("adam", more, more, state),
    )
    lost = state._replace(v={**state.v, "a": None})
    check_refused(
        StateMismatch,
        f"there is no v of a in the state of Adam: {changed}",
        lambda: ADAM.update(good, lost, good),
    )
    whole = state._replace(v={**state.v, "a": jnp.ones((3, 4), int)})
    check_refused(
        StateMismatch,
        "v of a in the state of Adam is of int32, and states are of float32, float64, bfloat16, float16: give what "
        "init returned",
        lambda: ADAM.update(good, whole, good),
    )
    for count in (jnp.zeros(2, int), jnp.zeros(())):
        check_refused(
            StateMismatch,
            f"the count of the state of Adam is not an array of whole numbers of shape (): {changed}",
            partial(ADAM.update, good, state._replace(count=count), good),
        )
    prodigy = rulec.jax.init("prodigy", good)
    check_refused(
        StateMismatch,
        f"d of the state of Prodigy is not an array of shape (): {changed}",
        lambda: rulec.jax.step("prodigy", good, good, prodigy._replace(d=jnp.ones(2))),
    )


def test_states_of_another_rule() -> None:
    good, state = params(), rulec.jax.init("lion", params())
    check_refused(
        StateMismatch,
        "the state is a State without 'v', which Adam needs: give what its init returned",
        lambda: ADAM.update(good, state, good),
    )
    check_refused(
        StateMismatch,
        "the state is a tuple without 'm', which Adam needs: give what its init returned",
        lambda: ADAM.update(good, optax.adam(0.1).init(good), good),
    )
    check_refused(
        StateMismatch,
        "the state is a NoneType without 'count', which Adam needs: give what its init returned",
        lambda: rulec.jax.step("adam", good, good, None),
    )


def test_memory_that_was_donated() -> None:
    tree = {"w": jnp.ones(3)}
    state, grads = rulec.jax.init("adam", tree), gradients(tree, 0)
    rulec.jax.step("adam", tree, grads, state)
    gone = (
        "was donated to an earlier call, which used its memory again: go on with what that call returned, or call step "
        "with donate=False"
    )
    fresh = {"w": jnp.ones(3)}
    other = rulec.jax.init("adam", fresh)
    for message, call in (
        (f"the parameter w {gone}", lambda: rulec.jax.step("adam", tree, grads, other)),
        (f"the state's count {gone}", lambda: rulec.jax.step("adam", fresh, grads, state)),
        (f"the state's count {gone}", lambda: ADAM.update(grads, state, fresh)),
    ):
        with pytest.raises(TensorError, match=f"^{re.escape(message)}$"):
            call()
    assert not any(leaf.is_deleted() for leaf in jax.tree.leaves((fresh, other, grads)))
    rulec.jax.step("adam", fresh, grads, other)


def test_one_array_twice() -> None:
    one = jnp.ones(3)
    tree = {"a": one, "b": one}
    advice = "and its memory can be used again only once: copy one of them, or call step with donate=False"
    state = rulec.jax.init("sgd", tree)
    grads = gradients(tree, 0)
    with pytest.raises(TensorError, match=f"^the parameter b is the same array as the parameter a, {advice}$"):
        rulec.jax.step("sgd", tree, grads, state)
    with pytest.raises(TensorError, match=f"^the gradient of a is the same array as the parameter a, {advice}$"):
        rulec.jax.step("sgd", {"a": one}, {"a": one}, rulec.jax.init("sgd", {"a": one}))
    assert not one.is_deleted()
    rulec.jax.step("sgd", tree, grads, state, donate=False)


def test_what_is_not_known_is_left_to_jax() -> None:
    """An array that is given twice is nobody's mistake where memory was not the trouble."""
    tree = {"a": jnp.ones(3)}
    operands: Any = tree, tree, rulec.jax.init("sgd", tree), [{}], {}

    def step(params: Any, grads: Any, state: Any, numbers: Any, inputs: Any) -> None:
        """Has the operands of a machine's."""

    assert explained(RuntimeError("out of memory"), step, operands) is None
    assert explained(TypeError("of something else"), step, operands) is None
    found = explained(RuntimeError("Attempt to donate the same buffer twice"), step, operands)
    assert str(found).startswith("the gradient of a is the same array as the parameter a")


# Hyper-parameters


def test_hyper_parameters_that_are_none() -> None:
    check_refused(
        HyperError,
        "Adam has no hyper-parameter 'beta3'; did you mean 'beta2'?",
        lambda: rulec.jax.transform("adam", beta3=0.5),
    )
    check_refused(HyperError, "lr=-1 of Adam must be at least 0", lambda: rulec.jax.transform("adam", -1))
    check_refused(HyperError, "lr=nan of Adam must be at least 0", lambda: rulec.jax.init("adam", {}, lr=float("nan")))
    check_refused(
        HyperError,
        "beta1=np.float64(1.5) of Adam must be at least 0 and below 1",
        lambda: rulec.jax.step("adam", {}, {}, rulec.jax.init("adam", {}), beta1=np.float64(1.5)),
    )
    check_refused(HyperError, "lr='fast' of Adam must be at least 0", lambda: rulec.jax.transform("adam", lr="fast"))
    with pytest.raises(TypeError, match="multiple values for argument 'lr'"):
        rulec.jax.transform("adam", 0.1, lr=0.2)  # type: ignore[misc]


@pytest.mark.parametrize("lr", [jnp.float32(-1), lambda count: -1.0, lambda count: -1.0 - count])
def test_what_is_known_only_when_the_step_runs_is_used_as_it_is(lr: Any) -> None:
    """As the pages say: neither an array nor what a function returns is looked at."""
    tree = {"w": jnp.ones(2)}
    new, _ = rulec.jax.step("sgd", tree, tree, rulec.jax.init("sgd", tree), lr=lr, donate=False)
    np.testing.assert_array_equal(new["w"], [2, 2])
    with pytest.raises(HyperError, match=r"^lr=np\.float32\(-1\.0\) of SGD must be at least 0$"):
        rulec.jax.step("sgd", tree, tree, rulec.jax.init("sgd", tree), lr=np.float32(-1))


def test_hyper_parameters_that_are_no_numbers() -> None:
    good, state = params(), ADAM.init(params())
    for given, what in (
        (jnp.ones(3), "lr of Adam must be one number, and is an array of shape (3,)"),
        (jnp.ones(1), "lr of Adam must be one number, and is an array of shape (1,)"),
        (
            lambda count: jnp.ones(2),
            "what the function for lr of Adam returns must be one number, and is an array of...",
        ),
        (lambda count: None, "what the function for lr of Adam returns must be one number, and is a NoneType"),
        (lambda count: 1j, "what the function for lr of Adam returns must be one number, and is a complex"),
        (lambda count: jnp.complex64(1), "what the function for lr of Adam returns must be a real number, and is..."),
    ):
        check_refused(HyperError, what, partial(rulec.jax.transform("adam", lr=given).update, good, state, good))
        check_refused(HyperError, what, partial(rulec.jax.step, "adam", good, good, state, lr=given))


def test_what_decides_what_is_compiled_cannot_be_traced() -> None:
    tree = {"w": jnp.ones((6, 4))}
    advice = "close over it, or name it among the static_args of optax.inject_hyperparams"
    with pytest.raises(
        HyperError,
        match=f"^rank of GaLore decides what is compiled, so it must be a Python number, and is traced here: {advice}",
    ):
        jax.jit(lambda rank: rulec.jax.transform("galore", rank=rank).init(tree))(2)
    with pytest.raises(HyperError, match=r"^rank of GaLore decides .* and is a function: close over it"):
        rulec.jax.init("galore", tree, rank=lambda count: 2)
    made = optax.inject_hyperparams(lambda rank, lr: rulec.jax.transform("galore", lr, rank=rank), static_args="rank")
    made(rank=2, lr=0.1).init(tree)
    advice = "under optax.inject_hyperparams name it among the static_args"
    with pytest.raises(
        HyperError,
        match=f"^seed decides what is compiled, so it must be Python's own, and is traced here: {advice}",
    ):
        jax.jit(lambda seed: rulec.jax.transform("adam", seed=seed).init(tree))(2)


def test_options_that_there_are_not() -> None:
    check_refused(
        HyperError,
        "there is no state dtype 'int9'; did you mean 'int8'?: use float32, float64, bfloat16, float16, bfloat16_sr, "
        "int8, softsign8, dynamic8, float8_e4m3, float8_e5m2, dynamic4",
        lambda: rulec.jax.transform("adam", state_dtype="int9"),
    )
    check_refused(
        TensorError,
        "the tags of Muon name 'embd', and there is no leaf of that path; did you mean 'embed'?",
        lambda: rulec.jax.init("muon", {"embed": jnp.ones((2, 2))}, tags={"embd": {"embedding"}}),
    )


# Inputs


def test_inputs_that_a_rule_needs() -> None:
    good = params()
    state, made = rulec.jax.init(INFORMED, good), rulec.jax.transform(INFORMED)
    check_refused(
        HyperError,
        "Informed needs loss: give it to step as a keyword, loss=...",
        lambda: rulec.jax.step(INFORMED, good, good, state, h=good),
    )
    with pytest.raises(HyperError, match=r"^Informed needs h: call update\(grads, state, params, h=\.\.\.\)$"):
        made.update(good, state, good, loss=1.0)
    check_refused(
        TensorError,
        "the input loss of Informed must be one number, and has shape (3,)",
        lambda: rulec.jax.step(INFORMED, good, good, state, loss=jnp.ones(3), h=good),
    )
    check_refused(
        TensorError,
        "the input h of a has shape (4, 3), its parameter (3, 4)",
        lambda: rulec.jax.step(INFORMED, good, good, state, loss=1.0, h={**good, "a": good["a"].T}),
    )
    check_refused(
        TensorError,
        "the input h of b/c is missing (None, or no leaf): ...",
        lambda: made.update(good, state, good, loss=1.0, h={"a": good["a"]}),
    )
