"""A step that gives new parameters: the update and its addition in one traced function, arguments donated."""

from __future__ import annotations

import functools
from collections.abc import Collection, Mapping
from dataclasses import replace
from typing import Any

from rulec.compiler.routing import Router
from rulec.errors import HyperError
from rulec.jax import cpu
from rulec.jax.machine import call, machine, numbered
from rulec.jax.packing import packed as pack
from rulec.jax.recipe import Given, Rules, recipe, rules_of
from rulec.jax.transform import options
from rulec.jax.xla import is_outermost
from rulec.language.rule import Rule


def init(
    rule: Rules, params: Any, *, state_dtype: Any = None, tags: Mapping[str, Collection[str]] | None = None,
    packed: bool = False, **hyper: Given,
) -> Any:  # fmt: skip
    """The state of a rule before its first step, for a tree of parameters; `step` takes it.

    `rule`, `state_dtype`, `tags` and hyper-parameters are as for `rulec.jax.transform`. Hyper-parameters are needed
    only where a state begins with one, such as `d0` of Prodigy: without it the state begins with the default, whatever
    `step` is given. With `packed` the state is packed, as by `rulec.jax.packed`.
    """
    current, numbers = numbered(recipe(rule, hyper, tags))
    functions = machine(current, options(state_dtype, False, 0))
    state = call(functions.init, params, numbers)
    return pack(state) if packed else state


def step(
    rule: Rules, params: Any, grads: Any, state: Any, *, maximize: bool = False, seed: int = 0,
    tags: Mapping[str, Collection[str]] | None = None, donate: bool = True, backend: str | None = None, **hyper: Given,
) -> tuple[Any, Any]:  # fmt: skip
    """New parameters and a new state, in one compiled call that reuses the memory of the old ones.

    `params` and `state` are donated: afterwards they cannot be used. With `donate=False`, and always inside of another
    jit, they can. Keywords are as for `rulec.jax.transform`, and the rule's `inputs` by name; a hyper-parameter with
    which a state begins must go to `init` as well. Neither another number nor another step compiles anything again.

    On one CPU device the fused kernels of the cpu backend are called in place where they are faster than XLA's own
    code. `backend="jax"` leaves them out; with `backend="cpu"` they are used whatever the sizes, inside of another jit
    too.

    Raises TensorError, StateMismatch or HyperError in one sentence; nothing is donated then.
    """
    inputs = {name: hyper.pop(name) for name in _inputs(rule, hyper)}
    current, numbers = numbered(recipe(rule, hyper, tags), getattr(state, "count", None))
    chosen = cpu.chosen(backend, params, grads, state)
    # `either` means that all arrays are concrete: they lie on one CPU device.
    alone = is_outermost(numbers, inputs, *(() if chosen == "either" else (params, grads, state)))
    if not alone and chosen == "either":
        chosen = "jax"  # others differentiate or batch it, which they cannot a kernel
    functions = machine(current, replace(options(None, maximize, seed), backend=chosen))
    function = functions.step if donate and alone else functions.step_keeping
    new_params, new_state = call(function, params, grads, state, numbers, inputs)
    return new_params, new_state


def _inputs(rule: Rules, keywords: Mapping[str, Any]) -> list[str]:
    named = {name: part for part in rules_of(rule) for name in _names(part)}
    for name, part in named.items():
        if name not in keywords:
            raise HyperError(f"{part.name} needs {name}: give it to step as a keyword, {name}=...")
    return list(named)


@functools.lru_cache(maxsize=256)
def _names(rule: Rule) -> list[str]:
    """The names of the inputs of a rule and of the rules to which it routes leaves."""
    return [name for routed in Router(rule).rules for name in routed.inputs]
