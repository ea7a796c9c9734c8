"""Whatever cannot be right is refused in one sentence, before anything is donated."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import rulec
import rulec.jax
from rulec.errors import HyperError, RulecError, RuleError, StateMismatch, TensorError
from tests.jax.eager import models

INFORMED = rulec.parse("""
name: Informed
inputs: {loss: scalar}
step: direction = loss*g
""")

HESSIAN = rulec.parse("""
name: Hessian
inputs: {h: like p}
step: direction = g/h
""")

X = np.ones((2, 8), np.float32)


def scan(layer: Any = models.layer, head: Any = models.head, rule: Any = "sgd", **options: Any) -> Any:
    """A step, one part of which is wrong."""
    return rulec.jax.eager_scan(layer, head, rule, **options)


def stepped(made: Any, params: Any = None, batch: Any = (X, X), **hyper: Any) -> Any:
    """Its first step, of a network of residual layers, from shapes alone: none of these errors needs numbers."""
    return made.bytes(models.deep() if params is None else params, batch, **({"lr": 0.1} | hyper))


CASES: dict[str, tuple[Callable[[], Any], type[RulecError], str]] = {
    "model": (
        lambda: stepped(scan(rule="prodigy")), RuleError,
        "Prodigy reads all tensors of the model before it updates any, and an eager update drops each gradient at "
        "once: update with rulec.jax.step",
    ),
    "unrolled": (
        lambda: stepped(rulec.jax.eager_step(models.loss, "dog"), models.unstacked(models.deep())), RuleError,
        "DoG reads all tensors of the model before it updates any, and an eager update drops each gradient at once: "
        "update with rulec.jax.step",
    ),
    "like p": (
        lambda: scan(rule=HESSIAN), RuleError,
        "Hessian needs h for every parameter, which an eager update does not keep until it comes to it: update with "
        "rulec.jax.step",
    ),
    "input": (lambda: stepped(scan(rule=INFORMED)), HyperError,
              "the rule needs loss: give it to step as a keyword, loss=..."),
    "hyper": (lambda: stepped(scan(), lr_=3), HyperError, "SGD has no hyper-parameter 'lr_'; did you mean 'lr'?"),
    "function": (lambda: scan(layer=3), HyperError, "layer must be a function, and is a int"),
    "params": (
        lambda: stepped(scan(), [jnp.ones(3)]), TensorError,
        'parameters of eager_scan are {"layers": stacked, "rest": whatever else there is}, not a list',
    ),
    "counts": (
        lambda: stepped(scan(), {"layers": {"a": jnp.ones((3, 2)), "b": jnp.ones((4, 2))}, "rest": {}}), TensorError,
        "all arrays of layers must have the layers as their first axis, and there are 3 and 4",
    ),
    "no layers": (
        lambda: stepped(scan(), {"layers": {}, "rest": {}}), TensorError,
        "all arrays of layers must have the layers as their first axis, and there are no arrays",
    ),
    "integers": (
        lambda: stepped(scan(), models.deep() | {"rest": {"out": jnp.ones((8, 8), int)}}), TensorError,
        "the parameter out is of int32, and only float32, float64, bfloat16, float16, complex64, complex128 can be "
        "updated: leave it out, as with optax.masked, or cast it",
    ),
    "another shape": (
        lambda: stepped(scan(layer=lambda own, x: x @ own["w"][:, :4])), TensorError,
        "a layer must return what the next one takes: it takes float32[2, 8] and returns float32[2, 4]",
    ),
    "whole numbers": (
        lambda: stepped(scan(embed=lambda rest, batch: batch[0].astype(int))), TensorError,
        "what goes through the layers is differentiated, and embed returns int32: let layers that need it name batch "
        "among their parameters",
    ),
    "loss": (
        lambda: stepped(scan(head=lambda rest, x, batch: x)), TensorError,
        "the loss must be one real number, and is float32[2, 8]: return its mean, for example",
    ),
    "a loss beside others": (
        lambda: stepped(rulec.jax.eager_step(lambda params, batch: (0.0, 1), "sgd"), [X]), TensorError,
        "the loss must be one real number, and is a tuple: return it alone, or with has_aux=True (loss, aux)",
    ),
    "a head beside others": (
        lambda: stepped(scan(head=lambda rest, x, batch: [x.sum()])), TensorError,
        "the loss must be one real number, and is a list: return it alone, or with has_aux=True (loss, aux)",
    ),
    "no loss": (
        lambda: stepped(rulec.jax.eager_step(lambda params, batch: None, "sgd"), [X]), TensorError,
        "the loss must be one real number, and is a NoneType: return it alone, or with has_aux=True (loss, aux)",
    ),
    "a loss alone": (
        lambda: stepped(rulec.jax.eager_step(lambda params, batch: params[0].sum(), "sgd", has_aux=True), [X]),
        TensorError, "the loss must return two things, (loss, aux), and returns something else",
    ),
    "aux": (
        lambda: stepped(scan(has_aux=True)), TensorError,
        "the head must return two things, (loss, aux), and returns something else",
    ),
    "tags": (
        lambda: stepped(scan(tags={"rest/ou": {"embedding"}})), TensorError,
        "the tags of SGD name 'rest/ou', and there is no leaf of that path; did you mean 'rest/out'?",
    ),
    "pattern": (
        lambda: stepped(scan(rule=rulec.partition({"bias*": None, "...": "sgd"}))), RuleError,
        "the pattern 'bias*' matches no parameter: correct it, or allow it with allow_unused=True",
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", CASES)
def test_it_is_refused_in_one_sentence(case: str) -> None:
    call, kind, message = CASES[case]
    with pytest.raises(kind) as caught:
        call()
    assert str(caught.value) == message


def test_a_state_of_another_rule_or_model_is_refused_and_nothing_is_donated() -> None:
    params, batch = models.deep(), models.pairs()
    made = scan(rule="momentum")
    with pytest.raises(StateMismatch, match=r"^the state is a dict, not what init of eager_scan returned$"):
        made.step(params, {}, batch, lr=0.1)
    other = scan(rule="sgd").init(params)
    with pytest.raises(StateMismatch, match=r"^the state is a State without 'm', which .* needs: give what its init"):
        made.step(params, other, batch, lr=0.1)
    unrolled = rulec.jax.eager_step(models.loss, "sgd")
    with pytest.raises(StateMismatch, match=r"^the state is a NoneType, not what init of eager_step returned$"):
        unrolled.step(models.unstacked(params), None, batch, lr=0.1)
    assert not any(leaf.is_deleted() for leaf in jax.tree.leaves(params))


def test_parameters_that_were_donated_are_named() -> None:
    params, batch, made = models.deep(), models.pairs(), scan()
    state = made.init(params)
    made.step(params, state, batch, lr=0.1)
    with pytest.raises(TensorError, match=re.escape("was donated to an earlier call, which used its memory again")):
        made.step(params, made.init(models.deep()), batch, lr=0.1)
