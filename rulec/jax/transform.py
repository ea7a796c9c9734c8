"""Rules as optax's gradient transformations.

Their signature lets optax.inject_hyperparams see the hyper-parameters: the rule's, by name, and nothing else.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, ParamSpec, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
import optax

from rulec.compiler.layout import PLAIN_STORAGE
from rulec.errors import HyperError
from rulec.formats import NAMES, parse
from rulec.functional.plan import Options
from rulec.jax.compiled import CompiledRecipe, call, check_watch, is_wide, machine, numbered
from rulec.jax.evaluations import passed
from rulec.jax.library import is_traced
from rulec.jax.oriented import Axes
from rulec.jax.recipe import Given, Group, Recipe, Rules, recipe, rules_of
from rulec.jax.state import Shown
from rulec.language.hyper import checked_seed
from rulec.language.statistics import Watch
from rulec.runtime.statistics import Words, checked_words
from rulec.runtime.storage.options import Storage, no_state_dtype

_Given = ParamSpec("_Given")
_Made = TypeVar("_Made")


@dataclass(frozen=True, eq=False)
class _Fixed:
    """An argument that is no hyper-parameter, although it can be called, or is a number."""

    value: Any


class _Signature(inspect.Signature):
    """A signature that binds each gathered keyword (`**hyper`) as a parameter."""

    def bind(self, *args: Any, **keywords: Any) -> inspect.BoundArguments:
        """The arguments with defaults; all but hyper-parameters are wrapped in `_Fixed`."""
        gathered = super().bind(*args, **keywords)
        last = next(p.name for p in self.parameters.values() if p.kind is inspect.Parameter.VAR_KEYWORD)
        hyper = gathered.arguments.get(last, {})
        parameters = [p for p in self.parameters.values() if p.name != last]
        parameters += [inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY) for name in hyper]
        bound = inspect.Signature(parameters).bind(*args, **keywords)
        bound.apply_defaults()
        numbers = {"lr", *hyper} - {*_static(_bare(bound.arguments["rule"]))}
        for name, value in bound.arguments.items():
            if name not in numbers:
                bound.arguments[name] = _Fixed(_bare(value))
        return bound


def _static(rule: Rules) -> Iterator[str]:
    """The names of the static hyper-parameters: other values of these compile anew."""
    for part in rules_of(rule):
        yield from (name for name, setting in Group(part, {}).settings.items() if setting.static)


def _bare(value: Any) -> Any:
    return value.value if isinstance(value, _Fixed) else value


def injectable(function: Callable[_Given, _Made]) -> Callable[_Given, _Made]:
    """The function with a signature by which optax injects its hyper-parameters: `lr` and the gathered keywords.

    Its first parameter must be `rule`.
    """

    @functools.wraps(function)
    def called(*args: _Given.args, **keywords: _Given.kwargs) -> _Made:
        bare: dict[str, Any] = {name: _bare(value) for name, value in keywords.items()}
        return function(*map(_bare, args), **bare)

    called.__signature__ = _Signature([*inspect.signature(function).parameters.values()])  # type: ignore[attr-defined]
    return called


@injectable
def transform(
    rule: Rules, lr: Given = None, *, state_dtype: Any = None, weights: str = "", maximize: bool = False, seed: int = 0,
    tags: Mapping[str, Collection[str]] | None = None, axes: Axes = None, watch: Watch | None = None, **hyper: Given,
) -> optax.GradientTransformationExtraArgs:  # fmt: skip
    """A rule as a transformation of optax: `init(params)` and `update(grads, state, params)`.

    `rule` is a Rule, a library name or a path, or a `rulec.partition` of several; a keyword is then for each rule with
    this hyper-parameter, unless its part gives it. Hyper-parameters are numbers, 0-d arrays, traced or not, or
    functions of the number of steps before this one; `lr` is one of them. Leaves are float32, bfloat16, float16, or
    float64 where JAX is allowed it. `state_dtype` is the storage dtype of states, of all or by name, by default each
    parameter's; or one of `rulec.formats`, as in `{"m": "int8", "v": "dynamic8"}`. In the state of a leaf of 4096
    elements or more then stands `codes` (int8 or uint8) and `scales` (float32) with their `format`; a format for all is
    for the states that it is proved safe for. A state in `bfloat16_sr` is bfloat16, as `values`, and rounded at random.
    `tags` is leaf path -> words, as in `{"embed/table": {"embedding"}}`, for rules that ask `tagged(...)`; `seed` is
    for the rule's random numbers and for rounding. `update` takes the rule's `inputs` as keywords, and for a rule that
    evaluates the model again in a step `gradient`, a function from parameters to gradients.

    Updates are the change of each parameter, in its dtype, for `optax.apply_updates`. `weights` is the kind of leaves
    of 16 bits in memory, as for `rulec.jax.init`; their updates are float32, and the transformation must be the last
    of a chain: the state has the digits that the parameter lacks after just this update.

    `watch` are the statistics of each update: `"norms"`, names that the rule declares, or expressions by name, as in
    `{"ratio": "norm(update)/norm(p)"}`. The state has them in one more field, which `rulec.jax.statistics` reads. A
    state without the field goes on with `watch`, and a state with the field without.

    Raises HyperError or RuleError here, and TensorError or StateMismatch when it is traced.
    """
    hyper = hyper if lr is None else {"lr": lr, **hyper}
    current = recipe(rule, hyper, tags, axes)
    words = checked_words(current.title, watch)
    check_watch(current, words)
    return of_recipe(current, options(state_dtype, maximize, seed, weights, words))


def options(state_dtype: Any, maximize: bool, seed: int, weights: str = "", watch: Words = ()) -> Options:
    """Options from users' keywords; HyperError for a wrong kind or dtype."""
    for name, value, wrong in (
        ("seed", seed, isinstance(seed, jax.Array)),
        ("maximize", maximize, not isinstance(maximize, bool | np.bool_)),
    ):
        if wrong:
            raise HyperError(
                f"{name} decides what is compiled, so it must be Python's own, and is "
                f"{'traced here' if is_traced(value) else repr(value)}: under optax.inject_hyperparams name it among "
                f"the static_args"
            )
    named = state_dtype if isinstance(state_dtype, Mapping) else {} if state_dtype is None else {"": state_dtype}
    dtypes = tuple(sorted((name, _dtype(value)) for name, value in named.items()))
    Storage(dict(dtypes), weights).check_weights(())
    return Options(False, maximize, checked_seed(seed), dtypes, weights, watch=watch)


def _dtype(value: Any) -> str:
    try:
        dtype = str(jnp.dtype(value))
    except TypeError:
        dtype = str(value)
    if dtype not in PLAIN_STORAGE:
        if dtype.partition("/")[0] not in NAMES:
            raise HyperError(no_state_dtype(value))
        parse(dtype)
    if dtype == "float64" and not is_wide():
        raise HyperError(
            "state_dtype='float64' needs 64-bit JAX: jax.config.update('jax_enable_x64', True) before arrays are made"
        )
    return dtype


def of_recipe(
    recipe: Recipe, options: Options, renamed: Mapping[str, Shown] | None = None
) -> optax.GradientTransformationExtraArgs:
    """The transformation of a recipe; `renamed` is state of the rule -> field, where the field is shown otherwise."""
    names = tuple(sorted((renamed or {}).items(), key=lambda pair: pair[0]))

    def functions_of(recipe: Recipe) -> CompiledRecipe:
        return machine(recipe, options, names)

    def init(params: Any) -> Any:
        current, numbers = numbered(recipe)
        return _first(functions_of(current).init, params, numbers)

    def update(grads: Any, state: Any, params: Any = None, **extra: Any) -> Any:
        current, numbers = numbered(recipe, getattr(state, "count", None))
        functions = functions_of(current)
        passes = functions.passes
        inputs = {name: _input(functions, name, extra) for name in functions.inputs if name not in passes.inputs}
        if passes.count:
            operands = params, grads, state, numbers
            grads, inputs = passed(current, options, names, operands, inputs, extra.get("gradient"))
        return call(functions.update, grads, state, params, numbers, inputs)

    return optax.GradientTransformationExtraArgs(init, update)


def _first(init: Callable[..., Any], params: Any, numbers: Any) -> Any:
    """The first state; parameters may be `jax.ShapeDtypeStruct`s."""
    if not any(isinstance(leaf, jax.ShapeDtypeStruct) for leaf in jax.tree.leaves(params)):
        return call(init, params, numbers)

    def of_shapes() -> Any:
        return init(jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, leaf.dtype), params), numbers)

    # Compiled as a whole, so that these zeros need no memory where no state begins with the parameter.
    return call(jax.jit(of_shapes))


def _input(functions: CompiledRecipe, name: str, extra: Mapping[str, Any]) -> Any:
    if name not in extra:
        raise HyperError(f"{functions.recipe.title} needs {name}: call update(grads, state, params, {name}=...)")
    return extra[name]
