"""Files of weights in parts: NumPy, torch, JAX and back go on with the bits of one run."""

from __future__ import annotations

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
from rulec.compiler.weights import PARTS
from tests.checkpoint import narrow
from tests.checkpoint.narrow import BRAIN, FIRST, GRADS, SHAPE, tensor


def in_arrays(params: Any, kind: str, grads: Any, file: Path | None = None) -> Optimizer:
    return narrow.in_arrays(params, grads, file, weights=kind, lr=1e-4)


@pytest.mark.parametrize("kind", [*PARTS, "stochastic"])
def test_a_run_goes_through_three_frameworks(kind: str, tmp_path: Path) -> None:
    whole = {"w": FIRST.copy()}
    in_arrays(whole, kind, GRADS)
    start = {"w": FIRST.copy()}
    of_arrays.save(in_arrays(start, kind, GRADS[:3]), tmp_path / "a", parameters=True)

    param = torch.nn.Parameter(torch.zeros(SHAPE, dtype=torch.bfloat16))
    there = rulec.torch.AdamW([("w", param)], lr=1e-4, weights=kind)
    of_torch.load(there, tmp_path / "a", parameters=True)
    for grad in GRADS[3:6]:
        param.grad = tensor(grad)
        there.step()
    of_torch.save(there, tmp_path / "b", parameters=True)

    params = of_jax.load_params(tmp_path / "b", {"w": jnp.zeros(SHAPE, jnp.bfloat16)})
    state = of_jax.load(tmp_path / "b", "adamw", params, weights=kind)
    for grad in GRADS[6:]:
        params, state = rulec.jax.step("adamw", params, {"w": jnp.asarray(grad)}, state, weights=kind, lr=1e-4)
    assert np.array_equal(np.asarray(params["w"]).view(np.uint16), whole["w"].view(np.uint16))
    of_jax.save(tmp_path / "c", "adamw", params, state, parameters=True, weights=kind)
    back = {"w": np.zeros(SHAPE, BRAIN)}
    again = in_arrays(back, kind, [], tmp_path / "c")
    if kind in PARTS:
        part = PARTS[kind]
        field = getattr(state, part.name.replace("::", "_"))["w"]
        assert np.array_equal(np.asarray(field).view(np.uint8), again.state("w")[part.name].view(np.uint8))


def test_a_state_of_another_kind_keeps_the_weight_in_float32() -> None:
    params = {"w": FIRST.copy()}
    split = in_arrays(params, "split", GRADS[:3])
    exact = (params["w"].astype(np.float32).view(np.int32) + split.state("w")["param::low"]).view(np.float32)
    for kind, far in (("master", 0), ("kahan", 2.0**-17), ("split24", 2.0**-15)):
        other = Optimizer("adamw", params, "cpu", weights=kind, lr=1e-4)
        other.load_state_dict(split.state_dict())
        part = other.state("w")[PARTS[kind].name].astype(np.float32)
        weight = params["w"].astype(np.float32)
        if kind == "split24":
            weight = (weight.view(np.int32) + 256 * part.astype(np.int32)).view(np.float32)
        else:
            weight = part if kind == "master" else weight + part
        assert (np.abs(weight - exact) <= far * np.abs(exact)).all(), kind
        assert not np.array_equal(weight, params["w"].astype(np.float32))


def whole(p: Any, part: Any, kind: str) -> Any:
    """The weight in float32 of a parameter and its part."""
    weight, beside = (np.asarray(x).astype(np.float32) for x in (p, part))
    if kind in ("split", "split24"):
        ulps = beside.astype(np.int32) * (1 if kind == "split" else 256)
        return (weight.view(np.int32) + ulps).view(np.float32)
    return beside if kind == "master" else weight + beside


#: How far the nearest weight of a kind is from a float32, of its size.
FAR = {"split": 2.0**-23, "master": 0, "kahan": 2.0**-17, "split24": 2.0**-15}


@pytest.mark.parametrize("after", PARTS)
@pytest.mark.parametrize("before", ["split", "master", "kahan"])
def test_a_file_of_another_kind_keeps_the_weight_in_float32(before: str, after: str, tmp_path: Path) -> None:
    """The file's parameters are loaded with it, and those in memory count before they are."""
    params, name = {"w": FIRST.copy()}, PARTS[after].name
    saved = in_arrays(params, before, GRADS[:3])
    of_arrays.save(saved, tmp_path / "a", parameters=True)
    exact = whole(params["w"], saved.state("w")[PARTS[before].name], before)

    arrays = {"w": np.zeros(SHAPE, BRAIN)}
    ours = [(arrays["w"], in_arrays(arrays, after, [], tmp_path / "a").state("w")[name])]
    param = torch.nn.Parameter(torch.zeros(SHAPE, dtype=torch.bfloat16))
    there = rulec.torch.AdamW([("w", param)], lr=1e-4, weights=after)
    of_torch.load(there, tmp_path / "a", parameters=True)
    ours.append((param.detach().float().numpy(), there.state[param][name].float().numpy()))
    tree = of_jax.load_params(tmp_path / "a", {"w": jnp.zeros(SHAPE, jnp.bfloat16)})
    state = of_jax.load(tmp_path / "a", "adamw", tree, weights=after)
    ours.append((tree["w"], getattr(state, name.replace("::", "_"))["w"]))
    for p, part in ours:
        assert np.array_equal(np.asarray(p).astype(np.float32), params["w"].astype(np.float32))
        weight = whole(p, part, after)
        assert (np.abs(weight - exact) <= FAR[after] * np.abs(exact)).all()
        assert not np.array_equal(weight, params["w"].astype(np.float32))


@pytest.mark.parametrize("kind", PARTS)
def test_a_weight_goes_over_into_float32_and_back(kind: str, tmp_path: Path) -> None:
    params = {"w": FIRST.copy()}
    saved = in_arrays(params, kind, GRADS[:3])
    of_arrays.save(saved, tmp_path / "narrow", parameters=True)
    exact = whole(params["w"], saved.state("w")[PARTS[kind].name], kind)
    wide = torch.nn.Parameter(torch.zeros(SHAPE))
    plain = rulec.torch.AdamW([("w", wide)], lr=1e-4)
    of_torch.load(plain, tmp_path / "narrow", parameters=True)
    assert np.array_equal(wide.detach().numpy(), exact)
    of_torch.save(plain, tmp_path / "wide", parameters=True)
    back = {"w": np.zeros(SHAPE, BRAIN)}
    again = in_arrays(back, kind, [], tmp_path / "wide")
    weight = whole(back["w"], again.state("w")[PARTS[kind].name], kind)
    assert (np.abs(weight - exact) <= FAR[kind] * np.abs(exact)).all()


def test_a_plain_file_begins_a_split_run(tmp_path: Path) -> None:
    params = {"w": FIRST.copy()}
    plain = Optimizer("adamw", params, "cpu", state_dtype="float32", lr=1e-4)
    plain.step({"w": GRADS[0]})
    of_arrays.save(plain, tmp_path / "plain", parameters=True)
    split = in_arrays({"w": np.zeros(SHAPE, BRAIN)}, "split", [], tmp_path / "plain")
    assert np.array_equal(split.state("w")["m"], plain.state("w")["m"])
    assert not split.state("w")["param::low"].any()
    master = in_arrays({"w": FIRST.copy()}, "master", [])
    of_arrays.save(split, tmp_path / "split", parameters=True)
    of_arrays.load(master, tmp_path / "split", parameters=True)
    master.step({"w": np.zeros(SHAPE, BRAIN)})
    assert np.allclose(master.state("w")["param::master"], params["w"].astype(np.float32), atol=1e-3)
