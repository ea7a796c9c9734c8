"""The steps of a rule on Keras' backend torch: in place, by the fused kernels of the device."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import increment_version

from rulec.keras.trained import Trained
from rulec.language.rule import Rule
from rulec.runtime.engine import EPS, Engine, default_hyper
from rulec.runtime.keyed import Key
from rulec.runtime.layers import layers_of
from rulec.torch.tensors.tensors import TorchArrays, dtype_name, is_dense


class TorchSteps:
    """Steps of `trained` variables; `hyper` has the hyper-parameters of each group without the learning rate.

    If kernels cannot step on a variable in its memory, they step on contiguous copies, and these are written back.
    """

    def __init__(self, rule: Rule, trained: Sequence[Trained], hyper: Sequence[Mapping[str, float]], seed: int) -> None:
        self.trained, self._rule, self._hyper = trained, rule, hyper
        self._engine = Engine(rule, TorchArrays(), seed=seed)
        names = [name for each in trained for name in each.names]
        tags = [each.tags for each in trained for _ in each.names]
        self._parts = [each.seen(each.variable._value.detach()) for each in trained]
        places = iter(range(len(names)))
        self._ids = [[next(places) for _ in parts] for parts in self._parts]
        owners = (pair for each, parts in zip(trained, self._parts, strict=True) for pair in ((each, p) for p in parts))
        layers = layers_of(names, tags)
        for place, (each, part) in enumerate(owners):
            self._engine.add(part, each.group, names[place], tags[place], layer=layers[place])
        self._addresses = [each.variable._value.data_ptr() for each in trained]
        self._dtype = max((dtype_name(each.variable._value.dtype) for each in trained), key=EPS.__getitem__)
        self._copied: set[int] = set()
        self._rate: tuple[Any, ...] = ()
        self._table: Any = None

    def states(self, learning_rate: Any) -> dict[Key, Tensor]:
        """The first states, by name and place: the memory that steps write."""
        engine, table = self._engine, self._table_at(learning_rate)
        with torch.no_grad():
            for i, (parts, ids) in enumerate(zip(self._parts, self._ids, strict=True)):
                if not self._in_place(i) or any(engine.needs_copy(tensor_id, table) for tensor_id in ids):
                    self._copied.add(i)
                    parts[:] = [part.contiguous().clone() for part in parts]
                    for tensor_id, part in zip(ids, parts, strict=True):
                        engine.replace(tensor_id, part)
            engine.prepare(range(len(engine.tensors)), None, table)
        for bucket in engine.buckets.values():
            bucket.stop_turning()
        return {key: torch.as_tensor(array) for key, array in engine.by_key().items()}

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def step(self, places: Sequence[int], grads: Sequence[Any], learning_rate: Any, states: Mapping[Key, Any]) -> None:
        """Updates these variables in place, with their `states`.

        In a stateless scope of Keras the memory has the scope's values during the step alone.
        """
        table = self._table_at(learning_rate)
        variables = [self.trained[place].variable for place in places]
        with torch.no_grad(), _with_values_of_scope([*variables, *states.values()]):
            for place in places:
                self._take(place)
            ids = tuple(tensor_id for place in places for tensor_id in self._ids[place])
            gradients = [part for pair in zip(places, grads, strict=True) for part in self._grads(*pair)]
            self._engine.step(ids, gradients, table)
            for place in self._copied.intersection(places):
                each = self.trained[place]
                each.variable._value.copy_(each.back(self._parts[place]))
        increment_version([variable._value for variable in variables])

    def _grads(self, place: int, grad: Tensor) -> list[Tensor]:
        each = self.trained[place]
        return each.seen(grad.to(each.variable._value.dtype))

    def _take(self, place: int) -> None:
        """Takes over the memory where a variable lies now, and the values of one with copies."""
        each = self.trained[place]
        value = each.variable._value.detach()
        if place in self._copied:
            for part, now in zip(self._parts[place], each.seen(value), strict=True):
                part.copy_(now)
        elif value.data_ptr() != self._addresses[place]:
            self._addresses[place], self._parts[place] = value.data_ptr(), each.seen(value)
            for tensor_id, part in zip(self._ids[place], self._parts[place], strict=True):
                self._engine.replace(tensor_id, part)

    def _in_place(self, place: int) -> bool:
        """Whether kernels can step on a variable where it lies."""
        storage = self.trained[place].variable._value.untyped_storage().data_ptr()
        return all(p.untyped_storage().data_ptr() == storage and is_dense(p) for p in self._parts[place])

    def _table_at(self, learning_rate: Any) -> Any:
        """The hyper-parameters; a learning rate on a device is read when it has changed."""
        rate = getattr(learning_rate, "value", learning_rate)
        seen = (id(rate), rate._version) if isinstance(rate, torch.nn.Parameter) else (float(rate),)
        if seen != self._rate:
            known = {"lr": float(rate)} if "lr" in self._rule.settings else {}
            groups = [default_hyper(self._rule, {**h, **known}, self._dtype) for h in self._hyper]
            self._table, self._rate = self._engine.hyper_table(groups), seen
        return self._table


@contextmanager
def _with_values_of_scope(variables: Sequence[Any]) -> Iterator[None]:
    """The values of a stateless scope in the memory of variables; afterwards the scope has the new ones."""
    apart = [variable for variable in variables if variable.value is not variable._value]
    before = [variable._value.clone() for variable in apart]
    for variable in apart:
        variable._value.copy_(variable.value)
    try:
        yield
        new = [variable._value.clone() for variable in apart]
    finally:
        for variable, old in zip(apart, before, strict=True):
            variable._value.copy_(old)
    for variable, value in zip(apart, new, strict=True):
        variable.assign(value)
