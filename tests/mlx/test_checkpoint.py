"""`rulec.mlx.save` and `load`: runs that go to and from torch and JAX, models, compiled steps, and what is refused."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest

mx = pytest.importorskip("mlx.core")
torch = pytest.importorskip("torch")
jax = pytest.importorskip("jax")
nn: Any = pytest.importorskip("mlx.nn")
optim: Any = pytest.importorskip("mlx.optimizers")

from mlx.utils import tree_flatten, tree_map, tree_unflatten  # noqa: E402

import rulec  # noqa: E402
import rulec.jax  # noqa: E402
import rulec.mlx  # noqa: E402
import rulec.torch  # noqa: E402
from rulec.checkpoint import read  # noqa: E402
from rulec.errors import RulecError, StateMismatch  # noqa: E402
from tests.checkpoint.runs import JaxRun, TorchRun, difference, first_parameters, gradients  # noqa: E402
from tests.checkpoint.test_between_frameworks import same_tensors  # noqa: E402
from tests.library import single  # noqa: E402


class MlxRun:
    """Training by a class of rulec.mlx; `keywords` are the class's."""

    def __init__(self, kind: Any, dtype: str = "float32", **keywords: Any) -> None:
        self.dtype = getattr(mx, dtype)
        self.params = {name: mx.array(array, self.dtype) for name, array in first_parameters().items()}
        self.optimizer = kind(**keywords)

    def steps(self, numbers: range) -> MlxRun:
        """Takes these steps."""
        for number in numbers:
            grads = {name: mx.array(array, self.dtype) for name, array in gradients(number).items()}
            self.params = self.optimizer.apply_gradients(grads, self.params)
        return self

    def now(self) -> dict[str, Any]:
        """The parameters in float64."""
        return {name: np.array(p.astype(mx.float32), np.float64) for name, p in self.params.items()}

    def save(self, file: Path) -> None:
        """With the parameters."""
        rulec.mlx.save(self.optimizer, file, self.params, parameters=True)

    def load(self, file: Path) -> MlxRun:
        """With the parameters."""
        self.params = rulec.mlx.load_params(file, self.params)
        rulec.mlx.load(self.optimizer, file, self.params)
        return self


#: Rules with states of every kind, and the class and keywords of torch's own for those that it has.
RULES: dict[str, Any] = {
    "adamw": ("AdamW", {"lr": 0.01, "weight_decay": 0.1}), "prodigy": None, "schedule_free_adamw": None,
    "novograd": None, "noise >> sgd": None,
}  # fmt: skip
OTHERS: dict[str, Any] = {
    "adafactor": ("Adafactor", {"lr": 0.01, "weight_decay": 0.0}), "soap": None, "momentum": None, "muon": None,
}  # fmt: skip


@pytest.mark.parametrize(
    "name",
    [
        pytest.param("adamw", marks=pytest.mark.slow), *[*RULES][1:],
        *(pytest.param(name, marks=pytest.mark.another) for name in OTHERS),
    ],
)  # fmt: skip
def test_a_run_goes_from_torch_to_mlx_to_jax_and_back(name: str, tmp_path: Path) -> None:
    """The oracle is the run that is never interrupted, of torch's own class where torch has the rule."""
    peer = {**RULES, **OTHERS}[name]
    rule = rulec.load(name)
    if "bfloat16" in (text := rule.to_yaml()):  # each library rounds matrix products in bfloat16 otherwise
        rule = rulec.parse(text.replace("bfloat16", "float64"))
    keywords = peer[1] if peer else {"lr": 0.01}
    rate = {"learning_rate" if key == "lr" else key: value for key, value in keywords.items()}
    ours = getattr(rulec.torch, peer[0]) if peer else rulec.torch.optimizer(rule)
    whole = TorchRun(getattr(torch.optim, peer[0]) if peer else ours, "float32", **keywords)
    first, second, third = (tmp_path / part for part in "abc")

    TorchRun(ours, "float32", **keywords).steps(range(3)).save(first)
    kind = rulec.mlx.optimizer(rule)
    run = MlxRun(kind, **rate).load(first)
    run.save(second)
    assert same_tensors(first, second)
    run.steps(range(3, 6)).save(second)
    assert difference(run.now(), whole.steps(range(6)).now()) <= 1e-5
    run_of_jax = JaxRun(rule, "float32", **keywords).load(second)
    run_of_jax.save(third)
    assert same_tensors(second, third)
    run_of_jax.steps(range(6, 9)).save(third)
    back = TorchRun(ours, "float32", **keywords).load(third).steps(range(9, 12))
    again = MlxRun(kind, **rate).load(third).steps(range(9, 12))
    expected = whole.steps(range(6, 12)).now()
    assert max(difference(each.now(), expected) for each in (back, again)) <= 1e-5


@pytest.mark.another
@pytest.mark.parametrize("name", [name for name in single() if "/" not in name])
def test_every_rule_goes_on_from_its_file_as_it_was(name: str, tmp_path: Path) -> None:
    """The run that is never interrupted ends with the same bits."""
    kind = rulec.mlx.optimizer(name)
    whole = MlxRun(kind).steps(range(2))
    whole.save(tmp_path / "a")
    resumed = MlxRun(kind).load(tmp_path / "a").steps(range(2, 4))
    assert bits([resumed.params, resumed.optimizer.state]) == bits([whole.steps(range(2, 4)).params, state_of(whole)])


def state_of(run: MlxRun) -> Any:
    return run.optimizer.state


def bits(tree: Any) -> dict[str, Any]:
    """Path -> dtype, shape and bytes."""
    return {
        path: (x.dtype, x.shape, np.array(x.view(mx.uint16) if x.dtype == mx.bfloat16 else x).tobytes())
        for path, x in tree_flatten(tree)
    }


@pytest.mark.parametrize(
    ("dtype", "keywords"),
    [
        ("bfloat16", {}),
        ("float16", {}),
        ("float32", {"state_dtype": {"m": "bfloat16_sr"}, "seed": 3}),
        ("bfloat16", {"weights": "split"}),
        ("bfloat16", {"weights": "kahan", "state_dtype": {"v": "float32"}}),
    ],
)
def test_every_bit_comes_back(dtype: str, keywords: dict[str, Any], tmp_path: Path) -> None:
    whole = MlxRun(rulec.mlx.AdamW, dtype, learning_rate=0.01, **keywords).steps(range(3))
    whole.save(tmp_path / "a")
    resumed = MlxRun(rulec.mlx.AdamW, dtype, learning_rate=0.01, **keywords).load(tmp_path / "a")
    assert bits([resumed.params, state_of(resumed)]) == bits([whole.params, state_of(whole)])
    assert bits(resumed.steps(range(3, 5)).params) == bits(whole.steps(range(3, 5)).params)


@pytest.mark.parametrize("form", ["int8", "dynamic8", "dynamic4"])
def test_codes_come_back_and_go_to_jax(form: str, tmp_path: Path) -> None:
    kind, file = rulec.mlx.optimizer("adamw"), tmp_path / "a"
    whole, resumed = (kind(0.01, state_dtype={"m": form}) for _ in range(2))
    params = {"w": mx.random.normal((64, 65), key=mx.random.key(0))}
    for _ in range(2):
        params = whole.apply_gradients(tree_map(mx.sin, params), params)
    rulec.mlx.save(whole, file, params)
    rulec.mlx.load(resumed, file, params)
    assert "m::scale" in resumed.state["w"]
    assert bits(resumed.state) == bits(whole.state)
    state = rulec.jax.load(file, "adamw", {"w": jax.numpy.array(params["w"])}, state_dtype={"m": form})
    assert np.array_equal(np.asarray(state.m["w"].codes).reshape(-1), np.array(whole.state["w"]["m"]).reshape(-1))


# Models


def bend(x: Any, maximum: Any) -> Any:
    return maximum(x, 0.1 * x)


class Model(nn.Module):  # type: ignore[misc]
    """A convolution and a dense layer, whose names are not torch's."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = [nn.Conv2d(2, 3, 3), nn.Linear(3 * 4, 2)]

    def __call__(self, images: Any) -> Any:
        seen = bend(self.layers[0](images), mx.maximum)
        return self.layers[1](seen.transpose(0, 3, 1, 2).reshape(len(images), -1))


class TorchModel(torch.nn.Module):  # type: ignore[misc, name-defined]
    """The same in torch."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.dense = torch.nn.Conv2d(2, 3, 3), torch.nn.Linear(3 * 4, 2)

    def forward(self, images: Any) -> Any:
        seen = bend(self.conv(images), torch.maximum)
        return self.dense(seen.reshape(len(images), -1))


IMAGES = np.random.default_rng(5).standard_normal((8, 2, 4, 4)).astype(np.float32)


def torch_steps(model: Any, optimizer: Any, count: int) -> Any:
    for _ in range(count):
        optimizer.zero_grad()
        model(torch.from_numpy(IMAGES)).square().mean().backward()
        optimizer.step()
    return model


def mlx_steps(model: Any, optimizer: Any, count: int) -> Any:
    images = mx.array(IMAGES.transpose(0, 2, 3, 1))
    both = nn.value_and_grad(model, lambda model: mx.mean(model(images) ** 2))
    for _ in range(count):
        optimizer.update(model, both(model)[1])
    return model


@pytest.mark.peer
def test_a_model_of_torch_goes_to_mlx_and_back(tmp_path: Path) -> None:
    """The oracle is torch's own AdamW, never interrupted; a convolution of MLX has its channels last."""
    torch.manual_seed(0)
    models = [TorchModel() for _ in range(2)]
    models[1].load_state_dict(models[0].state_dict())
    whole = torch.optim.AdamW(models[0].parameters(), 0.01)
    ours = rulec.torch.AdamW(models[1].named_parameters(), 0.01)
    torch_steps(models[1], ours, 3)
    rulec.torch.save(ours, tmp_path / "a", parameters=True)

    def names(name: str) -> str:
        return name.replace("conv/", "layers.0.").replace("dense/", "layers.1.")

    model, optimizer = Model(), rulec.mlx.AdamW(0.01, bias_correction=True)
    here: Any = {"names": names, "axes": {"layers.0.weight": (0, 2, 3, 1)}}
    model.update(rulec.mlx.load_params(tmp_path / "a", model, **here))
    rulec.mlx.load(optimizer, tmp_path / "a", model, **here)
    mlx_steps(model, optimizer, 3)
    rulec.mlx.save(optimizer, tmp_path / "b", model, parameters=True)
    back = {"layers/0/weight": "conv.weight", "layers/0/bias": "conv.bias"}
    back |= {"layers/1/weight": "dense.weight", "layers/1/bias": "dense.bias"}
    there: Any = {"names": back, "axes": {"conv.weight": (0, 3, 1, 2)}}
    rulec.torch.load(ours, tmp_path / "b", parameters=True, **there)
    torch_steps(models[1], ours, 3)
    torch_steps(models[0], whole, 9)
    for one, other in zip(models[0].parameters(), models[1].parameters(), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-6)


# Compiled steps


def compiled(model: Any, optimizer: Any) -> Any:
    state = [model.state, optimizer.state]

    @partial(mx.compile, inputs=state, outputs=state)
    def train() -> None:
        optimizer.update(model, model.parameters())

    def trained(count: int) -> Any:
        for _ in range(count):
            train()
            mx.eval(state)
        return bits([model.parameters(), optimizer.state])

    return trained


@pytest.mark.parametrize("when", ["between its calls", pytest.param("before it is compiled", marks=pytest.mark.slow)])
@pytest.mark.parametrize("name", ["momentum", pytest.param("prodigy", marks=pytest.mark.slow)])
def test_a_compiled_step_goes_on_from_a_file(name: str, when: str, tmp_path: Path) -> None:
    def begun() -> tuple[Any, Any, Any]:
        mx.random.seed(0)
        model, optimizer = nn.Linear(2, 3, bias=False), rulec.mlx.optimizer(name)(optim.cosine_decay(0.1, 20))
        optimizer.init(model.trainable_parameters())
        return model, optimizer, compiled(model, optimizer)

    model, optimizer, train = begun()
    train(3)
    rulec.mlx.save(optimizer, tmp_path / "a", model, parameters=True)
    wanted = train(3)
    model, optimizer, train = begun()
    if when == "between its calls":
        train(1)
    model.update(rulec.mlx.load_params(tmp_path / "a", model))
    rulec.mlx.load(optimizer, tmp_path / "a", model)
    assert train(3) == wanted


@pytest.mark.parametrize("name", ["momentum", pytest.param("prodigy", marks=pytest.mark.slow)])
def test_a_compiled_step_goes_on_from_mlx_s_own_file(name: str, tmp_path: Path) -> None:
    """By `mx.save_safetensors` and `mx.load`, also of a state that ran compiled before."""

    def begun() -> tuple[Any, Any]:
        mx.random.seed(0)
        model, optimizer = nn.Linear(2, 3, bias=False), rulec.mlx.optimizer(name)(optim.cosine_decay(0.1, 20))
        optimizer.init(model.trainable_parameters())
        return model, optimizer

    file = str(tmp_path / "a.safetensors")
    model, optimizer = begun()
    train = compiled(model, optimizer)
    train(2)
    mx.save_safetensors(file, dict(tree_flatten({"model": model.parameters(), "optimizer": optimizer.state})))
    wanted = train(2)
    model, optimizer = begun()
    content = tree_unflatten([*mx.load(file).items()])
    model.update(content["model"])
    optimizer.state = content["optimizer"]
    assert compiled(model, optimizer)(2) == wanted


# What is refused


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    MlxRun(rulec.mlx.Adam, learning_rate=0.01).steps(range(2)).save(tmp_path / "a")
    return tmp_path / "a"


MISTAKES: list[tuple[Any, dict[str, Any], str]] = [
    (lambda: rulec.mlx.AdamW(0.01), {}, "was updated by Adam when"),
    (lambda: rulec.mlx.Adam(0.01), {"names": {"kernel": "weight"}}, "has weight where there is kernel here"),
    (lambda: rulec.mlx.Adam(0.01), {"axes": {"kernel": (1, 0)}}, "kernel has shape (4, 6) here"),
    (lambda: optim.MultiOptimizer([optim.Adam(0.1)]), {}, "a MultiOptimizer has several optimizers: load each"),
    (lambda: optim.Adam(0.1), {}, "load takes an optimizer of rulec.mlx, not mlx.optimizers.optimizers.Adam"),
    (lambda: "adam", {}, "not a builtins.str"),
]


@pytest.mark.parametrize(("make", "keywords", "sentence"), MISTAKES)
def test_another_file_or_optimizer_is_refused_before_anything_is_written(
    make: Any, keywords: dict[str, Any], sentence: str, saved: Path
) -> None:
    optimizer, params = make(), MlxRun(rulec.mlx.Adam, learning_rate=0.01).params
    if isinstance(optimizer, rulec.mlx.RuleOptimizer):
        params = optimizer.apply_gradients(params, params)
    before = bits(getattr(optimizer, "state", {}))
    with pytest.raises(RulecError) as caught:
        rulec.mlx.load(optimizer, saved, params, **keywords)
    assert sentence in str(caught.value)
    assert bits(getattr(optimizer, "state", {})) == before


def test_a_number_that_does_not_fit_is_refused_before_anything_is_written(tmp_path: Path) -> None:
    """A parameter that torch updated less often than another has no place here, where one count is for all."""
    run = TorchRun(rulec.torch.Adam, "float32", lr=0.01).steps(range(1))
    run.params["bias"].grad = None
    run.optimizer.step()
    run.save(tmp_path / "a")
    here = MlxRun(rulec.mlx.optimizer("adam"), learning_rate=0.01).steps(range(1))
    before = bits(state_of(here))
    with pytest.raises(StateMismatch, match="bias was updated 1 times and kernel 2 times"):
        rulec.mlx.load(here.optimizer, tmp_path / "a", here.params)
    assert bits(state_of(here)) == before


def test_saving_inside_of_a_compiled_step_is_refused(tmp_path: Path) -> None:
    run = MlxRun(rulec.mlx.Adam, learning_rate=0.01)
    run.optimizer.init(run.params)

    def step(gradients: Any) -> Any:
        rulec.mlx.save(run.optimizer, tmp_path / "a", run.params)
        return gradients

    with pytest.raises(RulecError, match=r"the state of Adam is traced: save it outside of mx\.compile"):
        mx.compile(step, inputs=run.optimizer.state)(run.params)


def test_saving_changes_nothing(tmp_path: Path) -> None:
    """Also where a parameter has no state yet: the file has what `init` would make."""
    optimizer = rulec.mlx.optimizer("prodigy")(1.0)
    params = MlxRun(lambda: None).params
    params |= optimizer.apply_gradients({"bias": params["bias"]}, {"bias": params["bias"]})
    before = bits(optimizer.state)
    rulec.mlx.save(optimizer, tmp_path / "a", params)
    assert bits(optimizer.state) == before
    assert [sorted(p.states) for p in read(tmp_path / "a").parameters] == [["m", "s", "v", "x0"]] * 2
    rulec.mlx.load(optimizer, tmp_path / "a", params)
    assert bits({"bias": optimizer.state["bias"]}) == {k: v for k, v in before.items() if k.startswith("bias")}
