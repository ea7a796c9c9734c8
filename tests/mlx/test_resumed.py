"""Runs in MLX that are saved and go on, begin their state twice, or have parameters that are not trained."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

mx = pytest.importorskip("mlx.core")
nn: Any = pytest.importorskip("mlx.nn")
optim: Any = pytest.importorskip("mlx.optimizers")

from mlx.utils import tree_flatten, tree_map, tree_unflatten  # noqa: E402

import rulec  # noqa: E402
import rulec.mlx  # noqa: E402
from rulec.compiler.routing import Router  # noqa: E402
from rulec.errors import StateMismatch  # noqa: E402
from tests.library import single  # noqa: E402

SLOPES = {"w": mx.array([[1.0, 2.0], [0.5, 3.0]]), "layers": [{"b": mx.array([2.0, 1.0])}, {}]}

#: Rules of each kind of number that states of parameters do not have, and of names of states with dots.
EVERYDAY = ["prodigy", "schedule_free_sgd", "cautious_nadamw", "milder >> prodigy"]

MILDER = """
name: Milder
state: {d: {init: 0, per: model}}
step: |
  d = d + sum(abs(g), per="model")
  direction = g/(1 + d)
"""


def rule_of(name: str) -> Any:
    """A rule of the library; a composition with two numbers of the model of one name gives both names with dots."""
    return rulec.parse(MILDER) >> rulec.load("prodigy") if name.startswith("milder") else rulec.load(name)


def has_numbers_or_dots(name: str) -> bool:
    rule, states = rule_of(name), []
    while rule is not None:
        states += rule.state.items()
        rule = rule.rest
    return any("." in key or (state.shape is None and state.per in ("group", "model")) for key, state in states)


OTHERS = [name for name in single() if "/" not in name and name not in EVERYDAY and has_numbers_or_dots(name)]
RULES = [*EVERYDAY, *(pytest.param(name, marks=pytest.mark.another) for name in OTHERS)]


def begun() -> Any:
    return {"w": mx.array([[1.0, 2.0], [3.0, -1.0]]), "layers": [{"b": mx.array([1.0, -2.0])}, {}]}


def steps(optimizer: Any, params: Any, count: int) -> Any:
    """Steps down a quadratic bowl: its gradients differ in each step."""
    for _ in range(count):
        params = optimizer.apply_gradients(tree_map(mx.multiply, params, SLOPES), params)
    return params


def numbers(tree: Any) -> dict[str, list[Any]]:
    leaves: dict[str, Any] = dict(tree_flatten(tree))
    return {name: np.array(array).tolist() for name, array in leaves.items()}


@pytest.mark.parametrize("name", RULES)
def test_a_run_goes_on_from_its_flat_state(name: str) -> None:
    kind = rulec.mlx.optimizer(rule_of(name))
    whole, resumed = kind(), kind()
    params = steps(whole, begun(), 3)
    saved = numbers(whole.state)
    resumed.state = tree_unflatten(tree_flatten(whole.state))
    resumed.init(params)
    assert numbers(resumed.state) == saved
    assert numbers(steps(resumed, params, 2)) == numbers(steps(whole, params, 2))
    assert numbers(resumed.state) == numbers(whole.state) != saved


@pytest.mark.parametrize("name", RULES)
def test_a_second_init_changes_nothing(name: str) -> None:
    optimizer = rulec.mlx.optimizer(rule_of(name))()
    params = steps(optimizer, begun(), 3)
    saved = numbers(optimizer.state)
    optimizer.init(params)
    assert numbers(optimizer.state) == saved


def test_a_parameter_that_is_trained_later_leaves_the_numbers_of_all_where_they_are() -> None:
    optimizer = rulec.mlx.optimizer("prodigy")()
    params = begun()
    for _ in range(40):
        params |= optimizer.apply_gradients({"w": params["w"] * SLOPES["w"]}, {"w": params["w"]})
    reached = optimizer.state["rulec"]["d"].item()
    assert reached > 1e-5
    optimizer.init(params)
    assert optimizer.state["rulec"]["d"].item() == reached
    assert {"m", "v", "s", "x0"} <= optimizer.state["layers"][0]["b"].keys()


def older(name: str, state: Any) -> Any:
    """A state under the names that it had with dots."""
    keys = {key for rule in Router(rule_of(name)).rules for key in rule.state if "." in key}
    was = {key.replace(".", "_") + end: key + end for key in keys for end in ("", "::scale")}

    def renamed(tree: Any) -> Any:
        if isinstance(tree, dict):
            return {was.get(key, key): renamed(value) for key, value in tree.items()}
        return [renamed(value) for value in tree] if isinstance(tree, list) else tree

    return renamed(state)


@pytest.mark.parametrize("flat", [False, True])
@pytest.mark.parametrize("name", ["cautious_nadamw", "milder >> prodigy"])
def test_names_with_dots_of_older_states_are_read(name: str, flat: bool) -> None:
    kind = rulec.mlx.optimizer(rule_of(name))
    whole, resumed = kind(), kind()
    params = steps(whole, begun(), 3)
    state = older(name, whole.state)
    assert numbers(state) != numbers(whole.state)
    resumed.state = tree_unflatten(tree_flatten(state)) if flat else state
    assert numbers(steps(resumed, params, 2)) == numbers(steps(whole, params, 2))
    assert numbers(resumed.state) == numbers(whole.state)


def test_codes_under_an_older_name_are_read() -> None:
    kind = rulec.mlx.optimizer("cautious_adamw")
    whole, resumed = (kind(0.01, state_dtype="dynamic8") for _ in range(2))
    params = {"w": mx.ones((64, 64))}
    params = whole.apply_gradients(params, params)
    resumed.state = tree_unflatten(tree_flatten(older("cautious_adamw", whole.state)))
    resumed.apply_gradients(params, params)
    whole.apply_gradients(params, params)
    assert "adam_m::scale" in whole.state["w"]
    assert numbers(resumed.state) == numbers(whole.state)


def test_a_state_without_the_numbers_of_all_is_refused() -> None:
    kind = rulec.mlx.optimizer("prodigy")
    whole, resumed = kind(), kind()
    params = steps(whole, begun(), 3)
    resumed.state = {name: part for name, part in whole.state.items() if name != "rulec"}
    with pytest.raises(StateMismatch, match=r"the number rulec\.num of Prodigy .* is missing: load all of"):
        steps(resumed, params, 1)


class Quantized(nn.Module):  # type: ignore[misc]
    """A quantized embedding and a quantized layer, with a trained layer of low rank beside them."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.base = nn.QuantizedEmbedding(8, 64), nn.QuantizedLinear(64, 32, bias=False)
        self.lora = [nn.Linear(64, 2, bias=False), nn.Linear(2, 32)]

    def __call__(self, words: Any) -> Any:
        seen = self.table(words)
        return self.base(seen) + self.lora[1](self.lora[0](seen))


@pytest.mark.peer
@pytest.mark.parametrize("init", ["all parameters", "trained ones", "none"])
def test_layers_beside_quantized_ones_are_trained_as_with_mlx(init: str) -> None:
    results = []
    for package in (rulec.mlx, optim):
        mx.random.seed(0)
        model, optimizer = Quantized(), package.AdamW(0.1)
        first = numbers(model.parameters())
        if init != "none":
            optimizer.init(model.parameters() if init == "all parameters" else model.trainable_parameters())
        both = nn.value_and_grad(model, lambda model: mx.mean(model(mx.array([1, 2])) ** 2))
        for _ in range(2):
            optimizer.update(model, both(model)[1])
        results.append(numbers(model.parameters()))
    for name, value in results[0].items():
        np.testing.assert_allclose(value, results[1][name], rtol=1e-5, atol=1e-6)
        assert (value == first[name]) is not name.startswith("lora"), name


@pytest.mark.parametrize("where", ["gradients", "both"])
def test_leaves_that_are_none_are_not_trained(where: str) -> None:
    """As of a tree that is partitioned into trained and frozen leaves; others take the steps of a tree of their own."""
    alone, beside = (rulec.mlx.optimizer("prodigy")() for _ in range(2))
    params = begun()
    slopes: Any = {"w": None, "layers": SLOPES["layers"], "frozen": None, "more": [None, {"codes": None}]}
    frozen: Any = {"frozen": mx.ones(3), "more": [mx.array([1]), {"codes": mx.array([2], mx.uint32)}]}
    whole = {"w": params["w"], "layers": params["layers"], **frozen}
    if where == "both":
        whole |= {"w": None, "frozen": None, "more": [None, {"codes": None}]}
    trained = {"layers": params["layers"]}
    for _ in range(3):
        gradients = {**slopes, "layers": tree_map(mx.multiply, trained["layers"], SLOPES["layers"])}
        whole = beside.apply_gradients(gradients, whole)
        trained = alone.apply_gradients({"layers": gradients["layers"]}, trained)
    assert numbers(whole["layers"]) == numbers(trained["layers"]) != numbers(params["layers"])
    assert beside.state["w"] == beside.state["more"][1]["codes"] == {}
    if where == "both":
        assert whole["w"] is None
    else:
        assert numbers({"w": whole["w"], **{k: whole[k] for k in frozen}}) == numbers({"w": params["w"], **frozen})


def test_gradients_of_whole_numbers_move_nothing() -> None:
    params = {"codes": mx.array([3], mx.uint32), "w": mx.ones(2)}
    after = rulec.mlx.Adam(0.1).apply_gradients(tree_map(mx.ones_like, params), params)
    assert after["codes"].item() == 3
    assert after["codes"].dtype == mx.uint32
    assert after["w"][0].item() != 1


@pytest.mark.peer
def test_quantized_layers_have_whole_numbers_that_are_not_trained() -> None:
    """MLX's own optimizers begin with such parameters; adapters beside them are trained."""
    params = dict(nn.QuantizedLinear(64, 8).parameters(), flags=mx.array([True]))
    whole = [name for name, x in params.items() if not mx.issubdtype(x.dtype, mx.floating)]
    assert [*map(str, (params[name].dtype for name in whole))] == ["mlx.core.uint32", "mlx.core.bool"]
    trained = {name: params[name] for name in params if name not in whole}
    ours, theirs = (package.AdamW(0.1) for package in (rulec.mlx, optim))
    results = []
    for optimizer in (ours, theirs):
        optimizer.init(params)
        results.append(numbers(optimizer.apply_gradients(tree_map(mx.ones_like, trained), params)))
    assert results[0].keys() == results[1].keys()
    for name in results[0]:
        np.testing.assert_allclose(results[0][name], results[1][name], rtol=1e-6)
    assert not any(ours.state[name] for name in whole)
