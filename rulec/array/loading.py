"""Going on from a saved state: a new engine is checked and filled before it takes the place of the old one."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from rulec.array.checks import check_saved, check_states
from rulec.array.step import ArrayEngine
from rulec.compiler.weights import is_part, reweighed
from rulec.errors import StateMismatch
from rulec.language.hyper import checked_seed
from rulec.language.rule import Rule
from rulec.runtime.buckets.hyper import default_hyper
from rulec.runtime.buckets.scalar_table import Numbers
from rulec.runtime.storage.allocator import formats_of, recoded


def loaded(
    rule: Rule, before: ArrayEngine, saved: Mapping[str, Any], start: Mapping[str, float]
) -> tuple[ArrayEngine, dict[str, float]]:
    """An engine over the arrays of another by the same rule, with the states of a `state_dict()`, and the saved
    hyper-parameters; arrays that it has no states of are as before their first update. `start` has the learning rate
    at the start, where none was saved.

    StateMismatch or HyperError, and nothing is changed, where it belongs to another rule or other arrays.
    """
    check_saved(saved, rule.name)
    unknown = saved["state"].keys() - before.ids.keys()
    if unknown:
        raise StateMismatch(f"the saved state has {min(unknown)}, which is no parameter here")
    hyper = default_hyper(rule, {**start, **saved["hyper"]})
    seed = checked_seed(saved.get("seed", before.seed))
    engine = ArrayEngine(
        rule, before.params, before.tags, before.backend_name, before.state_dtype, before.maximize, seed,
        before.weights, before.watch, before.schedule,
    )  # fmt: skip
    table = engine.hyper_table([hyper])
    engine.check_hyper(table)
    with engine.arrays.here():
        engine.copies_for(table)
        _prepare(engine, before, saved["state"], table)
        saved = {**saved, "state": _recoded(engine, saved)}
        _check_fits(engine, saved)
        _fill(engine, saved)
    return engine, hyper


def _prepare(engine: ArrayEngine, before: ArrayEngine, names: Mapping[str, Any], table: Numbers) -> None:
    """Allocates the states of some arrays, for gradients of the same dtypes as before."""
    ids = [engine.ids[name] for name in names]
    buckets = [before.tensors[i].bucket for i in ids]
    arrays = [engine.tensors[i].array for i in ids]
    dtypes = [b.layout.dtype("g") if b else engine.arrays.dtype(x) for b, x in zip(buckets, arrays, strict=True)]
    engine.prepare(ids, dtypes, table)


def _recoded(engine: ArrayEngine, saved: Mapping[str, Any]) -> dict[str, Mapping[str, Any]]:
    """The saved states in the formats of the engine's."""
    keys, states = saved.get("formats", {}), dict[str, Mapping[str, Any]]()
    for name, values in saved["state"].items():
        before, after = formats_of(keys, values, name), engine.formats(engine.ids[name])
        values = recoded(values, before, after, engine.params[name].shape, name) if before != after else values
        states[name] = _with_parts(_reweighed(engine, name, values), engine.states(name))
    return states


def _reweighed(engine: ArrayEngine, name: str, saved: Mapping[str, Any]) -> dict[str, Any]:
    """The saved states of an array, with the part of its kind of weight."""
    array = engine.params[name]
    return reweighed(
        saved, engine.states(name), lambda: np.asarray(engine.arrays.copied(array), np.float32),
        lambda part: np.asarray(part, np.float32), name,
    )  # fmt: skip


def _with_parts(saved: Mapping[str, Any], first: Mapping[str, Any]) -> dict[str, Any]:
    """The saved states of an array. A part that was not saved has its first value, made of the array."""
    parts = {name: value for name, value in first.items() if is_part(name)}
    return {**parts, **{name: value for name, value in saved.items() if name in parts or not is_part(name)}}


def _check_fits(engine: ArrayEngine, saved: Mapping[str, Any]) -> None:
    shared = engine.shared
    for name, states in saved["state"].items():
        check_states(engine.states(name), states, name)
    check_states(shared.values, saved.get("shared", {}), "all arrays")
    for level, counts in (("group", shared.group_t), ("model", shared.model_t)):
        count = saved.get("counts", {}).get(level, 0)
        if np.shape(count) not in ((), counts.shape):
            raise StateMismatch(
                f"the count of updates of the {level} was saved with shape {np.shape(count)}, not {counts.shape}"
            )


def _fill(engine: ArrayEngine, saved: Mapping[str, Any]) -> None:
    fill, shared, counts = engine.arrays.fill, engine.shared, saved.get("counts", {})
    pairs = [(engine.states(name), states) for name, states in saved["state"].items()]
    for buffers, values in [*pairs, (shared.values, saved.get("shared", {}))]:
        for key, value in values.items():
            fill(buffers[key], value)
    fill(shared.group_t, counts.get("group", 0))
    fill(shared.model_t, counts.get("model", 0))


def contents(engine: ArrayEngine) -> dict[str, Any]:
    """The content of a copy: live buffers, for `copy` and `pickle` to copy."""
    shared, buckets = engine.shared, engine.buckets.values()
    return {
        "params": engine.params,
        "tags": engine.tags,
        "engine": (
            engine.backend_name,
            engine.state_dtype,
            engine.maximize,
            engine.seed,
            engine.weights,
            engine.watch,
            engine.schedule,
        ),
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
