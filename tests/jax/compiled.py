"""What XLA made of a step: its kernels, its buffers, and what it writes over."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import optax

import rulec
import rulec.jax
from rulec.jax.compiled import machine
from rulec.jax.recipe import recipe
from rulec.jax.transform import options

#: Large beside every vector of rows or columns of it.
SHAPE = (256, 512)
SIZE = math.prod(SHAPE) * 4


class Compiled:
    """A compiled step of one parameter of `SHAPE` in float32."""

    def __init__(self, compiled: Any, held: Any) -> None:
        memory = compiled.memory_analysis()
        self.temporary, self.aliased = memory.temp_size_in_bytes, memory.alias_size_in_bytes
        self.held = sum(array.nbytes for array in jax.tree.leaves(held))
        self.entry = compiled.as_text().split("\nENTRY ")[1].splitlines()

    @property
    def large(self) -> int:
        """How many buffers as large as the parameter are needed for a while."""
        return self.temporary // SIZE

    def kernels(self) -> list[str]:
        """The instructions that make something as large as the parameter, but for what stands for another."""
        sides = ",".join(map(str, SHAPE))
        made = [line for line in self.entry if re.search(rf"= \(?f\d+\[{sides}\]", line)]
        return [line for line in made if not re.search(r"\b(parameter|get-tuple-element|bitcast|tuple)\(", line)]

    def numbers_of_64_bits(self) -> list[str]:
        """Instructions that keep a float64 for each element."""
        return [line for line in self.kernels() if "= f64[" in line]


def arguments(rule: str, **given: Any) -> tuple[Any, Any, Any, Mapping[str, Any]]:
    """Parameters, gradients, the first state, and what the rule takes more."""
    params = {"w": jnp.ones(SHAPE)}
    inputs = {k: params if v == "like p" else jnp.ones(()) for k, v in rulec.load(rule).inputs.items()}
    return params, {"w": jnp.ones(SHAPE)}, rulec.jax.init(rule, params, **given), inputs


def own_step(rule: str) -> Compiled:
    """What `rulec.jax.step` compiles, by itself."""
    params, grads, state, inputs = arguments(rule)
    found = machine(recipe(rule, {}, None), options(None, False, 0))
    with jax.enable_x64(True):
        return Compiled(found.step.lower(params, grads, state, [{}], inputs).compile(), (params, state))


def step_in_jit(rule: str) -> Compiled:
    """`rulec.jax.step` in a user's jit that donates."""
    params, grads, state, inputs = arguments(rule)

    def train(params: Any, grads: Any, state: Any) -> Any:
        return rulec.jax.step(rule, params, grads, state, **inputs)

    return _in_jit(train, params, grads, state)


def update_in_jit(rule: str) -> Compiled:
    """A transformation, and optax's addition, in a user's jit that donates."""
    params, grads, state, inputs = arguments(rule)
    return _in_jit(_training(rulec.jax.transform(rule), inputs), params, grads, state)


def optax_in_jit(transformation: optax.GradientTransformation) -> Compiled:
    """The same of optax's own."""
    params, grads, *_ = arguments("sgd")
    return _in_jit(_training(transformation, {}), params, grads, transformation.init(params))


def _training(transformation: Any, inputs: Mapping[str, Any]) -> Callable[..., Any]:
    def train(params: Any, grads: Any, state: Any) -> Any:
        updates, state = transformation.update(grads, state, params, **inputs)
        return optax.apply_updates(params, updates), state

    return train


def _in_jit(train: Callable[..., Any], params: Any, grads: Any, state: Any) -> Compiled:
    return Compiled(jax.jit(train, donate_argnums=(0, 2)).lower(params, grads, state).compile(), (params, state))
