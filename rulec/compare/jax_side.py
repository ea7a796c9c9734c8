"""A rule through `rulec.jax`, as one side of a comparison."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from rulec.compiler.routing import Router
from rulec.language.rule import Rule

Array = np.ndarray[Any, Any]


class JaxSide:
    """A rule of ours in JAX with float64 allowed, by the jax backend alone.

    `params` are NumPy arrays, and are copied.
    """

    name = "jax"

    def __init__(self, rule: Rule, params: Sequence[Array], hyper: Mapping[str, Any]) -> None:
        import jax

        import rulec.jax

        self.rule, self.hyper = rule, hyper
        routed = [Router(rule).choose(p.shape, ()) for p in params]
        #: The tensors that have a state, by its name.
        self.having = {n: [i for i, r in enumerate(routed) if n in r.state] for each in routed for n in each.state}
        with jax.enable_x64(True):
            self.params = [jax.numpy.array(p) for p in params]
            self.state = rulec.jax.init(rule, self.params, **hyper)

    def step(self, grads: Sequence[Array], inputs: Mapping[str, Any] | None = None) -> None:
        """One update of every tensor."""
        import jax

        import rulec.jax

        with jax.enable_x64(True):
            gradients = [jax.numpy.array(g) for g in grads]
            beside: dict[str, Any] = {
                k: [*map(jax.numpy.array, v)] if isinstance(v, list) else v for k, v in (inputs or {}).items()
            }
            self.params, self.state = rulec.jax.step(
                self.rule, self.params, gradients, self.state, backend="jax", **self.hyper, **beside
            )

    def values(self) -> list[dict[str, Array]]:
        """For each tensor its parameter as `p`, and its states by the rule's names."""
        values: list[dict[str, Array]] = [{"p": np.asarray(p)} for p in self.params]
        for name, kept in self._states().items():
            for place, i in enumerate(self.having[name]):
                values[i][name] = np.asarray(kept[i] if isinstance(kept, list) else _number(kept, place))
        return values

    def _states(self) -> dict[str, Any]:
        from rulec.jax.recipe import recipe
        from rulec.jax.state import fields_of

        rules = [routed for group in recipe(self.rule, {}, None).groups for routed in Router(group.rule).rules]
        fields = fields_of(rules, {}).every
        return {name: getattr(self.state, fields[name]) for name in self.having}


def _number(kept: Any, place: int) -> Any:
    """The number of the tensor at `place`; of a state of the group or of the model its only number."""
    numbers = np.asarray(kept).reshape(-1)
    return numbers[place if numbers.size > 1 else 0]
