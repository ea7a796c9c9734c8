"""Rules as optax's gradient transformations."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

import optax

from rulec.errors import HyperError
from rulec.jax.machine import Settings, call, is_wide, machine
from rulec.jax.plan import Options
from rulec.jax.recipe import Given, Recipe, Rules, recipe


def transform(
    rule: Rules, lr: Given = None, *, state_dtype: Any = None, maximize: bool = False, seed: int = 0,
    tags: Mapping[str, Collection[str]] | None = None, **hyper: Given,
) -> optax.GradientTransformationExtraArgs:  # fmt: skip
    """A rule as a transformation of optax: `init(params)` and `update(grads, state, params)`.

    `rule` is a Rule, a library name or a path, or a `rulec.partition` of several; keywords are then for each rule that
    has them and does not say them itself. Hyper-parameters are numbers, 0-d arrays, traced or not, or functions of the
    number of steps before this one; `lr` is one of them. Leaves are float32, bfloat16, float16, or float64 where
    JAX is allowed it. `state_dtype` is the storage dtype of states, of all or by name; by default that of each
    parameter. `tags` gives leaves by their path, as in `{"embed/table": {"embedding"}}`, the words that a rule may ask
    for with `tagged(...)`; `seed` is that of the rule's random numbers. What a rule names under `inputs` is given to
    `update` as a keyword.

    Updates are the change of each parameter, in its dtype, for `optax.apply_updates`. Raises HyperError here, and
    TensorError or StateMismatch when it is traced.
    """
    given = hyper if lr is None else {"lr": lr, **hyper}
    return of_recipe(recipe(rule, given, tags), options(state_dtype, maximize, seed))


def options(state_dtype: Any, maximize: bool, seed: int) -> Options:
    """Options from users' keywords."""
    named = state_dtype if isinstance(state_dtype, Mapping) else {} if state_dtype is None else {"": state_dtype}
    return Options(False, maximize, seed, tuple(sorted((name, _dtype(given)) for name, given in named.items())))


def _dtype(given: Any) -> str:
    import jax.numpy as jnp

    from rulec.backend.layout import ITEM_SIZE

    try:
        found = str(jnp.dtype(given))
    except TypeError:
        found = str(given)
    if found not in ITEM_SIZE:
        raise HyperError(f"state_dtype={given!r} is none of {', '.join(ITEM_SIZE)}")
    return found


def of_recipe(
    recipe: Recipe, options: Options, renamed: Mapping[str, str] | None = None
) -> optax.GradientTransformationExtraArgs:
    """The transformation of a recipe; `renamed` gives fields of its state other names than the rule's."""
    names = tuple(sorted((renamed or {}).items()))

    def made() -> Any:
        return machine(recipe, Settings(options, names, is_wide()))

    def numbers() -> list[dict[str, Any]]:
        return [group.numbers() for group in recipe.groups]

    def init(params: Any) -> Any:
        return call(made().init, params, numbers())

    def update(grads: Any, state: Any, params: Any = None, **extra: Any) -> Any:
        found = made()
        inputs = {name: _input(found, name, extra) for name in found.inputs}
        return call(found.update, grads, state, params, numbers(), inputs)

    return optax.GradientTransformationExtraArgs(init, update)


def _input(found: Any, name: str, extra: Mapping[str, Any]) -> Any:
    if name not in extra:
        raise HyperError(f"{found.recipe.title} needs {name}: call update(grads, state, params, {name}=...)")
    return extra[name]
