"""What XLA makes of our steps on the CPU: kernels, buffers and memory written over, as its compiler says itself."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import rulec
import rulec.jax
from rulec_backends.jax import JaxKernel
from tests.backends.elementwise import elementwise_rules
from tests.jax.compiled import SIZE, Compiled, optax_in_jit, own_step, step_in_jit, update_in_jit
from tests.pairs import paired

#: How many buffers as large as a parameter a step needs for a while, where it needs any.
KEPT = {
    # What two results share and XLA finds too dear to work out twice; each needing what the other overwrites.
    "adadelta": 2, "rprop": 1, "schedule_free_adamw": 2, "schedule_free_sgd": 1,
    # What the program itself sets aside between two passes, and choices made element by element before they are summed.
    "cautious_adamw": 2, "came": 3, "dadapt_adam": 1, "sm3": 1,
    "transforms/cautious": 1, "transforms/skip_not_finite": 1, "transforms/noise": 2,
    # Matrix functions.
    "galore": 2, "muon": 3, "normuon": 3, "transforms/orthogonalize": 3, "shampoo": 7, "soap": 13,
}  # fmt: skip

#: Rules of one pass, of reductions of tensors, and of reductions of rows and columns.
SOME = ["adamw", "adabelief", "lion", "nadam", "lamb", "stable_adamw", "adafactor", "transforms/projection"]


def check_memory(made: Compiled, kept: int) -> None:
    assert made.aliased == made.held  # every parameter and every state is written over
    assert made.large == kept, made.kernels()
    assert kept or made.temporary < SIZE // 8


@pytest.mark.parametrize("rule", SOME)
def test_a_step_writes_over_parameters_and_states_and_needs_no_more_memory(rule: str) -> None:
    made = own_step(rule)
    check_memory(made, 0)
    assert len(made.kernels()) == len(jax.tree.leaves(stored_as_large(rule)))
    assert made.numbers_of_64_bits() == []


def stored_as_large(rule: str) -> Any:
    """The arrays of a parameter's size that a step gives."""
    params = {"w": jnp.ones((4, 4))}
    return params, [x for x in jax.tree.leaves(rulec.jax.init(rule, params)) if x.shape == (4, 4)]


@pytest.mark.another
@pytest.mark.parametrize(
    "rule", [*KEPT, "adamp", "adagrad", "adan", "madgrad", "larc", "fromage", "transforms/centralize"]
)
def test_steps_need_as_much_memory_as_is_known(rule: str) -> None:
    made = own_step(rule)
    check_memory(made, KEPT.get(rule, 0))
    if rule in elementwise_rules() and rule not in KEPT:
        assert len(made.kernels()) <= len(jax.tree.leaves(stored_as_large(rule)))


@pytest.mark.parametrize(("rule", "compiled"), paired(["adamw", "lamb", "adafactor"], [step_in_jit, update_in_jit]))
def test_in_a_users_jit_a_step_needs_no_more_memory(rule: str, compiled: Callable[[str], Compiled]) -> None:
    check_memory(compiled(rule), 0)


@pytest.mark.parametrize(
    ("rule", "theirs"),
    [
        ("lion", optax.lion(1e-3)), ("lamb", optax.lamb(1e-3)), ("adabelief", optax.adabelief(1e-3)),
        ("adafactor", optax.adafactor(1e-3)),
    ],
)  # fmt: skip
def test_in_a_users_jit_it_needs_no_more_than_optax(rule: str, theirs: optax.GradientTransformation) -> None:
    ours, other = update_in_jit(rule), optax_in_jit(theirs)
    assert ours.large <= other.large
    assert len(ours.kernels()) <= len(other.kernels())


class Traced:
    """Counts the stages that are traced, and the programs that are compiled."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
        self.stages, self._caplog = 0, caplog
        stage = JaxKernel.stage

        def counting(kernel: JaxKernel, *args: Any) -> Any:
            self.stages += 1
            return stage(kernel, *args)

        monkeypatch.setattr(JaxKernel, "stage", counting)

    @property
    def compiled(self) -> int:
        return sum(record.message.startswith("Compiling jit(") for record in self._caplog.records)


@pytest.fixture
def traced(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> Traced:
    caplog.set_level(logging.DEBUG, logger="jax")
    return Traced(monkeypatch, caplog)


def check_settled(way: Callable[[Any, Any, Any, Any], Any], state: Any, traced: Traced, rates: list[Any]) -> None:
    """Checks that a step is traced and compiled for the first rate, and for no rate and no count after it."""
    params = {"w": jnp.ones((3, 2)), "b": jnp.ones(5)}
    grads = jax.tree.map(jnp.ones_like, params)
    with jax.log_compiles():
        params, state = way(params, grads, state, rates[0])
        first = traced.stages, traced.compiled
        assert min(first) >= 1
        moved = []
        for rate in rates:
            before = float(np.asarray(params["w"])[0, 0])
            params, state = way(params, grads, state, rate)
            moved.append(before - float(np.asarray(params["w"])[0, 0]))
        assert (traced.stages, traced.compiled) == first
    assert len(set(moved)) == len(moved)  # each rate was used


RATES = [0.1, 0.05, 1e-3]


def momentum(name: str) -> rulec.Rule:
    """A rule that nobody traced before, whose steps depend on the count and on the rate."""
    return rulec.parse(
        f"name: {name}\nhyper: {{lr: 1e-3}}\nstate: {{m: 0}}\nstep: |\n  m = 0.9*m + g\n  direction = m/t\n"
    )


def test_steps_compile_nothing_again_for_a_count_or_a_rate(traced: Traced) -> None:
    rule = momentum("Counted")
    state = rulec.jax.init(rule, {"w": jnp.ones((3, 2)), "b": jnp.ones(5)})
    check_settled(lambda p, g, s, lr: rulec.jax.step(rule, p, g, s, lr=lr), state, traced, RATES)


def test_steps_compile_nothing_again_for_a_rate_in_an_array(traced: Traced) -> None:
    rule = momentum("Arrays")
    state = rulec.jax.init(rule, {"w": jnp.ones((3, 2)), "b": jnp.ones(5)})
    rates = [jnp.float32(rate) for rate in RATES]
    check_settled(lambda p, g, s, lr: rulec.jax.step(rule, p, g, s, lr=lr), state, traced, rates)


def trained(transformation: Any) -> Callable[[Any, Any, Any, Any], Any]:
    @jax.jit
    def train(params: Any, grads: Any, state: Any) -> Any:
        updates, state = transformation.update(grads, state, params)
        return optax.apply_updates(params, updates), state

    return lambda params, grads, state, _: train(params, grads, state)


def test_a_schedule_compiles_nothing_again(traced: Traced) -> None:
    tx = rulec.jax.transform(momentum("Scheduled"), lr=optax.exponential_decay(0.1, 1, 0.5))
    check_settled(trained(tx), tx.init({"w": jnp.ones((3, 2)), "b": jnp.ones(5)}), traced, [None] * 3)


def test_an_injected_rate_compiles_nothing_again(traced: Traced) -> None:
    made = optax.inject_hyperparams(lambda lr: rulec.jax.transform(momentum("Injected"), lr=lr))(lr=0.1)
    train = trained(made)

    def way(params: Any, grads: Any, state: Any, rate: float) -> Any:
        state.hyperparams["lr"] = jnp.float32(rate)
        return train(params, grads, state, None)

    check_settled(way, made.init({"w": jnp.ones((3, 2)), "b": jnp.ones(5)}), traced, RATES)


def test_leaves_of_one_shape_are_one_function() -> None:
    tx = rulec.jax.transform("adamw")

    def lowered(leaves: int) -> str:
        params = {f"w{i}": jnp.ones((3, 2)) for i in range(leaves)}
        return str(jax.jit(tx.update).lower(params, tx.init(params), params).as_text())

    text, params = lowered(40), {f"w{i}": jnp.ones((3, 2)) for i in range(40)}
    assert text.count("stablehlo.sqrt") == lowered(2).count("stablehlo.sqrt") > 0
    other = optax.adamw(1e-3)
    theirs = jax.jit(other.update).lower(params, other.init(params), params).as_text()
    assert len(text.splitlines()) < len(theirs.splitlines()) / 3
