"""Going on from a saved state: everything is checked, and made beside what there is, before that is given up."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import numpy as np

from rulec.array.checks import check_saved, check_states
from rulec.errors import StateMismatch
from rulec.language.seed import checked_seed
from rulec.runtime.engine import Engine, default_hyper
from rulec.runtime.rows import Numbers

if TYPE_CHECKING:
    from rulec.array.optimizer import Optimizer


def go_on(opt: Optimizer, saved: Mapping[str, Any]) -> None:
    """Gives an optimizer the states of a `state_dict()`; arrays that it has none of are as before their first update.

    StateMismatch or HyperError, and nothing is changed, where it belongs to another rule or other arrays.
    """
    check_saved(saved, opt.rule.name)
    unknown = saved["state"].keys() - opt._ids.keys()
    if unknown:
        raise StateMismatch(f"the saved state has {min(unknown)}, which is no parameter here")
    hyper = default_hyper(opt.rule, dict(saved["hyper"]))
    fresh = _without_states(opt, checked_seed(saved.get("seed", opt._engine.seed)))
    table = fresh._engine.hyper_table([hyper])
    fresh._engine.check_hyper(table)
    with fresh._arrays.here():
        fresh._copies_for(table)
        _prepare(fresh, opt._engine, saved["state"], table)
        _check_fits(fresh, saved)
        _fill(fresh, saved)
    opt._engine, opt._arrays, opt._ids, opt._turned = fresh._engine, fresh._arrays, fresh._ids, fresh._turned
    opt.hyper, opt._training = hyper, bool(saved.get("training", True))


def _without_states(opt: Optimizer, seed: int) -> Optimizer:
    """An optimizer of the same arrays by the same rule that has updated none."""
    fresh, engine = type(opt).__new__(type(opt)), opt._engine
    fresh.rule = opt.rule
    fresh._make(opt._params, opt._tags, engine.backend_name, engine.state_dtype, engine.maximize, seed)
    return fresh


def _prepare(fresh: Optimizer, before: Engine, names: Mapping[str, Any], table: Numbers) -> None:
    """Allocates the states of some arrays, whose gradients are expected in the dtypes that they have had."""
    engine, ids = fresh._engine, [fresh._ids[name] for name in names]
    buckets = [before.tensors[i].bucket for i in ids]
    arrays = [engine.tensors[i].array for i in ids]
    dtypes = [b.layout.dtype("g") if b else engine.arrays.dtype(x) for b, x in zip(buckets, arrays, strict=True)]
    engine.prepare(ids, dtypes, table)


def _check_fits(fresh: Optimizer, saved: Mapping[str, Any]) -> None:
    shared = fresh._engine.shared
    for name, states in saved["state"].items():
        check_states(fresh.state(name), states, name)
    check_states(shared.values, saved.get("shared", {}), "all arrays")
    for level, own in (("group", shared.group_t), ("model", shared.model_t)):
        count = saved.get("counts", {}).get(level, 0)
        if np.shape(count) not in ((), own.shape):
            raise StateMismatch(
                f"the count of updates of the {level} was saved with shape {np.shape(count)}, not {own.shape}"
            )


def _fill(fresh: Optimizer, saved: Mapping[str, Any]) -> None:
    fill, shared, counts = fresh._arrays.fill, fresh._engine.shared, saved.get("counts", {})
    own = [(fresh.state(name), states) for name, states in saved["state"].items()]
    for buffers, values in [*own, (shared.values, saved.get("shared", {}))]:
        for key, value in values.items():
            fill(buffers[key], value)
    fill(shared.group_t, counts.get("group", 0))
    fill(shared.model_t, counts.get("model", 0))
