"""Learning rates that change: second rates follow in every adapter, and a rate of 0 gives numbers on every backend.

The oracle of second rates is torch's AdamW; that of a step at no rate is the float64 reference.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import torch

import rulec
import rulec.jax
from rulec.array import Optimizer
from rulec.compiler.reference import ReferenceOptimizer
from rulec.errors import HyperError
from rulec.functional.hyper import peak_of
from rulec.language.expr.node import Op, names_in, walk
from rulec.language.hyper import followers

Array = np.ndarray[Any, Any]

#: The steps of a run, its first rates, and its schedules: a cosine to 0, and one behind a warm-up from 0.
STEPS, FIRST, SECOND = 8, 0.02, 0.003
SCHEDULES = {
    "cosine": optax.cosine_decay_schedule(FIRST, STEPS - 1),
    "warm-up": optax.warmup_cosine_decay_schedule(0.0, FIRST, 3, STEPS - 1),
}


def gradients(i: int) -> dict[str, Array]:
    return {"vector": np.cos(np.arange(5.0) + i), "matrix": np.sin(np.arange(12.0).reshape(3, 4) * (i + 1))}


def begin() -> dict[str, Array]:
    return {"vector": np.linspace(-1, 1, 5), "matrix": np.linspace(1, -1, 12).reshape(3, 4)}


def by_torch(schedule: Callable[[int], Any]) -> Array:
    """The vector by torch's AdamW, under a schedule of the second rate's own."""
    p = torch.nn.Parameter(torch.tensor(begin()["vector"]))
    optimizer = torch.optim.AdamW([p], lr=SECOND, eps=1e-8, weight_decay=0.1)
    for i in range(STEPS):
        optimizer.param_groups[0]["lr"] = SECOND * float(schedule(i)) / FIRST
        p.grad = torch.tensor(gradients(i)["vector"])
        optimizer.step()
    return np.array(p.detach().numpy())


def by_arrays(schedule: Callable[[int], Any], backend: str) -> Array:
    params = begin()
    optimizer = Optimizer("muon", params, backend, lr=FIRST, adamw_lr=SECOND)
    for i in range(STEPS):
        optimizer.hyper["lr"] = float(schedule(i))
        if i == 4:  # the run goes on elsewhere
            saved, optimizer = optimizer.state_dict(), Optimizer("muon", params, backend, lr=FIRST, adamw_lr=SECOND)
            optimizer.load_state_dict(saved)
        optimizer.step(gradients(i))
    return params["vector"]


def by_reference(schedule: Callable[[int], Any]) -> Array:
    start = begin()
    optimizer = ReferenceOptimizer(rulec.load("muon"), [*start.values()], {"lr": FIRST, "adamw_lr": SECOND})
    for i in range(STEPS):
        optimizer.step([*gradients(i).values()], {"lr": float(schedule(i))})
    return np.array(optimizer.params[0], np.float64)


def by_jax(schedule: Any) -> Array:
    transform = rulec.jax.transform("muon", lr=schedule, adamw_lr=SECOND, tags={})
    params: Any = {"vector": jnp.asarray(begin()["vector"], jnp.float32)}
    state = transform.init(params)
    update = jax.jit(transform.update)
    for i in range(STEPS):
        updates, state = update({"vector": jnp.float32(gradients(i)["vector"])}, state, params)
        params = optax.apply_updates(params, updates)
    return np.array(params["vector"], np.float64)


def by_numbers_of_jax(schedule: Any) -> Array:
    params: Any = {"vector": jnp.asarray(begin()["vector"], jnp.float32)}
    state = rulec.jax.init("muon", params, tags={})
    for i in range(STEPS):
        rates = {"lr": schedule(i), "adamw_lr": SECOND, "lr_at_start": FIRST}
        grads = {"vector": jnp.float32(gradients(i)["vector"])}
        params, state = rulec.jax.step("muon", params, grads, state, tags={}, **rates)
    return np.array(params["vector"], np.float64)


def by_mlx(schedule: Callable[[int], Any]) -> Array:
    mx = pytest.importorskip("mlx.core")
    import rulec.mlx

    peak, warm = mx.array(FIRST), schedule is SCHEDULES["warm-up"]

    def same(step: Any) -> Any:
        rest, over = (STEPS - 4, 3) if warm else (STEPS - 1, 0)
        down = peak * 0.5 * (1 + mx.cos(math.pi * mx.clip((step - over) / rest, 0, 1)))
        return mx.where(step < over, peak * step / 3, down) if warm else down

    optimizer = rulec.mlx.optimizer("muon")(same, adamw_lr=SECOND)
    params = {name: mx.array(value.astype(np.float32)) for name, value in begin().items()}
    for i in range(STEPS):
        if i == 4:
            state, optimizer = optimizer.state, rulec.mlx.optimizer("muon")(same, adamw_lr=SECOND)
            optimizer.state = state
        grads = {name: mx.array(value.astype(np.float32)) for name, value in gradients(i).items()}
        params = optimizer.apply_gradients(grads, params)
    return np.array(params["vector"], np.float64)


WAYS: dict[str, tuple[Callable[[Any], Array], float]] = {
    "reference": (by_reference, 1e-13),
    "numpy": (lambda schedule: by_arrays(schedule, "numpy"), 1e-13),
    "cpu": (lambda schedule: by_arrays(schedule, "cpu"), 1e-13),
    "jax": (by_jax, 1e-6),
    "numbers of jax": (by_numbers_of_jax, 1e-6),
    "mlx": (by_mlx, 1e-6),
}


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("way", WAYS)
def test_second_rates_follow_as_torch_schedules_them(way: str, schedule: str) -> None:
    run, tolerance = WAYS[way]
    np.testing.assert_allclose(run(SCHEDULES[schedule]), by_torch(SCHEDULES[schedule]), rtol=0, atol=tolerance)


def test_a_function_of_the_second_rate_is_taken_as_it_is() -> None:
    def moved(**rates: Any) -> Array:
        transform = rulec.jax.transform("muon", tags={}, **rates)
        params: Any = {"vector": jnp.ones(3)}
        state = transform.init(params)
        for _ in range(4):
            updates, state = transform.update({"vector": jnp.ones(3)}, state, params)
            params = optax.apply_updates(params, updates)
        return np.array(params["vector"])

    cosine = SCHEDULES["cosine"]
    fixed = moved(lr=FIRST, adamw_lr=SECOND)
    assert np.array_equal(moved(lr=cosine, adamw_lr=lambda count: SECOND), fixed)
    assert np.array_equal(moved(lr=cosine, adamw_lr=SECOND, lr_at_start=0.0), fixed)
    assert not np.array_equal(moved(lr=cosine, adamw_lr=SECOND), fixed)


@pytest.mark.parametrize(
    ("schedule", "peak"),
    [
        (lambda n: 0.5 * np.exp(-n / 10), 0.5), (lambda n: np.minimum(n / 70_001, 1) * 0.25, 0.25),
        (lambda n: np.where(n < 5, 0.1, 0.2), 0.2), (lambda n: 1e-3 * (1 + n), 1e-3), (lambda n: 0.0 * n, None),
        (lambda n: 0.1 if n < 5 else 0.2, None), (lambda n: 0.3, 0.3),
    ],
)  # fmt: skip
def test_the_start_of_a_schedule_is_its_peak(schedule: Callable[[Array], Any], peak: float | None) -> None:
    assert peak_of(schedule) == (None if peak is None else pytest.approx(peak, rel=1e-6))


@pytest.mark.parametrize(
    ("schedule", "peak"),
    [
        (lambda n: 0.1 if n < 5 else 0.2, 0.2), (lambda n: n / 777 if n < 777 else 100 / (n - 677), 1.0),
        (lambda n: 1.0 if n < 1 else float(n), 1.0), (lambda n: [0.1][n], None),
    ],
)  # fmt: skip
def test_a_schedule_of_one_count_at_a_time_is_asked_for_its_peak(
    schedule: Callable[[int], Any], peak: float | None
) -> None:
    assert peak_of(lambda counts: float(schedule(counts)), schedule) == peak


# The language


def test_a_second_rate_is_one_by_its_name_or_by_its_word() -> None:
    renamed = rulec.parse("name: R\napplies_to: ndim >= 2\notherwise: lion(lr=lion_lr)\nstep: |\n  direction = g\n")
    said = rulec.parse("name: S\nhyper: {lr: 1e-2, b: {default: 1, follows: true}}\nstep: |\n  p = p - lr*g - b*p\n")

    @rulec.rule(hyper={"b": {"follows": True, "min": 0}}, assigns="p")
    def traced(g: Any, p: Any, *, lr: float = 1e-2, b: float = 1.0) -> Any:
        return p - lr * g - b * p

    for rule, name in ((renamed, "lion_lr"), (said, "b"), (traced, "b")):
        assert followers(rule.settings) == [name]
        assert followers(rulec.parse(rule.to_yaml()).settings) == [name]
        assert rulec.load("sgd").settings.keys() & {"lr_at_start"} == set()


def test_a_rule_may_hold_a_second_rate_fixed() -> None:
    text = "name: R\nhyper: {lr: 1e-2, lion_lr: 1e-3}\napplies_to: ndim >= 2\notherwise: lion(lr=lion_lr)\n"
    assert followers(rulec.parse(text + "step: |\n  direction = g\n").settings) == []
    assert rulec.load("muon").bind(lr_at_start=0.0).settings["lr_at_start"].default == 0.0
    with pytest.raises(HyperError, match="lr_at_start=-1"):
        Optimizer("muon", begin(), lr_at_start=-1.0)


# A rate of 0


def divides_by_rates(name: str) -> bool:
    """Whether an expression of a rule divides by a learning rate, or begins a state with one."""
    rule = rulec.load(name)
    rates = {key for key in rule.settings if key in ("lr", "lr_at_start", "base_lr", "max_lr")}
    quotients = [n.args[1] for n in walk(rule.expressions) if n.op is Op.DIV]
    quotients += [state.init for state in rule.state.values()]
    return bool(rates & {*names_in(quotients)})


def dividing() -> Iterator[str]:
    yield from (name for name in rulec.rules(wrappers=False) if divides_by_rates(name) and not rulec.load(name).inputs)
    yield from ("corrected_decay(adam)", "fully_decoupled(adam)")


def finite(arrays: Any) -> bool:
    return all(np.isfinite(np.asarray(array, np.float64)).all() for array in arrays)


#: A schedule that begins and ends at 0; the second case never leaves it.
RATES = ((0.0, 0.01, 0.02, 0.01, 0.0, 0.0), (0.0, 0.0))


def test_the_kind_is_known() -> None:
    known = {"ftrl", "ftrl_proximal", "gravity", "adabound", "amsbound", "adamc", "larc", "rprop", "adaptive_sgd"}
    assert known <= {*dividing()}


@pytest.mark.parametrize("rates", RATES)
@pytest.mark.parametrize("name", [*dividing()])
def test_a_rate_of_zero_gives_numbers(name: str, rates: tuple[float, ...]) -> None:
    check_moved_at_zero(name, "reference", rates)


@pytest.mark.parametrize("name", ["ftrl", "ftrl_proximal"])
@pytest.mark.parametrize("backend", ["numpy", "cpu", "c"])
def test_a_rate_of_zero_gives_numbers_on_a_backend(backend: str, name: str) -> None:
    check_moved_at_zero(name, backend, RATES[0])


@pytest.mark.slow
@pytest.mark.parametrize("backend", ["numpy", "cpu", "c", "jax"])
def test_a_rate_of_zero_gives_numbers_in_every_rule(backend: str) -> None:
    for name in dividing():
        check_moved_at_zero(name, backend, RATES[0])


def check_moved_at_zero(name: str, backend: str, rates: tuple[float, ...]) -> None:
    rule, start = rulec.load(name), {**begin(), "zeros": np.zeros(3)}
    grads = [{**gradients(i), "zeros": np.zeros(3)} for i in range(len(rates))]
    if backend == "reference":
        oracle = ReferenceOptimizer(rule, [*start.values()], {"lr": rates[0]})
        for rate, grad in zip(rates, grads, strict=True):
            oracle.step([*grad.values()], {"lr": rate})
            assert finite(oracle.params), (name, rate)
        return
    if backend == "jax":
        params: Any = {key: jnp.asarray(value, jnp.float32) for key, value in start.items()}
        state = rulec.jax.init(rule, params, lr=rates[0])
        for rate, grad in zip(rates, grads, strict=True):
            params, state = rulec.jax.step(rule, params, jax.tree.map(jnp.float32, grad), state, lr=rate)
            assert finite(params.values()), (name, rate)
        return
    optimizer = Optimizer(rule, start, backend, lr=rates[0])
    for rate, grad in zip(rates, grads, strict=True):
        optimizer.hyper["lr"] = rate
        optimizer.step(grad)
        assert finite(start.values()), (name, rate)
