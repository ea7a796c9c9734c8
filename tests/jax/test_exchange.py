"""States go from optax to rulec and back for every function of optax's names, and a wrong word names the right one."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import pytest

jax = pytest.importorskip("jax")
optax = pytest.importorskip("optax")
import jax.numpy as jnp  # noqa: E402

import rulec.array  # noqa: E402
import rulec.jax  # noqa: E402
import rulec.jax.contrib  # noqa: E402
from rulec.errors import HyperError  # noqa: E402
from rulec.jax.drop_ins import names  # noqa: E402

pytestmark = [
    pytest.mark.peer,
    pytest.mark.filterwarnings("ignore:`optimistic_adam` is deprecated:DeprecationWarning"),
    pytest.mark.filterwarnings("ignore:Specifying a key will be required:UserWarning"),
]

FUNCTIONS = [*names(), *(f"contrib.{name}" for name in names("contrib."))]

#: Functions of each kind: a state of rulec's, optax's own state by one rule and by several, and a state around another.
EVERYDAY = ("adamw", "sm3", "contrib.schedule_free")

#: Function -> its keywords beside the learning rate, from the package that makes inner transformations.
KEYWORDS: Mapping[str, Callable[[Any], dict[str, Any]]] = {
    "contrib.galore": lambda package: {"rank": 2}, "contrib.scale_by_galore": lambda package: {"rank": 2},
    # Without numbers of axes optax's own function fails.
    "contrib.scale_by_muon": lambda package: {
        "weight_dimension_numbers": {"kernel": optax.contrib.MuonDimensionNumbers()},
    },
    "contrib.schedule_free": lambda package: {"base_optimizer": package.adam(0.05, b1=0.0)},
    "contrib.mechanize": lambda package: {"base_optimizer": package.adam(1.0)},
    "contrib.sam": lambda package: {
        "optimizer": package.adam(0.05), "adv_optimizer": package.sgd(0.02), "sync_period": 2,
    },
    "noisy_sgd": lambda package: {"key": jax.random.key(0)},
    "add_noise": lambda package: {"eta": 0.1, "gamma": 0.5, "key": jax.random.key(0)},
    "trace": lambda package: {"decay": 0.9},
    "scale_by_backtracking_linesearch": lambda package: {"max_backtracking_steps": 8},
    "scale_by_zoom_linesearch": lambda package: {"max_linesearch_steps": 8},
}  # fmt: skip

#: Functions whose update takes the loss, or searches along a line.
BY_LOSS = ("polyak_sgd", "scale_by_polyak", "contrib.momo", "contrib.momo_adam")
SEARCHES = ("lbfgs", "scale_by_backtracking_linesearch", "scale_by_zoom_linesearch")


def made(name: str, package: Any) -> Any:
    """The transformation of that name, by optax or by rulec."""
    parameters = inspect.signature(functools.reduce(getattr, name.split("."), optax)).parameters
    keywords = KEYWORDS.get(name, lambda package: {})(package)
    rate = parameters.get("learning_rate")
    if rate is not None and rate.default is inspect.Parameter.empty:
        keywords["learning_rate"] = 0.05
    return functools.reduce(getattr, name.split("."), package)(**keywords)


def loss(params: Any) -> Any:
    return sum(jnp.sum(jnp.square(leaf - 1)) for leaf in jax.tree.leaves(params))


def arrays(name: str, seed: int) -> Any:
    rng = np.random.default_rng(seed)
    shapes = {"kernel": (4, 6)} | ({} if name == "contrib.scale_by_muon" else {"bias": (5,)})
    return {key: jnp.asarray(rng.normal(size=shape), jnp.float32) for key, shape in shapes.items()}


def steps(name: str, tx: Any, params: Any, state: Any, numbers: range) -> tuple[Any, Any]:
    for number in numbers:
        grads, extra = arrays(name, 100 + number), {}
        if name in (*BY_LOSS, *SEARCHES):
            value, grads = jax.value_and_grad(loss)(params)
            extra = {"value": value} | ({"grad": grads, "value_fn": loss} if name in SEARCHES else {})
        if name == "contrib.sophia":
            extra = {"obj_fn": loss}
        updates, state = tx.update(grads, state, params, **extra)
        params = optax.apply_updates(params, updates)
    return params, state


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[] if name in EVERYDAY else [pytest.mark.another]) for name in FUNCTIONS]
)
def test_a_run_changes_over_both_ways(name: str) -> None:
    """Three steps of one and three of the other are six of optax's."""
    ours, theirs = made(name, rulec.jax), made(name, optax)
    begun = arrays(name, 0)
    middle, state = steps(name, theirs, begun, theirs.init(begun), range(3))
    expected, _ = steps(name, theirs, middle, state, range(3, 6))
    here, _ = steps(name, ours, middle, rulec.jax.from_optax(state, ours, middle), range(3, 6))
    middle, state = steps(name, ours, begun, ours.init(begun), range(3))
    there, _ = steps(name, theirs, middle, rulec.jax.to_optax(state, theirs, middle), range(3, 6))
    for found in (here, there):
        for mine, other in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
            np.testing.assert_allclose(mine, other, rtol=0, atol=1e-4 * max(1.0, float(jnp.max(jnp.abs(other)))))


@pytest.mark.parametrize("name", ["sm3", "contrib.muon"])
def test_optax_s_own_states_are_returned_also_inside_of_others(name: str) -> None:
    def around(package: Any) -> Any:
        function = functools.reduce(getattr, name.split("."), package)
        inner = optax.inject_hyperparams(function)(learning_rate=0.1)
        return optax.MultiSteps(optax.masked(optax.chain(optax.clip(1.0), inner, package.adam(0.1)), True), 2)

    params = arrays(name, 0)
    ours, theirs = around(rulec.jax), around(optax)
    state = theirs.init(params)
    loaded = rulec.jax.from_optax(state, ours, params)
    assert jax.tree.structure(loaded) == jax.tree.structure(ours.init(params))
    back = rulec.jax.to_optax(loaded, theirs, params)
    assert jax.tree.structure(back) == jax.tree.structure(state)
    jax.tree.map(np.testing.assert_array_equal, back, state)


WORDS: list[tuple[Callable[[], Any], str]] = [
    (lambda: rulec.jax.transform("adamw", learning_rate=0.1), "'learning_rate'; did you mean 'lr'?"),
    (lambda: rulec.jax.init("adamw", jnp.ones(3), learning_rate=0.1), "'learning_rate'; did you mean 'lr'?"),
    (lambda: rulec.jax.adamw(lr=0.1), "rulec.jax.adamw has no keyword 'lr'; did you mean 'learning_rate'?"),
    (lambda: rulec.jax.adamw(0.1, beta1=0.9), "rulec.jax.adamw has no keyword 'beta1'; did you mean 'b1'?"),
    (lambda: rulec.jax.transform("adamw", b2=0.9), "'b2'; did you mean 'beta2'?"),
    (lambda: rulec.array.Optimizer("adamw", [np.ones(3)], learning_rate=0.1), "'learning_rate'; did you mean 'lr'?"),
]


@pytest.mark.parametrize(("call", "sentence"), WORDS)
def test_a_word_of_another_library_names_the_one_that_is_meant(call: Callable[[], Any], sentence: str) -> None:
    with pytest.raises(HyperError) as caught:
        call()
    assert sentence in str(caught.value)
