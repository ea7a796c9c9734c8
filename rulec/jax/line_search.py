"""L-BFGS and line searches under optax's names: the direction of a rule, and searches that a trace runs through."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from rulec.errors import HyperError
from rulec.jax.entries import as_direction
from rulec.jax.recipe import recipe
from rulec.jax.transform import of_recipe, options
from rulec.language.compose.wrap import variant
from rulec.language.library.load import load
from rulec.language.rule import Rule
from rulec.language.sizes import sized
from rulec.runtime.line_search import Backtracking, Point, PureSearch, Zoom

#: Lines that optax has otherwise: the scale of the estimate before its pairs of changes.
_GAMMA = {
    True: "where(t > 1, where(yy > 0, sy/yy, 1), minimum(1, 1/norm(g, per='model')))",
    False: "1",
}


@functools.cache
def _direction(memory_size: int, scale_init_precond: bool) -> Rule:
    rule, _ = sized(load("lbfgs_direction"), {"memory": memory_size})
    return as_direction(variant(rule, {"gamma": _GAMMA[scale_init_precond]}, {}, {}))


def scale_by_lbfgs(memory_size: int = 10, scale_init_precond: bool = True) -> optax.GradientTransformationExtraArgs:
    """The direction of L-BFGS, by the rule `lbfgs_direction` with a history of `memory_size`.

    Takes what `optax.scale_by_lbfgs` takes, with a memory of 20 at most.
    """
    if isinstance(memory_size, bool) or not isinstance(memory_size, int):
        raise HyperError(f"rulec.jax.scale_by_lbfgs has memory_size={memory_size!r}: give a whole number")
    return of_recipe(recipe(_direction(memory_size, bool(scale_init_precond)), {}, None), options(None, False, 0))


class BacktrackingInfo(NamedTuple):
    """The number of trials, and how far the last one misses the condition, with the names of optax."""

    num_linesearch_steps: Any
    decrease_error: Any


def scale_by_backtracking_linesearch(
    max_backtracking_steps: Any, slope_rtol: Any = 1e-4, decrease_factor: Any = 0.8, increase_factor: Any = 1.5,
    max_learning_rate: Any = 1.0, atol: Any = 0.0, rtol: Any = 0.0, store_grad: bool = False, verbose: bool = False,
) -> optax.GradientTransformationExtraArgs:  # fmt: skip
    """Shortens updates until the value is low enough, by the condition of Armijo.

    Takes what `optax.scale_by_backtracking_linesearch` takes but `verbose`, and has its state.
    """
    name = "scale_by_backtracking_linesearch"
    _check_quiet(name, verbose)
    search = Backtracking(
        max_backtracking_steps, slope_rtol, decrease_factor, increase_factor, max_learning_rate, atol, rtol
    )

    def init(params: Any) -> Any:
        dtype = _dtype(params)
        inf = jnp.asarray(jnp.inf, dtype)
        info = BacktrackingInfo(jnp.asarray(0), inf)
        grad = optax.tree.zeros_like(params) if store_grad else None
        return optax.ScaleByBacktrackingLinesearchState(jnp.asarray(1.0, dtype), inf, grad, info)

    def update(updates: Any, state: Any, params: Any = None, **extra: Any) -> Any:
        line = _Line(name, updates, params, extra)
        last, _, _ = line.run(search, state.learning_rate, False)
        step = jnp.where(jnp.isinf(last.error), 0.0, last.step)
        info = BacktrackingInfo(last.count, last.error)
        grad = line.value_and_grad(last.step)[1] if store_grad else None
        new = optax.ScaleByBacktrackingLinesearchState(step, last.value, grad, info)
        return optax.tree.scale(step, updates), optax.tree.cast_like(new, other_tree=state)

    return optax.GradientTransformationExtraArgs(init, update)


def scale_by_zoom_linesearch(
    max_linesearch_steps: Any, max_learning_rate: Any = None, tol: Any = 0.0, increase_factor: Any = 2.0,
    slope_rtol: Any = 1e-4, curv_rtol: Any = 0.9, approx_dec_rtol: Any = 1e-6, stepsize_precision: Any = 1e-5,
    initial_guess_strategy: str = "keep", verbose: bool = False,
) -> optax.GradientTransformationExtraArgs:  # fmt: skip
    """Scales updates so that the value decreases and the slope along them becomes small, the conditions of Wolfe.

    Takes what `optax.scale_by_zoom_linesearch` takes but `verbose`, and has its state.
    """
    name = "scale_by_zoom_linesearch"
    _check_quiet(name, verbose)
    if initial_guess_strategy not in ("one", "keep"):
        raise HyperError(
            f"rulec.jax.{name} has initial_guess_strategy={initial_guess_strategy!r}: give 'one' or 'keep'"
        )
    search = Zoom(
        max_linesearch_steps, max_learning_rate, tol, increase_factor, slope_rtol, curv_rtol, approx_dec_rtol,
        stepsize_precision,
    )  # fmt: skip

    def init(params: Any) -> Any:
        dtype = _dtype(params)
        inf = jnp.asarray(jnp.inf, dtype)
        info = optax.ZoomLinesearchInfo(jnp.asarray(0), inf, inf)
        return optax.ScaleByZoomLinesearchState(jnp.asarray(1.0, dtype), inf, optax.tree.zeros_like(params), info)

    def update(updates: Any, state: Any, params: Any = None, **extra: Any) -> Any:
        line = _Line(name, updates, params, extra)
        guess = jnp.ones_like(state.learning_rate) if initial_guess_strategy == "one" else state.learning_rate
        end, last_grad, safe_grad = line.run(search, guess, True)
        safe = end.given_up & ((end.safe.step > 0.0) | jnp.isinf(end.decrease_error))
        step, value, grad = optax.tree.where(
            safe, (end.safe.step, end.safe.value, safe_grad), (end.last.step, end.last.value, last_grad)
        )
        info = optax.ZoomLinesearchInfo(end.count, end.decrease_error, end.curvature_error)
        new = optax.ScaleByZoomLinesearchState(step, value, grad, info)
        return optax.tree.scale(step, updates), optax.tree.cast_like(new, other_tree=state)

    return optax.GradientTransformationExtraArgs(init, update)


def _check_quiet(name: str, verbose: bool) -> None:
    if verbose:
        raise HyperError(f"rulec.jax.{name} prints nothing: leave verbose out, and read the info in its state")


def _dtype(params: Any) -> Any:
    leaves = jax.tree.leaves(params)
    return jnp.real(jnp.empty((), leaves[0].dtype)).dtype if leaves else jnp.float32


class _Line:
    """A function of parameters along updates, from what `update` of a search is given."""

    def __init__(self, name: str, updates: Any, params: Any, extra: Mapping[str, Any]) -> None:
        for key in ("value", "grad", "value_fn"):
            if extra.get(key) is None or params is None:
                raise HyperError(
                    f"rulec.jax.{name} needs the parameters, value, grad and value_fn: call "
                    f"update(grads, state, params, value=..., grad=..., value_fn=...)"
                )
        more = {key: value for key, value in extra.items() if key not in ("value", "grad", "value_fn")}
        self._function = _with_arguments(name, extra["value_fn"], more)
        self._updates, self._params, self._grad = updates, params, extra["grad"]
        self._type = _dtype(params)
        slope = optax.tree.real(optax.tree.vdot(updates, extra["grad"]))
        self._start = self._point(0.0, extra["value"], slope)

    def _point(self, *numbers: Any) -> Point:
        return Point(*(jnp.asarray(number, self._type) for number in numbers))

    def value_and_grad(self, step: Any) -> tuple[Any, Any]:
        return jax.value_and_grad(self._function)(optax.tree.add_scale(self._params, step, self._updates))

    def run(self, search: PureSearch[Any], guess: Any, slopes: bool) -> tuple[Any, Any, Any]:
        """The state at the end of a search, the gradient of the last trial, and of the one that is kept in case.

        Without `slopes` the search looks at values alone, and no gradient is computed.
        """

        def typed(state: Any) -> Any:
            return jax.tree.map(lambda x: x if jnp.result_type(x) in (bool, int) else jnp.asarray(x, self._type), state)

        def trial(carry: Any) -> Any:
            state, _, kept = carry
            step = jnp.asarray(search.candidate(jnp, state), self._type)
            if slopes:
                value, grad = self.value_and_grad(step)
                slope = optax.tree.real(optax.tree.vdot(grad, self._updates))
            else:
                value = self._function(optax.tree.add_scale(self._params, step, self._updates))
                grad, slope = kept, 0.0
            state, keep = search.advance(jnp, self._start, state, self._point(step, value, slope))
            return typed(state), grad, optax.tree.where(keep, grad, kept)

        first = typed(search.begin(jnp, self._start, jnp.asarray(guess, self._type)))
        carry = first._replace(count=jnp.asarray(0)), self._grad, self._grad
        end: tuple[Any, Any, Any] = jax.lax.while_loop(lambda carry: search.going(carry[0]), trial, carry)
        return end


def _with_arguments(name: str, function: Callable[..., Any], more: Mapping[str, Any]) -> Callable[[Any], Any]:
    """A function of parameters alone; HyperError for a keyword that it does not take."""
    known = inspect.signature(function).parameters
    if not any(parameter.kind is parameter.VAR_KEYWORD for parameter in known.values()):
        for key in more:
            if key not in known:
                raise HyperError(f"rulec.jax.{name} was given {key}, which value_fn does not take: leave it out")
    return functools.partial(function, **more)


_ZOOM = scale_by_zoom_linesearch(max_linesearch_steps=20, initial_guess_strategy="one")


def lbfgs(
    learning_rate: Any = None, memory_size: int = 10, scale_init_precond: bool = True, linesearch: Any = _ZOOM,
) -> optax.GradientTransformationExtraArgs:  # fmt: skip
    """L-BFGS with a search along the direction.

    Takes what `optax.lbfgs` takes, with a memory of 20 at most; `update` needs `value`, `grad` and `value_fn` too, as
    there. `linesearch` is any transformation, ours or optax's, or None.
    """
    rate = optax.scale(-1.0) if learning_rate is None else optax.scale_by_learning_rate(learning_rate)
    search = optax.identity() if linesearch is None else linesearch
    return optax.chain(scale_by_lbfgs(memory_size, scale_init_precond), rate, search)
