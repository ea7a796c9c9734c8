"""Copies of an optimizer that go on as it would: what it remembers is copied, its kernels are made anew."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from rulec.array.engine import ArrayEngine
from rulec.language.rule import Rule


def contents(engine: ArrayEngine) -> dict[str, Any]:
    """What a copy is made of: live buffers, which `copy` and `pickle` copy."""
    shared, buckets = engine.shared, engine.buckets.values()
    return {
        "params": engine.params,
        "tags": engine.tags,
        "engine": (engine.backend_name, engine.state_dtype, engine.maximize, engine.seed),
        # As the arrays joined, in their order.
        "buckets": [([t.name for t in b.tensors], b.layout.dtype("g"), dict(b.static)) for b in buckets],
        "state": {name: engine.states(name) for name in engine.params},
        "shared": (shared.values, shared.group_t, shared.model_t),
    }


def restored(rule: Rule, hyper: Mapping[str, float], found: Mapping[str, Any]) -> ArrayEngine:
    """An engine of the contents of another, of the same rule and hyper-parameters."""
    engine = ArrayEngine(rule, found["params"], found["tags"], *found["engine"])
    fill = engine.arrays.fill
    values, *counts = found["shared"]
    with engine.arrays.here():
        engine.copies_for(engine.hyper_table([hyper]))
        for names, grad_dtype, static in found["buckets"]:
            table = engine.hyper_table([{**hyper, **static}])
            engine.prepare([engine.ids[name] for name in names], [grad_dtype] * len(names), table)
        for name, states in found["state"].items():
            own = engine.states(name)
            for key, value in states.items():
                fill(own[key], value)
        for key, value in values.items():
            fill(engine.shared.values[key], value)
        for own_count, count in zip((engine.shared.group_t, engine.shared.model_t), counts, strict=True):
            fill(own_count, count)
    return engine
