"""Launches whose gradients are noise: which kernel they run, and when it is bound again."""

from __future__ import annotations

from typing import Any

import numpy as np

from rulec.backend.capabilities import Noise
from rulec.es.streams import short_weights
from rulec.runtime.engine import Launch, run
from rulec.runtime.stages.noise import EstimateCalls
from rulec_backends.cpu.noise import fill_noise
from tests.runtime.test_engine import engine_with, table


def noise(layer: int, values: Any = "rademacher") -> Noise:
    return Noise(values, 1, layer, 2, short_weights([0.25, -1.5], values))


def gradient(layer: int, like: np.ndarray) -> np.ndarray:
    found = np.empty_like(like)
    fill_noise(found, noise(layer))
    return found


def arrays(count: int = 3) -> list[np.ndarray]:
    random = np.random.default_rng(3)
    return [random.standard_normal(50 + i).astype(np.float32) for i in range(count)]


def ready(engine: Any, ids: tuple[int, ...], rates: np.ndarray) -> list[Launch]:
    found: list[Launch] = engine.ready(ids, [engine.tensors[i].array for i in ids], rates)
    return found


def test_calls_are_kept_until_there_are_more_tensors() -> None:
    made, plain = arrays(), arrays()
    (one, ids), (other, _) = (engine_with("adamw", x, [0] * 3, backend="cpu") for x in (made, plain))
    rates, calls, used = table(one, [0.1]), EstimateCalls(), []
    for fired in ((0, 1), (0, 1), (1,), (2, 0)):
        own = tuple(ids[i] for i in fired)
        (launch,) = ready(one, own, rates)
        assert calls.give(launch, [noise(i) for i in fired])
        used.append(launch.version.call)
        run([launch])
        other.step(own, [gradient(i, plain[i]) for i in fired], rates)
    assert used[0] is used[1] is used[2]
    assert used[3] is not used[2], "a third tensor has joined the bucket"
    assert all(np.array_equal(a, b) for a, b in zip(made, plain, strict=True))
    assert not np.array_equal(made[2], arrays()[2])


def test_a_launch_that_takes_no_noise_is_as_it_was() -> None:
    for rule, backend, kinds in (
        ("lamb", "cpu", ("normal", "normal")), ("adamw", "numpy", ("normal", "normal")),
        ("adamw", "cpu", ("normal", "popcount")),
    ):  # fmt: skip
        engine, ids = engine_with(rule, arrays(2), [0, 0], backend=backend)
        (launch,) = ready(engine, ids, table(engine, [0.1]))
        version, grads = launch.version, launch.grads
        assert not EstimateCalls().give(launch, [noise(i, kind) for i, kind in enumerate(kinds)])
        assert launch.version is version
        assert launch.grads is grads
