"""Functions of optax's names compute what optax's do, keep the same state under the same names, and refuse the rest."""

from __future__ import annotations

import inspect
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import rulec
import rulec.jax
from rulec.errors import HyperError, StateMismatch
from rulec.jax.built import BUILT
from rulec.jax.drop_ins import function_named
from rulec.jax.entries import entries, index
from tests.jax.agreement import (
    FUNCTIONS,
    HALF,
    Trial,
    check_moved,
    difference,
    keywords,
    ours,
    root_in_float64,
    run,
    theirs,
    trial,
)

#: Hyper-parameters that bfloat16 has exactly: optax rounds each to the dtype of what it multiplies.
EXACT = {
    "b1": 0.5, "b2": 0.75, "b3": 0.75, "decay": 0.75, "rho": 0.75, "momentum": 0.5, "betas": (0.5, 0.75),
    "beta": 0.5, "weight_decay": 2.0**-6, "eps": 2.0**-10,
}  # fmt: skip

#: Flags that choose other rules, and further numbers: each is a case beside the defaults.
MORE = [
    ("adam", {"nesterov": True, "eps_root": 1e-3}), ("adamw", {"eps_root": 1e-3, "weight_decay": 0.1}),
    ("nadamw", {"nesterov": False}), ("adabelief", {"eps_root": 1e-3}), ("sgd", {"momentum": 0.9}),
    ("sgd", {"momentum": 0.9, "nesterov": True}), ("sgd", {"momentum": 0.0}),
    ("rmsprop", {"momentum": 0.9, "initial_scale": 0.1}), ("rmsprop", {"centered": True, "initial_scale": 4.0}),
    ("rmsprop", {"eps_in_sqrt": False}), ("rmsprop", {"momentum": 0.9, "eps_in_sqrt": False}),
    ("rmsprop", {"centered": True, "eps_in_sqrt": False, "initial_scale": 4.0}),
    ("sgd", {"nesterov": True}), ("rmsprop", {"nesterov": True}),
    ("rmsprop", {"bias_correction": True}), ("rmsprop", {"bias_correction": True, "eps_in_sqrt": False}),
    ("rmsprop", {"momentum": 0.9, "nesterov": True}),
    ("rmsprop", {"momentum": 0.9, "nesterov": True, "bias_correction": True, "eps_in_sqrt": False}),
    ("rmsprop", {"centered": True, "momentum": 0.9, "initial_scale": 4.0}),
    ("rmsprop", {"centered": True, "momentum": 0.9, "nesterov": True, "initial_scale": 4.0}),
    ("scale_by_lion", {"mode": "smooth", "smooth_beta": 0.5}), ("scale_by_lion", {"mode": "refined"}),
    ("fromage", {"min_norm": 0.0}), ("adadelta", {"weight_decay": 0.1}), ("adadelta", {"learning_rate": None}),
    ("lamb", {"weight_decay": 0.1, "eps_root": 1e-3}), ("novograd", {"weight_decay": 0.1, "eps_root": 1e-3}),
    ("radam", {"threshold": 4.0, "eps_root": 1e-3}), ("scale_by_yogi", {"initial_accumulator_value": 1e-3}),
    ("trace", {"nesterov": True}), ("contrib.adopt", {"use_clipping": False}), ("contrib.dowg", {"eps": 1e-2}),
    ("contrib.dog", {"weight_decay": 0.1}), ("contrib.schedule_free_adamw", {"warmup_steps": 16}),
    ("contrib.schedule_free_sgd", {"warmup_steps": 16, "weight_decay": 0.1}), ("contrib.ademamix", {"eps_root": 1e-3}),
    ("optimistic_adam_v2", {"nesterov": False, "alpha": 0.5, "beta": 0.25}), ("contrib.acprop", {"weight_decay": 0.1}),
    ("adan", {"eps_root": 0.0, "weight_decay": 0.1}), ("lars", {"nesterov": True, "weight_decay": 0.1, "eps": 1e-3}),
    ("contrib.madgrad", {"weight_decay": 0.1}), ("optimistic_adam", {"optimism": 0.25, "nesterov": False}),
    ("contrib.cocob", {"weight_decay": 0.1}), ("contrib.simplified_ademamix", {"alpha": 3.0, "weight_decay": 0.1}),
    ("polyak_sgd", {"scaling": 0.25, "eps": 1e-3}), ("polyak_sgd", {"variant": "sps+", "f_min": 20.0}),
    ("scale_by_polyak", {"variant": "sps+"}), ("contrib.momo_adam", {"lower_bound": 0.5, "weight_decay": 0.1}),
]  # fmt: skip


def schedule(count: Any) -> Any:
    """Powers of two, which are the same in every dtype."""
    return 2.0**-5 * jnp.where(count < HALF - 2, 1.0, 0.5)


def rate(name: str) -> Any:
    return 2.0**-5 if "schedule_free" in name or name in ("rprop", "optimistic_adam") else schedule


def pair(name: str, given: dict[str, Any]) -> tuple[Any, Any]:
    return ours(name)(**given), theirs(name)(**given)


def taken(name: str, given: dict[str, Any]) -> dict[str, Any]:
    """The keywords that the function has."""
    known = inspect.signature(theirs(name)).parameters
    return {key: value for key, value in given.items() if key in known}


# The same numbers


def test_float32_steps_are_optax_s_but_for_its_bias_correction() -> None:
    """Those that the others are made of; optax's 1 - b2**t is float32, and off by 2**-24/(1 - b2) of itself."""
    for name in ("lion", "sgd"):
        both = run(pair(name, dict(keywords(name, schedule))), trial(jnp.float32))
        assert difference(*both.updates).max() < 2**-24 / 1e-3, name


@pytest.mark.parametrize(
    ("name", "more"),
    [
        ("sgd", {"nesterov": True}),
        ("scale_by_lion", {"mode": "smooth", "smooth_beta": 0.5}),
        ("rprop", {}),
        ("polyak_sgd", {"scaling": 0.25, "eps": 1e-3}),
        ("contrib.momo", {"weight_decay": 0.1}),
    ],
)
def test_flags_mean_what_they_mean_there(name: str, more: dict[str, Any]) -> None:
    with jax.enable_x64(True):
        both = run(pair(name, {**keywords(name, rate(name)), **more}), trial(jnp.float64, 4))
    assert difference(*both.updates).max() < 1e-12


@pytest.mark.slow
def test_optax_rounds_the_rates_of_its_warm_up() -> None:
    """To float32, where the learning rate is a number of Python; of a float64 array both are the same."""
    name = "contrib.schedule_free_sgd"
    with jax.enable_x64(True):
        rate = optax.warmup_constant_schedule(0.0, 0.1, 4)(jnp.int32(1))
        assert rate.dtype == jnp.float32
        assert abs(float(rate) - 0.1 / 4) > 1e-9
        rounded, exact = (
            run((ours(name)(0.1, warmup_steps=4), theirs(name)(lr, warmup_steps=4)), trial(jnp.float64, 6))
            for lr in (0.1, jnp.float64(0.1))
        )
    assert (
        difference(*exact.updates, across=True).max() < 1e-12 < 1e-9 < difference(*rounded.updates, across=True).max()
    )


def test_dtypes_stay_those_of_the_parameters() -> None:
    """optax's become those of the gradients, where these have more bits: states at the first step, and updates."""
    params, grads = {"w": jnp.ones(3, jnp.bfloat16)}, {"w": jnp.ones(3, jnp.float32)}
    for tx, dtype in ((rulec.jax.adam(0.1), jnp.bfloat16), (optax.adam(0.1), jnp.float32)):
        first = tx.init(params)
        updates, after = tx.update(grads, first, params)
        assert optax.tree.get(first, "mu")["w"].dtype == jnp.bfloat16
        assert (updates["w"].dtype, optax.tree.get(after, "mu")["w"].dtype) == (dtype, dtype)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["adamw", "lion", "lamb", "novograd", "contrib.prodigy", "contrib.schedule_free_sgd"])
def test_bfloat16(name: str) -> None:
    """optax rounds every operation, and we what is stored: most elements agree to some roundings."""
    both = run(pair(name, {**keywords(name, rate(name)), **taken(name, EXACT)}), trial(jnp.bfloat16))
    # Schedule-free updates are differences of parameters in optax, which cancel.
    last = tuple(jax.tree.map(lambda x: x[None], side) for side in both.params)
    found = difference(*(last if "schedule_free" in name else both.updates))
    assert np.quantile(found, 0.98) < 2**-5
    mine, other = (jax.tree.map(lambda x: x.dtype, side) for side in both.updates)
    assert mine == other


# States


@pytest.mark.parametrize("name", ["adamw", "sgd"])
def test_state_fields_have_optax_s_names(name: str) -> None:
    given = dict(keywords(name, 0.1)) | ({"momentum": 0.9} if name == "sgd" else {})
    states = [tx.init(trial(jnp.float32).params) for tx in pair(name, given)]
    for field in {field for entry in entries(name) for field in entry.state.values()}:
        mine, other = (optax.tree.get(state, field) for state in states)
        assert jax.tree.map(jnp.shape, mine) == jax.tree.map(jnp.shape, other)


def test_dtypes_of_states() -> None:
    params = trial(jnp.float32).params
    for tx in pair("adam", {"learning_rate": 0.1, "mu_dtype": "bfloat16"}):
        state = tx.init(params)
        assert optax.tree.get(state, "mu")["scale"].dtype == jnp.bfloat16
        assert optax.tree.get(state, "nu")["scale"].dtype == jnp.float32
    assert rulec.jax.sgd(0.1, 0.9, accumulator_dtype="float16").init(params).trace["scale"].dtype == jnp.float16


@pytest.mark.parametrize(
    ("name", "keyword", "field"),
    [
        ("adam", "mu_dtype", "mu"), ("amsgrad", "mu_dtype", "mu"), ("contrib.adopt", "mu_dtype", "mu"),
        ("lion", "mu_dtype", "mu"), ("sgd", "accumulator_dtype", "trace"),
    ],
)  # fmt: skip
def test_a_complex_dtype_is_that_of_real_leaves_too(name: str, keyword: str, field: str) -> None:
    """optax's state, with imaginary parts of zero where leaves are real; and the steps of a real state.

    optax rounds its factors to bfloat16 where it multiplies a gradient in it.
    """
    params = {"x": jnp.ones(3, jnp.float32), "y": jnp.ones((2, 2), jnp.bfloat16)}
    more: dict[str, Any] = {"learning_rate": 0.1} | ({"momentum": 0.9} if name == "sgd" else {})
    transformations = *pair(name, {**more, keyword: "complex64"}), pair(name, {**more, keyword: "float32"})[0]
    states = [tx.init(params) for tx in transformations]
    updates: list[Any] = []
    for step in range(3):
        grads = jax.tree.map(lambda p, s=step: jnp.full(p.shape, 1 + s, p.dtype), params)
        both = [tx.update(grads, state, params) for tx, state in zip(transformations, states, strict=True)]
        updates, states = map(list, zip(*both, strict=True))
        for mine, usual in zip(jax.tree.leaves(updates[0]), jax.tree.leaves(updates[2]), strict=True):
            np.testing.assert_array_equal(mine, usual)
    for leaf, close in (("x", 1e-6), ("y", 4e-3)):
        mine, other = (optax.tree.get(state, field)[leaf] for state in states[:2])
        assert mine.dtype == other.dtype == jnp.complex64
        np.testing.assert_allclose(mine, other, rtol=close)
    loaded = rulec.jax.from_optax(states[1], transformations[0], params)
    assert [x.dtype for x in jax.tree.leaves(loaded)] == [x.dtype for x in jax.tree.leaves(states[0])]


def test_a_complex_dtype_of_states_is_that_of_their_parts() -> None:
    params = {"z": jnp.ones(3, jnp.complex64), "x": jnp.ones(3, jnp.float32)}
    plain, asked = (rulec.jax.adam(0.1, mu_dtype=dtype) for dtype in (None, "complex64"))
    state = asked.init(params)
    assert {leaf.dtype for leaf in jax.tree.leaves(optax.tree.get(state, "mu"))} == {jnp.dtype("complex64")}
    grads = {"z": jnp.full(3, 1 + 2j, jnp.complex64), "x": jnp.ones(3, jnp.float32)}
    changes, state = asked.update(grads, state, params)
    usual, moved = plain.update(grads, plain.init(params), params)
    for mine, other in zip(jax.tree.leaves((changes, state)), jax.tree.leaves((usual, moved)), strict=True):
        np.testing.assert_array_equal(mine, other)


def test_complex_states_of_real_leaves_are_saved_and_loaded(tmp_path: Path) -> None:
    params = {"x": jnp.ones(3, jnp.float32)}
    tx = rulec.jax.adam(0.1, mu_dtype="complex64")
    _, state = tx.update({"x": jnp.ones(3, jnp.float32)}, tx.init(params), params)
    rulec.jax.save(tmp_path / "state.safetensors", "adam", params, state)
    again = rulec.jax.load(tmp_path / "state.safetensors", "adam", params, like=tx.init(params))
    assert again.mu["x"].dtype == jnp.complex64
    np.testing.assert_array_equal(again.mu["x"], state.mu["x"])


def check_function(name: str, more: dict[str, Any], bound: float, dtype: Any) -> None:
    given = {**keywords(name, rate(name)), **more}
    check_moved(pair(name, given), trial(dtype), bound, across="schedule_free" in name)


def test_a_state_before_its_first_step_goes_over() -> None:
    mine, other = pair("optimistic_gradient_descent", {"learning_rate": 0.1})
    params, grads = trial(jnp.float32, 1)
    first = other.init(params)
    loaded = rulec.jax.from_optax(first, mine, params)
    grad = jax.tree.map(lambda g: g[0], grads)
    updates = mine.update(grad, loaded, params)[0], other.update(grad, first, params)[0]
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-6), *updates)
    assert bool(optax.tree.get(rulec.jax.to_optax(loaded, other, params), "is_initial_step"))


def test_a_state_of_optax_goes_on() -> None:
    check_function("adamw", {"mask": {"layer": True, "scale": False}}, 2**-24 / 1e-3, jnp.float32)


@pytest.mark.another
@pytest.mark.filterwarnings("ignore:`optimistic_adam` is deprecated:DeprecationWarning")
@pytest.mark.parametrize(("name", "more"), [*((name, {}) for name in FUNCTIONS), *MORE])
def test_steps_are_optax_s_and_so_are_states_half_way(
    name: str, more: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    if name == "contrib.madgrad":
        monkeypatch.setattr(jnp, "sqrt", root_in_float64)
    with jax.enable_x64(True):
        check_function(name, more, 1e-12, jnp.float64)


def test_states_go_over_inside_of_what_optax_wraps_around() -> None:
    def build(package: Any) -> Any:
        chained = optax.chain(optax.clip_by_global_norm(1.0), optax.inject_hyperparams(package.adamw)(0.1))
        return optax.MultiSteps(optax.masked(chained, {"layer": True, "scale": False}), 2)

    params, grads = trial(jnp.float32, 4)
    mine, other = build(rulec.jax), build(optax)
    state = other.init(params)
    for i in range(4):
        _, state = jax.jit(other.update)(jax.tree.map(lambda g, i=i: g[i], grads), state, params)
    loaded = rulec.jax.from_optax(state, mine, params)
    assert jax.tree.structure(loaded) == jax.tree.structure(mine.init(params))
    back = rulec.jax.to_optax(loaded, other, params)
    assert jax.tree.structure(back) == jax.tree.structure(state)
    jax.tree.map(np.testing.assert_array_equal, back, state)


def test_states_that_do_not_fit_are_refused() -> None:
    params = trial(jnp.float32).params
    with pytest.raises(StateMismatch, match="the state has no 'mu' but trace"):
        rulec.jax.from_optax(optax.sgd(0.1, 0.9).init(params), rulec.jax.adam(0.1), params)
    with pytest.raises(StateMismatch, match="mu of the state does not have the structure of the parameters"):
        rulec.jax.from_optax(optax.adam(0.1).init({"other": jnp.ones(2)}), rulec.jax.adam(0.1), params)
    wrapped = optax.masked(rulec.jax.adam(0.1), True)
    with pytest.raises(StateMismatch, match="build both alike"):
        rulec.jax.from_optax(optax.adam(0.1).init(params), wrapped, params)


# Keywords


@pytest.mark.parametrize("name", [*FUNCTIONS, *BUILT])
def test_signatures_are_optax_s(name: str) -> None:
    """The functions of one rule, and Muon, have `axes` beside optax's keywords."""
    mine, other = dict(inspect.signature(ours(name)).parameters), inspect.signature(theirs(name)).parameters
    axes = mine.pop("axes", None)
    assert (axes is None) == (name in BUILT and "muon" not in name)
    assert mine == other
    assert ours(name).__name__ == name.removeprefix("contrib.")


def test_every_entry_is_reached() -> None:
    """What is told from the text of the rules is what their sections say."""
    named = set()
    for rule in rulec.rules():
        section = rulec.load(rule).interop.get("optax", [])
        for entry in section if isinstance(section, list) else [section]:
            called = [entry["function"]] if isinstance(entry["function"], str) else entry["function"]
            scaler = entry.get("scaler", [])
            named |= {*called, *([scaler] if isinstance(scaler, str) else [scaler["function"]] if scaler else [])}
    assert named == set(index()) == set(FUNCTIONS)
    assert all(entries(name) and callable(function_named(name)) for name in named)


def test_plain_keywords_mean_the_library_s_rule() -> None:
    """A state that other packages of rulec know is that of the rule itself, not of one like it."""
    for name, more, rule in (("adamw", {}, "adamw"), ("adam", {}, "adam"), ("lamb", {}, "lamb"), ("lion", {}, "lion")):
        given = inspect.signature(theirs(name)).bind(0.1, **more)
        given.apply_defaults()
        chosen = next(entry for entry in entries(name) if entry.matches(given.arguments))
        assert chosen.rule(given.arguments) is rulec.load(rule)


@pytest.mark.slow
def test_masks_spare_weights_in_the_same_update() -> None:
    params, grads = trial(jnp.float32, 3)
    mask = {"layer": {"kernel": True, "bias": False}, "scale": False}

    def by_shape(tree: Any) -> Any:
        return jax.tree.map(lambda x: x.ndim > 1, tree)

    given: dict[str, Any] = {"learning_rate": 0.1, "weight_decay": 0.5}
    for name, word, own in (("adamw", "mask", by_shape), ("adadelta", "weight_decay_mask", mask)):
        both = run((ours(name)(**given, **{word: own}), theirs(name)(**given, **{word: mask})), Trial(params, grads))
        assert difference(*both.updates).max() < 1e-4
    masked, unmasked = rulec.jax.adamw(**given, mask=mask), rulec.jax.adamw(**given)
    assert fusions(masked, params) == fusions(unmasked, params) > 0


def fusions(tx: Any, params: Any) -> int:
    """How many fused loops of the compiled update give arrays of the kernel's shape."""
    text = jax.jit(tx.update).lower(params, tx.init(params), params).compile().as_text()
    made = [line.split(" fusion(")[0] for line in text[text.index("ENTRY") :].splitlines() if " fusion(" in line]
    return sum("[3,4]" in line for line in made)


def test_numbers_that_are_injected_compile_once() -> None:
    params = trial(jnp.float32).params
    tx = optax.inject_hyperparams(rulec.jax.adamw)(learning_rate=0.1)
    assert set(tx.init(params).hyperparams) == {"learning_rate", "b1", "b2", "eps", "eps_root", "weight_decay"}
    update, state = jax.jit(tx.update), tx.init(params)
    found = []
    for value in (0.1, 0.2, 0.4):
        state.hyperparams["learning_rate"] = jnp.float32(value)
        found.append(update(params, tx.init(params)._replace(hyperparams=state.hyperparams), params)[0]["scale"])
    assert update._cache_size() == 1
    np.testing.assert_allclose(np.array(found) / found[0], [1, 2, 4], rtol=1e-6)


def test_a_schedule_of_weight_decay() -> None:
    given = {"learning_rate": 0.1, "weight_decay": lambda count: 0.1 * (count + 1)}
    assert difference(*run(pair("lion", given), trial(jnp.float32, 3)).updates).max() < 1e-6


def test_what_no_rule_computes_is_refused() -> None:
    with pytest.raises(HyperError, match=r"^rulec.jax.amsgrad has no rule for .*: it has one where bias_\w+ is True$"):
        rulec.jax.amsgrad(0.1, bias_correction_mu=False)
    with pytest.raises(
        HyperError,
        match=r"^rulec.jax.scale_by_lion has no rule for mode='soft': it has one where mode is 'hard', or where mode "
        "is 'smooth', or where mode is 'refined'$",
    ):
        rulec.jax.scale_by_lion(mode="soft")
    with pytest.raises(HyperError, match=r"no trust_ratio_mask=False, only the default True: leave it out$"):
        rulec.jax.lars(0.1, trust_ratio_mask=False)
    with pytest.raises(HyperError, match="static_args of inject_hyperparams"):
        optax.inject_hyperparams(rulec.jax.contrib.dog)(init_step=jnp.ones(2)).init(jnp.ones(2))
    with pytest.raises(HyperError, match="lr=-1 of AdamW must be at least 0"):
        rulec.jax.adamw(-1)
    with pytest.raises(HyperError, match="mu_dtype='int8' is none of float32"):
        rulec.jax.adam(0.1, mu_dtype="int8")
    with pytest.raises(
        HyperError, match=r"^rulec.jax.contrib.momo needs value: call update\(grads, state, params, val"
    ):
        rulec.jax.contrib.momo().update(jnp.ones(2), rulec.jax.contrib.momo().init(jnp.ones(2)), jnp.ones(2))
    with pytest.raises(TypeError, match="'learning_rate'"):
        rulec.jax.adam()
    with pytest.raises(AttributeError, match="no attribute 'adafactor_paper'"):
        rulec.jax.adafactor_paper(0.1)
    with pytest.raises(StateMismatch, match=r"^the mask is .* for each of these"):
        rulec.jax.adamw(0.1, mask={"w": True}).init({"w": jnp.ones(2), "b": jnp.ones(2)})


def test_where_parameters_stand_in_a_state() -> None:
    params = trial(jnp.float32).params
    for tx in (rulec.jax.adamw(0.1), rulec.jax.novograd(0.1), rulec.jax.contrib.prodigy()):
        state = optax.tree.map_params(tx, lambda x: x + 1, tx.init(params))
        assert state.count == 0
    assert jax.tree.all(jax.tree.map(lambda x: bool((x == 1).all()), optax.tree.get(state, "grad_sum")))
