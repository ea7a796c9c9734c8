"""A step that gives new parameters: the update and its addition in one traced function, arguments donated."""

from __future__ import annotations

import functools
from collections.abc import Collection, Mapping
from dataclasses import replace
from typing import Any

from rulec.compiler.routing import Router
from rulec.errors import HyperError
from rulec.jax import cpu
from rulec.jax.machine import Settings, call, is_wide, machine, numbered
from rulec.jax.packing import packed as pack
from rulec.jax.recipe import Given, Rules, recipe, rules_of
from rulec.jax.transform import options
from rulec.jax.xla import is_outermost
from rulec.language.rule import Rule


def init(
    rule: Rules, params: Any, *, state_dtype: Any = None, tags: Mapping[str, Collection[str]] | None = None,
    packed: bool = False, **hyper: Given,
) -> Any:  # fmt: skip
    """The state of a rule before its first step, for a tree of parameters: what `step` takes.

    `rule`, `state_dtype`, `tags` and hyper-parameters are those of `rulec.jax.transform`. Of hyper-parameters those are
    needed that states begin with, such as `d0` of Prodigy: without it the state begins with the default, whatever
    `step` is given. `packed` gives what `rulec.jax.packed` makes of the state.
    """
    made, numbers = numbered(recipe(rule, hyper, tags))
    found = machine(made, Settings(options(state_dtype, False, 0), (), is_wide()))
    state = call(found.init, params, numbers)
    return pack(state) if packed else state


def step(
    rule: Rules, params: Any, grads: Any, state: Any, *, maximize: bool = False, seed: int = 0,
    tags: Mapping[str, Collection[str]] | None = None, donate: bool = True, backend: str | None = None, **hyper: Given,
) -> tuple[Any, Any]:  # fmt: skip
    """New parameters and a new state, in one compiled call that reuses the memory of the old ones.

    `params` and `state` are donated: afterwards they cannot be used. With `donate=False`, and always inside of another
    jit, they can. Keywords are those of `rulec.jax.transform`, and what the rule names under `inputs`; a
    hyper-parameter that states begin with is for `init` as well. Neither another number nor another step compiles
    anything again.

    On one CPU device the fused kernels of the cpu backend are called in place where they are faster than XLA's own
    code. `backend="jax"` leaves them out; with `backend="cpu"` they are used whatever the sizes, inside of another jit
    too.

    Raises TensorError, StateMismatch or HyperError in one sentence; nothing is donated then.
    """
    inputs = {name: hyper.pop(name) for name in _inputs(rule, hyper)}
    made, numbers = numbered(recipe(rule, hyper, tags), getattr(state, "count", None))
    chosen = cpu.chosen(backend, params, grads, state)
    # What is on one CPU device was looked at already.
    alone = is_outermost(numbers, inputs, *(() if chosen == "either" else (params, grads, state)))
    if not alone and chosen == "either":
        chosen = "jax"  # others differentiate or batch it, which they cannot a kernel
    own = replace(options(None, maximize, seed), backend=chosen)
    found = machine(made, Settings(own, (), is_wide()))
    function = found.step if donate and alone else found.step_keeping
    new_params, new_state = call(function, params, grads, state, numbers, inputs)
    return new_params, new_state


def _inputs(rule: Rules, given: Mapping[str, Any]) -> list[str]:
    named = {name: own for own in rules_of(rule) for name in _names(own)}
    for name, own in named.items():
        if name not in given:
            raise HyperError(f"{own.name} needs {name}: give it to step as a keyword, {name}=...")
    return list(named)


@functools.lru_cache(maxsize=256)
def _names(rule: Rule) -> list[str]:
    """What a rule, and those that it routes leaves to, name under inputs."""
    return [name for found in Router(rule).rules for name in found.inputs]
