"""A rule of ours through the runtime, on a backend's arrays."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from rulec.backend import registry
from rulec.errors import BackendUnsupported
from rulec.language.rule import Rule
from rulec.runtime.engine import Engine, default_hyper
from rulec.testing.kinds import kind_of
from rulec.testing.whole import runtime_arrays

Array = np.ndarray[Any, Any]


class EngineSide:
    """A rule of ours on the arrays of its backend's library.

    `params` are NumPy arrays, and are copied. BackendUnsupported where the runtime does not know the backend's arrays.
    """

    def __init__(self, rule: Rule, params: Sequence[Array], hyper: Mapping[str, float], backend: str) -> None:
        self.name = backend
        self.rule = rule
        chosen = registry.usable(backend)
        self.kind = kind_of(chosen)
        arrays = runtime_arrays(self.kind)
        if arrays is None:
            raise BackendUnsupported(backend, "a comparison", rule.name)
        self.engine = Engine(rule, arrays, chosen)
        self.params = [self.kind.make(p) for p in params]
        self.ids = tuple(self.engine.add(p, 0, f"tensor {i}") for i, p in enumerate(self.params))
        self.table = self.engine.hyper_table([default_hyper(rule, hyper, params[0].dtype.name)])

    def step(self, grads: Sequence[Array], inputs: Mapping[str, Any] | None = None) -> None:
        """One update of every tensor."""
        arguments = {k: [*map(self.kind.make, v)] if isinstance(v, list) else v for k, v in (inputs or {}).items()}
        self.engine.step(self.ids, [*map(self.kind.make, grads)], self.table, arguments)

    def values(self) -> list[dict[str, Array]]:
        """For each tensor its parameter as `p`, and its states by the rule's names."""
        values = []
        for param, i in zip(self.params, self.ids, strict=True):
            states = {k: v for k, v in self.engine.state(i).items() if k != "step"}
            values.append({"p": self.kind.read(param), **{k: self._read(v) for k, v in states.items()}})
        return values

    def _read(self, value: Any) -> Array:
        return np.array(value) if isinstance(value, np.ndarray | np.generic) else self.kind.read(value)
