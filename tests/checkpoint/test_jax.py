"""`rulec.jax.save` and `load`: states inside of optax's, other names and dtypes, shardings, and what is refused."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import torch

import rulec
import rulec.jax
import rulec.torch
from rulec.checkpoint import read
from rulec.errors import RulecError, StateMismatch, TensorError
from rulec.functional.plan import Options
from rulec.jax.packing import Packed, packed
from rulec.jax.recipe import recipe
from rulec.jax.state import Shown
from rulec.jax.transform import of_recipe
from tests.checkpoint.runs import ROOT, JaxRun, first_parameters, gradients

ADAMW: dict[str, Any] = {"lr": 0.01, "weight_decay": 0.1}


def tree() -> dict[str, Any]:
    return {name: jnp.asarray(array, jnp.float32) for name, array in first_parameters().items()}


def grads(step: int) -> dict[str, Any]:
    return {name: jnp.asarray(array, jnp.float32) for name, array in gradients(step).items()}


def trained(tx: optax.GradientTransformation, params: Any, state: Any, steps: range) -> tuple[Any, Any]:
    for step in steps:
        updates, state = tx.update(grads(step), state, params)
        params = optax.apply_updates(params, updates)
    return params, state


def same(one: Any, other: Any) -> bool:
    """Whether two trees are the same, dtypes and structure too."""
    structures: list[Any] = [jax.tree.structure(tree) for tree in (one, other)]
    assert structures[0] == structures[1]
    pairs = zip(jax.tree.leaves(one), jax.tree.leaves(other), strict=True)
    return all(a.dtype == b.dtype and np.array_equal(a, b) for a, b in pairs)


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return tmp_path / "run.safetensors"


@pytest.fixture(scope="module")
def adamw() -> JaxRun:
    """A run of three steps, which no test changes."""
    return JaxRun("adamw", "float32", **ADAMW).steps(range(3))


def test_a_state_comes_back_as_it_was(adamw: JaxRun, file: Path) -> None:
    adamw.save(file)
    assert same(rulec.jax.load(file, "adamw", adamw.params), adamw.state)
    assert same(rulec.jax.load_params(file, tree()), adamw.params)
    assert type(rulec.jax.load(file, "adamw", adamw.params)) is type(adamw.state)
    assert read(file).hyper[0] == {"lr": 0.01, "weight_decay": 0.1, "beta1": 0.9, "beta2": 0.999, "eps": 1e-8}


def test_a_number_of_each_leaf_is_its_own(file: Path) -> None:
    run = JaxRun("novograd", "float32").steps(range(2))
    assert run.state.v[0] != run.state.v[1]
    run.save(file)
    assert same(rulec.jax.load(file, "novograd", run.params), run.state)
    for place, parameter in enumerate(read(file).parameters):
        assert parameter.states["v"].number == run.state.v[place]


def test_what_is_loaded_may_be_donated_and_compiles_nothing_anew(adamw: JaxRun, file: Path) -> None:
    adamw.save(file)
    params, state = rulec.jax.load_params(file, tree()), rulec.jax.load(file, "adamw", adamw.params)
    whole, _ = rulec.jax.step("adamw", adamw.params, grads(3), adamw.state, donate=False, **ADAMW)
    with jax.log_compiles(), jax.checking_leaks():
        ours, _ = rulec.jax.step("adamw", params, grads(3), state, donate=False, **ADAMW)
    assert same(ours, whole)
    donated, _ = rulec.jax.step("adamw", params, grads(3), state, **ADAMW)
    assert same(donated, whole)


def test_states_inside_of_optax_are_found(file: Path) -> None:
    schedule = optax.linear_schedule(0.1, 0.01, 10)
    tx = optax.chain(optax.clip_by_global_norm(1.0), rulec.jax.transform("adamw", lr=schedule, weight_decay=0.1))
    params, state = trained(tx, tree(), tx.init(tree()), range(3))
    rulec.jax.save(file, "adamw", params, state)
    loaded = rulec.jax.load(file, "adamw", params, like=tx.init(tree()))
    assert same(loaded, state)
    assert same(trained(tx, params, loaded, range(3, 5)), trained(tx, params, state, range(3, 5)))


def test_fields_may_have_optaxs_names(adamw: JaxRun, file: Path) -> None:
    tx = of_recipe(recipe("adamw", ADAMW, None), Options(), {"m": Shown("mu"), "v": Shown("nu")})
    params, state = trained(tx, tree(), tx.init(tree()), range(3))
    rulec.jax.save(file, "adamw", params, state)
    loaded = rulec.jax.load(file, "adamw", params, like=tx.init(tree()))
    assert loaded._fields == ("count", "mu", "nu")
    assert same(loaded, state)
    assert same(rulec.jax.load(file, "adamw", params).m, state.mu)


def test_a_packed_state_is_saved_by_leaves_and_loaded_packed(adamw: JaxRun, file: Path) -> None:
    rulec.jax.save(file, "adamw", adamw.params, packed(adamw.state))
    assert same(rulec.jax.load(file, "adamw", adamw.params), adamw.state)
    loaded = rulec.jax.load(file, "adamw", adamw.params, like=packed(adamw.state))
    assert isinstance(loaded.m, Packed)
    assert same(loaded, packed(adamw.state))


def test_a_model_of_torch_with_other_names_and_axes(file: Path) -> None:
    """A dense layer of Flax has torch's matrix transposed."""
    torch.manual_seed(0)
    net = torch.nn.Sequential(torch.nn.Linear(3, 4))
    optimizer = rulec.torch.AdamW(net.named_parameters())
    net(torch.ones(1, 3)).sum().backward()
    optimizer.step()
    rulec.torch.save(optimizer, file, parameters=True)
    params: Any = {"dense": {"kernel": jnp.zeros((3, 4)), "bias": jnp.zeros(4)}}
    names = {"0/weight": "dense/kernel", "0/bias": "dense/bias"}
    with pytest.raises(StateMismatch, match=r"dense/kernel has shape \(3, 4\) here, and \(4, 3\) in .*: give axes="):
        rulec.jax.load(file, "adamw", params, names=names)
    given: Any = {"names": names, "axes": {"dense/kernel": (1, 0)}}
    params = rulec.jax.load_params(file, params, **given)
    state = rulec.jax.load(file, "adamw", params, **given)
    assert np.array_equal(params["dense"]["kernel"], net[0].weight.detach().numpy().T)
    assert np.array_equal(state.v["dense"]["kernel"], optimizer.state[net[0].weight]["exp_avg_sq"].numpy().T)
    assert np.array_equal(state.m["dense"]["bias"], optimizer.state[net[0].bias]["exp_avg"].numpy())


def test_lists_and_single_arrays_have_torchs_places_for_names(file: Path) -> None:
    for params in ([jnp.ones(2), jnp.ones(3)], jnp.ones(2)):
        rulec.jax.save(file, "sgd", params, rulec.jax.init("sgd", params), parameters=True)
        count = len(jax.tree.leaves(params))
        assert [p.name for p in read(file).parameters] == ["0", "1"][:count]
        ours = [torch.nn.Parameter(torch.zeros(n)) for n in (2, 3)][:count]
        rulec.torch.load(rulec.torch.SGD(ours), file, parameters=True)
        assert all((p == 1).all() for p in ours)


def test_a_partition_saves_the_leaves_that_it_trains(file: Path) -> None:
    partition = rulec.partition({"bias": None, "kernel": "momentum"})
    params = tree()
    state = rulec.jax.init(partition, params)
    params, state = rulec.jax.step(partition, params, grads(0), state, donate=False)
    rulec.jax.save(file, partition, params, state)
    assert [(p.name, p.rule, p.steps) for p in read(file).parameters] == [("kernel", "Momentum", 1)]
    assert same(rulec.jax.load(file, partition, params), state)


@pytest.mark.slow
def test_several_rules_go_to_torch_in_one_optimizer_each(file: Path) -> None:
    partition = rulec.partition({"bias": "sgd", "kernel": "lion"})
    params, state = tree(), rulec.jax.init(partition, tree())
    params, state = rulec.jax.step(partition, params, grads(0), state, donate=False)
    rulec.jax.save(file, partition, params, state)
    assert same(rulec.jax.load(file, partition, params), state)
    assert [(p.name, p.rule, p.group) for p in read(file).parameters] == [("bias", "SGD", 0), ("kernel", "Lion", 1)]


def test_before_the_first_step_a_file_of_torch_has_the_first_state(file: Path) -> None:
    """Torch has no state then; that of JAX is what the rule says."""
    params = tree()
    ours = [(n, torch.nn.Parameter(torch.from_numpy(np.array(p)))) for n, p in params.items()]
    rulec.torch.save(rulec.torch.Prodigy(ours, d0=1e-3), file)
    assert same(rulec.jax.load(file, "prodigy", params, d0=1e-3), rulec.jax.init("prodigy", params, d0=1e-3))


def test_counts_of_leaves_apart(file: Path) -> None:
    """Where a rule may skip the steps of some leaves alone, each has its own count, as in torch."""
    rule = rulec.load("adam").renamed("Careful")
    rule = rulec.parse(rule.to_yaml() + "skip: not isfinite(sum(g))\n")
    params: Any = tree()
    state = rulec.jax.init(rule, params)
    bad = {**grads(0), "bias": jnp.full(5, jnp.nan)}
    params, state = rulec.jax.step(rule, params, bad, state, donate=False)
    assert np.asarray(state.count).tolist() == [0, 1]
    rulec.jax.save(file, rule, params, state, parameters=True)
    assert [p.steps for p in read(file).parameters] == [0, 1]
    assert same(rulec.jax.load(file, rule, params), state)


# What is refused


def test_one_count_cannot_stand_for_several(file: Path) -> None:
    net = [("bias", torch.nn.Parameter(torch.zeros(5))), ("kernel", torch.nn.Parameter(torch.zeros(4, 6)))]
    optimizer = rulec.torch.AdamW(net)
    for p in (net[0][1], net[1][1]):
        p.grad = torch.ones_like(p)
        optimizer.step()
    rulec.torch.save(optimizer, file)
    with pytest.raises(StateMismatch) as found:
        rulec.jax.load(file, "adamw", tree())
    assert str(found.value) == (
        f"in {file} bias was updated 2 times and kernel 1 times, and a state here has one count for all: save when all "
        f"were updated equally often, and none but those that are trained"
    )


def test_a_state_of_another_rule_or_tree_is_refused(adamw: JaxRun, file: Path) -> None:
    adamw.save(file)
    params = adamw.params
    with pytest.raises(StateMismatch, match=r"^bias was updated by AdamW when .* was saved, and Adam computes"):
        rulec.jax.load(file, "adam", params)
    assert same(rulec.jax.load(file, "adam", params, rule_may_differ=True), adamw.state)
    with pytest.raises(StateMismatch, match=r"has no v_max of bias \(it has m, v\): it is of another rule"):
        rulec.jax.load(file, "amsgrad", params, rule_may_differ=True)
    with pytest.raises(StateMismatch, match="has kernel, which is no parameter here"):
        rulec.jax.load(file, "adamw", {"bias": params["bias"]})
    with pytest.raises(StateMismatch, match="has bias where there is b here: the shapes agree in their order"):
        rulec.jax.load(file, "adamw", {"b": params["bias"], "k": params["kernel"]})
    assert (
        int(rulec.jax.load(file, "adamw", {"b": params["bias"], "k": params["kernel"]}, names=lambda n: n[0]).count)
        == 3
    )
    rulec.jax.save(file, "adamw", params, adamw.state)
    with pytest.raises(StateMismatch, match="has no value of bias: it was saved without parameters=True"):
        rulec.jax.load_params(file, params)


def test_a_state_that_is_not_the_rules_is_not_saved(adamw: JaxRun, file: Path) -> None:
    params, state = adamw.params, adamw.state
    with pytest.raises(StateMismatch, match="the state has m, v, and Lion has m: give the rule that it is of"):
        rulec.jax.save(file, "lion", params, state)
    with pytest.raises(StateMismatch, match="does not have the structure of the parameters"):
        rulec.jax.save(file, "adamw", {"bias": params["bias"]}, state)
    with pytest.raises(StateMismatch, match="the state is a tuple without 'm', which AdamW needs"):
        rulec.jax.save(file, "adamw", params, (1, 2))
    with pytest.raises(RulecError, match="there are 2 states of rules in the state: save and load each by itself"):
        rulec.jax.save(file, "adamw", params, (state, state))
    assert not file.exists()


def test_traced_and_donated_states_are_not_saved(adamw: JaxRun, file: Path) -> None:
    with pytest.raises(TensorError, match="the state is traced: save outside of jit"):
        jax.jit(lambda state: rulec.jax.save(file, "adamw", adamw.params, state))(adamw.state)
    gone = jax.tree.map(jnp.copy, adamw.state)
    for array in jax.tree.leaves(gone):
        array.delete()
    with pytest.raises(TensorError, match="the state was donated to a later step: save what that step returned"):
        rulec.jax.save(file, "adamw", adamw.params, gone)
    assert not file.exists()


def test_static_hyper_parameters_decide_shapes(file: Path) -> None:
    params = {"kernel": jnp.ones((4, 6))}
    rulec.jax.save(file, "galore", params, rulec.jax.init("galore", params, rank=2), rank=2)
    with pytest.raises(
        StateMismatch, match=r"P of kernel was saved with shape \(4, 2\), where it has \(4, 3\): give the"
    ):
        rulec.jax.load(file, "galore", params, rank=3)


def test_random_numbers_follow_from_seed_and_place(file: Path) -> None:
    params = {"kernel": jnp.ones((4, 6))}
    rulec.jax.save(file, "apollo", params, rulec.jax.init("apollo", params, rank=2), rank=2, seed=3)
    with pytest.raises(StateMismatch, match="was saved with seed=3, and the seed is 0 here: give the same"):
        rulec.jax.load(file, "apollo", params, rank=2)
    partition = rulec.partition({"a": None, "kernel": rulec.load("apollo").bind(rank=2)})
    with pytest.raises(StateMismatch, match="kernel is at another place among the parameters"):
        rulec.jax.load(file, partition, {"a": jnp.ones(1), **params}, seed=3)
    assert int(rulec.jax.load(file, "apollo", params, rank=2, seed=3).count) == 0


# Beside other tools


@pytest.mark.slow
def test_orbax_saves_and_restores_a_state(adamw: JaxRun, tmp_path: Path) -> None:
    """A state is a plain pytree of arrays."""
    import orbax.checkpoint as ocp

    with ocp.StandardCheckpointer() as checkpointer:
        checkpointer.save(tmp_path / "orbax", {"params": adamw.params, "state": adamw.state})
        checkpointer.wait_until_finished()
        first = {"params": tree(), "state": rulec.jax.init("adamw", tree())}
        found = checkpointer.restore(tmp_path / "orbax", first)
    assert same(found, {"params": adamw.params, "state": adamw.state})
    ours = rulec.jax.step("adamw", found["params"], grads(3), found["state"], donate=False, **ADAMW)
    theirs = rulec.jax.step("adamw", adamw.params, grads(3), adamw.state, donate=False, **ADAMW)
    assert same(ours, theirs)


SHARDED = """
import jax, numpy as np, rulec.jax
from jax.sharding import NamedSharding, PartitionSpec

mesh = jax.make_mesh((8,), ("x",))
where = {"b": NamedSharding(mesh, PartitionSpec()), "w": NamedSharding(mesh, PartitionSpec(None, "x"))}
numbers = {"b": np.arange(8, dtype=np.float32), "w": np.arange(32, dtype=np.float32).reshape(2, 16)}
params = {name: jax.device_put(array, where[name]) for name, array in numbers.items()}
state = rulec.jax.init("adamw", params)
params, state = rulec.jax.step("adamw", params, params, state, lr=0.1, donate=False)
rulec.jax.save("run.safetensors", "adamw", params, state, parameters=True)
loaded = rulec.jax.load("run.safetensors", "adamw", params)
again = rulec.jax.load_params("run.safetensors", params)
for name in params:
    for array in (loaded.v[name], again[name]):
        assert array.sharding.is_equivalent_to(where[name], array.ndim), array.sharding
    assert np.array_equal(loaded.v[name], state.v[name]) and np.array_equal(again[name], params[name])
print(len(loaded.m["w"].addressable_shards), loaded.m["w"].addressable_shards[0].data.shape)
"""


@pytest.mark.slow
def test_loaded_states_are_sharded_as_their_parameters(tmp_path: Path) -> None:
    environment = {"XLA_FLAGS": "--xla_force_host_platform_device_count=8", "PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        [sys.executable, "-c", SHARDED], cwd=tmp_path, env={**os.environ, **environment}, capture_output=True,
        text=True, check=False,
    )  # fmt: skip
    assert (done.stdout.strip(), done.returncode) == ("8 (2, 2)", 0), done.stderr
