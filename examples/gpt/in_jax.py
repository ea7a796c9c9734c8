"""The same model and training in JAX, with optax and with rulec.jax."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from torch import nn

import rulec.jax
from examples.gpt.contenders import WEIGHT_DECAY
from examples.gpt.model import Size

#: Parameters: name in torch -> array. A step: parameters, state, tokens, following -> parameters, state, loss.
Params = Mapping[str, Any]
Step = Callable[[Params, Any, Any, Any], tuple[Params, Any, Any]]


def params_of(net: nn.Module) -> Params:
    """The weights of a model in torch, under their names there."""
    return {name: jnp.asarray(p.detach().numpy()) for name, p in net.named_parameters()}


def loss_of(params: Params, size: Size, tokens: Any, following: Any) -> Any:
    """The mean cross entropy in nats, as `model.loss_of` has it."""
    x = params["tokens.weight"][tokens] + params["places.weight"][: tokens.shape[1]]
    for layer in range(size.layers):
        part = _Part(params, f"blocks.{layer}.")
        x = x + part.linear("project", _attention(part.linear("qkv", part.norm("attention_norm", x)), size.heads))
        x = x + part.linear("narrow", jax.nn.gelu(part.linear("widen", part.norm("inner_norm", x)), approximate=False))
    logits = _Part(params, "").norm("norm", x) @ params["head.weight"].T
    return optax.softmax_cross_entropy_with_integer_labels(logits, following).mean()


class _Part:
    """The layers of a module, by their names in it."""

    def __init__(self, params: Params, prefix: str) -> None:
        self.params, self.prefix = params, prefix

    def linear(self, name: str, x: Any) -> Any:
        at = self.prefix + name
        return x @ self.params[f"{at}.weight"].T + self.params[f"{at}.bias"]

    def norm(self, name: str, x: Any) -> Any:
        at = self.prefix + name
        centered = x - x.mean(-1, keepdims=True)
        scaled = centered * jax.lax.rsqrt(jnp.square(centered).mean(-1, keepdims=True) + 1e-5)
        return scaled * self.params[f"{at}.weight"] + self.params[f"{at}.bias"]


def _attention(qkv: Any, heads: int) -> Any:
    q, k, v = jnp.moveaxis(qkv.reshape(*qkv.shape[:2], 3, heads, -1), 2, 0)
    return jax.nn.dot_product_attention(q, k, v, is_causal=True).reshape(*qkv.shape[:2], -1)


def _with(tx: optax.GradientTransformation, size: Size, params: Params) -> tuple[Step, Any]:
    """A step of an optax transformation, under jit, and its first state."""

    def step(params: Params, state: Any, tokens: Any, following: Any) -> tuple[Params, Any, Any]:
        loss, grads = jax.value_and_grad(loss_of)(params, size, tokens, following)
        updates, state = tx.update(grads, state, params)
        return optax.apply_updates(params, updates), state, loss

    return jax.jit(step, donate_argnums=(0, 1)), tx.init(params)


def _rulec_step(size: Size, params: Params, lr: float) -> tuple[Step, Any]:
    """The gradients under jit, and rulec's donated step."""
    gradient = jax.jit(jax.value_and_grad(loss_of), static_argnums=1)

    def step(params: Params, state: Any, tokens: Any, following: Any) -> tuple[Params, Any, Any]:
        loss, grads = gradient(params, size, tokens, following)
        params, state = rulec.jax.step("adamw", params, grads, state, lr=lr, weight_decay=WEIGHT_DECAY)
        return params, state, loss

    return step, rulec.jax.init("adamw", params)


def contenders(size: Size, params: Params) -> dict[str, tuple[Step, Any]]:
    """Name -> a step and its first state."""
    lr, decay = size.lr, WEIGHT_DECAY
    return {
        "optax adamw": _with(optax.adamw(lr, weight_decay=decay), size, params),
        "rulec.jax.adamw": _with(rulec.jax.adamw(lr, weight_decay=decay), size, params),
        "rulec.jax.step": _rulec_step(size, params, lr),
    }


class Run:
    """A contender with its parameters and state, trained batch by batch."""

    def __init__(self, step: Step, state: Any, params: Params) -> None:
        self.step, self.state = step, state
        self.params: Params = {name: jnp.array(p, copy=True) for name, p in params.items()}

    def train(self, tokens: np.ndarray[Any, Any], following: np.ndarray[Any, Any]) -> float:
        """Takes a step; the loss before it."""
        self.params, self.state, loss = self.step(self.params, self.state, tokens, following)
        return float(loss)


def runs(size: Size, net: nn.Module, only: Iterable[str] | None = None) -> dict[str, Run]:
    """Name -> the run of a contender that begins with the weights of a model in torch."""
    params = params_of(net)
    steps = contenders(size, params)
    return {name: Run(step, state, params) for name, (step, state) in steps.items() if only is None or name in only}
