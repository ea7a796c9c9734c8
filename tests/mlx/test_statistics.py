"""Statistics in MLX: their values, the same bits with and without, compiled steps, files, and mistakes."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import numpy as np
import pytest

mx = pytest.importorskip("mlx.core")

import mlx.optimizers as optim  # noqa: E402
from mlx.utils import tree_flatten, tree_map, tree_unflatten  # noqa: E402

import rulec  # noqa: E402
import rulec.mlx  # noqa: E402
from rulec.errors import HyperError, RulecError, RuleError  # noqa: E402
from rulec.language.expr.node import Op  # noqa: E402
from rulec.mlx.arrays import LIBRARY  # noqa: E402
from rulec.mlx.statistics import MEASURED  # noqa: E402
from tests.weights import KINDS, RATES, check_unchanged, first_weights, gradient, options, weights  # noqa: E402

ROOT = Path(__file__).parents[2]
RULES = ["adamw", "lion", "lamb", "muon"]
TRUSTING = rulec.parse("""
name: Trusting
hyper: {lr: 1e-2, beta: 0.9}
state: {m: 0}
statistics:
  trust: ratio
  agree: mean(where(m*g > 0, 1, 0))
step: |
  m = beta*m + (1 - beta)*g
  ratio = norm(p)/(norm(m) + 1e-8)
  direction = ratio*m
""")
SHAPES = {"a": (8, 6), "layers.0.b": (5,), "layers.1.c": (2, 3, 4)}


def tree(seed: int) -> dict[str, Any]:
    rng = np.random.default_rng(seed)
    return tree_unflatten([(k, mx.array(rng.normal(size=s).astype(np.float32))) for k, s in SHAPES.items()])


def flat(given: Any) -> dict[str, np.ndarray[Any, Any]]:
    """The arrays of a tree by their names, in float64."""
    return {name: np.array(array, np.float64) for name, array in tree_flatten(given)}


def bits(given: Any) -> dict[str, bytes]:
    return {name: np.array(array).tobytes() for name, array in tree_flatten(given)}


def made(rule: Any, **options: Any) -> Any:
    settings = (rulec.load(rule) if isinstance(rule, str) else rule).settings
    return rulec.mlx.optimizer(rule)(*([0.01] if "lr" in settings else []), **options)


def same(given: Any) -> Any:
    """The arrays of a tree in another one."""
    return tree_map(lambda array: array, given)


def stepping(optimizer: Any, params: Any, compiled: bool = False) -> tuple[Any, dict[str, Any]]:
    """A function of gradients that takes a step, and what holds the parameters; `mx.compile` writes to its trees."""
    hold = {"params": same(params)}
    optimizer.init(params)

    def step(gradients: Any) -> None:
        hold["params"] = optimizer.apply_gradients(gradients, hold["params"])

    state = [hold, optimizer.state]
    return partial(mx.compile, inputs=state, outputs=state)(step) if compiled else step, hold


def trained(rule: Any, steps: int = 2, compiled: bool = False, **options: Any) -> tuple[Any, Any, Any]:
    """An optimizer after some steps, and the parameters before and after the last one."""
    optimizer, old = made(rule, **options), None
    step, hold = stepping(optimizer, tree(0), compiled)
    for seed in range(1, steps + 1):
        old = same(hold["params"])
        step(tree(seed))
        mx.eval(hold["params"], optimizer.state)
    return optimizer, old, hold["params"]


def norms(old: Any, new: Any, grad: Any) -> dict[str, float]:
    """The set `norms` by NumPy in float64, after a step."""
    update, size = new - old, np.linalg.norm
    return {
        "grad_norm": size(grad.ravel()), "update_norm": size(update.ravel()), "param_norm": size(old.ravel()),
        "update_ratio": size(update.ravel()) / size(old.ravel()), "grad_ratio": size(grad.ravel()) / size(old.ravel()),
        "cosine": (update * grad).sum() / size(update.ravel()) / size(grad.ravel()), "nonfinite": 0.0,
        "unchanged": float((new == old).sum()),
    }  # fmt: skip


def check_norms(rule: str, compiled: bool) -> None:
    optimizer, old, new = trained(rule, compiled=compiled, watch="norms")
    statistics, gradients = optimizer.statistics(), flat(tree(2))
    olds, news = flat(old), flat(new)
    assert statistics.step == 2
    for name in SHAPES:
        wanted = norms(olds[name], news[name], gradients[name])
        assert {*statistics} == {*wanted}
        for key, value in wanted.items():
            assert statistics[key][name].item() == pytest.approx(value, rel=3e-4, abs=1e-9), (key, name)
    for key in ("grad_norm", "param_norm", "grad_ratio"):  # of values that no step rounds
        ours = [statistics[key][name].item() for name in SHAPES]
        np.testing.assert_allclose(ours, [norms(olds[n], news[n], gradients[n])[key] for n in SHAPES], rtol=2e-7)


@pytest.mark.parametrize("rule", RULES)
def test_norms_are_those_that_numpy_computes_after_the_step(rule: str) -> None:
    check_norms(rule, compiled=False)


@pytest.mark.slow
@pytest.mark.parametrize("rule", RULES)
def test_norms_of_compiled_steps_are_those_of_numpy(rule: str) -> None:
    check_norms(rule, compiled=True)


def check_trusting(compiled: bool) -> None:
    optimizer, old, _ = trained(TRUSTING, compiled=compiled, watch=["trust", "agree"])
    moments = {name[:-2]: m for name, m in flat({k: optimizer.state[k] for k in ("a", "layers")}).items()}
    numbers, gradients = optimizer.statistics().numbers(), flat(tree(2))
    assert [*numbers] == [f"{key}/{name}" for key in ("trust", "agree") for name in SHAPES]
    for name, before in flat(old).items():
        ratio = np.linalg.norm(before) / np.linalg.norm(moments[name].ravel())
        assert numbers[f"trust/{name}"] == pytest.approx(ratio, rel=1e-6)
        assert numbers[f"agree/{name}"] == pytest.approx((moments[name] * gradients[name] > 0).mean(), rel=1e-6)


@pytest.mark.parametrize("compiled", [False, True])
def test_statistics_of_a_rule_are_those_of_numpy(compiled: bool) -> None:
    check_trusting(compiled)


def test_the_trust_of_lamb_is_that_of_its_paper() -> None:
    optimizer, old, _ = trained("lamb", watch="trust", weight_decay=0.1)
    state = flat({k: optimizer.state[k] for k in ("a", "layers")})
    for name, p in flat(old).items():
        m, v = state[f"{name}.m"] / (1 - 0.9**2), state[f"{name}.v"] / (1 - 0.999**2)
        direction = m / (np.sqrt(v) + 1e-6) + 0.1 * p
        trust = np.linalg.norm(p) / np.linalg.norm(direction)
        (measured,) = optimizer.statistics().values()
        assert measured[name].item() == pytest.approx(trust, rel=1e-5)


def test_expressions_have_the_names_places_and_shapes_of_those_of_arrays() -> None:
    watch = {
        "agree": "mean(where(m*g > 0, 1, 0))", "neurons": 'max(abs(update), per="row")',
        "columns": 'sum(g, per="col")', "decay": "lr*weight_decay", "total": 'norm(grad, per="model")', "t": "t",
    }  # fmt: skip
    optimizer, _, _ = trained("adamw", watch=watch, weight_decay=0.1)
    arrays = {name: np.array(array) for name, array in tree_flatten(tree(0))}
    peer = rulec.array.Optimizer("adamw", arrays, watch=watch, lr=0.01, weight_decay=0.1)
    for seed in (1, 2):
        peer.step({name: np.array(array) for name, array in tree_flatten(tree(seed))})
    ours, theirs = optimizer.statistics(), peer.statistics()
    assert [(name, [*ours[name]]) for name in ours] == [(name, [*theirs[name]]) for name in theirs]
    for name in watch:
        for place, value in theirs[name].items():
            assert (name, place, ours[name][place].shape) == (name, place, value.shape)
            np.testing.assert_allclose(np.array(ours[name][place]), value, rtol=1e-4)
    assert ours.numbers() == pytest.approx(theirs.numbers(), rel=1e-5)
    assert ours.table().split()[:4] == theirs.table().split()[:4]
    assert repr(ours) == repr(theirs)
    assert {value.dtype for name in watch for value in ours[name].values()} == {mx.float32}


def without(state: Any) -> dict[str, bytes]:
    return bits({key: entry for key, entry in state.items() if key != MEASURED})


def check_bits(rule: Any, compiled: bool) -> None:
    plain, _, first = trained(rule, compiled=compiled)
    watched, _, second = trained(rule, compiled=compiled, watch="norms")
    assert bits(first) == bits(second)
    assert without(plain.state) == without(watched.state)
    assert MEASURED not in plain.state


def library() -> list[str]:
    """The rules that a step of MLX takes."""
    known = {name: rulec.load(name) for name in rulec.rules()}
    taken = [name for name, rule in known.items() if not (rule.wraps or rule.inputs or rule.passes)]
    return [name for name in taken if name != "transforms/skip_large"]


@pytest.mark.parametrize(
    "rule", [pytest.param(name, marks=[] if name in RULES else pytest.mark.another) for name in library()]
)
def test_parameters_and_states_have_the_same_bits_with_statistics(rule: str) -> None:
    check_bits(rule, compiled=False)


def test_a_compiled_step_has_the_same_bits_with_statistics() -> None:
    check_bits(TRUSTING, compiled=True)


def test_statistics_of_a_compiled_step_are_a_computation_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each parameter, gradient and state is another value for them."""
    depends = Mock(side_effect=mx.depends)
    monkeypatch.setattr(mx, "depends", depends)
    counts = []
    for watch, compiled in ((None, True), ("norms", False), ("norms", True)):
        step, _ = stepping(made("sgd", watch=watch), tree(0), compiled)
        step(tree(1))
        counts.append(depends.call_count)
    assert counts[:2] == [0, 0]
    assert counts[2] >= 2 * len(SHAPES)


CONTRACTED = """
import json
from tests.mlx.test_statistics import SHAPES, bits, trained

SHAPES |= {"a": (40, 30), "layers.0.b": (50,)}
plain, watched = (trained("lamb", 3, True, watch=watch)[2] for watch in (None, "norms"))
print(json.dumps(bits(plain) == bits(watched)))
"""


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("g++") is None, reason="needs g++")
def test_a_compiler_that_contracts_products_and_sums_gives_the_same_bits(tmp_path: Path) -> None:
    """As one computation with its statistics, the step has other bits under this compiler."""
    flags = "-march=native -ffp-contract=fast"
    wrapper = tmp_path / "g++"
    wrapper.write_text(f'#!/bin/sh\nexec {shutil.which("g++")} {flags} "$@"\n')
    wrapper.chmod(0o755)
    places = {"PATH": f"{tmp_path}:{os.environ['PATH']}", "TMPDIR": str(tmp_path)}
    run = subprocess.run(
        [sys.executable, "-c", CONTRACTED], cwd=ROOT, env={**os.environ, **places}, capture_output=True, text=True,
        check=False,
    )  # fmt: skip
    assert run.returncode == 0, run.stderr
    assert any((tmp_path / "mlx").rglob("*.so"))
    assert json.loads(run.stdout)


def test_matrix_functions_are_not_done_twice(monkeypatch: pytest.MonkeyPatch) -> None:
    iterate = Mock(side_effect=LIBRARY.matrix[Op.NEWTON_SCHULZ])
    monkeypatch.setattr(type(LIBRARY), "matrix", {**LIBRARY.matrix, Op.NEWTON_SCHULZ: iterate})
    counts = []
    for watch in (None, "norms"):
        step, _ = stepping(made("muon", watch=watch), tree(0), compiled=True)
        iterate.reset_mock()
        step(tree(1))
        counts.append(iterate.call_count)
    assert counts[0] == counts[1] > 0


def test_compiled_steps_of_other_parameters_keep_their_names() -> None:
    """Both steps have states of the same shapes, so `mx.compile` traces neither a second time."""
    optimizer = rulec.mlx.SGD(0.1, watch={"norm": "norm(g)"})
    params = {"x": mx.ones(4), "y": mx.ones(4)}
    optimizer.init(params)

    def of(name: str) -> Any:
        def step(gradient: Any) -> Any:
            return optimizer.apply_gradients({name: gradient}, params)

        return mx.compile(step, inputs=optimizer.state, outputs=optimizer.state)

    first, second = of("x"), of("y")
    for step, place, size in ((first, "x", 1.0), (second, "y", 2.0), (first, "x", 3.0), (second, "y", 4.0)):
        step(mx.full(4, size))
        assert optimizer.statistics().numbers() == {f"norm/{place}": 2 * size}
    assert optimizer.statistics().step == 4


def test_a_schedule_measures_the_first_of_every_few_steps() -> None:
    optimizer = made("adamw", watch={"t": "t"}, watch_every=2)
    optimizer.init(tree(0))
    assert repr(optimizer.statistics()) == "<no statistics yet>"
    params, seen = tree(0), []
    for seed in range(1, 6):
        params = optimizer.apply_gradients(tree(seed), params)
        seen.append((optimizer.statistics().step, optimizer.statistics().numbers()["t/a"]))
    assert seen == [(1, 1.0), (1, 1.0), (3, 3.0), (3, 3.0), (5, 5.0)]


def test_steps_between_run_the_program_without_statistics(monkeypatch: pytest.MonkeyPatch) -> None:
    optimizer = made("sgd", watch={"bad": "sum(where(isfinite(grad), 0, 1))"}, watch_every=3)
    optimizer.init(tree(0))
    finite = Mock(side_effect=mx.isfinite)
    monkeypatch.setattr(mx, "isfinite", finite)
    counts = []
    for seed in range(1, 5):
        finite.reset_mock()
        optimizer.apply_gradients(tree(seed), tree(0))
        counts.append(finite.call_count)
    assert counts == [len(SHAPES), 0, 0, len(SHAPES)]


def test_two_optimizers_on_one_state_measure_some_compiled_steps() -> None:
    watching, plain = made("lion", watch={"norm": "norm(update)"}), made("lion")
    step, hold = stepping(watching, tree(0))
    plain.state = watching.state
    plain.init(hold["params"])
    state = [hold, watching.state]

    def without_statistics(gradients: Any) -> None:
        hold["params"] = plain.apply_gradients(gradients, hold["params"])

    measured, between = (
        partial(mx.compile, inputs=state, outputs=state)(function) for function in (step, without_statistics)
    )
    seen = []
    for seed in range(1, 5):
        (measured if seed % 3 == 1 else between)(tree(seed))
        seen.append(watching.statistics().step)
    assert seen == [1, 1, 1, 4]
    _, _, expected = trained("lion", 4, compiled=True)
    assert bits(hold["params"]) == bits(expected)


def test_compiled_steps_that_do_not_all_measure_are_refused() -> None:
    step, _ = stepping(made("adamw", watch="norms", watch_every=10), tree(0), compiled=True)
    message = "watch_every=10 of AdamW is for steps outside of mx.compile, which repeats one step: compile a step with"
    with pytest.raises(RulecError, match=message):
        step(tree(1))


def test_statistics_are_not_read_inside_of_a_compiled_function() -> None:
    optimizer, _, _ = trained("sgd", 1, watch="norms")
    read = mx.compile(lambda: optimizer.statistics().step, inputs=optimizer.state)
    with pytest.raises(RulecError, match=r"statistics\(\) of SGD inside of mx\.compile: call it after the compiled"):
        read()


def test_a_saved_state_goes_on(tmp_path: Path) -> None:
    """With the statistics of its last step, and also in an optimizer without."""
    whole, _, _ = trained("adamw", 3, watch="norms")
    before, _, params = trained("adamw", 2, watch="norms")
    file = str(tmp_path / "state.safetensors")
    mx.save_safetensors(file, dict(tree_flatten(before.state)))
    for watch in ("norms", None, {"t": "t"}):
        after = made("adamw", watch=watch)
        after.state = tree_unflatten([*mx.load(file).items()])
        after.init(params)
        if watch:
            assert after.statistics().numbers() == (before.statistics().numbers() if watch == "norms" else {})
        after.apply_gradients(tree(3), params)
        assert without(after.state) == without(whole.state)
        if watch == "norms":
            assert after.statistics().numbers() == whole.statistics().numbers()
        elif watch:
            assert {*after.statistics().numbers().values()} == {3.0}


def test_states_without_statistics_go_on_with_them() -> None:
    optimizer, _, params = trained("lion", 1)
    watched = made("lion", watch={"norm": "norm(g)"})
    watched.state = optimizer.state
    watched.apply_gradients(tree(2), params)
    assert watched.statistics().step == 2
    sizes = {f"norm/{name}": np.linalg.norm(array) for name, array in flat(tree(2)).items()}
    assert watched.statistics().numbers() == pytest.approx(sizes, rel=1e-6)


@pytest.mark.parametrize("compiled", [False, True])
def test_a_skipped_step_has_no_numbers(compiled: bool) -> None:
    optimizer = made("skip_not_finite >> sgd", watch={"norm": "norm(update)", "rows": 'sum(p, per="row")'})
    step, _ = stepping(optimizer, tree(0), compiled)
    gradients = tree(1)
    gradients["layers"][0]["b"] = mx.full((5,), float("nan"))
    step(gradients)
    assert all(np.isnan(number) for number in optimizer.statistics().numbers().values())
    assert np.isnan(np.array(optimizer.statistics()["rows"]["a"])).all()
    step(tree(2))
    assert np.isfinite([*optimizer.statistics().numbers().values()]).all()


def test_some_rules_may_lack_a_statistic() -> None:
    """Muon has no `v` of its matrices."""
    optimizer, _, _ = trained("muon", watch={"second": "max(v)", "size": "norm(update)"})
    assert [*optimizer.statistics()["second"]] == ["layers.0.b", "layers.1.c"]
    assert [*optimizer.statistics()["size"]] == [*SHAPES]


@pytest.mark.parametrize("rule", RATES)
@pytest.mark.parametrize("kind", KINDS)
def test_unchanged_weights_are_those_that_their_memory_keeps(kind: str, rule: str) -> None:
    dtype = mx.float32 if kind == "float32" else mx.bfloat16
    params = {"w": mx.array(first_weights()).astype(dtype)}
    optimizer = rulec.mlx.optimizer(rule)(RATES[rule], weight_decay=0, watch="norms", **options(kind))
    measured, seen = [], [weights("", params["w"].astype(mx.float32), None)]
    for step in range(3):
        params = optimizer.apply_gradients({"w": mx.array(gradient(step)).astype(dtype)}, params)
        measured.append(optimizer.statistics()["unchanged"]["w"].item())
        parts = [x for name, x in optimizer.state["w"].items() if name.startswith("param::")]
        (part,) = [x.astype(mx.float32 if x.dtype == mx.bfloat16 else x.dtype) for x in parts] or [None]
        seen.append(weights(kind, params["w"].astype(mx.float32), part))
    check_unchanged(measured, seen)


def test_the_update_of_weights_with_a_part_in_the_state_is_that_of_all_digits() -> None:
    old = {"w": mx.sin(mx.arange(4000.0)).astype(mx.bfloat16)}
    optimizer = rulec.mlx.AdamW(1e-4, weights="master", watch="norms")
    optimizer.apply_gradients({"w": old["w"]}, old)
    master = np.array(optimizer.state["w"]["param::master"], np.float64)
    update = master - np.array(old["w"].astype(mx.float32), np.float64)
    assert optimizer.statistics().numbers()["update_norm/w"] == pytest.approx(np.linalg.norm(update), rel=1e-4)


def test_states_in_codes_are_measured_too() -> None:
    params, gradients = {"w": mx.sin(mx.arange(8192.0))}, {"w": mx.cos(mx.arange(8192.0))}
    options: dict[str, Any] = {"state_dtype": {"m": "int8", "v": "bfloat16_sr"}}
    runs = []
    for watch in (None, "norms"):
        optimizer = rulec.mlx.AdamW(1e-2, watch=watch, **options)
        step, hold = stepping(optimizer, params, compiled=watch is not None)
        step(gradients)
        runs.append((optimizer, hold["params"]))
    (_, plain), (optimizer, new) = runs
    update = np.array(new["w"], np.float64) - np.array(params["w"], np.float64)
    assert optimizer.statistics().numbers()["update_norm/w"] == pytest.approx(np.linalg.norm(update), rel=1e-4)
    assert np.allclose(plain["w"], new["w"], rtol=1e-5, atol=1e-7)


def test_optimizers_of_a_multi_optimizer_measure_their_parameters() -> None:
    parts = [made("muon", watch="norms"), rulec.mlx.AdamW(0.01, watch={"norm": "norm(update)"})]
    both = optim.MultiOptimizer(parts, [lambda _, array: array.ndim == 2])
    params = {"w": mx.ones((4, 3)), "b": mx.ones(3)}
    both.init(params)
    both.apply_gradients(params, params)
    assert [next(iter(each.statistics().values())).keys() for each in parts] == [{"w"}, {"b"}]


@pytest.mark.parametrize(
    ("options", "kind", "message"),
    [
        ({"watch": "normz"}, RuleError, "AdamW has no statistic 'normz'; did you mean 'norms'?"),
        ({"watch": {"x": "m*g"}}, RuleError, "differs from element to element"),
        ({"watch": {"x": 3}}, RuleError, "the statistic x is an expression in quotes, such as 'norm(update)', not 3"),
        ({"watch": 3}, HyperError, "watch of AdamW is a name such as 'norms', a list of names, or expressions by name"),
        ({"watch": "norms", "watch_every": 0}, HyperError, "watch_every of AdamW is a whole number of steps from 1"),
    ],
)
@pytest.mark.parametrize("kind_of", [lambda: rulec.mlx.AdamW, lambda: rulec.mlx.optimizer("adamw")])
def test_a_mistake_is_named_as_in_torch(kind_of: Any, options: Any, kind: Any, message: str) -> None:
    with pytest.raises(kind, match=re.escape(message)):
        kind_of()(0.1, **options)


def test_an_optimizer_without_statistics_says_so() -> None:
    with pytest.raises(RulecError, match="AdamW measures no statistics: make it with watch='norms', or with"):
        rulec.mlx.AdamW(0.1).statistics()
