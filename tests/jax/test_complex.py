"""Complex parameters are trained as torch's optimizers train them: each part by itself."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import torch

import rulec.jax
from rulec.errors import TensorError

START = np.array([[1 + 2j, -3 + 0.5j], [0.25 - 1j, 2j]], np.complex64)

THEIRS: dict[str, tuple[Callable[..., torch.optim.Optimizer], dict[str, float]]] = {
    "adamw": (torch.optim.AdamW, {"lr": 0.1, "weight_decay": 0.01}),
    "momentum": (lambda params, lr: torch.optim.SGD(params, lr, momentum=0.9), {"lr": 0.1}),
    "rmsprop": (torch.optim.RMSprop, {"lr": 0.1}),
}


def tree(dtype: Any = np.complex64) -> Any:
    return {"real": jnp.ones(3, np.zeros(0, dtype).real.dtype), "z": jnp.array(START, dtype)}


def gradient(step: int, dtype: Any = np.complex64) -> Any:
    return {"real": tree(dtype)["real"] * (step + 1), "z": jnp.array(np.roll(START, step) * (0.5 - 1j), dtype)}


@pytest.mark.parametrize(
    ("rule", "dtype"),
    [
        ("momentum", np.complex128),
        pytest.param("adamw", np.complex64, marks=pytest.mark.slow),
        pytest.param("rmsprop", np.complex128, marks=pytest.mark.slow),
    ],
)
def test_steps_are_torch_s(rule: str, dtype: Any) -> None:
    make, hyper = THEIRS[rule]
    with jax.enable_x64(dtype is np.complex128):
        params, tx = tree(dtype), rulec.jax.transform(rule, **hyper)
        state, updated, tx_state = rulec.jax.init(rule, params), params, tx.init(params)
        theirs = torch.tensor(START.astype(dtype), requires_grad=True)
        optimizer = make([theirs], **hyper)
        for step in range(3):
            grads = gradient(step, dtype)
            params, state = rulec.jax.step(rule, params, grads, state, donate=False, **hyper)
            updates, tx_state = tx.update(grads, tx_state, updated)
            updated = optax.apply_updates(updated, updates)
            theirs.grad = torch.tensor(np.asarray(grads["z"]))
            optimizer.step()
        bound = 1e-6 if dtype is np.complex64 else 1e-14
        for found in (params["z"], updated["z"]):
            np.testing.assert_allclose(found, theirs.detach().numpy(), rtol=bound, atol=bound)
        assert {leaf.dtype for leaf in jax.tree.leaves((params["z"], updates["z"], state[1]["z"]))} == {np.dtype(dtype)}
        assert state[1]["z"].shape == (2, 2)
        assert state[1]["real"].dtype == tx_state[1]["real"].dtype == params["real"].dtype


def test_a_norm_is_of_moduli() -> None:
    grads = {"z": jnp.array([3 + 4j])}
    updates, _ = rulec.jax.transform("clip_by_global_norm >> sgd", lr=1.0, max_norm=1.0).update(
        grads, rulec.jax.init("clip_by_global_norm >> sgd", grads), grads
    )
    np.testing.assert_allclose(updates["z"], [-0.6 - 0.8j], rtol=1e-6)


def test_a_real_gradient_of_a_complex_parameter_has_no_imaginary_part() -> None:
    params = {"z": jnp.array([1 + 1j])}
    moved, _ = rulec.jax.step("sgd", params, {"z": jnp.ones(1)}, rulec.jax.init("sgd", params), lr=0.5)
    np.testing.assert_array_equal(moved["z"], [0.5 + 1j])


def test_states_of_16_bits_are_pairs() -> None:
    state = rulec.jax.init("adam", tree(), state_dtype="bfloat16")
    assert (state.m["z"].shape, state.m["z"].dtype) == ((2, 2, 2), jnp.bfloat16)
    _, state = rulec.jax.step("adam", tree(), gradient(0), state)
    assert (state.m["z"].shape, state.m["z"].dtype) == ((2, 2, 2), jnp.bfloat16)


def refusals(tmp_path: Any) -> dict[str, Callable[[], Any]]:
    params, real = tree(), {"real": jnp.ones(3), "z": jnp.ones((2, 2))}
    state, tx = rulec.jax.init("adam", params), rulec.jax.adam(0.1)
    return {
        "Muon treats tensors by their dimensions, and the parameter z is complex": lambda: rulec.jax.init(
            "muon", params, tags={}
        ),
        "the gradient of z is complex, and its parameter real: give its real part": lambda: rulec.jax.step(
            "adam", real, params, rulec.jax.init("adam", real)
        ),
        r"the gradient of z has shape \(2,\), its parameter \(2, 2\)": lambda: rulec.jax.step(
            "adam", params, {**params, "z": params["z"][0]}, state
        ),
        "a state of complex64 cannot be packed": lambda: rulec.jax.init("adam", params, packed=True),
        "the parameter z is complex, and an eager update": lambda: rulec.jax.eager_step(
            lambda p, x: jnp.abs(p["z"]).sum(), "adam"
        ).init(params),
        "the parameter z is complex, and files": lambda: rulec.jax.save(tmp_path / "file", "adam", params, state),
        "the parameter z is complex, and optax": lambda: rulec.jax.from_optax(optax.adam(0.1).init(params), tx, params),
    }


@pytest.mark.parametrize("case", range(7))
def test_what_complex_parameters_cannot_have(tmp_path: Any, case: int) -> None:
    message, call = [*refusals(tmp_path).items()][case]
    with pytest.raises(TensorError, match=f"^{message}"):
        call()
