"""Buckets, rows of the scalar table, and steps that fail."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import rulec
from rulec.array.arrays import NumpyArrays
from rulec.compiler.reference import ReferenceOptimizer
from rulec.compiler.stages import ELEMENT
from rulec.errors import BackendUnsupported, InternalError, PartialUpdate, TensorError
from rulec.language.expr.node import const
from rulec.runtime.engine import Engine, default_hyper
from rulec.runtime.storage import allocator as state_module
from rulec.runtime.storage.allocator import StateSpec, plan_arena


def engine_with(
    rule: str, params: list[np.ndarray], groups: list[int], **options: Any
) -> tuple[Engine, tuple[int, ...]]:
    engine = Engine(rulec.load(rule), NumpyArrays(), **options)
    return engine, tuple(engine.add(p, g, str(i)) for i, (p, g) in enumerate(zip(params, groups, strict=True)))


def table(engine: Engine, rates: list[float]) -> np.ndarray:
    return engine.hyper_table([default_hyper(engine.rule, {"lr": r}) for r in rates])


class CountingCall:
    """Counts calls of a bucket's kernel, and what rows each was given."""

    def __init__(self, call: Any, seen: list[Any]) -> None:
        self.call, self.seen = call, seen

    def __call__(self, stage: int, moving: Any, rows: Any, scratch: Any, **options: Any) -> Any:
        self.seen.append(rows)
        return self.call(stage, moving, rows, scratch, **options)


def test_a_thousand_groups_are_one_call_and_each_has_its_own_rate() -> None:
    params = [np.zeros(2) for _ in range(1000)]
    engine, ids = engine_with("sgd", params, list(range(1000)))
    rates = [0.001 * (i + 1) for i in range(1000)]
    grads = [np.ones(2) for _ in params]
    engine.step(ids, grads, table(engine, rates))
    (bucket,) = engine.buckets.values()
    seen: list[Any] = []
    bucket.version().call = CountingCall(bucket.version().call, seen)  # type: ignore[assignment]
    engine.step(ids, grads, table(engine, rates))
    assert len(seen) == 1
    np.testing.assert_allclose([p[0] for p in params], -2 * np.array(rates), rtol=1e-15)


def test_one_group_is_one_row_however_many_tensors() -> None:
    params = [np.zeros(2) for _ in range(50)]
    engine, ids = engine_with("adamw", params, [0] * 50)
    engine.step(ids, [np.ones(2)] * 50, table(engine, [0.1]))
    (bucket,) = engine.buckets.values()
    seen: list[Any] = []
    bucket.version().call = CountingCall(bucket.version().call, seen)  # type: ignore[assignment]
    engine.step(ids, [np.ones(2)] * 50, table(engine, [0.1]))
    assert len(seen[0].table) == 1
    assert not seen[0].index.any()


@pytest.mark.parametrize(
    "rule", ["adam", "nadam", *(pytest.param(name, marks=pytest.mark.slow) for name in ("adamax", "radam"))]
)
def test_scalars_evaluated_ahead_are_those_of_each_step(rule: str) -> None:
    """Changing rates, pauses, tensors that join late and long runs at one rate: all agree with the reference."""
    rng = np.random.default_rng(3)
    params = [rng.normal(size=3) for _ in range(3)]
    reference = ReferenceOptimizer(rulec.load(rule), params, [{"lr": 0.1}, {"lr": 0.2}], groups=[0, 1, 0])
    engine, ids = engine_with(rule, params, [0, 1, 0])
    for step in range(80):
        rate = 0.1 if step < 45 else 0.05
        grads: list[Any] = [rng.normal(size=3) for _ in params]
        if step < 4:
            grads[1] = None
        if step in (20, 60):
            grads[0] = None
        live = [i for i in ids if grads[i] is not None]
        engine.step(tuple(live), [grads[i] for i in live], table(engine, [rate, 0.2]))
        for part in reference._parts.values():
            part.hyper[0]["lr"] = rate
        reference.step(grads)
    for ours, theirs in zip(params, reference.params, strict=True):
        np.testing.assert_allclose(ours, theirs, rtol=1e-12)


def test_bits_do_not_depend_on_neighbours() -> None:
    rng = np.random.default_rng(1)
    values = [rng.normal(size=n).astype(np.float32) for n in (1, 17, 70001, 5, 33)]
    grads = [rng.normal(size=v.size).astype(np.float32) for v in values]
    together = [v.copy() for v in values]
    engine, ids = engine_with("ademamix", together, [0, 1, 2, 3, 4])
    rates = [0.1, 0.01, 0.02, 0.3, 0.5]
    for _ in range(3):
        engine.step(ids, grads, table(engine, rates))
    for i, value in enumerate(values):
        alone = value.copy()
        single, one = engine_with("ademamix", [alone], [0])
        for _ in range(3):
            single.step(one, [grads[i]], table(single, [rates[i]]))
        np.testing.assert_array_equal(alone, together[i])


def test_mixed_dtypes_are_separate_buckets_of_one_step() -> None:
    params = [np.ones(4, np.float32), np.ones(4, np.float64), np.ones(4, np.float16)]
    engine, ids = engine_with("adam", params, [0, 0, 0])
    engine.step(ids, [np.ones(4, p.dtype) for p in params], table(engine, [0.125]))
    assert len(engine.buckets) == 3
    for p in params:
        np.testing.assert_allclose(p.astype(float), 0.875, atol=1e-3)


def test_a_step_that_fails_on_the_way_says_what_was_written() -> None:
    params = [np.ones(4, np.float32), np.ones(4, np.float64)]
    engine, ids = engine_with("sgd", params, [0, 0])
    grads = [np.ones(4, p.dtype) for p in params]
    engine.step(ids, grads, table(engine, [0.5]))
    second = list(engine.buckets.values())[1]

    def broken(*args: Any, **options: Any) -> None:
        raise OSError("device lost")

    second.version().call = broken  # type: ignore[assignment]
    with pytest.raises(PartialUpdate, match=r"after 1 tensors were updated \(0"):
        engine.step(ids, grads, table(engine, [0.5]))
    np.testing.assert_array_equal(params[0], 0.0)
    np.testing.assert_array_equal(params[1], 0.5)
    assert (int(engine.state(0)["step"]), int(engine.state(1)["step"])) == (2, 1)


def test_a_step_that_fails_first_writes_nothing() -> None:
    params = [np.ones(4)]
    engine, ids = engine_with("adam", params, [0])
    engine.step(ids, [np.ones(4)], table(engine, [0.5]))
    (bucket,) = engine.buckets.values()

    def broken(*args: Any, **options: Any) -> None:
        raise OSError("device lost")

    version = bucket.version()
    working, version.call = version.call, broken  # type: ignore[assignment]
    before = params[0].copy()
    with pytest.raises(OSError, match="device lost"):
        engine.step(ids, [np.ones(4)], table(engine, [0.5]))
    np.testing.assert_array_equal(params[0], before)
    assert int(engine.state(0)["step"]) == 1
    version.call = working
    engine.step(ids, [np.ones(4)], table(engine, [0.5]))
    assert int(engine.state(0)["step"]) == 2


def test_a_tensor_fires_once_in_a_call() -> None:
    engine, _ = engine_with("sgd", [np.ones(2)], [0])
    with pytest.raises(TensorError, match="updated twice"):
        engine.step((0, 0), [np.ones(2), np.ones(2)], table(engine, [0.5]))


def test_the_arena_is_aligned_and_disjoint(monkeypatch: pytest.MonkeyPatch) -> None:
    specs = [StateSpec("m", "float32", const(0), ELEMENT), StateSpec("v", "bfloat16", const(0), ELEMENT)]
    slots, size = plan_arena(specs, [(3, 3), (0, 0), (1000, 1000)])
    assert all(slot.offset % 64 == 0 for slot in slots)
    assert size >= 3 * 6 + 6000
    monkeypatch.setattr(state_module, "ALIGNMENT", -64)
    with pytest.raises(InternalError, match="overlap"):
        plan_arena(specs, [(300, 300), (300, 300)])


def test_group_states_advance_once_a_step_and_match_the_reference() -> None:
    """Averaging weights are kept per group: several dtypes and partial firing must not advance them twice."""
    text = """
name: Averaged
hyper: {lr: 0.1}
state:
  z: p
  weight_sum: {init: 0, per: group}
step: |
  weight_sum = weight_sum + t
  z = z - lr*g
  p = p + (z - p)*t/weight_sum
"""
    rule = rulec.parse(text)
    rng = np.random.default_rng(5)
    params = [rng.normal(size=3), rng.normal(size=2).astype(np.float32), rng.normal(size=4)]
    reference = ReferenceOptimizer(rule, params, [{"lr": 0.1}, {"lr": 0.3}], groups=[0, 0, 1])
    engine = Engine(rule, NumpyArrays())
    ids = tuple(engine.add(p, g, str(i)) for i, (p, g) in enumerate(zip(params, [0, 0, 1], strict=True)))
    for _ in range(5):
        grads = [rng.normal(size=p.shape).astype(p.dtype) for p in params]
        engine.begin()
        engine.fire(ids[:1], grads[:1], table(engine, [0.1, 0.3]))
        engine.fire(ids[1:], grads[1:], table(engine, [0.1, 0.3]))
        engine.end()
        reference.step(grads)
    for ours, theirs in zip(params, reference.params, strict=True):
        np.testing.assert_allclose(ours, theirs, rtol=1e-6)
    np.testing.assert_array_equal(engine.shared.values["weight_sum"], [15.0, 15.0])


def test_a_backend_that_gives_new_arrays_is_refused_and_nothing_is_counted() -> None:
    pytest.importorskip("jax")
    params = [np.ones(3, np.float32)]
    engine, ids = engine_with("sgd", params, [0], backend="jax")
    with pytest.raises(BackendUnsupported, match="'jax' cannot express an update in place of arrays of this kind"):
        engine.step(ids, [np.ones(3, np.float32)], table(engine, [0.5]))
    np.testing.assert_array_equal(params[0], 1.0)
    assert int(engine.state(0)["step"]) == 0


def test_triton_refuses_arrays_that_have_no_address(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("triton")
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    engine, ids = engine_with("sgd", [np.ones(3, np.float32)], [0], backend="triton")
    with pytest.raises(BackendUnsupported, match="arrays other than PyTorch's"):
        engine.step(ids, [np.ones(3, np.float32)], table(engine, [0.5]))
