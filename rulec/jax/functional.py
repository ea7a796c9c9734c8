"""Functional steps in JAX: a step to new parameters in one traced function with donated arguments.

Points for evaluations of the model, and estimates of the Hessian's diagonal for rules that read it, are here too.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Collection, Mapping
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp

from rulec.compiler.routing import Router
from rulec.errors import HyperError, RuleError
from rulec.functional.plan import Options, Route, StepPlan, values_of
from rulec.functional.values import Leaf
from rulec.jax import cpu
from rulec.jax.compiled import CompiledRecipe, Renamed, call, machine, machine_of, numbered
from rulec.jax.evaluations import Gradient, passed
from rulec.jax.library import is_outermost
from rulec.jax.oriented import Axes
from rulec.jax.packing import packed as pack
from rulec.jax.recipe import Given, Recipe, Rules, recipe, rules_of
from rulec.jax.state import behind_trees, delete_trees, held, is_held_packed
from rulec.jax.step import one_step
from rulec.jax.transform import options
from rulec.language.eval_point import to_evaluation
from rulec.language.rule import Rule
from rulec.language.statistics import Watch
from rulec.runtime.buckets.launch_builder import inputs_of
from rulec.runtime.evaluations import EvaluationNames
from rulec.runtime.statistics import checked_words


def init(
    rule: Rules, params: Any, *, state_dtype: Any = None, weights: str = "",
    tags: Mapping[str, Collection[str]] | None = None, axes: Axes = None, packed: bool = False, **hyper: Given,
) -> Any:  # fmt: skip
    """The state of a rule before its first step, for a tree of parameters; `step` takes it.

    `rule`, `state_dtype`, `tags`, `axes` and hyper-parameters are as for `rulec.jax.transform`. Hyper-parameters are
    needed only where a state begins with one, such as `d0` of Prodigy: without it the state begins with the default,
    whatever `step` is given. `weights` is the kind of leaves of 16 bits in memory: `split`, `split24`, `master`,
    `kahan` or `stochastic`; `step` needs it too. With `packed` the state is packed, as by `rulec.jax.packed`.
    """
    current, numbers = numbered(recipe(rule, hyper, tags, axes))
    functions = machine(current, options(state_dtype, False, 0, weights))
    state = call(functions.init, params, numbers)
    return pack(state) if packed else state


def step(
    rule: Rules, params: Any, grads: Any, state: Any, *, weights: str = "", maximize: bool = False, seed: int = 0,
    tags: Mapping[str, Collection[str]] | None = None, axes: Axes = None, donate: bool = True,
    backend: str | None = None, gradient: Gradient | None = None, watch: Watch | None = None, **hyper: Given,
) -> Any:  # fmt: skip
    """New parameters and a new state, in one compiled call that reuses the memory of the old ones.

    `params` and `state` are donated: afterwards they cannot be used. With `donate=False`, and always inside of another
    jit, they can. Keywords are as for `rulec.jax.transform`, and the rule's `inputs` by name; a hyper-parameter with
    which a state begins must go to `init` as well. Neither another number nor another step compiles anything again.
    Of a rule that evaluates the model again in a step, `gradient` is a function from parameters to gradients.

    On one CPU device the fused kernels of the cpu backend are called in place where they are faster than XLA's own
    code. `backend="jax"` leaves them out; with `backend="cpu"` they are used whatever the sizes, inside of another jit
    too.

    With `watch`, as for `rulec.jax.transform`, the statistics of the step are the third result: a dict of trees, as
    from `rulec.jax.statistics`. Parameters and state have the same bits without it.

    Raises TensorError, StateMismatch or HyperError in one sentence; nothing is donated then.
    """
    inputs = {name: hyper.pop(name) for name in _inputs(rule, hyper)}
    current, numbers = numbered(recipe(rule, hyper, tags, axes), getattr(state, "count", None))
    words = checked_words(current.title, watch)
    chosen = cpu.chosen(backend, params, grads, held(state))
    options_of = options(None, maximize, seed, weights, words)
    passes = any(_passes(part).count for part in rules_of(rule))
    if passes:
        operands = params, grads, state, numbers
        grads, inputs = passed(current, options_of, (), operands, inputs, gradient)
    # `either` means that all arrays are concrete: they lie on one CPU device.
    alone = is_outermost(numbers, inputs, *(() if chosen == "either" else (params, grads, state)))
    if not alone and chosen == "either":
        chosen = "jax"  # others differentiate or batch it, which they cannot a kernel
    functions = machine(current, replace(options_of, backend=chosen))
    function = functions.step if donate and alone else functions.step_keeping
    # The functions of passes read the trees.
    packs = chosen == "either" and not (weights or passes)
    packed_state = _packed(functions, params, grads, state) if packs else None
    if packed_state is None:
        return call(function, params, grads, state, numbers, inputs)
    new_params, new_state, *measured = call(function, params, grads, packed_state, numbers, inputs)
    if donate:
        delete_trees(state)
    return new_params, behind_trees(new_state), *measured


def routing(
    rule: Rules, params: Any, *, tags: Mapping[str, Collection[str]] | None = None, axes: Axes = None, **hyper: Given
) -> dict[str, str]:
    """Path of a leaf -> the name of its rule, for all leaves with a rule.

    `rule`, `tags`, `axes` and hyper-parameters are as for `init`.
    """
    current, _ = numbered(recipe(rule, hyper, tags, axes))
    names: dict[str, str] = call(machine(current, options(None, False, 0)).routing, params)
    return names


def _packed(functions: CompiledRecipe, params: Any, grads: Any, state: Any) -> Any:
    """A state as a step holds it where that is packed behind its trees; None where it is not."""
    return held(state) if is_held_packed(state) else call(functions.packed_state, params, grads, state)


def _inputs(rule: Rules, keywords: Mapping[str, Any]) -> list[str]:
    named = {name: part for part in rules_of(rule) for name in _names(part)}
    for name, part in named.items():
        if name not in keywords:
            raise HyperError(f"{part.name} needs {name}: give it to step as a keyword, {name}=...")
    return list(named)


@functools.lru_cache(maxsize=256)
def _names(rule: Rule) -> list[str]:
    """The names of the inputs of a rule and of the rules to which it routes leaves."""
    return [name for routed in Router(rule).rules for name in inputs_of(routed) if name not in _passes(rule).inputs]


@functools.lru_cache(maxsize=256)
def _passes(rule: Rule) -> EvaluationNames:
    """The passes of a rule and of the rules to which it routes leaves."""
    return EvaluationNames(Router(rule).rules)


def eval_params(
    rule: Rules, params: Any, state: Any, *, weights: str = "", tags: Mapping[str, Collection[str]] | None = None,
    axes: Axes = None, **hyper: Given,
) -> Any:  # fmt: skip
    """The parameters at which the model is evaluated, in the shapes and dtypes of the trained ones.

    `state` is the last result of `rulec.jax.step` or of `update` of `rulec.jax.transform`. `rule`, `weights`, `tags`,
    `axes` and hyper-parameters are as for these calls; functions of the count have their values in the last step.
    Nothing is changed or donated: training goes on with `params` and `state`.

    RuleError for a rule that is evaluated where it is trained; TensorError or StateMismatch as in a step.
    """
    count = getattr(state, "count", None)
    # The last step was given the number of those before it.
    current, numbers = numbered(recipe(rule, hyper, tags, axes), None if count is None else jnp.maximum(count, 1) - 1)
    functions = machine_of(Evaluation, current, options(None, False, 0, weights))
    return call(functions.evaluate, params, state, numbers)


class Evaluation(CompiledRecipe):
    """The functions from the trained parameters of a recipe to the parameters for evaluation."""

    def __init__(self, recipe: Recipe, options: Options, renamed: Renamed = ()) -> None:
        super().__init__(recipe, options, renamed)
        if all(rule.evaluate is None for rule in self.rules):
            raise RuleError(f"{recipe.title} is evaluated where it is trained: it has no evaluate")
        self._to_evaluation = functools.cache(to_evaluation)
        self.evaluate = jax.jit(self._evaluate, inline=True)

    def _evaluate(self, params: Any, state: Any, numbers: Any) -> Any:
        tree = self._flat(params, "the parameter")
        trained, values = self._begun(state, tree, None, False)
        plan = self._moving(trained)
        hyper = self._hyper(numbers, plan)
        evaluated, _, _ = one_step(plan, tree.arrays, tree.arrays, values_of(plan, trained, values), hyper, {})
        return tree.of(evaluated)

    def _moving(self, trained: StepPlan) -> StepPlan:
        """The plan of the one step to the evaluation point; leaves of rules without `evaluate` stay."""
        routes = [self._moved(*pair) for pair in zip(trained.leaves, trained.routes, strict=True)]
        return StepPlan(trained.leaves, routes, trained.options, trained.groups)

    def _moved(self, leaf: Leaf, route: Route | None) -> Route | None:
        if route is None:
            return None
        way: Rule | None = self._to_evaluation(Router(route.rule).choose(leaf.shape, route.tags, leaf.name))
        return None if way is None else replace(route, rule=way)


#: The kinds of random vectors.
DRAWS = ("rademacher", "normal")


def hutchinson(
    loss: Callable[[Any], Any], params: Any, key: Any, *, samples: int = 1, draws: str = "rademacher"
) -> Any:  # fmt: skip
    """Hutchinson's estimate of the diagonal of the Hessian of `loss` at `params`, a tree like theirs.

    It is the mean of z*(Hz) over `samples` random vectors z, of -1 and 1 or normal, from the PRNG `key`. `loss` is a
    function from parameters to one number. The result is an input like `p` of `step` and `update`, as `hessian=...`;
    under `lax.cond` it is computed in some steps alone.

    Raises HyperError for other options.
    """
    if draws not in DRAWS:
        raise HyperError(f"draws={draws!r} of hutchinson is none of {', '.join(DRAWS)}")
    if isinstance(samples, bool) or not isinstance(samples, int) or samples < 1:
        raise HyperError(f"samples={samples!r} of hutchinson must be a whole number from 1 on")
    leaves, structure = jax.tree.flatten(params)
    draw = jax.random.rademacher if draws == "rademacher" else jax.random.normal

    def sample(key: Any) -> Any:
        keys = jax.random.split(key, len(leaves))
        vectors = [draw(k, jnp.shape(x), jnp.result_type(x)) for k, x in zip(keys, leaves, strict=True)]
        vector = jax.tree.unflatten(structure, vectors)
        product = jax.jvp(jax.grad(loss), (params,), (vector,))[1]
        return jax.tree.map(jnp.multiply, vector, product)

    if samples == 1:
        return sample(key)
    return jax.tree.map(lambda x: jnp.mean(x, axis=0), jax.lax.map(sample, jax.random.split(key, samples)))
