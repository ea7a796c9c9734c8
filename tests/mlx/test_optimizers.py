"""The classes of rulec.mlx beside those of mlx.optimizers: values, states, compiled steps, a model, and mistakes."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import pytest

mx = pytest.importorskip("mlx.core")
torch = pytest.importorskip("torch")
pytest.importorskip("torch._dynamo")  # imported by the first optimizer of torch
datasets = pytest.importorskip("sklearn.datasets")

import mlx.nn as nn  # noqa: E402
import mlx.optimizers as optim  # noqa: E402
from mlx.utils import tree_flatten, tree_unflatten  # noqa: E402

import rulec  # noqa: E402
import rulec.mlx  # noqa: E402
from rulec.errors import BackendUnsupported, RulecError  # noqa: E402
from rulec.language.expr.node import Op, walk  # noqa: E402
from rulec.testing.cases import loaded  # noqa: E402
from rulec.tools.compare.sides import ReferenceSide  # noqa: E402
from tests.library import single  # noqa: E402

#: Classes of MLX, with keywords, and how many times 2**-23 a parameter may differ by, of its largest, after 12 steps.
CLASSES: list[tuple[str, Mapping[str, Any], float]] = [
    ("SGD", {}, 0), ("SGD", {"weight_decay": 0.1}, 0), ("SGD", {"momentum": 0.9}, 0),
    ("SGD", {"momentum": 0.9, "weight_decay": 0.1, "dampening": 0.2}, 0),
    ("SGD", {"momentum": 0.9, "nesterov": True}, 0), ("RMSprop", {}, 4), ("Adagrad", {}, 4), ("AdaDelta", {}, 0),
    ("Muon", {}, 4), ("Adafactor", {}, 4), ("Adafactor", {"relative_step": False, "beta_1": 0.9}, 4),
    ("Adam", {}, 4), ("AdamW", {}, 4), ("Adamax", {"betas": [0.8, 0.99]}, 4), ("Lion", {"weight_decay": 0.1}, 4),
]  # fmt: skip


def tree(seed: int) -> dict[str, Any]:
    rng = np.random.default_rng(seed)

    def array(*shape: int) -> Any:
        return mx.array(rng.normal(size=shape).astype(np.float32))

    return {"a": array(4, 3), "layers": [{"b": array(5)}, {"c": array(2, 3)}]}


def values(given: Any) -> list[np.ndarray[Any, Any]]:
    return [np.array(array) for _, array in tree_flatten(given)]


def steps(optimizer: Any, params: Any, first: int = 1, last: int = 12) -> Any:
    for seed in range(first, last + 1):
        params = optimizer.apply_gradients(tree(seed), params)
    return params


def difference(ours: Any, theirs: Any) -> float:
    pairs = zip(values(ours), values(theirs), strict=True)
    return max(float(np.abs(a - b).max() / np.abs(b).max()) for a, b in pairs) / 2.0**-23


@pytest.mark.peer
@pytest.mark.parametrize("scheduled", [False, True])
@pytest.mark.parametrize(("name", "keywords", "allowed"), CLASSES)
def test_parameters_are_those_of_mlx(name: str, keywords: Mapping[str, Any], allowed: float, scheduled: bool) -> None:
    def made(package: Any) -> Any:
        return getattr(package, name)(optim.cosine_decay(0.1, 20) if scheduled else 0.01, **keywords)

    ours, theirs = made(rulec.mlx), made(optim)
    assert difference(steps(ours, tree(0)), steps(theirs, tree(0))) <= allowed
    assert ours.step.item() == theirs.step.item() == 12
    assert ours.learning_rate.item() == theirs.learning_rate.item()


#: Keywords of Muon and Adafactor that choose other lines; gradients of a size at which an epsilon counts.
FLAGS: list[tuple[str, Mapping[str, Any], float]] = [
    ("Muon", {"nesterov": False, "ns_steps": 3, "weight_decay": 0.0}, 1e-7), ("Muon", {"momentum": 0.5}, 1),
    ("Adafactor", {"eps": (1e-8, 1e-2)}, 1e-4),
    ("Adafactor", {"relative_step": False, "scale_parameter": False, "weight_decay": 0.1}, 1),
    ("Adafactor", {"warmup_init": True, "eps": (1e-30, 1e3), "beta_1": 0.8, "clip_threshold": 0.5}, 1),
    ("Adafactor", {"decay_rate": -0.5, "relative_step": False}, 1),
]  # fmt: skip


@pytest.mark.peer
@pytest.mark.parametrize(("name", "keywords", "size"), FLAGS)
def test_muon_and_adafactor_of_mlx_over_twenty_steps(name: str, keywords: Mapping[str, Any], size: float) -> None:
    """Tall and wide matrices, kernels of one and two axes with channels last, vectors and a number."""
    shapes = {"wide": (4, 9), "tall": (8, 5), "conv": (6, 3, 4, 2), "conv1": (5, 3, 2), "bias": (7,), "scale": ()}

    def arrays(seed: int, size: float = 1) -> dict[str, Any]:
        rng = np.random.default_rng(seed)
        return {key: mx.array((size * rng.normal(size=shape)).astype(np.float32)) for key, shape in shapes.items()}

    ours, theirs = (getattr(package, name)(0.02, **keywords) for package in (rulec.mlx, optim))
    here = there = arrays(0)
    for seed in range(1, 21):
        here, there = (o.apply_gradients(arrays(seed, size), p) for o, p in ((ours, here), (theirs, there)))
    assert difference(here, there) <= 4
    moved = {key: float(mx.abs(there[key] - first).max()) for key, first in arrays(0).items()}
    assert min(moved.values()) > 0 if size == 1 else moved["tall"] > 0


def test_adafactor_without_relative_steps_needs_a_rate() -> None:
    with pytest.raises(RulecError, match="Adafactor needs a learning_rate: give a number"):
        rulec.mlx.Adafactor(relative_step=False)
    assert "learning_rate" not in rulec.mlx.Adafactor().state


@pytest.mark.peer
@pytest.mark.parametrize("name", ["Adam", "AdamW"])
def test_bias_correction_is_exact(name: str) -> None:
    """MLX takes 1 - beta2**t in float32, which has four of its digits: torch is the peer."""
    optimizer = getattr(rulec.mlx, name)(0.01, bias_correction=True)
    params = steps(optimizer, tree(0))
    tensors = [torch.nn.Parameter(torch.tensor(x)) for x in values(tree(0))]
    peer = getattr(torch.optim, name)(tensors, lr=float(np.float32(0.01)))
    for seed in range(1, 13):
        for tensor, gradient in zip(tensors, values(tree(seed)), strict=True):
            tensor.grad = torch.tensor(gradient)
        peer.step()
    for ours, tensor in zip(values(params), tensors, strict=True):
        np.testing.assert_allclose(ours, tensor.detach().numpy(), rtol=0, atol=8 * 2.0**-23 * np.abs(ours).max())


@pytest.mark.peer
@pytest.mark.parametrize(("name", "keywords", "allowed"), CLASSES)
def test_states_go_both_ways(name: str, keywords: Mapping[str, Any], allowed: float) -> None:
    """As MLX's users save them: the flat tree, by its paths."""
    whole = steps(getattr(optim, name)(0.01, **keywords), tree(0))
    for first, second in ((optim, rulec.mlx), (rulec.mlx, optim)):
        before, after = (getattr(package, name)(0.01, **keywords) for package in (first, second))
        params = steps(before, tree(0), last=6)
        after.state = tree_unflatten(tree_flatten(before.state))
        assert difference(steps(after, params, first=7), whole) <= allowed


#: Operations that iterate: another library rounds each iteration another way.
ITERATED = {Op.NEWTON_SCHULZ, Op.INVERSE_ROOT}

RULES = [
    "adabelief",
    "adafactor",
    "apollo_mini",
    "dadapt_adam",
    "dog",
    "lamb",
    "prodigy",
    "schedule_free_adamw",
    "soap",
]


@pytest.mark.parametrize("name", RULES)
def test_rules_of_every_kind_are_the_reference(name: str) -> None:
    check_rule(name)


#: SPEL's parameter is itself what is rounded to bfloat16, another way by each library.
OTHERS = [name for name in single() if "/" not in name and name not in (*RULES, "spel")]


@pytest.mark.another
@pytest.mark.parametrize("name", OTHERS)
def test_every_rule_is_the_reference(name: str) -> None:
    check_rule(name)


def check_rule(name: str) -> None:
    kind = rulec.mlx.optimizer(name)
    known = kind.entry.rule.settings
    operations = {n.op for n in walk(loaded(name).expressions)}
    iterated = bool(ITERATED & operations)
    more = {"rank": 2} if "rank" in known else {}
    lr = known["lr"].default if "lr" in known else None
    rate = {}
    if iterated and lr is not None:  # what is rounded another way is a part of the step
        lr = 5e-4 if Op.TOPK in operations else 1e-3  # a few rows have the whole step
        rate = {"learning_rate": lr}
    hyper = more | ({} if lr is None else {"lr": float(np.float32(lr))})
    side = ReferenceSide(rulec.load(name), values(tree(0)), hyper)
    optimizer, params = kind(**more, **rate), tree(0)
    for seed in range(1, 5):
        params = optimizer.apply_gradients(tree(seed), params)
        side.step(values(tree(seed)))
    for ours, want in zip(values(params), side.values(), strict=True):
        allowed = 1e-4 if iterated else 2e-6
        np.testing.assert_allclose(ours, want["p"], rtol=0, atol=allowed * np.abs(want["p"]).max())


@pytest.mark.parametrize("function", ["sin", "cos"])
def test_a_schedule_by_a_function_of_seven_digits_is_refused(function: str) -> None:
    wave = rulec.parse(f"name: Wave\nstep: |\n  direction = g*{function}(t)\n")
    with pytest.raises(BackendUnsupported, match=f"cannot express {function}, which MLX computes to seven digits"):
        rulec.mlx.optimizer(wave)().apply_gradients({"a": mx.ones(3)}, {"a": mx.ones(3)})


@pytest.mark.parametrize(
    "name", ["momentum", *(pytest.param(name, marks=pytest.mark.slow) for name in ("adamw", "lamb"))]
)
def test_a_compiled_step_is_the_step(name: str) -> None:
    plain, compiled = (rulec.mlx.optimizer(name)(optim.linear_schedule(0.1, 0.01, 4)) for _ in range(2))
    params = again = {"a": tree(0)["a"]}
    compiled.init(again)

    def step(params: Any, gradients: Any) -> Any:
        return compiled.apply_gradients(gradients, params)

    whole = mx.compile(step, inputs=compiled.state, outputs=compiled.state)
    for seed in range(1, 4):
        gradients = {"a": tree(seed)["a"]}
        params, again = plain.apply_gradients(gradients, params), whole(again, gradients)
        mx.eval(again, compiled.state)
    assert difference(again, params) <= 4
    assert difference(compiled.state, plain.state) <= 4
    assert compiled.step.item() == 3


@pytest.mark.peer
def test_several_optimizers() -> None:
    def made(package: Any) -> Any:
        return optim.MultiOptimizer([package.Lion(0.01), package.SGD(0.1)], [lambda name, array: array.ndim == 2])

    assert difference(steps(made(rulec.mlx), tree(0)), steps(made(optim), tree(0))) <= 4


def trained(optimizer: Any) -> float:
    """The share of handwritten digits that a perceptron tells after 60 steps on all of the others."""
    digits = datasets.load_digits()
    images, labels = mx.array((digits.data / 16).astype(np.float32)), mx.array(digits.target)
    mx.random.seed(0)
    model = nn.Sequential(nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, 10))

    def loss(model: Any) -> Any:
        return nn.losses.cross_entropy(model(images[:1400]), labels[:1400], reduction="mean")

    both = nn.value_and_grad(model, loss)
    for _ in range(60):
        optimizer.update(model, both(model)[1])
        mx.eval(model.parameters(), optimizer.state)
    return float(mx.mean(mx.argmax(model(images[1400:]), axis=1) == labels[1400:]))


@pytest.mark.peer
def test_a_model_learns_as_with_mlx() -> None:
    ours, theirs = trained(rulec.mlx.AdamW(0.02)), trained(optim.AdamW(0.02))
    assert theirs > 0.85
    assert ours == pytest.approx(theirs, abs=0.01)


def test_states_begin_as_the_rule_says() -> None:
    """That of averaged weights begins as the parameter: not as the gradient that a step without init is given first."""
    optimizer = rulec.mlx.optimizer("schedule_free_adamw")()
    optimizer.init({"a": tree(0)["a"]})
    assert any(np.array_equal(x, tree(0)["a"]) for x in values(optimizer.state["a"]))
    later = rulec.mlx.optimizer("schedule_free_adamw")()
    later.apply_gradients({"a": tree(1)["a"]}, {"a": tree(0)["a"]})
    optimizer.apply_gradients({"a": tree(1)["a"]}, {"a": tree(0)["a"]})
    assert difference(later.state, optimizer.state) == 0


def test_keywords_of_a_class_by_place() -> None:
    assert difference(steps(rulec.mlx.SGD(0.1, 0.9), tree(0)), steps(optim.SGD(0.1, 0.9), tree(0))) == 0


MISTAKES = [
    (
        lambda: rulec.mlx.AdamW(0.1, beta_2=0.9),
        "rulec.mlx.AdamW has no keyword 'beta_2'; did you mean 'betas'?",
    ),
    (
        lambda: rulec.mlx.AdamW(0.1, foreach=True),
        "has no keyword 'foreach': it takes learning_rate, betas, eps, weight_decay, bias_correction",
    ),
    (lambda: rulec.mlx.AdamW(), "'learning_rate': rulec.mlx.AdamW takes learning_rate, betas"),
    (lambda: rulec.mlx.AdamW(lr=0.1), "rulec.mlx.AdamW has no keyword 'lr'; did you mean 'learning_rate'?"),
    (lambda: rulec.mlx.optimizer("lion")(lr=0.1), "Lion has no keyword 'lr'; did you mean 'learning_rate'?"),
    (lambda: rulec.mlx.AdamW(0.1, betas=[0.9]), "betas of AdamW must be 2 numbers, not 1"),
    (lambda: rulec.mlx.Adam(0.1, betas=[0.9, 1.5]), "beta2"),
    (lambda: rulec.mlx.SGD(0.1, nesterov=True), "nesterov=True needs a momentum above 0"),
    (lambda: rulec.mlx.optimizer("lamb")(0.1, epsilon=1), "LAMB has no keyword 'epsilon'"),
    (lambda: rulec.mlx.optimizer("transforms/lookahead")(0.1), "a rule to wrap"),
    (lambda: rulec.mlx.SGD(0.1).apply_gradients({"a": mx.ones(2)}, {"a": mx.ones(3)}), "gradient of a has shape"),
    (lambda: rulec.mlx.SGD(0.1).apply_gradients({"b": mx.ones(2)}, {"a": mx.ones(3)}), "the parameters nothing there"),
    (lambda: rulec.mlx.SGD(0.1).apply_gradients({"a": mx.array([1])}, {"a": mx.array([1.0])}), "a is of int32"),
    (lambda: rulec.mlx.SGD(0.1).init({"a": mx.array([1j])}), "the parameter a is of complex64"),
]


@pytest.mark.parametrize(("call", "sentence"), MISTAKES)
def test_mistakes_are_one_sentence(call: Any, sentence: str) -> None:
    with pytest.raises(RulecError) as caught:
        call()
    assert sentence in str(caught.value)


def test_a_step_that_is_skipped_changes_nothing_and_is_not_counted() -> None:
    optimizer = rulec.mlx.optimizer("skip_not_finite >> adam")(0.1)
    params = steps(optimizer, tree(0), last=2)
    before = values(optimizer.state)
    gradients = tree(3)
    gradients["layers"][0]["b"] = mx.full((5,), float("nan"))
    for now, then in zip(values(optimizer.apply_gradients(gradients, params)), values(params), strict=True):
        assert np.array_equal(now, then)
    for now, then in zip(values(optimizer.state), before, strict=True):
        assert np.array_equal(now, then)
    assert optimizer.step.item() == 2


def test_a_skip_of_some_parameters_alone_is_refused() -> None:
    rule = rulec.parse("name: Picky\nskip: count_nonzero(g) < 2\nstep: |\n  direction = g\n")
    with pytest.raises(RulecError, match="a skip of some parameters alone"):
        rulec.mlx.optimizer(rule)(0.1).apply_gradients(tree(1), tree(0))


def test_a_refused_step_leaves_the_state_as_it_was() -> None:
    optimizer = rulec.mlx.Adam(0.1)
    params = steps(optimizer, tree(0), last=1)
    before = values(optimizer.state)
    with pytest.raises(RulecError):
        optimizer.apply_gradients({"a": mx.ones((4, 4))}, params)
    for now, then in zip(values(optimizer.state), before, strict=True):
        assert np.array_equal(now, then)


def test_a_state_of_other_shapes_is_refused() -> None:
    optimizer = rulec.mlx.Adam(0.1)
    optimizer.init({"a": mx.ones(3)})
    with pytest.raises(RulecError, match=r"m of a in the state of Adam has shape \(3,\) and not \(4, 3\)"):
        optimizer.apply_gradients({"a": tree(1)["a"]}, {"a": tree(0)["a"]})


@pytest.mark.parametrize("name", ["prodigy", "nadam", "soap", "adafactor"])
def test_a_saved_run_goes_on(name: str, tmp_path: Any) -> None:
    """Numbers of the model and of tensors too, through a file of MLX's."""
    kind = rulec.mlx.optimizer(name)
    whole, before, after = kind(), kind(), kind()
    params = steps(before, tree(0), last=3)
    file = str(tmp_path / "state.safetensors")
    mx.save_safetensors(file, dict(tree_flatten(before.state)))
    after.state = tree_unflatten([*mx.load(file).items()])
    assert difference(steps(after, params, first=4, last=6), steps(whole, tree(0), last=6)) == 0


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float64"])
def test_parameters_of_other_dtypes(dtype: str) -> None:
    """The first step of Adam without a correction of its moments, in closed form."""
    kind = getattr(mx, dtype)
    optimizer = rulec.mlx.Adam(0.125)
    params = optimizer.apply_gradients({"a": mx.full((3,), 2.0, kind)}, {"a": mx.zeros((3,), kind)})["a"]
    assert params.dtype == optimizer.state["a"]["m"].dtype == kind
    expected = -0.125 * 0.1 * 2 / ((0.001 * 4) ** 0.5 + 1e-8)
    assert float(params[0]) == pytest.approx(expected, rel={"bfloat16": 2.0**-7, "float16": 2.0**-9}.get(dtype, 1e-13))
