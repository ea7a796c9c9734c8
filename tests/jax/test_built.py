"""Functions of optax's names that ours build with optax's own states: the same numbers, and states that go over."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from optax.contrib import GaLoreDimensionNumbers, MuonDimensionNumbers

import rulec.jax
from rulec.errors import HyperError, StateMismatch, TensorError
from rulec.jax.built import BUILT
from rulec.jax.state import State
from tests.jax.agreement import Trial, check_moved, difference, ours, run, theirs

STEPS = 6


def some(steps: int = 0, dtype: Any = jnp.float64, shapes: Any = None) -> Any:
    """A tree of arrays of several shapes, with steps in front where there are any."""
    random = np.random.default_rng(5 + steps)
    shapes = shapes or {"wide": (3, 4), "tall": (5, 2), "deep": (3, 2, 4), "bias": (4,)}
    front = (steps,) if steps else ()
    return {name: jnp.asarray(random.normal(size=front + shape), dtype) for name, shape in shapes.items()}


def trial_of(dtype: Any = jnp.float64, shapes: Any = None, steps: int = STEPS) -> Trial:
    return Trial(some(0, dtype, shapes), some(steps, dtype, shapes))


def schedule(count: Any) -> Any:
    return 0.125 / (count + 1)


def of_matrices(tree: Any) -> Any:
    return jax.tree.map(lambda x: x.ndim > 1, tree)


def loss(params: Any) -> Any:
    return sum(jnp.sum(jnp.cos(x) + x**2) for x in jax.tree.leaves(params))


def grad_fn(params: Any, i: int) -> Any:
    return jax.tree.map(lambda g: (i + 1) * g, jax.grad(loss)(params))


def axes(tree: Any) -> Any:
    """Axes of Muon for the leaves of `some`; the bias is AdamW's."""
    numbers = {
        "wide": MuonDimensionNumbers(1, 0), "tall": MuonDimensionNumbers((0,), (1,)),
        "deep": MuonDimensionNumbers(2, (0,)),
    }  # fmt: skip
    return {name: numbers.get(name) for name in tree}


def every_axis(tree: Any) -> Any:
    return jax.tree.map(lambda _: MuonDimensionNumbers(), tree)


_GALORE = {"wide": GaLoreDimensionNumbers(), "deep": GaLoreDimensionNumbers(1, (2, 0)), "tall": None, "bias": None}
_TWO = {"wide": (3, 4), "tall": (5, 2)}
_POLYNOMIALS = ((3.0, -4.0, 2.0), (2.0, -1.5, 0.5))


def inner(package: Any, name: str, *keywords: Any, **more: Any) -> Any:
    return getattr(package, name)(*keywords, **more)


#: Function, keywords from a package, keywords of the update, shapes.
Case = tuple[str, Callable[[Any], dict[str, Any]], dict[str, Any], Any]


def case(name: str, extra: dict[str, Any] | None = None, shapes: Any = None, **keywords: Any) -> Case:
    return name, lambda package: keywords, extra or {}, shapes


CASES: dict[str, Case] = {
    "adafactor": case("adafactor", learning_rate=schedule, min_dim_size_to_factor=3),
    "adafactor, whole": case("adafactor", learning_rate=0.1, factored=False, clipping_threshold=2.0, decay_rate=0.5),
    "adafactor, momentum": case(
        "adafactor", learning_rate=0.1, min_dim_size_to_factor=1, momentum=0.9, dtype_momentum="float64",
        weight_decay_rate=0.01, weight_decay_mask=of_matrices, multiply_by_parameter_scale=False,
        clipping_threshold=None,
    ),
    "factored": case("scale_by_factored_rms", min_dim_size_to_factor=2, decay_rate_fn=lambda i, rate: rate),
    "sm3": case("sm3", learning_rate=0.1),
    "sm3, means": case("scale_by_sm3", b2=0.75, b1=0.5),
    "noisy": case("noisy_sgd", learning_rate=schedule, key=7, eta=0.5),
    "noise": case("add_noise", eta=0.5, gamma=0.25, key=7),
    "muon": case("contrib.muon", learning_rate=schedule, ns_steps=2, shapes={"wide": (3, 4), "bias": (4,)}),
    "muon, axes": case(
        "contrib.muon", learning_rate=0.1, preconditioning="aol", ns_coeffs=_POLYNOMIALS, weight_decay=0.1,
        weight_decay_mask=of_matrices, muon_weight_dimension_numbers=axes, consistent_rms=0.2, adam_weight_decay=0.1,
    ),
    "muon, schatten": case(
        "contrib.scale_by_muon", preconditioning="schatten", ns_steps=2, adaptive=True, nesterov=False, shapes=_TWO,
        weight_dimension_numbers=every_axis,
    ),
    "muon, spectral": case(
        "contrib.scale_by_muon", preconditioning="spectral", ns_steps=1, shapes=_TWO,
        weight_dimension_numbers=every_axis,
    ),
    "galore": (
        "contrib.galore",
        lambda p: {
            "learning_rate": schedule, "rank": 2, "update_proj_gap": 2, "scale": 0.5, "weight_decay": 0.1,
            "mask": of_matrices, "base_optimizer": p.scale_by_adam(), "weight_dimension_numbers": _GALORE,
        }, {}, None,
    ),
    "galore, matrices": case("contrib.scale_by_galore", rank=1, update_proj_gap=2),
    "sophia": case(
        "contrib.sophia", {"obj_fn": loss}, learning_rate=schedule, update_interval=2, weight_decay=0.1,
        weight_decay_mask=of_matrices, gamma=0.5,
    ),
    "sophia, unbounded": case("contrib.sophia", {"obj_fn": loss}, learning_rate=1e-3, clip_threshold=None, eps=0.1),
    "schedule_free": (
        "contrib.schedule_free", lambda p: {"base_optimizer": p.adamw(schedule, b1=0.0), "learning_rate": schedule,
        "weight_lr_power": 1.0}, {}, None,
    ),
    "mechanize": (
        "contrib.mechanize", lambda p: {"base_optimizer": p.lion(1.0), "num_betas": 3, "s_init": 1e-2}, {}, None,
    ),
    "sam": (
        "contrib.sam", lambda p: {"optimizer": p.adamw(0.1), "adv_optimizer": optax.chain(p.contrib.normalize(),
        p.sgd(0.1))}, {}, None,
    ),
    "sam, three": (
        "contrib.sam", lambda p: {"optimizer": p.sgd(0.1, 0.9), "adv_optimizer": p.adam(schedule), "sync_period": 3,
        "reset_state": False}, {}, None,
    ),
    "sam, opaque": (
        "contrib.sam", lambda p: {"optimizer": p.adamw(0.1), "adv_optimizer": p.sgd(0.1), "sync_period": 3,
        "opaque_mode": True}, {"grad_fn": grad_fn}, None,
    ),
}  # fmt: skip


def both(label: str) -> tuple[tuple[Any, Any], dict[str, Any], Any]:
    """Ours and theirs of a case, around their own packages' inner ones; the keywords of the update; and the shapes."""
    name, keywords, extra, shapes = CASES[label]
    return (ours(name)(**keywords(rulec.jax)), theirs(name)(**keywords(optax))), extra, shapes


@pytest.fixture
def decay_in_float64(monkeypatch: pytest.MonkeyPatch) -> None:
    """optax works out the decay of Adafactor in float32."""
    function = optax.scale_by_factored_rms
    defaults = (*function.__defaults__[:-1], lambda i, rate: 1.0 - (i + jnp.float64(1.0)) ** -rate)
    monkeypatch.setattr(function, "__defaults__", defaults)


def test_every_function_has_a_case() -> None:
    assert {name for name, *_ in CASES.values()} == {*BUILT}


#: A matrix whose rows are the longer side, or a leaf whose two largest axes are not the last ones.
_ONE = {"factored": {"deep": (3, 2, 4)}}


def check_states(states: tuple[Any, Any]) -> None:
    """Both states are the same numbers, but for those of inner transformations, which may be states of a rule."""
    if any(isinstance(x, State) for x in jax.tree.leaves(states[0], is_leaf=lambda x: isinstance(x, State))):
        return
    for mine, other in zip(*map(jax.tree.leaves, states), strict=True):
        if jnp.issubdtype(mine.dtype, jax.dtypes.prng_key):
            mine, other = jax.random.key_data(mine), jax.random.key_data(other)
        np.testing.assert_allclose(mine, other, rtol=1e-9, atol=1e-11)


@pytest.mark.parametrize("label", ["factored", "sm3", "galore, matrices", "sam, opaque", "muon, spectral"])
def test_steps_of_one_matrix_are_optax_s(label: str) -> None:
    with jax.enable_x64(True):
        pair, extra, _ = both(label)
        shapes = _ONE.get(label, {"tall": (5, 2)})
        check_states(check_moved(pair, trial_of(shapes=shapes, steps=4), 1e-12, extra=extra).states)


@pytest.mark.slow
@pytest.mark.another
@pytest.mark.parametrize("label", CASES)
@pytest.mark.usefixtures("decay_in_float64")
def test_steps_are_optax_s_and_states_go_over_half_way(label: str) -> None:
    with jax.enable_x64(True):
        pair, extra, shapes = both(label)
        # The updates of schedule-free and Mechanic are differences of parameters, which are nothing at first.
        across = label in ("schedule_free", "mechanize")
        check_states(check_moved(pair, trial_of(shapes=shapes), 1e-12, across=across, extra=extra).states)


def test_the_decay_of_optax_is_float32() -> None:
    """What the fixture takes away: as shipped the two part by some 1e-8, in float64 too."""
    with jax.enable_x64(True):
        pair, _, _ = both("adafactor")
        apart = difference(*run(pair, trial_of(steps=3)).updates).max()
    assert 1e-12 < apart < 1e-6


# Wherever optax's stand


@pytest.mark.parametrize(
    ("name", "keywords"),
    [
        ("adafactor", {"learning_rate": 0.1, "min_dim_size_to_factor": 2}), ("sm3", {"learning_rate": 0.1}),
        ("contrib.muon", {"learning_rate": 0.1, "ns_steps": 1}), ("noisy_sgd", {"learning_rate": 0.1, "key": 3}),
    ],
)  # fmt: skip
def test_states_keep_their_dtypes_and_mapped_updates_are_those_of_each(name: str, keywords: dict[str, Any]) -> None:
    """In bfloat16, over a batch of two models, beside each by itself."""
    tx = ours(name)(**keywords)
    params, grads = (some(steps, jnp.bfloat16, {"a": (3, 4), "b": (5,)}) for steps in (2, 4))
    grads = jax.tree.map(lambda g: g[2:], grads)
    states = jax.vmap(tx.init)(params)
    updates, after = jax.jit(jax.vmap(tx.update))(grads, states, params)
    assert [x.dtype for x in jax.tree.leaves(after)] == [x.dtype for x in jax.tree.leaves(states)]
    assert [x.dtype for x in jax.tree.leaves(updates)] == [jnp.bfloat16, jnp.bfloat16]
    for i in range(2):
        one = jax.tree.map(lambda x, i=i: x[i], (grads, states, params))
        single, _ = tx.update(*one)
        for mine, other in zip(jax.tree.leaves(updates), jax.tree.leaves(single), strict=True):
            np.testing.assert_allclose(np.float32(mine[i]), np.float32(other), rtol=2**-6, atol=1e-4)


def wrapped(package: Any) -> Any:
    """Several of the functions inside of what optax has around transformations."""
    parts = {
        "matrices": optax.chain(optax.clip(0.5), package.adafactor(0.1, min_dim_size_to_factor=2)),
        "others": optax.apply_if_finite(package.sm3(0.1), 2),
    }
    labels = {"wide": "matrices", "tall": "matrices", "deep": "others", "bias": "others"}
    injected = optax.inject_hyperparams(package.noisy_sgd, static_args=("key",))(learning_rate=schedule, key=3)
    return optax.chain(optax.partition(parts, labels), optax.masked(injected, labels_of(labels)))


def labels_of(labels: dict[str, str]) -> dict[str, bool]:
    return {name: label == "others" for name, label in labels.items()}


@pytest.mark.usefixtures("decay_in_float64")
def test_they_stand_inside_of_what_optax_wraps_around() -> None:
    with jax.enable_x64(True):
        check_moved((wrapped(rulec.jax), wrapped(optax)), trial_of(), 1e-6)


def test_injected_numbers_compile_once() -> None:
    tx = optax.inject_hyperparams(ours("contrib.muon"), static_args=("ns_steps",))(learning_rate=0.1, ns_steps=1)
    params = some(0, jnp.float32, {"a": (3, 4), "b": (5,)})
    update: Any = jax.jit(tx.update)
    state, moves = tx.init(params), []
    for value in (0.1, 0.2):
        state.hyperparams["learning_rate"] = jnp.float32(value)
        updates, _ = update(params, state, params)
        moves.append(updates)
    assert update._cache_size() == 1
    jax.tree.map(lambda a, b: np.testing.assert_allclose(2 * a, b, rtol=1e-5), *moves)


def test_places_of_parameters_in_a_state_are_optax_s() -> None:
    params = some(0, jnp.float32)
    states = [optax.tree.map_params(tx, lambda x: x + 1, tx.init(params)) for tx in (ours("sm3")(0.1), optax.sm3(0.1))]
    jax.tree.map(np.testing.assert_array_equal, *states)


def test_dtypes_of_states_are_optax_s() -> None:
    params = some(0, jnp.float32, {"a": (3, 4), "b": (5,)})
    for name, keywords in (
        ("adafactor", {"learning_rate": 0.1, "momentum": 0.5, "dtype_momentum": "bfloat16"}),
        ("contrib.muon", {"learning_rate": 0.1, "ns_steps": 1, "mu_dtype": "bfloat16"}),
        ("contrib.schedule_free", {"base_optimizer": optax.sgd(0.1), "learning_rate": 0.1, "state_dtype": "bfloat16"}),
    ):
        dtypes = []
        for tx in (ours(name)(**keywords), theirs(name)(**keywords)):
            state = tx.init(params)
            _, state = tx.update(params, state, params)
            dtypes.append([(x.shape, x.dtype) for x in jax.tree.leaves(state)])
        assert dtypes[0] == dtypes[1], name
        assert jnp.bfloat16 in [dtype for _, dtype in dtypes[0]]


def test_the_model_of_schedule_free_is_evaluated_as_by_optax() -> None:
    tx, params = ours("contrib.schedule_free")(optax.sgd(0.1), 0.1, b1=0.75), some(0, jnp.float32)
    updates, state = tx.update(params, tx.init(params), params)
    moved = optax.apply_updates(params, updates)
    ways = ours("contrib.schedule_free_eval_params"), optax.contrib.schedule_free_eval_params
    jax.tree.map(np.testing.assert_array_equal, *[way(state, moved) for way in ways])
    with pytest.raises(StateMismatch, match=r"this state of a rule has no b1: call rulec.jax.eval_params"):
        ours("contrib.schedule_free_eval_params")(ours("contrib.schedule_free_sgd")().init(params), params)


# What is refused


def update_once(tx: Any, shape: tuple[int, ...], **extra: Any) -> None:
    params = {"w": jnp.ones(shape)}
    tx.update(params, tx.init(params), params, **extra)


@pytest.mark.parametrize(
    ("name", "keywords", "error", "words"),
    [
        ("sm3", {"learning_rate": schedule}, HyperError, "counts no steps"),
        ("adafactor", {"learning_rate": -1.0}, HyperError, "lr=-1.0 of Adafactor must be at least 0"),
        ("adafactor", {"min_dim_size_to_factor": 1.5}, HyperError, "min_dim_size_to_factor=1.5, which decides"),
        ("contrib.muon", {"learning_rate": 0.1, "ns_coeffs": "cubic"}, HyperError, "give standard or dion"),
        ("contrib.muon", {"learning_rate": 0.1, "ns_steps": 1.5}, HyperError, "ns_steps=1.5, which decide"),
        ("contrib.muon", {"learning_rate": 0.1, "ns_coeffs": (1.0, 2.0)}, HyperError, r"must have shape \(3,\)"),
        ("contrib.muon", {"learning_rate": 0.1, "ns_coeffs": _POLYNOMIALS, "ns_steps": 1}, HyperError, "as many steps"),
        ("contrib.muon", {"learning_rate": 0.1, "preconditioning": "l1"}, HyperError, "give frobenius, spectral, "),
        ("contrib.galore", {"learning_rate": 0.1, "rank": 0}, HyperError, "rank=0, which decides"),
        ("contrib.sophia", {"learning_rate": 0.1, "verbose": True}, HyperError, "prints nothing"),
        ("contrib.mechanize", {"base_optimizer": optax.sgd(1.0), "num_betas": 0}, HyperError, "num_betas=0"),
        (
            "contrib.sam", {"optimizer": optax.sgd(1.0), "adv_optimizer": optax.sgd(1.0), "sync_period": 0},
            HyperError, "sync_period=0",
        ),
    ],
)  # fmt: skip
def test_keywords_that_mean_nothing_are_refused(name: str, keywords: dict[str, Any], error: Any, words: str) -> None:
    with pytest.raises(error, match=f"(^rulec.jax.{name} has .*)?{words}"):
        ours(name)(**keywords)


def test_leaves_and_calls_that_do_not_fit_are_refused() -> None:
    with pytest.raises(TensorError, match=r"sm3 takes leaves of 1 to 8 axes, and the parameter w has 0"):
        update_once(ours("sm3")(0.1), ())
    with pytest.raises(TensorError, match=r"scale_by_muon takes leaves of 2 axes, .* one has shape \(3,\)"):
        update_once(ours("contrib.scale_by_muon")(), (3,))
    for numbers, words in ((MuonDimensionNumbers(0, 3), "give axes it has"), (MuonDimensionNumbers(0, -2), "once")):
        with pytest.raises(TensorError, match=words):
            update_once(ours("contrib.muon")(0.1, muon_weight_dimension_numbers={"w": numbers}), (2, 3))
    with pytest.raises(TensorError, match=r"give one, or None, for each leaf or part"):
        update_once(ours("contrib.scale_by_muon")(weight_dimension_numbers={"v": None}), (2, 3))
    galore = ours("contrib.scale_by_galore")
    with pytest.raises(TensorError, match=r"leave out the axes \(2,\) of a leaf of shape \(2, 3, 4\)"):
        update_once(galore(weight_dimension_numbers=GaLoreDimensionNumbers()), (2, 3, 4))
    with pytest.raises(TensorError, match="complex, and the states of this function are optax's"):
        ours("adafactor")(0.1).init({"w": jnp.ones(3, jnp.complex64)})
    for name, keywords in (("schedule_free", {"learning_rate": 0.1}), ("mechanize", {})):
        tx = ours(f"contrib.{name}")(optax.sgd(1.0), **keywords)
        with pytest.raises(HyperError, match=rf"{name} needs the parameters: call update\(grads, state, params\)"):
            tx.update({"w": jnp.ones(2)}, tx.init({"w": jnp.ones(2)}))
    sam = ours("contrib.sam")(optax.sgd(1.0), optax.sgd(1.0), opaque_mode=True)
    with pytest.raises(HyperError, match=r"opaque_mode needs grad_fn, .*: call update\(grads, state, params, grad_fn"):
        update_once(sam, (2,))
