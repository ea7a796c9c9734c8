"""A function of ours beside optax's of the same name: the same gradients for some steps, in one compiled loop."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

import rulec.jax
from rulec.jax.entries import index

STEPS = 16
HALF = STEPS // 2

#: Every function that entries of rules make: those of optax.contrib with the module's name before theirs.
FUNCTIONS = [*index()]


def ours(name: str) -> Any:
    """Our function of that name."""
    return getattr(rulec.jax.contrib, name.removeprefix("contrib.")) if "." in name else getattr(rulec.jax, name)


def theirs(name: str) -> Any:
    """Theirs."""
    return getattr(optax.contrib, name.removeprefix("contrib.")) if "." in name else getattr(optax, name)


class Trial(NamedTuple):
    """Parameters, and the gradients of all steps, stacked."""

    params: Any
    grads: Any


def trial(dtype: Any, steps: int = STEPS) -> Trial:
    """A matrix, a vector and a number, of values that every dtype has."""
    random = np.random.default_rng(3)

    def some(*shape: int) -> Any:
        values = np.round(random.normal(size=shape) * 64) / 64
        return jnp.asarray(np.where(values == 0, 0.5, values), dtype)

    shapes = {"layer": {"kernel": (3, 4), "bias": (4,)}, "scale": ()}
    params = jax.tree.map(lambda shape: some(*shape), shapes, is_leaf=lambda x: isinstance(x, tuple))
    return Trial(params, jax.tree.map(lambda p: some(steps, *p.shape), params))


class Both(NamedTuple):
    """What two transformations gave: updates of all steps, stacked, and the last states."""

    updates: tuple[Any, Any]
    states: tuple[Any, Any]
    params: tuple[Any, Any]


def loop(pair: tuple[Any, Any], extra: Mapping[str, Any] | None = None) -> Callable[[Any, Any, Any], Both]:
    """Both transformations on their own parameters, from states of their own, in one function that is compiled.

    Those that take a loss get the norm of the gradients, where `extra` has no keywords of the update.
    """
    told = [optax.with_extra_args_support(tx) for tx in pair]

    def step(carried: Any, grads: Any) -> Any:
        params, kept = carried
        more = {"value": optax.tree.norm(grads)} if extra is None else extra
        made = [tx.update(grads, own, p, **more) for tx, own, p in zip(told, kept, params, strict=True)]
        params = tuple(optax.apply_updates(p, update) for p, (update, _) in zip(params, made, strict=True))
        return (params, tuple(new for _, new in made)), tuple(update for update, _ in made)

    @jax.jit
    def steps(params: Any, kept: Any, grads: Any) -> Any:
        return jax.lax.scan(step, (params, kept), grads)

    def both(params: Any, kept: Any, grads: Any) -> Both:
        (params, kept), updates = steps(params, kept, grads)
        return Both(updates, kept, params)

    return both


def run(pair: tuple[Any, Any], given: Trial) -> Both:
    """Both from the same parameters and their first states."""
    return loop(pair)((given.params, given.params), tuple(tx.init(given.params) for tx in pair), given.grads)


def check_moved(
    pair: tuple[Any, Any], whole: Trial, bound: float, *, across: bool = False, extra: Mapping[str, Any] | None = None
) -> Both:
    """Half of the steps by each; then optax's state goes over to ours and ours to optax's, and both end alike."""
    half = len(jax.tree.leaves(whole.grads)[0]) // 2
    first, second = (jax.tree.map(lambda g, s=s: g[s], whole.grads) for s in (slice(half), slice(half, None)))
    steps, states = loop(pair, extra), tuple(tx.init(whole.params) for tx in pair)
    before = steps((whole.params, whole.params), states, first)
    assert difference(*before.updates, across=across).max() < bound
    loaded = rulec.jax.from_optax(before.states[1], pair[0], before.params[1])
    saved = rulec.jax.to_optax(before.states[0], pair[1], before.params[0])
    structures: list[Any] = [jax.tree.structure(states) for states in ((loaded, saved), before.states)]
    assert structures[0] == structures[1]
    after = steps(before.params[::-1], (loaded, saved), second)
    plain = steps(before.params, before.states, second)
    for crossed, straight in zip(after.updates, plain.updates[::-1], strict=True):
        assert difference(crossed, straight, across=across).max() < 10 * bound
    return plain


def difference(mine: Any, other: Any, across: bool = False) -> np.ndarray[Any, Any]:
    """How far elements are apart, by the largest of their leaf in the same step; the first axis is steps.

    `across` is by the largest in any step, for updates that are differences of parameters and may be nothing in one.
    """
    found = []
    for a, b in zip(jax.tree.leaves(mine), jax.tree.leaves(other), strict=True):
        a, b = (np.asarray(x, np.float64).reshape(x.shape[0], -1) for x in (a, b))
        largest = np.abs(b).max() if across else np.abs(b).max(axis=1, keepdims=True)
        found.append(np.abs(a - b) / np.maximum(largest, 1e-300))
    return np.concatenate(found, axis=1)


def keywords(name: str, rate: Any) -> Mapping[str, Any]:
    """A learning rate where theirs has one, and what has no default."""
    import inspect

    known = inspect.signature(theirs(name)).parameters
    return ({"learning_rate": rate} if "learning_rate" in known else {}) | ({"decay": 0.5} if name == "trace" else {})


def root_in_float64(x: Any) -> Any:
    """JAX takes the root of a whole number in float32, and so has optax's MADGRAD its count of steps."""
    return jax.lax.sqrt(x.astype(jnp.float64) if jnp.issubdtype(x.dtype, jnp.integer) else x)
