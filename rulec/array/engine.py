"""The engine of an optimizer of plain arrays, which have names."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from rulec.array.arrays import NumpyArrays
from rulec.array.kinds import arrays_for
from rulec.array.turned import Turned
from rulec.backend.protocol import Backend
from rulec.language.rule import Rule
from rulec.runtime.engine import Engine
from rulec.runtime.rows import Numbers


class ArrayEngine(Engine):
    """An engine over `params`, arrays by name, that have no states yet; `tags` are their words, `ids` the engine's."""

    arrays: NumpyArrays

    def __init__(
        self, rule: Rule, params: dict[str, Any], tags: dict[str, frozenset[str]], backend: str | Backend | None,
        state_dtype: Mapping[str, str] | None, maximize: bool, seed: int,
    ) -> None:  # fmt: skip
        arrays = arrays_for(params)
        super().__init__(rule, arrays, backend, state_dtype, maximize, seed)
        self.params, self.tags = params, tags
        for name, array in params.items():
            arrays.check_parameter(array, name)
        arrays.claim([*params.values()], [f"parameter {name}" for name in params])
        self.ids = {n: self.add(array, 0, n, tags.get(n, frozenset())) for n, array in params.items()}
        self._turned: Turned | None = None

    def copies_for(self, table: Numbers) -> Turned:
        """Copies in C order of the arrays whose rules need them, made when they are first asked for."""
        if self._turned is None:
            self._turned = Turned(self, self.ids, table)
        return self._turned

    def states(self, name: str) -> dict[str, Any]:
        """The states of one array, as `state` has them."""
        return self.state(self.ids[name])
