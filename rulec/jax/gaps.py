"""The work between the stages of a step, where XLA sees all of it at once."""

from __future__ import annotations

from collections.abc import Callable, Generator
from typing import Any

import jax.numpy as jnp

from rulec.jax.guards import where_wanted
from rulec.language.node import Node
from rulec.pure.gaps import Gaps
from rulec.pure.guards import Guard
from rulec.runtime.joins import Join


class GuardedGaps(Gaps):
    """Computes matrix functions matrix by matrix, for XLA would shard all matrices of a stack alike.

    A matrix function with a guard is computed only where the guard's condition holds.
    """

    def _by_shape(self, value: Node, function: Callable[..., Any]) -> list[Any]:
        return self._for_each(value, function)

    def _value(self, value: Node) -> Generator[Join, Any, Any]:
        guard = self.around.bucket.guards.get(value)  # type: ignore[attr-defined]
        if guard is None or guard.condition not in self.values or not self.is_number(guard.condition):
            return (yield from super()._value(value))
        function = self._matrix_function(value)
        return [self._guarded(value, guard, function, i) for i in range(self.count)]

    def _guarded(self, value: Node, guard: Guard, function: Callable[..., Any], i: int) -> Any:
        holds = jnp.asarray(self.library.at(self.values[guard.condition], i)) != 0
        result = where_wanted(holds == guard.truth, function, self._operands(value, i))
        return self.rounded(value, result)
