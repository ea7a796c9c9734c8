"""Steps of rules in Keras beside those of Keras' own optimizers, of torch.optim, and of the reference."""

from __future__ import annotations

import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import keras
import numpy as np
import pytest
import torch

import rulec
from rulec.errors import HyperError, RulecError, TensorError
from rulec.keras import RuleOptimizer, optimizer
from tests.keras.runs import AXES, NAMES, data, difference, fitted, gradients, model, start, trained, weights

ROOT = Path(__file__).resolve().parents[2]
ON_JAX = keras.backend.backend() == "jax"
OPTIM = keras.optimizers

#: Keras' Adagrad, as keywords of the rule.
ADAGRAD = {"eps": 1e-7, "initial": 0.1}

#: Rule and keywords -> Keras' optimizer, and how far they may be apart after 20 steps.
SAME: list[tuple[str, dict[str, Any], Any, float]] = [
    ("sgd", {}, lambda: OPTIM.SGD(0.01), 1e-6),
    ("nesterov", {"momentum": 0.9}, lambda: OPTIM.SGD(0.01, momentum=0.9, nesterov=True), 2e-6),
    ("adam", {"eps": 1e-7}, lambda: OPTIM.Adam(0.01), 1e-5),
    ("adamw", {"eps": 1e-7, "weight_decay": 0.004}, lambda: OPTIM.AdamW(0.01), 1e-5),
    ("nadam", {"eps": 1e-7, "momentum_decay": 1.0}, lambda: OPTIM.Nadam(0.01), 1e-5),
    ("adagrad", ADAGRAD, lambda: OPTIM.Adagrad(0.01), 1e-6),
    ("lion", {"weight_decay": 0}, lambda: OPTIM.Lion(0.01), 1e-6),
    ("ftrl_proximal", {}, lambda: OPTIM.Ftrl(0.01), 2e-6),
    ("adafactor", {"axes": AXES}, lambda: OPTIM.Adafactor(0.01), 2e-6),
]


@pytest.mark.peer
@pytest.mark.parametrize(("rule", "keywords", "theirs", "bound"), SAME, ids=[each[0] for each in SAME])
def test_rules_take_the_steps_of_keras(rule: str, keywords: dict[str, Any], theirs: Any, bound: float) -> None:
    assert difference(trained(optimizer(rule, 0.01, **keywords)), trained(theirs())) < bound


@pytest.mark.peer
def test_muon_takes_the_steps_of_torch_on_transposed_kernels() -> None:
    tensors = [torch.nn.Parameter(torch.tensor(x.T.copy())) for x in start()]
    muon = torch.optim.Muon([tensors[0], tensors[2]], lr=0.01, weight_decay=0.1)
    adamw = torch.optim.AdamW([tensors[1]], lr=1e-3, weight_decay=0.1)
    for grads in gradients(5):
        for tensor, grad in zip(tensors, grads, strict=True):
            tensor.grad = torch.tensor(grad.T.copy())
        muon.step()
        adamw.step()
    ours = trained(optimizer("muon", 0.01, axes=AXES, tags={}), 5)
    # Muon multiplies in bfloat16, of three digits, in an order of its library's own.
    assert difference(ours, [tensor.detach().numpy().T for tensor in tensors]) < 2e-3
    turned = trained(optimizer("muon", 0.01, axes=dict.fromkeys(AXES, ("outputs", "inputs")), tags={}), 5)
    assert difference(turned, [tensor.detach().numpy().T for tensor in tensors]) > 2e-3


@pytest.mark.parametrize("rule", ["prodigy", "shampoo", "adafactor", "adam_mini"])
def test_steps_are_those_on_arrays_as_rules_see_them(rule: str) -> None:
    arrays = {name: np.ascontiguousarray(x.T) for name, x in zip(NAMES, start(), strict=True)}
    reference = rulec.array.Optimizer(rule, arrays, lr=float(np.float32(0.01)))
    for grads in gradients(4):
        reference.step({name: np.ascontiguousarray(g.T) for name, g in zip(NAMES, grads, strict=True)})
    ours = trained(optimizer(rule, 0.01, axes=AXES), 4)
    # After four gradients some eigenvalues of Shampoo are roundings, which its power enlarges.
    assert difference(ours, [x.T for x in arrays.values()]) < (1e-3 if rule == "shampoo" else 2e-5)


def test_experts_are_stepped_each_for_itself() -> None:
    kernel, grad = np.random.default_rng(0).normal(size=(2, 3, 4, 5)).astype(np.float32)
    roles = ("batch", "inputs", "outputs")
    whole, parts = keras.Variable(kernel, name="experts"), [keras.Variable(x, name="experts") for x in kernel]
    optimizer("muon", 0.1, axes={"experts": roles}, tags={}).apply([keras.ops.convert_to_tensor(grad)], [whole])
    for part, g in zip(parts, grad, strict=True):
        optimizer("muon", 0.1, axes={"experts": roles[1:]}, tags={}).apply([keras.ops.convert_to_tensor(g)], [part])
    np.testing.assert_allclose(whole.numpy(), np.stack([part.numpy() for part in parts]), rtol=1e-5, atol=1e-6)


# Keywords of Keras


@pytest.mark.parametrize(
    "keywords",
    [
        {"clipnorm": 0.1}, {"clipvalue": 0.05}, {"global_clipnorm": 0.1}, {"weight_decay": 0.1},
        {"use_ema": True, "ema_momentum": 0.9, "ema_overwrite_frequency": 3}, {"gradient_accumulation_steps": 2},
        {"loss_scale_factor": 8.0},
    ],
    ids=lambda keywords: next(iter(keywords)),
)  # fmt: skip
def test_keywords_of_keras_mean_the_same(keywords: dict[str, Any]) -> None:
    ours, theirs, plain = model(), model(), model()
    fitted(ours, optimizer("adagrad", 0.05, **ADAGRAD, **keywords))
    fitted(theirs, OPTIM.Adagrad(0.05, **keywords))
    fitted(plain, OPTIM.Adagrad(0.05))
    assert difference(weights(ours), weights(theirs)) < 1e-5
    assert (difference(weights(plain), weights(theirs)) > 1e-4) == ("loss_scale_factor" not in keywords)


@pytest.mark.slow
def test_schedules_and_callbacks_set_the_learning_rate() -> None:
    schedule = OPTIM.schedules.ExponentialDecay(0.05, 3, 0.7)
    lowered = keras.callbacks.LearningRateScheduler(lambda epoch, rate: rate * 0.3)
    for rate, options in ((schedule, {}), (0.05, {"callbacks": [lowered]})):
        ours, theirs = model(), model()
        fitted(ours, optimizer("adagrad", rate, **ADAGRAD), 3, **options)
        fitted(theirs, OPTIM.Adagrad(rate), 3, **options)
        assert difference(weights(ours), weights(theirs)) < 1e-5


@pytest.mark.parametrize(
    ("schedule", "peak"),
    [
        (lambda: OPTIM.schedules.PiecewiseConstantDecay([5], [0.02, 0.01]), 0.02),
        (lambda: OPTIM.schedules.CosineDecay(0.0, 900, warmup_target=0.03, warmup_steps=77), 0.03),
        (lambda: lambda: 0.04, 0.04),
        (lambda: 0.05, 0.05),
    ],
)
def test_second_rates_follow_a_schedule_from_its_peak(schedule: Any, peak: float) -> None:
    assert optimizer("muon", schedule()).hyper["lr_at_start"] == pytest.approx(peak, rel=1e-3)


def test_decay_leaves_excluded_variables_out() -> None:
    def run(excluded: bool) -> list[Any]:
        made = optimizer("adamw", 0.01, weight_decay=1.0)
        if excluded:
            made.exclude_from_weight_decay(var_names=["bias"])
        return trained(made)

    def undecayed() -> list[Any]:
        return trained(optimizer("adamw", 0.01, weight_decay=0.0))

    some, every, none = run(True), run(False), undecayed()
    assert np.array_equal(some[0], every[0])
    assert np.array_equal(some[1], none[1])
    assert not np.array_equal(some[1], every[1])


def test_frozen_layers_and_embeddings() -> None:
    keras.utils.set_random_seed(1)
    inputs = keras.Input((5,))
    x = keras.layers.GlobalAveragePooling1D()(keras.layers.Embedding(11, 4, name="words")(inputs))
    network = keras.Model(inputs, keras.layers.Dense(1)(keras.layers.Dense(4, trainable=False)(x)))
    before = [v.numpy().copy() for v in network.variables]
    network.compile(optimizer("muon", 0.02, model=network), "mse")
    tokens = np.arange(40).reshape(8, 5) % 11
    losses = network.fit(tokens, tokens.mean(1, keepdims=True) / 10, epochs=8, verbose=0).history["loss"]
    after = [v.numpy() for v in network.variables]
    assert losses[-1] < losses[0]
    assert [np.array_equal(a, b) for a, b in zip(before, after, strict=True)] == [False, True, True, False, False]


@pytest.mark.parametrize("policy", ["mixed_bfloat16", "bfloat16"])
def test_policies_of_precision(policy: str) -> None:
    keras.config.set_dtype_policy(policy)
    try:
        network = model()
    finally:
        keras.config.set_dtype_policy("float32")
    losses = fitted(network, optimizer("adamw", 0.02), 6).history["loss"]
    assert losses[-1] < losses[0]
    moments = [v for v in network.optimizer.variables if v.name.endswith("_m")]
    assert {v.dtype for v in moments} == {"float32" if policy.startswith("mixed") else "bfloat16"}


def test_dynamic_loss_scales() -> None:
    ours, theirs = model(), model()
    fitted(ours, OPTIM.LossScaleOptimizer(optimizer("adagrad", 0.05, **ADAGRAD), initial_scale=64.0))
    fitted(theirs, OPTIM.LossScaleOptimizer(OPTIM.Adagrad(0.05), initial_scale=64.0))
    assert difference(weights(ours), weights(theirs)) < 1e-5


def test_stateless_steps_change_nothing() -> None:
    variables = [keras.Variable(x, name=name) for x, name in zip(start(), NAMES, strict=True)]
    made = optimizer("soap", 0.01, axes=AXES)
    made.build(variables)
    before = [np.array(keras.ops.convert_to_numpy(v)) for v in (*variables, *made.variables)]
    grads = [keras.ops.convert_to_tensor(g) for g in gradients(1)[0]]
    values = [keras.ops.copy(v.value) for v in variables]
    states = [keras.ops.copy(v.value) for v in made.variables]
    for _ in range(3):
        values, states = made.stateless_apply(states, grads, values)
    after = [keras.ops.convert_to_numpy(v) for v in (*variables, *made.variables)]
    assert all(np.array_equal(a, b) for a, b in zip(before, after, strict=True))
    for _ in range(3):
        made.apply(grads, variables)
    assert (
        difference([keras.ops.convert_to_numpy(v) for v in values], [keras.ops.convert_to_numpy(v) for v in variables])
        < 1e-6
    )


def test_variables_without_gradients() -> None:
    variables = [keras.Variable(x, name=name) for x, name in zip(start(), NAMES, strict=True)]
    made = optimizer("adamw", 0.01)
    made.build(variables)
    grads = [None, *map(keras.ops.convert_to_tensor, gradients(1)[0][1:])]
    if ON_JAX:
        with pytest.raises(TensorError, match="kernel has no gradient, and on JAX a step takes those of all"):
            made.apply(grads, variables)
        return
    made.apply(grads, variables)
    assert np.array_equal(variables[0].numpy(), start()[0])
    assert [v.numpy().item() for v in made.variables if v.name.endswith("step")] == [0, 1, 1]


# Refusals


@pytest.mark.parametrize(
    ("rule", "keywords", "message"),
    [
        ("sophia", {}, "Sophia needs the input hessian, which an optimizer of Keras does not give"),
        ("schedule_free_sgd", {}, "is evaluated elsewhere than where it is trained"),
        ("adamw", {"beta_2": 0.9}, r"AdamW has no keyword 'beta_2'; did you mean 'beta2'\?"),
        ("adamw", {"beta2": 1.5}, "beta2=1.5 of AdamW must be"),
        ("adamw", {"learning_rate": -1.0}, "learning_rate=-1.0 of AdamW must be at least 0"),
        (rulec.partition({"...": "adamw"}), {}, "takes one rule and not a partition: give keras"),
        ("sam", {}, "SAM needs a rule to wrap, which an optimizer of Keras does not give"),
        (rulec.load("sam")(rulec.load("sgd")), {}, "an optimizer of Keras"),
    ],
)  # fmt: skip
def test_refusals(rule: Any, keywords: dict[str, Any], message: str) -> None:
    with pytest.raises(RulecError, match=message):
        optimizer(rule, **keywords)


def test_rules_of_matrices_ask_for_roles_and_tags() -> None:
    with pytest.raises(TensorError, match=r"SOAP looks at rows and columns, and the roles of the axes of kernel"):
        trained(optimizer("soap"), 1)
    with pytest.raises(HyperError, match="'rows' of the axes of 'kernel' is none of batch, outputs, inputs, window"):
        trained(optimizer("soap", axes={"kernel": ("rows", "outputs")}), 1)
    with pytest.raises(TensorError, match=r"Muon asks for the tags of variables"):
        trained(optimizer("muon", axes=AXES), 1)


# Files


RULES = ["adamw", "prodigy", "adafactor", pytest.param("soap", marks=pytest.mark.slow), "muon"]


@pytest.mark.parametrize("rule", RULES)
def test_saved_models_go_on_alike(rule: str, tmp_path: Any) -> None:
    network = model()
    # On JAX, Keras' own optimizers too fail at a second fit with use_ema.
    rate = 1.0 if rule == "prodigy" else 0.01  # at which Prodigy's `d` grows in these steps
    fitted(network, optimizer(rule, rate, model=network, use_ema=rule == "adamw" and not ON_JAX))
    network.save(tmp_path / "model.keras")
    loaded = keras.models.load_model(tmp_path / "model.keras")
    pairs = zip(network.optimizer.variables, loaded.optimizer.variables, strict=True)
    assert all(np.array_equal(a.numpy(), b.numpy()) for a, b in pairs)
    for each in (network, loaded):
        each.fit(*data(), epochs=2, batch_size=8, verbose=0, shuffle=False)
    assert difference(weights(loaded), weights(network)) == 0


def test_models_that_were_not_trained_are_saved_too(tmp_path: Any) -> None:
    network = model()
    network.compile(optimizer("muon", 0.01, model=network), "mse")
    network.save(tmp_path / "model.keras")
    loaded = keras.models.load_model(tmp_path / "model.keras")
    for each in (network, loaded):
        each.fit(*data(), epochs=1, batch_size=8, verbose=0, shuffle=False)
    assert difference(weights(loaded), weights(network)) == 0


def test_configurations_make_equal_optimizers() -> None:
    own = rulec.load("l2") >> rulec.load("adam")
    made = optimizer(own, OPTIM.schedules.CosineDecay(0.01, 20), beta2=0.9, clipnorm=1.0, seed=3)
    text = OPTIM.serialize(made)
    again = OPTIM.deserialize(text)
    assert isinstance(again, RuleOptimizer)
    assert again.get_config() == made.get_config()
    assert difference(trained(again), trained(made)) == 0


# The other backend

_SAVE = """
import keras, rulec.keras
from tests.keras.runs import data, fitted, model, weights
import numpy as np
for rule in {rules}:
    network = model()
    fitted(network, rulec.keras.optimizer(rule, 0.01, model=network), 1)
    network.save(f"{folder}/{{rule}}.keras")
    fit = network.fit(*data(), epochs=1, batch_size=8, verbose=0, shuffle=False)
    np.savez(f"{folder}/{{rule}}.npz", *weights(network))
"""


def check_elsewhere(*arguments: str) -> None:
    """Runs Python on the other backend of Keras."""
    words = {**os.environ, "KERAS_BACKEND": "torch" if ON_JAX else "jax"}
    done = subprocess.run([sys.executable, *arguments], env=words, capture_output=True, text=True, cwd=ROOT)
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.skipif(find_spec("tensorflow") is not None, reason="Keras' usual backend is installed")
def test_a_backend_that_is_not_installed_is_named_with_the_setting() -> None:
    words = {**os.environ, "KERAS_BACKEND": "tensorflow"}
    done = subprocess.run([sys.executable, "-c", "import rulec.keras"], env=words, capture_output=True, text=True)
    sentence = (
        "Keras runs on tensorflow here, which is not installed, and rulec.keras on jax and torch: set KERAS_BACKEND"
    )
    assert f"BackendUnavailable: {sentence}" in done.stderr


@pytest.mark.slow
def test_files_of_the_other_backend_go_on_alike(tmp_path: Any) -> None:
    rules = ["adamw", "prodigy", "adafactor", "shampoo"]
    check_elsewhere("-c", _SAVE.format(rules=rules, folder=tmp_path))
    for rule in rules:
        loaded = keras.models.load_model(tmp_path / f"{rule}.keras")
        loaded.fit(*data(), epochs=1, batch_size=8, verbose=0, shuffle=False)
        theirs = np.load(tmp_path / f"{rule}.npz")
        assert difference(weights(loaded), [*theirs.values()]) < (1e-3 if rule == "shampoo" else 1e-4)


@pytest.mark.slow
@pytest.mark.skipif("RULEC_KERAS_TWICE" in os.environ, reason="this is the run on the other backend")
def test_all_of_this_on_the_other_backend() -> None:
    os.environ["RULEC_KERAS_TWICE"] = "1"
    try:
        check_elsewhere("-m", "pytest", "-q", "-m", "not gpu and not whole", "tests/keras", "-p", "no:cacheprovider")
    finally:
        del os.environ["RULEC_KERAS_TWICE"]
