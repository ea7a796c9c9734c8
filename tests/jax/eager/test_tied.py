"""Parameters that stand at two places: one update, by the sum of their gradients."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import rulec.jax
from rulec.errors import TensorError
from rulec.jax.eager.tied import tied_in
from tests.jax.eager import models
from tests.jax.training import difference

X = np.linspace(-1, 1, 6, dtype=np.float32).reshape(2, 3)


def loss(params: Any, batch: Any) -> Any:
    """A table that is used to read and to write, with a matrix between."""
    return jnp.mean((jnp.tanh(batch @ params["in"]) @ params["mid"] @ params["out"].T - batch) ** 2)


def tied() -> dict[str, Any]:
    table, mid = jnp.arange(12.0).reshape(3, 4) / 12, jnp.eye(4)
    return {"in": table, "mid": mid, "out": table}


def expected(rule: str, steps: int) -> Any:
    """The same with the table as one leaf."""
    params = {"in": jnp.array(tied()["in"]), "mid": jnp.eye(4)}
    state = rulec.jax.init(rule, params)
    for _ in range(steps):
        grads = jax.grad(lambda p: loss({**p, "out": p["in"]}, X))(params)
        params, state = rulec.jax.step(rule, params, grads, state, lr=0.1)
    return params


def test_an_array_at_two_places_is_updated_once_by_the_sum_and_stays_one() -> None:
    made, params = rulec.jax.eager_step(loss, "momentum"), tied()
    state = made.init(params)
    assert state.m["out"] is None
    for _ in range(2):
        params, state, _ = made.step(params, state, X, lr=0.1)
        assert params["in"] is params["out"]
    assert difference({"in": params["in"], "mid": params["mid"]}, expected("momentum", 2)) < 1e-6


def test_what_is_declared_is_shared_whatever_the_arrays() -> None:
    made, params = rulec.jax.eager_step(loss, "sgd", shared={"out": "in"}), tied()
    params["out"] = jnp.array(params["out"])
    params, _, _ = made.step(params, made.init(params), X, lr=0.1)
    assert params["in"] is params["out"]
    assert difference({"in": params["in"], "mid": params["mid"]}, expected("sgd", 1)) < 1e-6


def test_layers_may_share_in_themselves_and_the_rest_in_itself() -> None:
    def head(rest: Any, x: Any, batch: Any) -> Any:
        return models.head(rest, x @ rest["before"], batch)

    def plain(params: Any, batch: Any) -> Any:
        x = batch[0]
        for own in params["layers"]:
            x = models.layer({**own, "v": own["w"]}, x)
        return head({**params["rest"], "before": params["rest"]["out"]}, x, batch)

    params, batch = models.deep(), models.pairs()
    params["layers"]["v"] = params["layers"]["w"]
    params["rest"]["before"] = params["rest"]["out"]
    theirs = models.unstacked(
        {"layers": {k: params["layers"][k] for k in "bw"}, "rest": {"out": params["rest"]["out"]}}
    )
    grads = jax.grad(plain)(theirs, batch)
    theirs, _ = rulec.jax.step("sgd", theirs, grads, rulec.jax.init("sgd", theirs), lr=0.1)
    made = rulec.jax.eager_scan(models.layer, head, "sgd")
    params, _, _ = made.step(params, made.init(params), batch, lr=0.1)
    assert params["layers"]["v"] is params["layers"]["w"]
    assert params["rest"]["before"] is params["rest"]["out"]
    del params["layers"]["v"], params["rest"]["before"]
    assert difference(models.unstacked(params), theirs) < 2e-6


def test_chains_and_circles_of_declarations_end_at_one_parameter() -> None:
    a, b, c = jnp.ones(2), jnp.zeros(2), jnp.ones(2)
    assert tied_in([a, b, c], {"2": "1", "1": "0"}).origins == ((1, 0), (2, 0))
    assert tied_in([a, b, c], {"0": "1", "1": "0"}).origins == ((1, 0),)
    assert tied_in([a, b, a, None, b], {}).origins == ((2, 0), (4, 1))


@pytest.mark.parametrize(
    ("declared", "message"),
    [
        ({"ouT": "in"}, r"^shared names 'ouT', and there is no such parameter; did you mean 'out'\?$"),
        ({"mid": "in"}, r"^mid cannot be in, as shared says: it is float32\[4, 4\], and that float32\[3, 4\]$"),
    ],
)
def test_what_cannot_be_shared_is_refused(declared: dict[str, str], message: str) -> None:
    with pytest.raises(TensorError, match=message):
        rulec.jax.eager_step(loss, "sgd", shared=declared).init({**tied(), "out": jnp.ones((3, 4))})


def test_leaves_of_one_name_cannot_be_told_apart() -> None:
    params = {**tied(), "more/in": jnp.ones(2), "more": {"in": jnp.ones(2)}}
    with pytest.raises(TensorError, match=r"^two leaves are called more/in by the keys on their paths: give each a"):
        tied_in(params, {"out": "in"})
    layers = {"w/b": jnp.ones((1, 2)), "w": {"b": jnp.ones((1, 2))}}
    with pytest.raises(TensorError, match=r"^two leaves are called .*w/b by the keys"):
        rulec.jax.eager_scan(lambda own, x: x, models.head, "sgd").init({"layers": layers, "rest": tied()})


def test_layers_share_nothing_with_the_rest() -> None:
    params = {"layers": {"w": jnp.ones((3, 3))}, "rest": {"out": jnp.ones((3, 3))}}
    made = rulec.jax.eager_scan(lambda own, x: x, models.head, "sgd", shared={"rest/out": "layers/w"})
    with pytest.raises(TensorError, match=r"^a parameter of the rest cannot be one of the layers, of which there are"):
        made.bytes(params, (np.ones((2, 3), np.float32), np.ones((2, 3), np.float32)), lr=0.1)
