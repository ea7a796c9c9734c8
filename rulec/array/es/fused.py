"""A step of an optimizer with some gradients made of noise inside its kernels."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any
from weakref import WeakKeyDictionary

from rulec.array.optimizer import Optimizer
from rulec.backend.capabilities import Noise
from rulec.runtime.buckets.runtime_launch import Launch
from rulec.runtime.engine import run
from rulec.runtime.stages.noise import EstimateCalls, takes_parts

_CALLS: WeakKeyDictionary[Optimizer, EstimateCalls] = WeakKeyDictionary()


def fused_step(
    opt: Optimizer, names: Sequence[str], noises: Mapping[str, Noise], gradient: Callable[[str], Any]
) -> tuple[str, ...]:
    """One step of the arrays of these names; returns the names of arrays updated by noise, without a gradient.

    `noises` are the sources of gradients by name. Where there is none, or no kernel that makes it, `gradient` returns
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
