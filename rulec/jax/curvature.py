"""Sophia as optax.contrib has it: a step by the last estimated diagonal, from a transformation that estimates it."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import optax

from rulec.errors import HyperError
from rulec.jax.built import BUILT, built
from rulec.jax.masks import Maker, marked
from rulec.jax.recipe import Group
from rulec.jax.theirs import renamed, with_state_of
from rulec.jax.transform import options
from rulec.language.library.load import parse
from rulec.language.rule import Rule

#: sophia's lines in optax's order: the step has the diagonal of the step before, and a corrected momentum.
_SOPHIA = """
name: Sophia
hyper: {{beta1: 0.965, beta2: 0.99, eps: 1e-8, gamma: {{default: 0.01, above: 0}}, interval: {{default: 10, min: 1}},
  lr: 1e-4, weight_decay: 0{hyper}}}
inputs: {{hessian: like p}}
state: {{m: 0, h: 0}}
step: |
  m = beta1*m + (1 - beta1)*g
  u = m/(1 - beta1**t)/maximum(gamma*h, eps)
  d = {bound}
  if (t - 1) % interval == 0:
    h = beta2*h + (1 - beta2)*hessian
  p = p - lr*(d + weight_decay*p)
"""


@functools.cache
def _rule(bounded: bool) -> Rule:
    hyper, bound = (", threshold: {default: 1, min: 0}", "clip(u, -threshold, threshold)") if bounded else ("", "u")
    return parse(_SOPHIA.format(hyper=hyper, bound=bound))


@built("contrib.sophia", "sophia", "the step has the diagonal of the step before, and a corrected momentum")
def sophia(values: Mapping[str, Any]) -> optax.GradientTransformationExtraArgs:
    """Momentum divided by the diagonal of the Hessian, each element bounded; the diagonal is read every few steps."""
    name, interval, bound = "contrib.sophia", values["update_interval"], values["clip_threshold"]
    if values["verbose"]:
        raise HyperError(f"rulec.jax.{name} prints nothing: leave verbose out")
    hyper = {
        "lr": values["learning_rate"], "beta1": values["b1"], "beta2": values["b2"], "eps": values["eps"],
        "gamma": values["gamma"], "weight_decay": values["weight_decay"], "interval": interval,
    }  # fmt: skip
    group = Group(_rule(bound is not None), hyper if bound is None else {**hyper, "threshold": bound})
    storage = options({} if values["mu_dtype"] is None else {"m": values["mu_dtype"]}, False, 0)
    group.check()

    def ours(params: Any, count: Any) -> optax.GradientTransformationExtraArgs:
        return Maker(group, marked(values["weight_decay_mask"], params), storage).transformation()

    kept = with_state_of(BUILT[name].theirs(**values), ours, renamed(m="mu", h="nu"))
    reads = optax.with_extra_args_support(values["hessian_diagonal_fn"])

    def update(grads: Any, state: Any, params: Any = None, **extra: Any) -> Any:
        if params is None:
            raise HyperError(f"rulec.jax.{name} needs the parameters: call update(grads, state, params)")
        inner = state[0].hessian_fn_state

        def read() -> Any:
            return reads.update(grads, inner, params=params, **extra)

        def skip() -> Any:
            return jax.tree.map(jnp.zeros_like, jax.eval_shape(read)[0]), inner

        hessian, inner = jax.lax.cond(state[0].count % interval == 0, read, skip)
        updates, state = kept.update(grads, state, params, hessian=hessian)
        return updates, (state[0]._replace(hessian_fn_state=inner), *state[1:])

    return optax.GradientTransformationExtraArgs(kept.init, update)
