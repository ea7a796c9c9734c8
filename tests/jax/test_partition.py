"""Rules by patterns of paths in JAX, beside optax.multi_transform."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import optax.contrib
import pytest

import rulec
import rulec.jax
from rulec.errors import HyperError, RuleError, TensorError
from tests.jax.training import check_compiles_nothing

Tree = Any


@pytest.fixture(autouse=True)
def float64() -> Iterator[None]:
    with jax.enable_x64(True):
        yield


def model() -> Tree:
    """Two layers and a table."""
    made = np.random.default_rng(3)
    layer = {"w": (3, 4), "bias": (4,)}, {"w": (4, 2), "bias": (2,)}
    tree = {"layer": [{k: made.normal(size=s) for k, s in own.items()} for own in layer], "table": made.normal(size=5)}
    return jax.tree.map(jnp.array, tree)


def gradient(params: Tree, number: int) -> Tree:
    return jax.tree.map(lambda p: jnp.sin(p * (number + 1)) + 0.1, params)


def labels(params: Tree, words: Mapping[str, str]) -> Tree:
    """The first of `words` that a path begins or ends with says the label."""

    def label(path: Any, leaf: Any) -> str:
        text = jax.tree_util.keystr(path, simple=True, separator="/")
        return next(label for word, label in words.items() if text.startswith(word) or text.endswith(word))

    return jax.tree_util.tree_map_with_path(label, params)


def assert_close(ours: Tree, theirs: Tree, bound: float = 1e-12) -> None:
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=bound, atol=bound), ours, theirs)


def schedule(count: Any) -> Any:
    return 0.02 / (count + 1)


def agree(partition: Any, theirs: optax.GradientTransformation, **hyper: Any) -> Any:
    """Five steps of `rulec.jax.step` arrive where optax does; the state after them."""
    ours, their = model(), model()
    state, their_state = rulec.jax.init(partition(), ours, **hyper), theirs.init(their)
    their_update = jax.jit(theirs.update)
    for number in range(5):
        grads = gradient(their, number)
        ours, state = rulec.jax.step(partition(), ours, grads, state, **hyper)
        changes, their_state = their_update(grads, their_state, their)
        their = optax.apply_updates(their, changes)
    assert_close(ours, their)
    return state


def assert_changes_are_the_steps(partition: rulec.Partition, **hyper: Any) -> None:
    """`transform` gives what `step` adds."""
    tx = rulec.jax.transform(partition, **hyper)
    params = model()
    grads, state = gradient(params, 0), tx.init(params)
    changes, changed = tx.update(grads, state, params)
    stepped, after = rulec.jax.step(partition, params, grads, state, **hyper)
    assert_close(optax.apply_updates(model(), changes), stepped)
    assert_close(changed, after)


def test_agrees_with_multi_transform() -> None:
    """A rule for biases, another for the rest, a table that is not trained, a schedule for those who do not say."""
    words = {"bias": "sgd", "table": "frozen", "w": "adamw"}
    theirs = optax.multi_transform(
        {
            "sgd": optax.sgd(0.1, momentum=0.9),
            "adamw": optax.adamw(schedule, b2=0.99, weight_decay=0.1),
            "frozen": optax.set_to_zero(),
        },
        lambda params: labels(params, words),
    )  # fmt: skip

    def partition() -> rulec.Partition:
        return rulec.partition(
            {"**/bias": ("momentum", {"momentum": 0.9, "lr": 0.1}), "table": None, "...": "adamw"}
        )  # fmt: skip

    hyper = {"lr": schedule, "beta2": 0.99, "weight_decay": 0.1}
    state = agree(partition, theirs, **hyper)
    assert_changes_are_the_steps(partition(), **hyper)
    assert state._fields == ("count", "m", "v")
    assert state.m["layer"][0]["bias"].shape == (4,)
    assert state.m["table"] is None
    assert state.v["layer"][0]["bias"] is None
    assert state.v["layer"][1]["w"].shape == (4, 2)


def clip_as_torch(bound: float) -> optax.GradientTransformation:
    return optax.stateless(
        lambda g, _: jax.tree.map(lambda x: x * jnp.minimum(1.0, bound / (optax.tree.norm(g) + 1e-6)), g)
    )


@pytest.mark.slow
def test_what_is_of_the_model_is_of_one_rules_leaves() -> None:
    """Three rules that reduce over the model, two of them with numbers of the same name: each over its own leaves."""
    words = {"bias": "clipped", "layer": "prodigy", "table": "other"}
    other = rulec.load("prodigy").bind(d0=1e-4)
    theirs = optax.multi_transform(
        {
            "clipped": optax.chain(clip_as_torch(0.7), optax.sgd(0.1)),
            "prodigy": optax.contrib.prodigy(1.0),
            "other": optax.contrib.prodigy(1.0, estim_lr0=1e-4),
        },
        lambda params: labels(params, words),
    )  # fmt: skip

    def partition() -> rulec.Partition:
        clipped = rulec.load("clip_by_global_norm >> sgd")
        return rulec.partition(
            {"**/bias": (clipped, {"max_norm": 0.7, "lr": 0.1}), "layer/**": "prodigy", "...": other}
        )

    state = agree(partition, theirs)
    assert state._fields == ("count", "m", "v", "s", "x0", "num", "d", "prodigy_num", "prodigy_d")
    assert state.d != state.prodigy_d


@pytest.mark.slow
def test_patterns_of_one_rule_share_what_is_of_the_model() -> None:
    """As the groups of one optimizer do: here with a rate for each, and one distance for all."""
    partition = rulec.partition({"**/bias": ("prodigy", {"lr": 1.0}), "...": rulec.part("prodigy", lr=1.0)})
    both, alone = rulec.jax.transform(partition), rulec.jax.transform("prodigy")
    params = model()
    states = [both.init(params), alone.init(params)]
    for number in range(4):
        grads = gradient(params, number)
        found = [way.update(grads, state, params) for way, state in zip((both, alone), states, strict=True)]
        states = [state for _, state in found]
        assert_close(found[0][0], found[1][0], 1e-14)
        params = optax.apply_updates(params, found[0][0])
    assert states[0].d > 1e-6
    assert_close(states[0].d, states[1].d, 1e-14)


GROUPED = """
name: Grouped
hyper: {lr: 0.1}
state: {v: {init: 0, per: group}}
step: |
  v = 0.5*v + sum(g**2, per="group")
  direction = g/sqrt(v)
"""


def test_each_pattern_is_a_group() -> None:
    rule = rulec.parse(GROUPED)
    tx = rulec.jax.transform(rulec.partition({"**/bias": rule, "table": None, "...": (rule, {"lr": 0.2})}))
    params = model()
    grads, state = gradient(params, 0), tx.init(params)
    squares = jax.tree.map(lambda g: jnp.sum(g**2), grads)
    biases = sum(layer["bias"] for layer in squares["layer"])
    weights = sum(layer["w"] for layer in squares["layer"])
    for number in range(2):
        changes, state = tx.update(grads, state, params)
        scale = 1 + 0.5 * number
        np.testing.assert_allclose(state.v, [scale * biases, scale * weights], rtol=1e-14)
        bias, w = grads["layer"][0]["bias"], grads["layer"][0]["w"]
        assert_close(changes["layer"][0]["bias"], -0.1 * bias / jnp.sqrt(scale * biases))
        assert_close(changes["layer"][0]["w"], -0.2 * w / jnp.sqrt(scale * weights))


MEAN = """
name: MeanSquare
hyper: {lr: 0.1}
state: {v: {init: 0, per: model}}
step: |
  v = 0.5*v + mean(g**2, per="model")
  direction = g/sqrt(v)
"""


def test_a_number_and_an_array_of_one_name_are_kept_apart() -> None:
    """Whichever rule comes first."""
    params = model()
    grads = gradient(params, 0)
    biases = jnp.concatenate([layer["bias"] ** 2 for layer in grads["layer"]])
    for last in (True, False):
        entries = {"**/bias": rulec.parse(MEAN), "**/w": "adam", "table": None}
        order = [*entries] if last else ["**/w", "**/bias", "table"]
        tx = rulec.jax.transform(rulec.partition({key: entries[key] for key in order}))
        _, state = tx.update(grads, tx.init(params), params)
        number = state.v if last else state.mean_square_v
        arrays = state.adam_v if last else state.v
        np.testing.assert_allclose(number, jnp.mean(biases), rtol=1e-14)
        assert_close(arrays["layer"][0]["w"], 0.001 * grads["layer"][0]["w"] ** 2)
        assert arrays["layer"][0]["bias"] is None


def test_leaves_without_an_entry_stay_as_they_are() -> None:
    """No state, a change of zero, and the same numbers in a donated step."""
    partition = rulec.partition({"table": None, "...": "sgd"})
    tx = rulec.jax.transform(partition)
    params = model()
    table = np.array(params["table"])
    changes, _ = tx.update(gradient(params, 0), tx.init(params))
    np.testing.assert_array_equal(changes["table"], np.zeros(5))
    assert changes["table"].dtype == params["table"].dtype
    found, state = rulec.jax.step(partition, params, gradient(params, 0), rulec.jax.init(partition, params))
    np.testing.assert_array_equal(found["table"], table)
    assert params["table"].is_deleted()
    assert state.count == 1


def test_a_partition_made_anew_compiles_nothing_again(caplog: pytest.LogCaptureFixture) -> None:
    """Equal by its content, with rules that are composed anew; not where its patterns are others."""

    def partition(decay: float, pattern: str = "**/w") -> rulec.Partition:
        composed = rulec.load("clip_by_value >> adam")
        return rulec.partition(
            {"table": None, pattern: (composed, {"bound": decay}), "...": ("adamw", {"weight_decay": decay})}
        )

    params = model()
    grads, state = gradient(params, 0), rulec.jax.init(partition(0.1), params)
    params, state = rulec.jax.step(partition(0.1), params, grads, state, lr=schedule)
    with check_compiles_nothing(caplog):
        params, state = rulec.jax.step(partition(0.2), params, grads, state, lr=schedule)
        params, state = rulec.jax.step(partition(0.3), params, grads, state, lr=schedule)
    other = rulec.jax.init(partition(0.1, "**/bias"), params)
    with pytest.raises(AssertionError, match="Compiling"), check_compiles_nothing(caplog):
        rulec.jax.step(partition(0.1, "**/bias"), params, grads, other, lr=schedule)


def test_tags_of_a_part_route_its_leaves() -> None:
    """A matrix that is tagged goes to the rule that Muon names for embeddings."""
    params = {"w": jnp.ones((3, 4)), "e": jnp.ones((3, 4))}
    tagged = rulec.partition({"e": rulec.part("muon", tags=["embedding"]), "...": "muon"})
    ways = [rulec.jax.transform(tagged), rulec.jax.transform("muon", tags={"e": ["embedding"]})]
    found, known, plain = (str(jax.tree.structure(way.init(params))) for way in [*ways, rulec.jax.transform("muon")])
    assert found == known != plain


def test_a_single_array_and_no_leaf_at_all() -> None:
    partition = rulec.partition({"...": ("sgd", {"lr": 0.5})})
    param, _ = rulec.jax.step(partition, jnp.ones(3), jnp.ones(3), rulec.jax.init(partition, jnp.ones(3)))
    np.testing.assert_array_equal(param, np.full(3, 0.5))
    assert rulec.jax.step(partition, {}, {}, rulec.jax.init(partition, {}))[0] == {}


def test_inputs_reach_the_rules_that_name_them() -> None:
    rule = rulec.parse("name: Lossy\ninputs: {loss: scalar}\nhyper: {lr: 0.1}\nstep: |\n  direction = g*loss\n")
    partition = rulec.partition({"**/w": rule, "...": None})
    params = model()
    grads, state = gradient(params, 0), rulec.jax.init(partition, params)
    found, _ = rulec.jax.step(partition, params, grads, state, loss=3.0, donate=False)
    assert_close(found["layer"][0]["w"], params["layer"][0]["w"] - 0.1 * 3.0 * grads["layer"][0]["w"])
    with pytest.raises(HyperError, match="Lossy needs loss: give it to step as a keyword, loss="):
        rulec.jax.step(partition, params, grads, state)


APART = """
name: Apart
state: {a: {init: 0, per: model}}
step: |
  if ndim >= 2:
    a = sum(g, per="model")
    b = max(g, per="model")
  else:
    a = max(g, per="model")
    b = 0
  direction = g*a + b
"""


def test_a_rule_that_reduces_differently_by_shape_is_refused() -> None:
    tx, params = rulec.jax.transform(rulec.parse(APART)), model()
    state = tx.init(params)
    with pytest.raises(RuleError, match="the leaves of Apart do not all have the same values across the model"):
        tx.update(gradient(params, 0), state, params)


@pytest.mark.parametrize(
    ("entries", "hyper", "error", "sentence"),
    [
        ({"**/w": "adam"}, {}, TensorError, "no pattern of the partition matches the parameter layer/0/bias: add"),
        ({"**/wt": "adam", "...": "sgd"}, {}, RuleError, "the pattern '**/wt' matches no parameter"),
        ({"...": "sgd", }, {"beta1": 0.9}, HyperError, "no rule of the partition has a hyper-parameter 'beta1'"),
        ({"...": "adam"}, {"bta1": 0.9}, HyperError, "hyper-parameter 'bta1'; did you mean 'beta1'?"),
        ({"...": ("adam", {"bta1": 0.9})}, {}, HyperError, "Adam has no hyper-parameter 'bta1'; did you mean 'beta1'?"),
        ({"table": ("adam", {"beta1": 2.0}), "...": "sgd"}, {}, HyperError, "beta1"),
    ],
)  # fmt: skip
def test_mistakes(entries: Any, hyper: Any, error: type[Exception], sentence: str) -> None:
    with pytest.raises(error, match=re.escape(sentence)):
        rulec.jax.transform(rulec.partition(entries), **hyper).init(model())
