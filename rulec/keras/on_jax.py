"""The steps of a rule on Keras' backend JAX: pure, so that Keras traces them into its own training step."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import islice
from typing import Any

import jax
import jax.numpy as jnp

from rulec.compiler.routing import Router
from rulec.errors import TensorError
from rulec.functional.axes import decomposes
from rulec.functional.hyper import resolved
from rulec.functional.keyed import by_key, of_keys
from rulec.functional.plan import Options, Route, StepPlan
from rulec.functional.values import Values, leaves_of
from rulec.jax.compiled import call
from rulec.jax.first import first_values
from rulec.jax.library import LIBRARY
from rulec.jax.step import one_step
from rulec.keras.trained import Trained
from rulec.language.rule import Rule
from rulec.runtime.keyed import COUNT, COUNTS, Key, in_order


class JaxSteps:
    """Steps of `trained` variables; `hyper` has the hyper-parameters of each group without the learning rate."""

    def __init__(self, rule: Rule, trained: Sequence[Trained], hyper: Sequence[Mapping[str, float]], seed: int) -> None:
        self.rule, self.trained, self.hyper, self.options = rule, trained, hyper, Options(seed=seed)
        self._decomposes = any(map(decomposes, Router(rule).rules))
        self._plans: dict[Any, StepPlan] = {}
        self._compiled = jax.jit(self._pure, inline=True)

    def states(self, learning_rate: Any) -> dict[Key, Any]:
        """The first states, as arrays, by name and place."""
        return call(self._first, [each.variable.value for each in self.trained], learning_rate)  # type: ignore[no-any-return]

    def step(self, places: Sequence[int], grads: Sequence[Any], learning_rate: Any, states: Mapping[Key, Any]) -> None:
        """Assigns new values to the variables and to the states. TensorError where a gradient is lacking."""
        if len(places) < len(self.trained):
            lacking = next(each for place, each in enumerate(self.trained) if place not in places)
            raise TensorError(
                f"{lacking.variable.path} has no gradient, and on JAX a step takes those of all variables: set "
                f"trainable=False in its layer before compile"
            )
        ordered = dict(zip(places, grads, strict=True))
        params = [each.variable.value for each in self.trained]
        rate = getattr(learning_rate, "value", learning_rate)
        values = [variable.value for variable in states.values()]
        new_params, new = call(self._compiled, params, [ordered[i] for i in range(len(params))], values, rate)
        for each, value in zip(self.trained, new_params, strict=True):
            each.variable.assign(value)
        for key, variable in states.items():
            variable.assign(new[key])

    def _first(self, params: Sequence[Any], rate: Any) -> dict[Key, Any]:
        arrays = self._seen(params)
        plan = self._plan(arrays, arrays)
        states = self._packed(plan, first_values(plan, arrays, self._hyper(plan, rate), "float32"))
        self._keys = [*states]
        return states

    def _pure(self, params: Sequence[Any], grads: Sequence[Any], states: Sequence[Any], rate: Any) -> Any:
        arrays, gradients = self._seen(params), self._seen(grads)
        plan = self._plan(arrays, gradients)
        values = self._unpacked(plan, dict(zip(self._keys, states, strict=True)))
        results, new, _ = one_step(plan, arrays, gradients, values, self._hyper(plan, rate), {})
        seen = iter(results)
        return [each.back([*islice(seen, len(each.names))]) for each in self.trained], self._packed(plan, new)

    def _seen(self, arrays: Sequence[Any]) -> list[Any]:
        pairs = zip(self.trained, arrays, strict=True)
        parts = [part for each, array in pairs for part in each.seen(array)]
        # XLA makes the tensors in memory, and so decomposes the same bits whatever their layout.
        return jax.lax.optimization_barrier(parts) if self._decomposes else parts  # type: ignore[no-untyped-call]

    def _hyper(self, plan: StepPlan, rate: Any) -> list[Mapping[str, Any]]:
        settings, known = self.rule.settings, {"lr": rate} if "lr" in self.rule.settings else {}
        return [
            resolved(self.rule.name, settings, {**h, **known}, {**h, **known}, plan.coarsest(group), LIBRARY)
            for group, h in enumerate(self.hyper)
        ]

    def _plan(self, arrays: Sequence[Any], grads: Sequence[Any]) -> StepPlan:
        owners = [each for each in self.trained for _ in each.names]
        leaves = leaves_of([name for each in self.trained for name in each.names], arrays, grads, {})
        if leaves not in self._plans:
            settings = self.rule.settings
            static = [{k: h.get(k, s.default) for k, s in settings.items() if s.static} for h in self.hyper]
            routes = [Route(self.rule, each.group, each.tags, static[each.group]) for each in owners]  # type: ignore[arg-type]
            self._plans[leaves] = StepPlan(leaves, routes, self.options, len(self.hyper))
        return self._plans[leaves]

    def _unpacked(self, plan: StepPlan, states: Mapping[Key, Any]) -> Values:
        counts = [states[COUNT, place] for place in range(len(plan.leaves))]
        return of_keys(plan, jnp.stack(counts) if plan.own_counts else counts[0], states, LIBRARY)

    def _packed(self, plan: StepPlan, values: Values) -> dict[Key, Any]:
        counts = jnp.broadcast_to(values.count, (len(plan.leaves),))
        states = by_key(plan, values)
        states |= {(COUNT, place): count for place, count in enumerate(counts)}
        for name, level in plan.numbers.items():
            if level != "tensor":
                states[COUNTS[level], None] = jnp.full(states[name, None].shape, jnp.max(counts), jnp.int32)
        return in_order(states)
