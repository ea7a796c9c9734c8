"""Files of states that are rounded at random: NumPy, torch, JAX and back go on with the bits of one run."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest
import torch

import rulec.array.checkpoint as of_arrays
import rulec.jax
import rulec.jax.checkpoint as of_jax
import rulec.torch
import rulec.torch.checkpoint as of_torch
from rulec.array import Optimizer
from rulec.checkpoint.content import Parameter
from rulec.checkpoint.convert import faults
from rulec.checkpoint.tensors import Stored, read_file
from rulec.errors import StateMismatch
from tests.checkpoint import narrow
from tests.checkpoint.narrow import BRAIN, FIRST, GRADS, SHAPE, tensor

#: In bfloat16 the step of XLA's own code has the bits of the kernels.
WORDS: dict[str, Any] = {"state_dtype": "bfloat16_sr"}
SEED = 70000


def in_arrays(params: Any, grads: Any, file: Path | None = None, **words: Any) -> Optimizer:
    return narrow.in_arrays(params, grads, file, **{"lr": 1e-2, "seed": SEED, **WORDS, **words})


def test_a_run_goes_through_three_frameworks(tmp_path: Path) -> None:
    whole = {"w": FIRST.copy()}
    expected = in_arrays(whole, GRADS).state("w")
    of_arrays.save(in_arrays({"w": FIRST.copy()}, GRADS[:3]), tmp_path / "a", parameters=True)

    param = torch.nn.Parameter(torch.zeros(SHAPE, dtype=torch.bfloat16))
    there = rulec.torch.AdamW([("w", param)], lr=1e-2, seed=SEED, **WORDS)
    of_torch.load(there, tmp_path / "a", parameters=True)
    for grad in GRADS[3:6]:
        param.grad = tensor(grad)
        there.step()
    of_torch.save(there, tmp_path / "b", parameters=True)

    params = of_jax.load_params(tmp_path / "b", {"w": jnp.zeros(SHAPE, jnp.bfloat16)})
    state = of_jax.load(tmp_path / "b", "adamw", params, seed=SEED, **WORDS)
    for grad in GRADS[6:]:
        params, state = rulec.jax.step("adamw", params, {"w": jnp.asarray(grad)}, state, seed=SEED, lr=1e-2)
    assert np.array_equal(np.asarray(params["w"]).view(np.uint16), whole["w"].view(np.uint16))
    of_jax.save(tmp_path / "c", "adamw", params, state, parameters=True, seed=SEED)
    again = in_arrays({"w": np.zeros(SHAPE, BRAIN)}, [], tmp_path / "c").state("w")
    for name in "mv":
        assert np.array_equal(again[name].view(np.uint16), expected[name].view(np.uint16))
    for file in "abc":
        metadata = read_file(tmp_path / file)[1]
        assert json.loads(metadata["seed"]) == SEED
        assert json.loads(metadata["parameters"])[0]["formats"] == {"m": "bfloat16_sr", "v": "bfloat16_sr"}


def test_another_seed_is_refused_everywhere(tmp_path: Path) -> None:
    file = tmp_path / "run"
    of_arrays.save(in_arrays({"w": FIRST.copy()}, GRADS[:1]), file)
    params = {"w": jnp.asarray(FIRST)}
    like = rulec.jax.init("adamw", params, **WORDS)
    for load in (
        lambda: of_arrays.load(in_arrays({"w": FIRST.copy()}, [], seed=2), file),
        lambda: of_jax.load(file, "adamw", params, seed=2, **WORDS),
        lambda: of_jax.load(file, "adamw", params, seed=2, like=like),
    ):
        with pytest.raises(StateMismatch, match="was saved with seed=70000, and the seed is 2 here"):
            load()
    assert of_jax.load(file, "adamw", params, seed=2).v["w"].dtype == jnp.bfloat16  # nothing is drawn
    assert of_jax.load(file, "adamw", params, seed=SEED, like=like).v["w"].dtype == "bfloat16_sr"


def test_stochastic_weights_say_their_seed_too(tmp_path: Path) -> None:
    words = {"weights": "stochastic", "state_dtype": "float32"}
    of_arrays.save(in_arrays({"w": FIRST.copy()}, GRADS[:1], **words), tmp_path / "run", parameters=True)
    with pytest.raises(StateMismatch, match="was saved with seed=70000"):
        in_arrays({"w": FIRST.copy()}, [], tmp_path / "run", **words, seed=1)


@pytest.mark.parametrize("storage", ["float32", "dynamic8", "bfloat16"])
@pytest.mark.filterwarnings("ignore:v of AdamW moves")
def test_files_change_the_storage(storage: str, tmp_path: Path) -> None:
    shape, words = (80, 80), {"state_dtype": storage, "seed": 0}
    grad = np.random.default_rng(0).standard_normal(shape).astype(np.float32)
    ours = in_arrays({"w": np.zeros(shape, np.float32)}, [grad])
    of_arrays.save(ours, tmp_path / "a", parameters=True)
    other = in_arrays({"w": np.zeros(shape, np.float32)}, [], tmp_path / "a", **words)
    of_arrays.save(other, tmp_path / "b", parameters=True)
    back = in_arrays({"w": np.zeros(shape, np.float32)}, [], tmp_path / "b")
    near = np.asarray(back.state("w")["v"], np.float64)
    exact = np.asarray(ours.state("w")["v"], np.float64)
    assert np.abs(near - exact).max() <= (0.01 * exact.max() if storage == "dynamic8" else 0)


def test_a_state_that_says_so_and_is_not_bfloat16_is_a_fault() -> None:
    state = Stored.of(np.zeros(3, np.float32), format="bfloat16_sr")
    parameter = Parameter("w", (3,), "float32", "AdamW", "", 0, states={"v": state})
    assert [*faults(parameter)] == ["v of w in bfloat16_sr is of float32"]
