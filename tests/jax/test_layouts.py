"""Layers in the layouts of torch, Flax and Haiku: the same steps, whatever the order of a parameter's axes."""

from __future__ import annotations

import functools
import json
import os
import re
import subprocess
import sys
import warnings
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import rulec
import rulec.jax
from rulec.errors import HyperError, StateMismatch, TensorError
from rulec.functional.axes import Orientation, reads_layout, reads_tensors
from rulec.language.rule_data import draws
from tests.layouts import AXES, arrays, as_torch, largest_difference, of_layouts, whole_rules, wide, with_heads
from tests.library import by_kind


def stepped(rule: Any, seen: Callable[[Any], Any], axes: Any, steps: int = 3, **options: Any) -> tuple[Any, Any]:
    with jax.enable_x64(True):
        params = jax.tree.map(jnp.array, seen(arrays(0)))
        state = rulec.jax.init(rule, params, axes=axes, tags={}, **options)
        for t in range(steps):
            grads = jax.tree.map(jnp.array, seen(arrays(t + 1)))
            params, state = rulec.jax.step(rule, params, grads, state, axes=axes, tags={}, donate=False, lr=0.01)
        return jax.tree.map(np.asarray, params), state


#: Module and name of a parameter of Haiku -> the parameter here, in the same order.
HAIKU = {
    ("conv2_d", "w"): "conv", ("linear", "b"): "dense_b", ("linear", "w"): "dense_w",
    ("multi_head_attention/linear", "w"): "out", ("multi_head_attention/query", "w"): "query",
    ("stack/__layer_stack_no_per_layer/linear", "w"): "stack",
}  # fmt: skip


def in_haiku(tree: Mapping[str, Any]) -> dict[str, Any]:
    """The parameters with the axes of Haiku, whose attention has the heads joined."""
    return {**with_heads(tree), "out": tree["out"].T, "query": tree["query"].T}


def as_haiku(tree: Mapping[str, Any]) -> dict[str, Any]:
    """The parameters in Haiku's dicts."""
    nested: dict[str, Any] = {}
    for (module, name), ours in HAIKU.items():
        nested.setdefault(module, {})[name] = in_haiku(tree)[ours]
    return nested


@functools.cache
def in_torch_s(name: str) -> dict[str, Any]:
    """The parameters after steps of a rule in the layout of torch."""
    return stepped(wide(name), as_torch, None)[0]  # type: ignore[no-any-return]


@pytest.mark.parametrize("name", by_kind(of_layouts()))
def test_every_rule_takes_the_same_steps_in_both_layouts(name: str) -> None:
    flaxs, _ = stepped(wide(name), with_heads, AXES)
    assert largest_difference(in_torch_s(name), flaxs) <= 1e-12


@pytest.mark.parametrize(
    "name", ["muon", *(pytest.param(n, marks=pytest.mark.another) for n in of_layouts() if n != "muon")]
)
def test_every_rule_takes_the_same_steps_in_the_layout_of_haiku(name: str) -> None:
    haikus, _ = stepped(wide(name), as_haiku, rulec.jax.haiku_axes(as_haiku(arrays(0))))
    flat = {ours: haikus[module][layer] for (module, layer), ours in HAIKU.items()}
    assert largest_difference(in_torch_s(name), flat, in_haiku) <= 1e-12


def test_a_state_of_the_shape_of_a_parameter_lies_as_it_does() -> None:
    _, state = stepped(wide("muon"), with_heads, AXES, steps=1)
    kept = {name: x.shape for name, x in state.m.items() if x is not None}
    assert kept == {name: with_heads(arrays(0))[name].shape for name in kept}
    assert {"dense_w", "query", "stack"} <= kept.keys()


def test_without_roles_the_layouts_differ() -> None:
    """The fault that roles mend, so that the tests above can fail."""
    torchs, _ = stepped(wide("muon"), as_torch, None)
    flaxs, _ = stepped(wide("muon"), with_heads, None)
    assert largest_difference(torchs, flaxs) > 1e-3


def test_a_transformation_sees_roles_and_traces_once() -> None:
    tx = rulec.jax.transform(wide("muon"), lr=0.01, axes=AXES, tags={})
    traced = 0

    def update(grads: Any, state: Any, params: Any) -> Any:
        nonlocal traced
        traced += 1
        return tx.update(grads, state, params)

    with jax.enable_x64(True):
        params = jax.tree.map(jnp.array, with_heads(arrays(0)))
        state, compiled = tx.init(params), jax.jit(update)
        for t in range(3):
            updates, state = compiled(jax.tree.map(jnp.array, with_heads(arrays(t + 1))), state, params)
            params = optax.apply_updates(params, updates)
    expected, _ = stepped(wide("muon"), as_torch, None)
    assert traced == 1
    assert largest_difference(expected, jax.tree.map(np.asarray, params)) <= 1e-12


# States


@pytest.mark.parametrize("rule", ["adafactor", "soap", "lamb", "prodigy", "normuon"])
@pytest.mark.parametrize("shape", [(4, 3, 4), (3, 3, 4)])
def test_states_of_a_batch_in_the_middle_go_on(rule: str, shape: tuple[int, ...]) -> None:
    """The shape of a state may be that of the leaf by chance."""
    roles = {"w": ("inputs", "batch", "outputs")}
    rng = np.random.default_rng(0)
    grads = [rng.normal(size=shape) for _ in range(3)]
    with jax.enable_x64(True):
        one, many = {"w": jnp.ones(shape)}, {"w": {str(i): jnp.ones((shape[2], shape[0])) for i in range(shape[1])}}
        state, states = rulec.jax.init(rule, one, axes=roles), rulec.jax.init(rule, many)
        for g in grads:
            parts = {"w": {str(i): jnp.array(g[:, i].T) for i in range(shape[1])}}
            one, state = rulec.jax.step(rule, one, {"w": jnp.array(g)}, state, axes=roles, lr=0.01)
            many, states = rulec.jax.step(rule, many, parts, states, lr=0.01)
        expected = np.stack([np.asarray(x).T for x in many["w"].values()], axis=1)
        assert np.abs(np.asarray(one["w"]) - expected).max() <= 1e-12


@pytest.mark.parametrize("rule", ["adamw", "muon"])
def test_states_in_codes_go_on(rule: str) -> None:
    axes = {"w": ("batch", "inputs", "outputs")}
    grads = [np.random.default_rng(t).normal(size=(2, 96, 64)).astype(np.float32) for t in range(3)]
    params = {"w": jnp.zeros((2, 96, 64))}
    state = rulec.jax.init(rule, params, axes=axes, state_dtype="dynamic8", tags={})
    for g in grads:
        params, state = rulec.jax.step(rule, params, {"w": jnp.array(g)}, state, axes=axes, tags={})
    each = [{"w": jnp.zeros((64, 96))} for _ in range(2)]
    for i, one in enumerate(each):
        alone = rulec.jax.init(rule, one, state_dtype="dynamic8", tags={})
        for g in grads:
            one, alone = rulec.jax.step(rule, one, {"w": jnp.array(g[i].T)}, alone, tags={})
        # Codes of rules that do not depend on the layout are of blocks in the parameter's own.
        bound = 0.0 if rule == "muon" else 1e-3
        assert float(jnp.abs(one["w"].T - params["w"][i]).max()) <= bound


def test_complex_parameters_have_roles() -> None:
    axes = {"w": ("batch", "inputs", "outputs")}
    grads = np.random.default_rng(0).normal(size=(2, 3, 4)) + 1j
    params = {"w": jnp.ones((2, 3, 4), jnp.complex64)}
    state = rulec.jax.init("lamb", params, axes=axes)
    new, _ = rulec.jax.step("lamb", params, {"w": jnp.array(grads, jnp.complex64)}, state, axes=axes, donate=False)
    for i in range(2):
        one = {"w": params["w"][i]}
        alone, _ = rulec.jax.step("lamb", one, {"w": jnp.array(grads[i], jnp.complex64)}, rulec.jax.init("lamb", one))
        assert np.allclose(new["w"][i], alone["w"], atol=1e-6)


def test_inputs_and_statistics_have_the_layout_of_their_parameters() -> None:
    axes = {"w": ("batch", "inputs", "outputs")}
    params = {"w": jnp.ones((2, 3, 4))}
    state = rulec.jax.init("lamb", params, axes=axes)
    grads = {"w": jnp.arange(24.0).reshape(2, 3, 4)}
    _, _, measured = rulec.jax.step("lamb", params, grads, state, axes=axes, watch={"size": "norm(g)"}, donate=False)
    assert np.allclose(measured["size"]["w"], jnp.linalg.norm(grads["w"].reshape(2, -1), axis=1))
    state = rulec.jax.init("adahessian", params, axes=axes)
    hessian = {"w": jnp.cos(grads["w"])}
    new, _ = rulec.jax.step("adahessian", params, grads, state, axes=axes, hessian=hessian, donate=False)
    plain, _ = rulec.jax.step("adahessian", params, grads, rulec.jax.init("adahessian", params), hessian=hessian)
    assert new["w"].shape == plain["w"].shape


def test_a_stack_of_no_layers_stays_as_it_is() -> None:
    params = {"w": jnp.ones((0, 3, 4)), "v": jnp.ones((1, 3, 4))}
    axes = {"*": ("batch", "inputs", "outputs")}
    state = rulec.jax.init("adafactor", params, axes=axes)
    new, _ = rulec.jax.step("adafactor", params, params, state, axes=axes, donate=False)
    assert {name: x.shape for name, x in new.items()} == {"w": (0, 3, 4), "v": (1, 3, 4)}


# Mistakes


def test_mistakes_in_roles_are_one_sentence() -> None:
    params = {"dense": {"kernel": jnp.ones((3, 4))}, "conv": {"kernel": jnp.ones((2, 2, 3, 4))}}

    def init(axes: Any) -> Any:
        return rulec.jax.init("muon", params, axes=axes, tags={})

    with pytest.raises(
        HyperError, match="'input' of the axes of '\\*kernel' is none of batch, outputs, inputs, window"
    ):
        init({"*kernel": ("input", "outputs")})
    with pytest.raises(
        TensorError, match=re.escape("conv/kernel of shape (2, 2, 3, 4) needs 4 roles, and '*kernel' gives it 2")
    ):
        init({"*kernel": ("inputs", "outputs")})
    with pytest.raises(TensorError, match="the pattern '\\*weight' of axes matches no parameter"):
        init({"*weight": ("inputs", "outputs")})
    with pytest.raises(HyperError, match="are those of one array: give them by path"):
        init(("inputs", "outputs"))
    with pytest.raises(HyperError, match="give a role for each axis"):
        init({"dense": {"kernel": 1}})
    window = ("window", "window", "inputs", "outputs")
    state = init({"*kernel": ("inputs", "outputs"), "conv*": window})
    assert state.m["dense"]["kernel"].shape == (3, 4)
    assert init({"dense": {"kernel": ("inputs", "outputs")}, "conv": {"kernel": None}}).m["dense"]["kernel"] is not None


def test_a_state_of_other_roles_is_refused() -> None:
    params = {"w": jnp.ones((4, 3, 5))}
    state = rulec.jax.init("adafactor", params, axes={"w": ("batch", "inputs", "outputs")})
    with pytest.raises(StateMismatch):
        rulec.jax.step("adafactor", params, params, state, axes={"w": ("inputs", "batch", "outputs")}, donate=False)


def test_packed_states_have_no_roles() -> None:
    params = {"w": jnp.ones((4, 3))}
    axes = {"w": ("inputs", "outputs")}
    state = rulec.jax.packed(rulec.jax.init("adafactor", params, axes=axes))
    with pytest.raises(StateMismatch, match=re.escape("give the state that rulec.jax.unpacked returns")):
        rulec.jax.step("adafactor", params, params, state, axes=axes, donate=False)


def test_a_kernel_whose_roles_are_unknown_is_named_once() -> None:
    params = {"a": {"kernel": jnp.ones((3, 4))}, "b": {"kernel": jnp.ones((5, 4))}, "c": {"weight": jnp.ones((6, 4))}}
    rule = rulec.load("muon")
    named = re.escape("takes the axes of a/kernel, of shape (3, 4), for (outputs, inputs)")
    with pytest.warns(UserWarning, match=named):
        state = rulec.jax.init(rule, params, tags={}, momentum=0.875)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        rulec.jax.step(rule, params, params, state, tags={}, momentum=0.875, backend="jax", donate=False)
        for axes in ({"*kernel": None}, {"*kernel": ("inputs", "outputs")}):
            rulec.jax.init(rule, params, tags={}, axes=axes)
        rulec.jax.init("adamw", params)


# Several devices


#: Rule -> the largest difference: NorMuon iterates in bfloat16, and sums on several devices are in another order.
_NEAR = {"adafactor": 1e-12, "lamb": 1e-12, "normuon": 1e-3}

_ON_EIGHT = """
import json, sys
import jax, jax.numpy as jnp, numpy as np
from jax.sharding import AxisType, NamedSharding, PartitionSpec as P
import rulec.jax
jax.config.update("jax_enable_x64", True)
rng = np.random.default_rng(0)
shapes = {"w": (8, 16), "q": (16, 4, 8), "s": (8, 8, 16), "k": (3, 3, 8, 16)}
roles = {"w": ("inputs", "outputs"), "q": ("inputs", "outputs", "outputs"), "s": ("batch", "inputs", "outputs"),
         "k": ("window", "window", "inputs", "outputs")}
specs = {"w": P("x", "y"), "q": P("x", "y"), "s": P("x", None, "y"), "k": P(None, None, "x", "y")}
trees = [{k: rng.normal(size=shape) for k, shape in shapes.items()} for _ in range(4)]
def run(rule, put):
    params, *grads = [{k: put(k, v) for k, v in tree.items()} for tree in trees]
    state = rulec.jax.init(rule, params, axes=roles, tags={})
    for g in grads:
        params, state = rulec.jax.step(rule, params, g, state, axes=roles, tags={}, lr=0.01)
    return params
found = {}
for rule in sys.argv[1:]:
    alone = run(rule, lambda k, v: jnp.array(v))
    for kind in (AxisType.Auto, AxisType.Explicit):
        mesh = jax.make_mesh((4, 2), ("x", "y"), axis_types=(kind, kind))
        spread = run(rule, lambda k, v: jax.device_put(v, NamedSharding(mesh, specs[k])))
        kept = {k: NamedSharding(mesh, spec) for k, spec in specs.items()}
        lost = [k for k, x in spread.items() if not x.sharding.is_equivalent_to(kept[k], x.ndim)]
        worst = max(float(np.abs(np.asarray(alone[k]) - np.asarray(spread[k])).max()) for k in spread)
        found[f"{rule} {kind.name}"] = [worst, lost]
print(json.dumps(found))
"""


@pytest.mark.slow
def test_sharded_axes_and_roles_meet_on_eight_devices() -> None:
    """Numbers as on one device, and every parameter stays sharded as it was."""
    flags = {"XLA_FLAGS": "--xla_force_host_platform_device_count=8", "JAX_PLATFORMS": "cpu"}
    done = subprocess.run(
        [sys.executable, "-c", _ON_EIGHT, *_NEAR], env={**os.environ, **flags},
        capture_output=True, text=True, check=True,
    )  # fmt: skip
    found = json.loads(done.stdout)
    assert len(found) == 2 * len(_NEAR)
    for what, (worst, lost) in found.items():
        assert worst <= _NEAR[what.split()[0]]
        assert lost == []


def test_an_orientation_and_its_inverse() -> None:
    one = Orientation((2, 3, 4, 5), ("inputs", "batch", "outputs", "inputs"))
    array = np.arange(120).reshape(2, 3, 4, 5)
    stack = one.stacked(array, np)
    assert stack.shape == (3, 4, 10)
    assert np.array_equal(stack[1, 2], array[:, 1, 2].reshape(-1))
    assert np.array_equal(one.joined(one.apart(array, np), np), array)
    assert Orientation((2, 3, 4), ("batch", "batch", "outputs")).names("w")[::4] == ["w/0/0", "w/1/1"]


def test_which_rules_read_axes() -> None:
    assert reads_layout(rulec.load("muon"))
    assert not reads_layout(rulec.load("lamb"))
    assert reads_tensors(rulec.load("lamb"))
    assert not reads_tensors(rulec.load("adamw"))
    assert not any(draws(rule) and not reads_layout(rule) for rule in map(rulec.load, whole_rules()))
