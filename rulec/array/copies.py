"""Copies of an optimizer that go on as it would: states are copied, kernels are built anew."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from rulec.array.engine import ArrayEngine
from rulec.language.rule import Rule


def contents(engine: ArrayEngine) -> dict[str, Any]:
    """The content of a copy: live buffers, for `copy` and `pickle` to copy."""
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


def restored(rule: Rule, hyper: Mapping[str, float], content: Mapping[str, Any]) -> ArrayEngine:
    """An engine of the contents of another, of the same rule and hyper-parameters."""
    engine = ArrayEngine(rule, content["params"], content["tags"], *content["engine"])
    fill = engine.arrays.fill
    values, *counts = content["shared"]
    with engine.arrays.here():
        engine.copies_for(engine.hyper_table([hyper]))
        for names, grad_dtype, static in content["buckets"]:
            table = engine.hyper_table([{**hyper, **static}])
            engine.prepare([engine.ids[name] for name in names], [grad_dtype] * len(names), table)
        for name, states in content["state"].items():
            buffers = engine.states(name)
            for key, value in states.items():
                fill(buffers[key], value)
        for key, value in values.items():
            fill(engine.shared.values[key], value)
        for buffer, count in zip((engine.shared.group_t, engine.shared.model_t), counts, strict=True):
            fill(buffer, count)
    return engine
