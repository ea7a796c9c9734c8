"""Adafactor, SM3 and noisy SGD as optax has them: second moments by axes of a tensor, and noise."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from rulec.errors import HyperError, TensorError
from rulec.jax.built import BUILT, built
from rulec.jax.entries import as_direction
from rulec.jax.leaves import flat
from rulec.jax.masks import Maker, marked
from rulec.jax.recipe import Group
from rulec.jax.theirs import FieldMap, by_leaf, renamed, with_state_of
from rulec.jax.transform import options
from rulec.language.library.load import parse
from rulec.language.rule import Rule

# Adafactor

#: The moments of adafactor_paper, of the two largest axes.
_MOMENTS = """
name: Adafactor
hyper: {{{hyper}}}
state:
  r: {{init: 0, per: row, if: "{factored}"}}
  c: {{init: 0, per: col, if: "{factored}"}}
  v: {{init: 0, if: "not ({factored})"}}{state}
step: |
  beta = {beta}
  s = g**2 + eps
  if {factored}:
    r = beta*r + (1 - beta)*mean(s, per="row")
    c = beta*c + (1 - beta)*mean(s, per="col")
    u = g*rsqrt(r/mean(r, per="matrix"))*rsqrt(c)
  else:
    v = beta*v + (1 - beta)*s
    u = g*rsqrt(v)
"""

#: Hyper-parameter of optax's parts after the moments -> its default here, and the line of the part, in their order.
_PARTS = {
    "threshold": ("{default: 1, above: 0}", "u = u/maximum(1, rms(u)/threshold)"),
    "lr": ("1", "u = lr*u"),
    "scale": ("", "u = u*maximum(rms(p), 1e-3)"),
    "momentum": ("0.9", "m = momentum*m + (1 - momentum)*u\n  u = m"),
    "weight_decay": ("0", "u = u + weight_decay*p"),
}

#: The share of the old moment in the new one, as optax has it.
_BETA = "1 - (t - offset)**-decay"


@functools.cache
def _adafactor_rule(smallest: int | None, scheduled: bool, parts: frozenset[str]) -> Rule:
    """The rule with some parts, for axes of `smallest` elements or more; `scheduled` where a user's function decays."""
    factored = "ndim < 0" if smallest is None else f"ndim >= 2 and minimum(rows, cols) >= {smallest}"
    chosen = {name: part for name, part in _PARTS.items() if name in parts}
    hyper = {"eps": "1e-30", **({"beta2": "0"} if scheduled else {"decay": "0.8", "offset": "0"})}
    hyper |= {name: default for name, (default, _) in chosen.items() if default}
    text = _MOMENTS.format(
        hyper=", ".join(f"{name}: {default}" for name, default in hyper.items()),
        factored=factored,
        state="\n  m: 0" if "momentum" in parts else "",
        beta="beta2" if scheduled else _BETA,
    )
    lines = [line for _, line in chosen.values()]
    return parse(text + "".join(f"  {line}\n" for line in [*lines, "p = p - u" if parts else "p = p + u"]))


def _axes(shape: tuple[int, ...], smallest: int | None) -> tuple[int, ...] | None:
    """The axes with the two largest last, where optax factors the moments of this shape."""
    if smallest is None or len(shape) < 2:
        return None
    *_, d1, d0 = np.argsort(shape)
    return (*(i for i in range(len(shape)) if i not in (d1, d0)), int(d1), int(d0)) if shape[d1] >= smallest else None


def _moments(smallest: int | None, momentum: bool) -> FieldMap:
    """The fields of optax's factored moments: one axis less than the parameter, or a single zero where not factored."""

    def turned(array: Any, param: Any) -> Any:
        axes = _axes(param.shape, smallest)
        return array if axes is None else jnp.transpose(array, axes)

    def turned_back(array: Any, param: Any) -> Any:
        axes = _axes(param.shape, smallest)
        return array if axes is None else jnp.transpose(array, [*map(int, np.argsort(axes))])

    def reduced(gone: int) -> Callable[[Any, Any], Any]:
        def of(param: Any, array: Any) -> Any:
            axes = _axes(param.shape, smallest)
            # The axis that is the mean over comes back with one element.
            return None if axes is None else turned(jnp.expand_dims(array, axes[gone]), param)

        return of

    def kept(gone: int) -> Callable[[Any, Any], Any]:
        def of(param: Any, array: Any) -> Any:
            axes = _axes(param.shape, smallest)
            return jnp.zeros(1, param.dtype) if axes is None else jnp.squeeze(turned_back(array, param), axes[gone])

        return of

    def whole(param: Any, array: Any) -> Any:
        return array if _axes(param.shape, smallest) is None else None

    def whole_back(param: Any, array: Any) -> Any:
        return array if _axes(param.shape, smallest) is None else jnp.zeros(1, param.dtype)

    def read(known: Mapping[str, Any], params: Any) -> Mapping[str, Any]:
        values = {
            "r": by_leaf(reduced(-1), params, known["v_row"]),
            "c": by_leaf(reduced(-2), params, known["v_col"]),
            "v": by_leaf(whole, params, known["v"]),
        }
        return values | ({"m": jax.tree.map(turned, known["ema"], params)} if momentum else {})

    def write(new: Any, params: Any) -> Mapping[str, Any]:
        fields = {
            "v_row": by_leaf(kept(-1), params, new.r),
            "v_col": by_leaf(kept(-2), params, new.c),
            "v": by_leaf(whole_back, params, new.v),
        }
        return fields | ({"ema": jax.tree.map(turned_back, new.m, params)} if momentum else {})

    return FieldMap(
        read, write, lambda tree, params: jax.tree.map(turned, tree, params),
        lambda tree, params: jax.tree.map(turned_back, tree, params),
    )  # fmt: skip


def _factored(
    name: str, values: Mapping[str, Any], smallest: int | None, hyper: Mapping[str, Any], parts: frozenset[str],
    decay: Callable[[Any], Any] | None = None, mask: Any = None, dtype: Any = None,
) -> optax.GradientTransformationExtraArgs:  # fmt: skip
    """The transformation of the rule with some parts; `decay` is a user's function of the step."""
    rule = _adafactor_rule(smallest, decay is not None, parts)
    storage = options({"m": dtype} if "momentum" in parts else {}, False, 0)
    Group(rule, hyper).check()

    def ours(params: Any, count: Any) -> optax.GradientTransformationExtraArgs:
        more = {} if decay is None else {"beta2": decay(count)}
        return Maker(Group(rule, {**hyper, **more}), marked(mask, params), storage).transformation()

    return with_state_of(BUILT[name].theirs(**values), ours, _moments(smallest, "momentum" in parts))


def _smallest(name: str, values: Mapping[str, Any]) -> int | None:
    """From how many elements on axes are factored; None where none is."""
    smallest = values["min_dim_size_to_factor"]
    if not values["factored"]:
        return None
    if isinstance(smallest, bool) or not isinstance(smallest, int | np.integer):
        raise HyperError(
            f"rulec.jax.{name} has min_dim_size_to_factor={smallest!r}, which decides what is compiled: give a whole "
            f"number of Python, and under inject_hyperparams name it among the static_args"
        )
    return int(smallest)


@built("adafactor", "adafactor_paper", "the two largest axes; `lr` as it is; then `momentum` and `weight_decay_rate`")
def adafactor(values: Mapping[str, Any]) -> optax.GradientTransformationExtraArgs:
    """Second moments as the product of a row and a column, and steps relative to the size of the parameter."""
    by_part = {
        "threshold": values["clipping_threshold"], "lr": values["learning_rate"], "momentum": values["momentum"],
        "weight_decay": values["weight_decay_rate"],
    }  # fmt: skip
    chosen = {name: value for name, value in by_part.items() if value is not None}
    parts = {*chosen, *(["scale"] if values["multiply_by_parameter_scale"] else []), ""}
    hyper = {"decay": values["decay_rate"], "offset": values["decay_offset"], "eps": values["eps"], **chosen}
    return _factored(
        "adafactor", values, _smallest("adafactor", values), hyper, frozenset(parts),
        mask=values["weight_decay_mask"], dtype=values["dtype_momentum"],
    )  # fmt: skip


@built("scale_by_factored_rms", "adafactor_paper", "the two largest axes; the direction alone")
def scale_by_factored_rms(values: Mapping[str, Any]) -> optax.GradientTransformationExtraArgs:
    """The gradient over the root of second moments that are the product of a row and a column."""
    name = "scale_by_factored_rms"
    function, hyper = values["decay_rate_fn"], {"eps": values["epsilon"]}
    decay: Any = None
    if function is BUILT[name].signature.parameters["decay_rate_fn"].default:
        hyper |= {"decay": values["decay_rate"], "offset": values["step_offset"]}
    else:

        def decay(count: Any) -> Any:
            return function(count - values["step_offset"], values["decay_rate"])

    return _factored(name, values, _smallest(name, values), hyper, frozenset(), decay)


# SM3

#: sm3_axes with a sum for every index of every axis, up to the most axes that a loop is written out for.
_SM3 = """
name: SM3
hyper: {{lr: 0.1, momentum: 0.9, eps: 1e-8{hyper}}}
applies_to: 1 <= ndim and ndim <= 8
state:
  m: 0
  a: {{init: 0, per: axis(i), each: axis(i)}}
step: |
  s = a[0]
  for i in range(1, ndim):
    s = minimum(s, a[i])
  s = {sums}
  for i in range(ndim):
    a[i] = max(s, per=axis(i))
  m = momentum*m + (1 - momentum)*where(s > 0, g*rsqrt(s + eps), 0)
  direction = m
"""


@functools.cache
def _sm3_rule(decays: bool, scales: bool) -> Rule:
    sums = "beta2*s + (1 - beta2)*g*g" if decays else "s + g**2"
    rule = parse(_SM3.format(sums=sums, hyper=", beta2: 0.99" if decays else ""))
    return as_direction(rule) if scales else rule


#: The axes that loops of the rule are written out for.
_MOST = 8


def _axis_sums(known: Mapping[str, Any], params: Any) -> Mapping[str, Any]:
    """The states of the rule in optax's lists of sums, one for each axis."""

    def spread(axis: int) -> Callable[[Any, Any], Any]:
        def of(param: Any, sums: Any) -> Any:
            shape = [-1 if i == axis else 1 for i in range(param.ndim)]
            return jnp.reshape(sums[axis], shape) if axis < param.ndim else None

        return of

    return {"m": known["nu"], **{f"a_{i}": by_leaf(spread(i), params, known["mu"]) for i in range(_MOST)}}


def _as_lists(new: Any, params: Any) -> Mapping[str, Any]:
    by_axis = [getattr(new, f"a_{axis}") for axis in range(_MOST)]
    mu = by_leaf(lambda param, *sums: [jnp.ravel(part) for part in sums[: param.ndim]], params, *by_axis)
    return {"nu": new.m, "mu": mu}


def _check_axes(name: str, params: Any) -> None:
    """TensorError for a leaf without an axis, which optax's function has no sum for, or with too many."""
    tree = flat(params, "the parameter")
    for leaf, array in zip(tree.names, tree.arrays, strict=True):
        if not 1 <= array.ndim <= _MOST:
            raise TensorError(
                f"rulec.jax.{name} takes leaves of 1 to {_MOST} axes, and the parameter {leaf} has {array.ndim}: leave "
                f"it to another transformation, as with optax.partition"
            )


def _sm3(name: str, values: Mapping[str, Any], decays: bool, hyper: Mapping[str, Any], scales: bool) -> Any:
    transformation = Maker(Group(_sm3_rule(decays, scales), hyper)).transformation()

    def ours(params: Any, count: Any) -> optax.GradientTransformationExtraArgs:
        _check_axes(name, params)
        return transformation

    def init(params: Any) -> Any:
        _check_axes(name, params)
        return kept.init(params)

    kept = with_state_of(BUILT[name].theirs(**values), ours, FieldMap(_axis_sums, _as_lists))
    return optax.GradientTransformationExtraArgs(init, kept.update)


@built("sm3", "sm3_axes", "")
def sm3(values: Mapping[str, Any]) -> optax.GradientTransformationExtraArgs:
    """Adagrad whose sums are the smallest of one for each index of each axis."""
    if callable(values["learning_rate"]):
        raise HyperError(
            "rulec.jax.sm3 counts no steps, as optax.sm3, so learning_rate must be a number: put "
            "optax.scale_by_learning_rate after rulec.jax.scale_by_sm3 for a schedule"
        )
    hyper = {"lr": values["learning_rate"], "momentum": values["momentum"]}
    return _sm3("sm3", values, False, hyper, False)


@built("scale_by_sm3", "sm3_axes", "with `b2` below 1 the sums are means")
def scale_by_sm3(values: Mapping[str, Any]) -> optax.GradientTransformationExtraArgs:
    """The direction of SM3 alone, for a learning rate to follow."""
    b2 = values["b2"]
    decays = not (isinstance(b2, int | float) and b2 == 1)
    hyper = {"momentum": values["b1"], "eps": values["eps"], **({"beta2": b2} if decays else {})}
    return _sm3("scale_by_sm3", values, decays, hyper, True)


# Noise

#: transforms/noise with the draws as an input: those of optax's key.
_NOISE = """
name: NoisySGD
hyper: {lr: 1e-3, eta: {default: 0.01, min: 0}, gamma: 0.55}
inputs: {noise: like p}
step: |
  direction = g + sqrt(eta/t**gamma)*noise
"""


@functools.cache
def _noise_rule(scales: bool) -> Rule:
    return as_direction(parse(_NOISE)) if scales else parse(_NOISE)


def _noisy(name: str, values: Mapping[str, Any], hyper: Mapping[str, Any], scales: bool) -> Any:
    transformation = Maker(Group(_noise_rule(scales), hyper)).transformation()
    kept = with_state_of(BUILT[name].theirs(**values), lambda params, count: transformation, renamed())

    def update(grads: Any, state: Any, params: Any = None, **extra: Any) -> Any:
        key, draw = jax.random.split(optax.tree.get(state, "rng_key"))
        noise = optax.tree.random_like(draw, grads, jax.random.normal)
        updates, state = kept.update(grads, state, params, **{**extra, "noise": noise})
        return updates, optax.tree.set(state, rng_key=key)

    return optax.GradientTransformationExtraArgs(kept.init, update)


@built("noisy_sgd", "noise >> sgd", "the draws are those of `key` in JAX")
def noisy_sgd(values: Mapping[str, Any]) -> optax.GradientTransformationExtraArgs:
    """Gradients with Gaussian noise of a variance that falls with the steps."""
    hyper = {"lr": values["learning_rate"], "eta": values["eta"], "gamma": values["gamma"]}
    return _noisy("noisy_sgd", values, hyper, False)


@built("add_noise", "transforms/noise", "the draws are those of `key` in JAX")
def add_noise(values: Mapping[str, Any]) -> optax.GradientTransformationExtraArgs:
    """The gradient with Gaussian noise of a variance that falls with the steps."""
    return _noisy("add_noise", values, {"eta": values["eta"], "gamma": values["gamma"]}, True)
