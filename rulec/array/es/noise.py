"""Noise of evolution strategies for NumPy and CuPy arrays: the random numbers of one array, and steps with noise.

Kernels of a backend make the random numbers. In a step, kernels may compute some gradients from noise by themselves.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any
from weakref import WeakKeyDictionary

import numpy as np

from rulec.array.optimizer import Optimizer
from rulec.backend.capabilities import Noise
from rulec.es.families.base import Draws
from rulec.es.streams import NOISE, SCALE, Stream, short_weights
from rulec.runtime.buckets.launch import Launch
from rulec.runtime.engine import run
from rulec.runtime.stages.noise import EstimateCalls, takes_parts


@dataclass(frozen=True)
class ArrayDraws(Draws):
    """What `rulec.es.families` draws from. `fill` is the `fill_noise` of the arrays' backend."""

    xp: Any
    fill: Callable[[Any, Noise], None]
    kind: Any
    stream: Stream
    dtype: Any

    def values(self, directions: Sequence[int], purpose: int, shape: tuple[int, ...]) -> Any:
        """One direction after the other."""
        return self._filled(np.array([SCALE[self.kind]]), directions, purpose, shape)

    def _filled(self, weights: Any, firsts: Sequence[int], purpose: int, shape: tuple[int, ...]) -> Any:
        out = self.xp.empty((len(firsts), *shape), self.dtype)
        number = np.float64 if out.dtype == np.float64 else np.float32
        stream = self.stream
        for line, first in zip(out, firsts, strict=True):
            noise = Noise(self.kind, stream.seed, stream.layer, stream.step, weights.astype(number), first, purpose)
            self.fill(line, noise)
        return out

    def orders(self, directions: Sequence[int], purpose: int, count: int) -> Any:
        """The orders that sort the lines' words."""
        orders = [self.stream.of(direction, purpose).permutation(count) for direction in directions]
        return self.xp.asarray(np.stack(orders))

    def added_at(self, array: Any, columns: Any, values: Any) -> Any:
        """The array, which is written to."""
        array[:, columns] += values
        return array

    def summed_at(self, size: int, place: Any, values: Any) -> Any:
        """A vector with values summed at places."""
        return self.xp.bincount(place, weights=values, minlength=size).astype(self.dtype)

    def summed(self, weights: Any, shape: tuple[int, ...]) -> Any:
        """The weighted sum of all directions' own noise."""
        return self._filled(short_weights(weights, self.kind), [0], NOISE, shape)[0]

    def noise(self, weights: Any) -> Noise:
        """The noise of a kernel that makes it in place."""
        stream = self.stream
        return Noise(self.kind, stream.seed, stream.layer, stream.step, short_weights(weights, self.kind))


def namespace(array: Any) -> Any:
    """The library of an array, of NumPy's names."""
    if isinstance(array, np.ndarray):
        return np
    import cupy

    return cupy


_CALLS: WeakKeyDictionary[Optimizer, EstimateCalls] = WeakKeyDictionary()


def fused_step(
    opt: Optimizer, names: Sequence[str], noises: Mapping[str, Noise], gradient: Callable[[str], Any]
) -> tuple[str, ...]:
    """One step of the arrays of these names; returns the names of arrays updated by noise, without a gradient.

    `noises` are the sources of gradients by name. If there is none, or no kernel that makes it, `gradient` returns
    the gradient, of the parameter's dtype, before anything is written. The numbers are those of a step with all
    gradients; so are errors.
    """
    opt._check_closed("step()", "use update() and opt.update(layer, grad) there, or close it first")
    opt._check_training()
    engine = opt._engine
    table = opt._hyper_table()
    turned = engine.copies_for(table)
    with engine.arrays.here(), turned.stepping(names):
        engine.check_hyper(table)
        # All of them before anything is bound to some: they may share buckets.
        engine.prepare([engine.ids[name] for name in names], None, table)
        launches = _by_noise(opt, noises, table)
        fused = {tensor.name for launch in launches for tensor in launch.part.tensors}
        grads = {name: gradient(name) for name in names if name not in fused}
        engine.begin()
        try:
            run([*launches, *engine.ready(tuple(engine.ids[name] for name in grads), turned.in_order(grads), table)])
        finally:
            engine.end()
    return tuple(name for name in names if name in fused)


def _by_noise(opt: Optimizer, noises: Mapping[str, Noise], table: Any) -> list[Launch]:
    """The launches that update arrays by noise, where a kernel can, checked."""
    engine = opt._engine
    # Of what stands for gradients only shape and dtype are looked at.
    largest: dict[Any, Any] = {}
    for name in noises:
        param = engine.params[name]
        if param.dtype not in largest or largest[param.dtype].size < param.size:
            largest[param.dtype] = param
    room = {dtype: engine.arrays.scratch(p, engine.arrays.dtype(p)).reshape(-1) for dtype, p in largest.items()}
    params = [engine.params[name] for name in noises]
    shapes = [room[p.dtype][: p.size].reshape(p.shape) for p in params]
    launches = engine.ready(tuple(engine.ids[name] for name in noises), shapes, table)
    calls = _CALLS.setdefault(opt, EstimateCalls())
    return [
        launch
        for launch in launches
        if takes_parts(launch.version) and calls.give(launch, [noises[tensor.name] for tensor in launch.part.tensors])
    ]
