"""The update of an evolution strategy in JAX: the gradient estimate from the fitness of members, and the rule's step.

Both are one pass over leaves with independent noise and an elementwise rule. Updates are traced to find whether they
are elementwise: such an update can be done on a part of a leaf at a time.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax.extend.core import Literal

from rulec.es.families import is_plain
from rulec.es.perturbation import Perturbation
from rulec.jax.es.draws import CHUNK
from rulec.jax.es.state import Layer, Shaping, State, draws, leaves, noise_of, weights


def update(
    params: Any, opt_state: Any, tx: Any, state: State, perturbation: Perturbation, fitness: Any,
    shaping: Shaping = None, *, fused: bool = True, **extra: Any,
) -> tuple[Any, Any, State, Any]:  # fmt: skip
    """New parameters, the new states of `tx` and of the strategy, and whether there was an estimate.

    `tx` is a transformation of `rulec.jax` or optax, `opt_state` its state; `fitness` and `shaping` are as for
    `estimate`. If the last result is False, parameters and the state of `tx` are as they were. Further keywords are
    for `tx`.

    If `tx` is elementwise, leaves with independent noise are updated part by part, and no gradient of them exists.
    Under jit their arrays must be donated for that to be in place. `fused=False` is for sharded leaves: gradients are
    made first.
    """
    weighed, ok = weights(fitness, perturbation, shaping, state.sigma)
    pairs = leaves(params, state, perturbation)
    whole = _Whole(tx, jax.tree.structure(params), jax.tree.structure((params, opt_state, ok, extra)))
    rest = jax.tree.leaves((params, opt_state, ok, extra))
    parts = fused and [_is_large(layer, perturbation) for _, layer in pairs]
    apart = None
    if parts and any(parts):
        owners = [*range(len(pairs)), *_owners(params, (params, opt_state, ok, extra))]
        apart = elementwise(whole, [*(leaf for leaf, _ in pairs), *map(jnp.asarray, rest)], owners)
    grads = [
        None if apart and parts and parts[number] else gradient(leaf, layer, state, perturbation, weighed)
        for number, (leaf, layer) in enumerate(pairs)
    ]
    estimate = _Estimate(state, perturbation, weighed)
    results = _in_parts(apart, [*grads, *rest], estimate) if apart else whole(*grads, *rest)
    params, opt_state = jax.tree.unflatten(jax.tree.structure((params, opt_state)), results)
    return params, opt_state, state.next, ok


@dataclass(frozen=True)
class _Whole:
    """A step as a function of flat arrays: gradients, and then the leaves of a tree of structure `rest`."""

    tx: Any
    params: Any
    rest: Any

    def __call__(self, *arrays: Any) -> list[Any]:
        """New parameters and the state of `tx`, or the old ones, flat."""
        count = self.params.num_leaves
        grads = jax.tree.unflatten(self.params, arrays[:count])
        params, opt_state, ok, extra = jax.tree.unflatten(self.rest, arrays[count:])
        updates, after = optax.with_extra_args_support(self.tx).update(grads, opt_state, params, **extra)
        new = optax.apply_updates(params, updates), after
        return jax.tree.leaves(jax.tree.map(lambda now, before: jnp.where(ok, now, before), new, (params, opt_state)))


@dataclass(frozen=True)
class _Estimate:
    """The arguments of the estimate of gradients."""

    state: State
    perturbation: Perturbation
    weighed: Any

    def part(self, layer: Layer, begin: Any, count: int) -> Any:
        """A part of a leaf's gradient."""
        numbers = draws(self.perturbation, self.state, layer)
        return numbers.part(self.weighed, begin, count).astype(layer.dtype)


def _is_large(layer: Layer | None, perturbation: Perturbation) -> bool:
    """Whether a leaf has noise of each element's own, and more than is made at a time."""
    return layer is not None and math.prod(layer.shape) > CHUNK and is_plain(perturbation, layer.shape)


def _owners(params: Any, tree: Any) -> list[int | None]:
    """The parameter of each leaf of a tree: of the leaf's shape, and with a path that the leaf's path ends with."""
    shapes = {path: (n, leaf.shape) for n, (path, leaf) in enumerate(jax.tree_util.tree_leaves_with_path(params))}

    def owner(path: tuple[Any, ...], leaf: Any) -> int | None:
        ends = (shapes.get(path[start:], (None, None)) for start in range(len(path) + 1))
        return next((number for number, shape in ends if shape == jnp.shape(leaf)), None)

    return [owner(path, leaf) for path, leaf in jax.tree_util.tree_leaves_with_path(tree)]


def _in_parts(apart: Elementwise, operands: Sequence[Any], estimate: _Estimate) -> list[Any]:
    """The results of a step in which leaves are updated one by one, leaves without gradients part by part."""
    shared = apart.shared(operands)
    results: dict[int, Any] = {}
    for owner, layer in enumerate(estimate.state.layers):
        arrays = {place: operands[place] for place in apart.places(owner)}
        if layer is not None and arrays.pop(owner) is None:
            results |= _large(apart, owner, arrays, shared, layer, estimate)
        else:
            results |= apart.of_owner(owner, arrays | {owner: operands[owner]}, shared)
    return [results[place] if place in results else apart.result(place, shared) for place in range(len(apart.results))]


def _large(
    apart: Elementwise, owner: int, arrays: dict[int, Any], shared: Any, layer: Layer, estimate: _Estimate
) -> dict[int, Any]:
    """A leaf's results, made part by part in the place of their operands.

    A part is written in the turn after its own: where it is made and written at once, XLA copies the arrays.
    """
    before = len(estimate.state.layers)  # operands are gradients first, and then as results are

    def fresh(flat: dict[int, Any], begin: Any, count: int) -> dict[int, Any]:
        parts = {place: jax.lax.dynamic_slice(array, (begin,), (count,)) for place, array in flat.items()}
        parts[owner] = estimate.part(layer, begin, count)
        return {before + place: part for place, part in apart.of_owner(owner, parts, shared).items()}

    def written(flat: dict[int, Any], parts: dict[int, Any], begin: Any) -> dict[int, Any]:
        return flat | {place: jax.lax.dynamic_update_slice(flat[place], parts[place], (begin,)) for place in parts}

    def turn(number: Any, turned: tuple[Any, Any]) -> tuple[Any, Any]:
        flat = written(*turned, (number - 1) * CHUNK)
        return flat, fresh(flat, number * CHUNK, CHUNK)

    flat = {place: array.reshape(-1) for place, array in arrays.items()}
    whole, rest = divmod(math.prod(layer.shape), CHUNK)
    flat, parts = jax.lax.fori_loop(1, whole, turn, (flat, fresh(flat, 0, CHUNK)))
    flat = written(flat, parts, (whole - 1) * CHUNK)
    if rest:
        flat = written(flat, fresh(flat, whole * CHUNK, rest), whole * CHUNK)
    results = (place for place, value in enumerate(apart.results) if getattr(value, "owner", None) == owner)
    return {place: flat[before + place].reshape(layer.shape) for place in results}


def estimate(
    params: Any, state: State, perturbation: Perturbation, fitness: Any, shaping: Shaping = None
) -> tuple[Any, Any]:
    """The gradient of minus the fitness, a tree like the parameters, and whether there is one.

    `fitness` has one number for each member, positive signs first, or for each row of `member_batch`; the more the
    better. Without `shaping` (`centered_rank`, `zscore`, `ars_top` or a function of an array (signs, directions)) the
    mean of the estimate is the gradient of the smoothed fitness. Directions with a member whose fitness is not finite
    count for nothing; where too few are left the gradient is zero and the second result False. TensorError for fitness
    of another length.
    """
    weighed, ok = weights(fitness, perturbation, shaping, state.sigma)
    gradients = [
        gradient(leaf, layer, state, perturbation, weighed) for leaf, layer in leaves(params, state, perturbation)
    ]
    return jax.tree.unflatten(jax.tree.structure(params), gradients), ok


def gradient(leaf: Any, layer: Layer | None, state: State, perturbation: Perturbation, weighed: Any) -> Any:
    """The gradient of one leaf from the weights of directions; zero for one that is not perturbed."""
    if layer is None:
        return jnp.zeros_like(leaf)
    noise = noise_of(perturbation, state, layer)
    return noise.estimate(weighed, leaf).astype(leaf.dtype)


#: Primitives of which every element of the result follows from the same element of each operand.
_ELEMENTWISE = frozenset({
    "abs", "add", "add_any", "and", "asinh", "atan", "atan2", "cbrt", "ceil", "clamp", "convert_element_type", "copy",
    "cos", "cosh", "div", "eq", "erf", "exp", "exp2", "expm1", "floor", "ge", "gt", "integer_pow", "is_finite", "le",
    "log", "log1p", "logistic", "lt", "max", "min", "mul", "ne", "neg", "nextafter", "not", "or", "pow",
    "reduce_precision", "rem", "round", "rsqrt", "select_n", "sign", "sin", "sinh", "sqrt", "square", "sub", "tan",
    "tanh", "xor",
})  # fmt: skip

#: Primitives that call what they have as a parameter.
_CALLS = frozenset(
    {"jit", "pjit", "closed_call", "core_call", "checkpoint", "remat", "custom_jvp_call", "custom_vjp_call"}
)


class _Mixed(Exception):
    """Something is not elementwise."""


@dataclass(eq=False)
class _Value:
    """A value of a traced function. `owner` is the leaf that it has an element for each of; None where leaves share it.

    `number` is the element of a shared array of equal ones.
    """

    shape: tuple[int, ...]
    owner: int | None = None
    number: Any = None


@dataclass(frozen=True)
class _Step:
    primitive: Any
    operands: list[Any]
    results: list[_Value]
    parameters: dict[str, Any]


@dataclass
class Elementwise:
    """A traced function of flat operands, in which each owned result follows from the operands of its owner alone."""

    operands: list[_Value]
    results: list[Any] = field(default_factory=list)
    _steps: list[_Step] = field(default_factory=list)

    def shared(self, operands: Sequence[Any]) -> dict[_Value, Any]:
        """The values that have no owner, from all operands."""
        known = {value: array for value, array in zip(self.operands, operands, strict=True) if value.owner is None}
        # Numbers may be wider than JAX's user has it.
        with jax.enable_x64(True):
            return self._run(known, None)

    def of_owner(self, owner: int, operands: Mapping[int, Any], shared: Mapping[_Value, Any]) -> dict[int, Any]:
        """An owner's results by their place, from its operands by theirs: of its shape, or parts of any one shape."""
        known = {**shared, **{self.operands[place]: array for place, array in operands.items()}}
        shape = next(iter(operands.values())).shape
        values = self._run(known, owner, shape)
        return {
            place: values[value]
            for place, value in enumerate(self.results)
            if isinstance(value, _Value) and value.owner == owner
        }

    def places(self, owner: int) -> list[int]:
        """The places of an owner's operands."""
        return [place for place, value in enumerate(self.operands) if value.owner == owner]

    def result(self, place: int, shared: Mapping[_Value, Any]) -> Any:
        """A result that no leaf owns."""
        value = self.results[place]
        return shared[value] if isinstance(value, _Value) else value

    def _run(self, known: dict[_Value, Any], owner: int | None, shape: tuple[int, ...] = ()) -> dict[_Value, Any]:
        def value_of(operand: Any) -> Any:
            if not isinstance(operand, _Value):
                return operand
            if owner is not None and operand.number is not None:
                return jnp.broadcast_to(value_of(operand.number), shape)
            return known[operand]

        for step in self._steps:
            if step.results[0].owner == owner:
                result = step.primitive.bind(*map(value_of, step.operands), **step.parameters)
                results = result if step.primitive.multiple_results else [result]
                known.update(zip(step.results, results, strict=True))
        return known

    def _walk(self, jaxpr: Any, constants: Sequence[Any], operands: Sequence[Any]) -> list[Any]:
        """Adds the steps of a jaxpr, with the steps of the jaxprs that it calls; raises _Mixed."""
        known = dict(zip([*jaxpr.constvars, *jaxpr.invars], [*constants, *operands], strict=True))

        def value_of(atom: Any) -> Any:
            return atom.val if isinstance(atom, Literal) else known[atom]

        for equation in jaxpr.eqns:
            inputs = [value_of(atom) for atom in equation.invars]
            inner = equation.params.get("jaxpr", equation.params.get("call_jaxpr"))
            if equation.primitive.name in _CALLS:
                values = self._walk(getattr(inner, "jaxpr", inner), getattr(inner, "consts", ()), inputs)
            else:
                values = self._added(equation, inputs)
            known.update(zip(equation.outvars, values, strict=True))
        return [value_of(atom) for atom in jaxpr.outvars]

    def _added(self, equation: Any, operands: list[Any]) -> list[_Value]:
        owners = {value.owner for value in operands if isinstance(value, _Value)} - {None}
        results = [_Value(tuple(variable.aval.shape)) for variable in equation.outvars]
        if owners:
            _check(equation.primitive.name, owners, operands, results)
            for value in results:
                value.owner = next(iter(owners))
        elif equation.primitive.name == "broadcast_in_dim" and _shape(operands[0]) == ():
            results[0].number = operands[0]
        parameters = equation.primitive.get_bind_params(equation.params)
        self._steps.append(_Step(equation.primitive, operands, results, parameters))
        return results


def _shape(operand: Any) -> tuple[int, ...]:
    return tuple(jnp.shape(operand)) if not isinstance(operand, _Value) else operand.shape


def _check(name: str, owners: set[Any], operands: Sequence[Any], results: Sequence[_Value]) -> None:
    """Raises _Mixed where an element of an owner meets anything but itself and numbers."""
    if name not in _ELEMENTWISE or len(owners) > 1:
        raise _Mixed
    shape = next(value.shape for value in operands if isinstance(value, _Value) and value.owner is not None)
    for value in operands:
        number = _shape(value) == () or (isinstance(value, _Value) and value.number is not None)
        if not number and not (isinstance(value, _Value) and value.owner is not None and value.shape == shape):
            raise _Mixed
    if any(value.shape != shape for value in results):
        raise _Mixed


def elementwise(
    function: Callable[..., Any], operands: Sequence[Any], owners: Sequence[int | None]
) -> Elementwise | None:
    """The steps of a function of flat operands and results; None where it is not elementwise in owned operands."""
    jaxpr = jax.make_jaxpr(function)(*operands)
    update = Elementwise([_Value(tuple(x.shape), owner) for x, owner in zip(operands, owners, strict=True)])
    try:
        update.results = update._walk(jaxpr.jaxpr, jaxpr.consts, update.operands)
    except _Mixed:
        return None
    return update
