"""A step of an optimizer whose kernels make some gradients, of noise, where they need them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any
from weakref import WeakKeyDictionary

from rulec.array.optimizer import Optimizer
from rulec.backend.noise import Noise
from rulec.runtime.engine import run
from rulec.runtime.estimate import EstimateCalls, takes_parts
from rulec.runtime.launch import Launch

_CALLS: WeakKeyDictionary[Optimizer, EstimateCalls] = WeakKeyDictionary()


def fused_step(opt: Optimizer, noises: Mapping[str, Noise], grads: Mapping[str, Any]) -> bool:
    """One step of arrays by noise, and of others by gradients; False, and nothing done, where there is no such kernel.

    The numbers are those of a step with the noise in gradients of the parameters' dtypes. Errors are those of `step`.
    """
    opt._check_closed("step()", "use update() and opt.update(layer, grad) there, or close it first")
    opt._check_training()
    if opt.rule.inputs:
        return False
    engine = opt._engine
    table = engine.hyper_table([opt.hyper])
    with opt._arrays.here():
        engine.begin()
        try:
            made = _by_noise(opt, noises, table)
            if made is None:
                return False
            ids = tuple(opt._ids[name] for name in grads)
            run([*made, *(engine.ready(ids, [*grads.values()], table) if ids else ())])
        finally:
            engine.finish()
    return True


def _by_noise(opt: Optimizer, noises: Mapping[str, Noise], table: Any) -> list[Launch] | None:
    """What updates arrays by noise, checked; None where there is no kernel for one."""
    # Of what stands for gradients only shape and dtype are looked at.
    largest: dict[Any, Any] = {}
    for name in noises:
        param = opt._params[name]
        if param.dtype not in largest or largest[param.dtype].size < param.size:
            largest[param.dtype] = param
    room = {dtype: opt._arrays.scratch(p, opt._arrays.dtype(p)).reshape(-1) for dtype, p in largest.items()}
    params = [opt._params[name] for name in noises]
    shapes = [room[p.dtype][: p.size].reshape(p.shape) for p in params]
    launches = opt._engine.ready(tuple(opt._ids[name] for name in noises), shapes, table)
    calls = _CALLS.setdefault(opt, EstimateCalls())
    for launch in launches:
        if not takes_parts(launch.version.program):
            return None
        if not calls.give(launch, [noises[tensor.name] for tensor in launch.part.tensors]):
            return None
    return launches
