"""Updates that are traced and found to be elementwise: each can then be done on a part of a leaf at a time."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import jax
import jax.numpy as jnp
from jax.extend.core import Literal

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
