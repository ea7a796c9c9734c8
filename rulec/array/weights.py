"""Arrays of 16 bits, with the rest of their weights beside them, as one vector of the weights in float32."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from rulec.array.engine import ArrayEngine
from rulec.array.vectors import Evaluate, Vectors
from rulec.compiler.ir import Memory
from rulec.compiler.reweigh import float_of
from rulec.compiler.scalars import evaluate_once
from rulec.compiler.weights import part_name, stored
from rulec.errors import HyperError
from rulec.language.expr.node import Op, node

#: A weight in the expressions of its parts.
_NEW = "new"


@dataclass(frozen=True)
class _Copy:
    """An array, the part beside it where there is one, and the weight of both in float32."""

    array: Any
    part: Any
    weight: Any


class WeightVectors(Vectors):
    """The weights of an engine's arrays as one vector: a change of a weight below the array's dtype is a change."""

    def __init__(self, owner: str, engine: ArrayEngine, evaluate: Evaluate) -> None:
        super().__init__(owner, engine.params, engine.arrays, evaluate)
        self._engine = engine

    def copies(self) -> list[Any]:
        """Copies of the arrays and of what is beside them."""
        return [_Copy(p.copy(), _copied(self._part(n)), self._weight(n).copy()) for n, p in self._params.items()]

    def change(self, before: Sequence[Any]) -> Any:
        """The change of the weights since these copies."""
        each = zip(self._params, before, strict=True)
        return np.concatenate([(self._weight(name) - copy.weight).reshape(-1) for name, copy in each])

    def move(self, step: float, direction: Any) -> None:
        """Adds a step along a direction to the weights."""
        start = 0
        for name, param in self._params.items():
            weight = self._weight(name)
            part = direction[start : start + param.size].reshape(param.shape)
            self._put(name, (weight + step * part).astype(weight.dtype))
            start += param.size

    def put_back(self, copies: Sequence[Any]) -> None:
        """Writes copies back: arrays, and the parts beside them."""
        for (name, param), copy in zip(self._params.items(), copies, strict=True):
            part = self._part(name)
            if part is not None and copy.part is None:  # the first step made it
                self._put(name, copy.weight)
            elif part is not None:
                part[...] = copy.part
            param[...] = copy.array

    def _name(self, name: str) -> str:
        return part_name(self._engine.weights, self._arrays.dtype(self._params[name]))

    def _part(self, name: str) -> Any:
        """The part beside an array; None where its dtype has none, and before the first step."""
        return self._engine.states(name).get(self._name(name))

    def _weight(self, name: str) -> Any:
        """The weight of an array, as a step reads it."""
        param, part = self._params[name], self._part(name)
        if part is None:
            return param.astype(self._type)
        return float_of(self._engine.weights, param.astype("float32"), part.astype("float32"))

    def _put(self, name: str, weight: Any) -> None:
        """Stores a weight as a step stores it."""
        part = self._part(name)
        if part is None:
            self._params[name][...] = weight
            return
        for store in stored(Memory(self._engine.weights), node(Op.LOAD, _NEW)):
            array = self._params[name] if store.buffer == "p" else part
            array[...] = np.asarray(evaluate_once(store.value, {}, {}, {_NEW: weight})).astype(array.dtype)


def vectors_of(owner: str, engine: ArrayEngine, evaluate: Evaluate) -> Vectors:
    """The arrays of an engine as one vector: of their weights, where they have parts beside them."""
    if engine.weights:
        return WeightVectors(owner, engine, evaluate)
    return Vectors(owner, engine.params, engine.arrays, evaluate)


def check_weights(owner: str, engine: ArrayEngine) -> None:
    """HyperError for weights that a method cannot move along a direction."""
    if engine.weights == "stochastic":
        raise HyperError(
            f"{owner} takes parts of an update, and weights='stochastic' rounds at random in whole steps alone: take "
            f"weights='split' or 'master'"
        )
    if engine.weights and engine.arrays.module != "np":
        raise HyperError(f"{owner} has weights={engine.weights!r} for NumPy's arrays alone: leave weights out")


def _copied(part: Any) -> Any:
    return None if part is None else part.copy()
