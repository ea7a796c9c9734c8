"""Copies of an optimizer that go on as it would: what it remembers is copied, its kernels are made anew."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rulec.array.optimizer import Optimizer


def contents(opt: Optimizer) -> dict[str, Any]:
    """What a copy is made of: live buffers, which `copy` and `pickle` copy."""
    engine = opt._engine
    shared, buckets = engine.shared, engine.buckets.values()
    return {
        "rule": opt.rule,
        "params": opt._params,
        "hyper": opt.hyper,
        "tags": opt._tags,
        "training": opt._training,
        "engine": (engine.backend_name, engine.state_dtype, engine.maximize, engine.seed),
        # As the arrays joined, in their order.
        "buckets": [([t.name for t in b.tensors], b.layout.dtype("g"), dict(b.static)) for b in buckets],
        "state": {name: opt.state(name) for name in opt.names},
        "shared": (shared.values, shared.group_t, shared.model_t),
    }


def restore(opt: Optimizer, found: dict[str, Any]) -> None:
    """Makes an optimizer of the contents of another."""
    opt.rule, opt.hyper, opt._training = found["rule"], found["hyper"], found["training"]
    opt._make(found["params"], found["tags"], *found["engine"])
    engine, fill = opt._engine, opt._arrays.fill
    values, *counts = found["shared"]
    with opt._arrays.here():
        opt._copies_for(engine.hyper_table([opt.hyper]))
        for names, grad_dtype, static in found["buckets"]:
            table = engine.hyper_table([{**opt.hyper, **static}])
            engine.prepare([opt._ids[name] for name in names], [grad_dtype] * len(names), table)
        for name, states in found["state"].items():
            own = opt.state(name)
            for key, value in states.items():
                fill(own[key], value)
        for key, value in values.items():
            fill(engine.shared.values[key], value)
        for own_count, count in zip((engine.shared.group_t, engine.shared.model_t), counts, strict=True):
            fill(own_count, count)
