"""optax.contrib's transformations around another one: schedule-free averages, a tuner of learning rates, and SAM.

The inner transformation is ours or optax's. Its updates are an input of a rule: the library's wrapper around a rule
that moves by its input. States are optax's, with the inner state inside of them.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import optax

from rulec.errors import HyperError, StateMismatch
from rulec.jax.built import BUILT, built
from rulec.jax.masks import Maker
from rulec.jax.recipe import Group
from rulec.jax.state import State
from rulec.jax.theirs import check_real, state_of
from rulec.jax.transform import options
from rulec.language.library.load import load, parse
from rulec.language.rule import Rule

#: The rule in the place of the inner one.
_MOVED = """
name: Moved
inputs: {move: like p}
step: |
  p = p + move
"""


@functools.cache
def _around(wrapper: str) -> Rule:
    rule: Rule = load(wrapper)(parse(_MOVED))
    return rule


def _params_of(name: str, params: Any) -> Any:
    if params is None:
        raise HyperError(f"rulec.jax.{name} needs the parameters: call update(grads, state, params)")
    return params


# Schedule-free


@built("contrib.schedule_free", "schedule_free", "the learning rate is that of the next step")
def schedule_free(values: Mapping[str, Any]) -> optax.GradientTransformationExtraArgs:
    """Averages the points that a transformation steps to, in place of a schedule of the learning rate."""
    name = "contrib.schedule_free"
    rate, base = values["learning_rate"], optax.with_extra_args_support(values["base_optimizer"])
    other, dtype = BUILT[name].theirs(**values), values["state_dtype"]
    storage = options({} if dtype is None else {"z": dtype}, False, 0)
    rule = _around("schedule_free").bind(lr=1.0)
    hyper = {"beta": values["b1"], "weight_lr_power": values["weight_lr_power"]}
    Group(rule, hyper | ({} if callable(rate) else {"lr": rate})).check()

    def init(params: Any) -> Any:
        check_real(params)
        return other.init(params)

    def update(grads: Any, state: Any, params: Any = None, **extra: Any) -> Any:
        check_real(_params_of(name, params))
        moves, inner = base.update(grads, state.base_optimizer_state, params, **extra)
        lr = jnp.asarray(rate(state.step_count), state.max_lr.dtype) if callable(rate) else rate
        transformation = Maker(Group(rule, {**hyper, "lr": lr}), options=storage).transformation()
        values = {"z": state.z, "lr_max": state.max_lr, "weight_sum": state.weight_sum}
        mine = state_of(transformation, params, state.step_count - 1, values)
        updates, new = transformation.update(moves, mine, params, move=moves)
        return updates, state._replace(
            weight_sum=_number(new.weight_sum, state.weight_sum), max_lr=_number(new.lr_max, state.max_lr),
            step_count=optax.safe_increment(state.step_count), base_optimizer_state=inner, z=_typed(new.z, state.z),
        )  # fmt: skip

    return optax.GradientTransformationExtraArgs(init, update)


def schedule_free_eval_params(state: Any, params: Any) -> Any:
    """The parameters to evaluate with, from the state of `schedule_free` and those of the training."""
    if not hasattr(state, "b1") or not hasattr(state, "z"):
        advice = "call rulec.jax.eval_params with its rule" if isinstance(state, State) else "give that state"
        raise StateMismatch(
            f"schedule_free_eval_params needs the state of rulec.jax.contrib.schedule_free, and this {_kind(state)} "
            f"has no b1: {advice}"
        )
    return jax.tree.map(lambda y, z: (y - (1.0 - state.b1) * z) / state.b1, params, state.z)


def _kind(state: Any) -> str:
    return "state of a rule" if isinstance(state, State) else type(state).__name__


def _number(value: Any, like: Any) -> Any:
    return jnp.asarray(value, like.dtype).reshape(like.shape)


def _typed(tree: Any, like: Any) -> Any:
    """The tree in the dtypes of another one."""
    return jax.tree.map(lambda x, y: jnp.asarray(x).astype(y.dtype), tree, like)


# Mechanic


@built("contrib.mechanize", "mechanic", "it starts from the parameters of the first update")
def mechanize(values: Mapping[str, Any]) -> optax.GradientTransformationExtraArgs:
    """Scales the distance from the start that a transformation travels, by a factor learned from the gradients."""
    name, base = "contrib.mechanize", optax.with_extra_args_support(values["base_optimizer"])
    several = _whole(name, "num_betas", values["num_betas"])
    rule = _tuned(several)
    hyper = {"s_decay": values["weight_decay"], "tiny": values["eps"], "s_init": values["s_init"]}
    transformation = Maker(Group(rule, hyper)).transformation()
    other = BUILT[name].theirs(**values)

    def init(params: Any) -> Any:
        check_real(params)
        return other.init(params)

    def update(grads: Any, state: Any, params: Any = None, **extra: Any) -> Any:
        check_real(_params_of(name, params))
        moves, inner = base.update(grads, state.base_optimizer_state, params, **extra)
        # Training loops put trained weights in the place of the first ones.
        start = jax.tree.map(lambda p, x: jnp.where(state.count == 0, p, x), params, state.x0)
        values = {f"{key}_{i}": getattr(state, key)[i] for key in ("r", "m", "v", "s") for i in range(several)}
        mine = state_of(transformation, params, state.count, {"x0": start, **values})
        updates, new = transformation.update(grads, mine, params, move=moves)
        fields = {key: jnp.stack([jnp.ravel(getattr(new, f"{key}_{i}"))[0] for i in range(several)]) for key in "rmvs"}
        fields = {key: _number(value, getattr(state, key)) for key, value in fields.items()}
        return updates, state._replace(
            base_optimizer_state=inner, count=optax.safe_increment(state.count), x0=start, **fields
        )

    return optax.GradientTransformationExtraArgs(init, update)


@functools.cache
def _tuned(several: int) -> Rule:
    betas: Any = [1.0 - 0.1**i for i in range(1, several + 1)]
    return _around("mechanic").bind(tuner_betas=betas)


def _whole(name: str, keyword: str, value: Any) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise HyperError(
            f"rulec.jax.{name} has {keyword}={value!r}, which decides what is compiled: give a whole number of Python "
            f"from 1 on, and under inject_hyperparams name it among the static_args"
        )
    return value


# Sharpness-aware minimization


@built("contrib.sam", "sam", "a step is several updates, or calls `grad_fn` with `opaque_mode`")
def sam(values: Mapping[str, Any]) -> optax.GradientTransformationExtraArgs:
    """Steps by the gradient at the end of a climb, which is some updates of another transformation."""
    name = "contrib.sam"
    period = _whole(name, "sync_period", values["sync_period"])
    outer, climb = (optax.with_extra_args_support(values[key]) for key in ("optimizer", "adv_optimizer"))
    init = BUILT[name].theirs(**values).init
    reset = values["reset_state"]

    def between(grads: Any, state: Any, params: Any = None, grad_fn: Any = None, **extra: Any) -> Any:
        cache = state.cache
        _params_of(name, params)

        def stepped() -> Any:
            moves, opt_state = outer.update(grads, state.opt_state, cache, **extra)
            moves = jax.tree.map(lambda c, p, u: c - p + u, cache, params, moves)
            return moves, opt_state, climb.init(params) if reset else state.adv_state

        def climbed() -> Any:
            moves, adv_state = climb.update(grads, state.adv_state, params, **extra)
            return jax.tree.map(jnp.negative, moves), state.opt_state, adv_state

        def kept(result: Any) -> Any:
            return _alike(result, (params, state.opt_state, state.adv_state))

        step = state.steps_since_sync
        updates, opt_state, adv_state = jax.lax.cond(
            step == period - 1, lambda: kept(stepped()), lambda: kept(climbed())
        )
        cache = jax.tree.map(lambda p, c: jnp.where(step == 0, p, c), params, cache)
        return updates, state._replace(
            steps_since_sync=(step + 1) % period, opt_state=opt_state, adv_state=adv_state, cache=cache
        )

    def inside(grads: Any, state: Any, params: Any = None, grad_fn: Any = None, **extra: Any) -> Any:
        if grad_fn is None or params is None:
            raise HyperError(
                f"rulec.jax.{name} with opaque_mode needs grad_fn, a function from parameters and the number of the "
                f"climb's step to gradients: call update(grads, state, params, grad_fn=...)"
            )
        point, adv_state = params, state.adv_state
        for i in range(period - 1):
            moves, adv_state = climb.update(grads, adv_state, point, **extra)
            point = optax.apply_updates(point, jax.tree.map(jnp.negative, moves))
            grads = grad_fn(point, i)
            if values["batch_axis_name"] is not None:
                grads = jax.lax.pmean(grads, axis_name=values["batch_axis_name"])  # type: ignore[no-untyped-call]
        updates, opt_state = outer.update(grads, state.opt_state, params, **extra)
        return updates, state._replace(
            steps_since_sync=jnp.zeros((), jnp.int32), opt_state=opt_state,
            adv_state=climb.init(params) if reset else adv_state,
        )  # fmt: skip

    return optax.GradientTransformationExtraArgs(init, inside if values["opaque_mode"] else between)


def _alike(new: Any, old: Any) -> Any:
    """A tree in the dtypes of another one; keys of random numbers are as they are."""

    def cast(x: Any, y: Any) -> Any:
        return x if jnp.issubdtype(y.dtype, jax.dtypes.prng_key) else jnp.asarray(x).astype(y.dtype)

    return jax.tree.map(cast, new, old)
