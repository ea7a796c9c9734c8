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
    """What a traced function computes. `owner` is the leaf whose elements it has; None for what all leaves share.

    `number` is what a shared array has in every element.
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
        known = {value: given for value, given in zip(self.operands, operands, strict=True) if value.owner is None}
        # Numbers may be wider than JAX's user has it.
        with jax.enable_x64(True):
            return self._run(known, None)

    def of_owner(self, owner: int, operands: Mapping[int, Any], shared: Mapping[_Value, Any]) -> dict[int, Any]:
        """An owner's results by their place, from its operands by theirs: of its shape, or parts of any one shape."""
        known = {**shared, **{self.operands[place]: given for place, given in operands.items()}}
        shape = next(iter(operands.values())).shape
        found = self._run(known, owner, shape)
        return {
            place: found[value]
            for place, value in enumerate(self.results)
            if isinstance(value, _Value) and value.owner == owner
        }

    def places(self, owner: int) -> list[int]:
        """Which operands are an owner's."""
        return [place for place, value in enumerate(self.operands) if value.owner == owner]

    def result(self, place: int, shared: Mapping[_Value, Any]) -> Any:
        """A result that no leaf owns."""
        value = self.results[place]
        return shared[value] if isinstance(value, _Value) else value

    def _run(self, known: dict[_Value, Any], owner: int | None, shape: tuple[int, ...] = ()) -> dict[_Value, Any]:
        def given(operand: Any) -> Any:
            if not isinstance(operand, _Value):
                return operand
            if owner is not None and operand.number is not None:
                return jnp.broadcast_to(given(operand.number), shape)
            return known[operand]

        for step in self._steps:
            if step.results[0].owner == owner:
                found = step.primitive.bind(*map(given, step.operands), **step.parameters)
                results = found if step.primitive.multiple_results else [found]
                known.update(zip(step.results, results, strict=True))
        return known

    def _walk(self, jaxpr: Any, constants: Sequence[Any], operands: Sequence[Any]) -> list[Any]:
        """Adds the steps of a jaxpr, those that it calls in the place of calls; raises _Mixed."""
        known = dict(zip([*jaxpr.constvars, *jaxpr.invars], [*constants, *operands], strict=True))

        def given(atom: Any) -> Any:
            return atom.val if isinstance(atom, Literal) else known[atom]

        for equation in jaxpr.eqns:
            inputs = [given(atom) for atom in equation.invars]
            inner = equation.params.get("jaxpr", equation.params.get("call_jaxpr"))
            if equation.primitive.name in _CALLS:
                found = self._walk(getattr(inner, "jaxpr", inner), getattr(inner, "consts", ()), inputs)
            else:
                found = self._added(equation, inputs)
            known.update(zip(equation.outvars, found, strict=True))
        return [given(atom) for atom in jaxpr.outvars]

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
    """Raises _Mixed where what is done to an owner's elements is not done to each of them alone."""
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
    """A function of flat operands and results, taken apart; None where it is not elementwise in what is owned."""
    jaxpr = jax.make_jaxpr(function)(*operands)
    found = Elementwise([_Value(tuple(x.shape), owner) for x, owner in zip(operands, owners, strict=True)])
    try:
        found.results = found._walk(jaxpr.jaxpr, jaxpr.consts, found.operands)
    except _Mixed:
        return None
    return found
