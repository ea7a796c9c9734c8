"""Loading into an optimizer that has been trained: all of a file is taken over or nothing, on each side alike."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest

import rulec
import rulec.array
import rulec.jax
import rulec.torch
from rulec.checkpoint.tensors import Stored, read_file, write_file
from rulec.errors import StateMismatch
from tests.checkpoint.runs import JaxRun, TorchRun, first_parameters, gradients

Tensors = dict[str, Stored]
Said = dict[str, Any]
Saved = tuple[Tensors, dict[str, str]]

#: One that remembers numbers of groups, and one that does of the model.
OF_GROUPS, OF_MODEL = "schedule_free_adamw", "prodigy"


class ArrayRun:
    """Training of plain arrays."""

    def __init__(self, rule: str) -> None:
        self.params = {name: array.astype(np.float32) for name, array in first_parameters().items()}
        self.optimizer = rulec.array.Optimizer(rule, self.params)

    def steps(self, numbers: range, only: str = "") -> ArrayRun:
        for number in numbers:
            grads = {name: grad.astype(np.float32) for name, grad in gradients(number).items()}
            self.optimizer.step({name: grad if only in name else None for name, grad in grads.items()})
        return self

    def save(self, file: Path) -> None:
        rulec.array.save(self.optimizer, file, parameters=True)

    def load(self, file: Path) -> ArrayRun:
        rulec.array.load(self.optimizer, file, parameters=True)
        return self

    def now(self) -> dict[str, Any]:
        """The parameters in float64."""
        return {name: array.astype(np.float64) for name, array in self.params.items()}

    def everything(self) -> dict[str, bytes]:
        """Every number that training goes on from."""
        found = {name: array.tobytes() for name, array in self.params.items()}
        saved = self.optimizer.state_dict()
        states = {f"{n}/{k}": v.tobytes() for n, own in saved["state"].items() for k, v in own.items()}
        shared = {k: v.tobytes() for k, v in saved["shared"].items()}
        return found | states | shared | {"counts": repr(saved["counts"]).encode()}


class OurTorchRun(TorchRun):
    """Training in torch."""

    def __init__(self, rule: str) -> None:
        super().__init__(rulec.torch.optimizer(rulec.load(rule)), "float32")

    def everything(self) -> dict[str, bytes]:
        """Every number that training goes on from."""
        found = {name: p.detach().numpy().tobytes() for name, p in self.params.items()}
        saved = self.optimizer.state_dict()
        states = {f"{n}/{k}": np.asarray(v).tobytes() for n, own in saved["state"].items() for k, v in own.items()}
        return found | states | {"groups": repr(saved["param_groups"]).encode()}


class OurJaxRun(JaxRun):
    """Training in JAX, which writes into nothing."""

    def __init__(self, rule: str) -> None:
        super().__init__(rule, "float32")

    def everything(self) -> dict[str, bytes]:
        """Nothing that loading could change."""
        return {}


RUNS: tuple[Any, ...] = (ArrayRun, OurTorchRun, OurJaxRun)


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Saved]:
    """Whole files of two steps, as arrays and metadata, by their rules."""
    found = {}
    for rule in (OF_GROUPS, OF_MODEL):
        file = tmp_path_factory.mktemp("saved") / "run.safetensors"
        ArrayRun(rule).steps(range(2)).save(file)
        found[rule] = read_file(file)
    return found


@pytest.fixture(scope="module")
def receivers() -> dict[Any, Any]:
    """Trained runs of each kind, which nothing that is refused may change."""
    return {(kind, rule): kind(rule).steps(range(2, 5)) for kind in RUNS for rule in (OF_GROUPS, OF_MODEL)}


def reshaped(name: str, *shape: int) -> Callable[[Tensors, Said], object]:
    return lambda tensors, said: tensors.update({name: Stored(tensors[name].dtype, shape, tensors[name].data)})


def parameter(**keys: Any) -> Callable[[Tensors, Said], object]:
    """The last parameter described otherwise."""
    return lambda tensors, said: said["parameters"][-1].update(keys)


def part(key: str, value: Any) -> Callable[[Tensors, Said], object]:
    return lambda tensors, said: said.update({key: value})


def counts(*values: int) -> Callable[[Tensors, Said], object]:
    return lambda tensors, said: tensors.update(step=Stored.of(np.array(values, np.int64), "int64"))


def wide(tensors: Tensors, said: Said) -> None:
    tensors["parameter/kernel"] = Stored.of(tensors["parameter/kernel"].wide, "float64")


def twice(tensors: Tensors, said: Said) -> None:
    said["parameters"].append(said["parameters"][-1])
    counts(2, 2, 2)(tensors, said)


DEEP = "[" * 100_000 + "]" * 100_000

CHANGES: dict[str, Callable[[Tensors, Said], object]] = {
    "value of more axes": reshaped("parameter/bias", 1, 5),
    "last value of more axes": reshaped("parameter/kernel", 1, 4, 6),
    "value of other axes": reshaped("parameter/kernel", 6, 4),
    "flat value": reshaped("parameter/kernel", 24),
    "value of another dtype": wide,
    "no last value": lambda tensors, said: tensors.pop("parameter/kernel"),
    "value of nobody": lambda tensors, said: tensors.update({"parameter/other": tensors["parameter/bias"]}),
    "state of more axes": reshaped("state/kernel/z", 1, 4, 6),
    "no last state": lambda tensors, said: tensors.pop("state/kernel/z"),
    "tensor of no kind": lambda tensors, said: tensors.update(other=tensors["step"]),
    "described with more axes": parameter(shape=[1, 4, 6]),
    "shape no list": parameter(shape=4),
    "shape of texts": parameter(shape=["4", "6"]),
    "group a text": parameter(group="0"),
    "group below zero": parameter(group=-1),
    "group a fraction": parameter(group=0.0),
    "group that is not there": parameter(group=7),
    "endless group": parameter(group=10**30),
    "rule below zero": parameter(rule=-1),
    "rule that is not there": parameter(rule=1),
    "number a list": parameter(number=[1]),
    "name a number": parameter(name=3),
    "two of one name": twice,
    "hyper a number": part("hyper", 7),
    "hyper of numbers": part("hyper", [7]),
    "hyper a text": part("hyper", [{"lr": "0.1"}]),
    "hyper nested": part("hyper", [{"lr": [[1.0]]}]),
    "hyper deep": part("hyper", DEEP),
    "hyper endless": part("hyper", "9" * 5000),
    "rules deep": part("rules", DEEP),
    "seed a text": part("seed", '"0"'),
    "seed endless": part("seed", 10**30),
    "rule without a meaning": part("rules", [{"name": "Prodigy"}]),
    "count below zero": counts(2, -1),
    "counts of others": counts(2),
    "counts of two axes": reshaped("step", 1, 2),
    "fractional counts": lambda tensors, said: tensors.update(step=Stored.of(np.array([2.0, 2.0]), "float64")),
    "numbers of no group": reshaped("group/weight_sum"),
    "group numbers of two axes": reshaped("group/weight_sum", 1, 1),
    "numbers of no model": reshaped("model/d", 1),
    "no count of the model": lambda tensors, said: tensors.pop("model_step"),
    "counts of many models": reshaped("model_step", 1),
    "no count of groups": lambda tensors, said: tensors.pop("group_step"),
    "group counts of two axes": reshaped("group_step", 1, 1),
}  # fmt: skip


@pytest.mark.parametrize("kind", RUNS)
@pytest.mark.parametrize("case", CHANGES)
def test_a_file_whose_parts_do_not_fit_changes_nothing(
    kind: Any, case: str, saved: dict[str, Saved],
    receivers: dict[Any, Any], tmp_path: Path,
) -> None:  # fmt: skip
    """Though its checksum is right."""
    rule = OF_MODEL if "model" in case else OF_GROUPS
    tensors, metadata = dict(saved[rule][0]), dict(saved[rule][1])
    said = {key: json.loads(metadata[key]) for key in ("rules", "parameters", "hyper")}
    CHANGES[case](tensors, said)
    texts = {key: value if isinstance(value, str) else json.dumps(value) for key, value in said.items()}
    file = tmp_path / "run.safetensors"
    write_file(file, tensors, {k: v for k, v in {**metadata, **texts}.items() if k != "checksum"})
    run = receivers[kind, rule]
    before = run.everything()
    with pytest.raises(StateMismatch, match=r"run\.safetensors|kernel") as refused:
        run.load(file)
    assert len(str(refused.value)) < 600
    assert "\n" not in str(refused.value)
    assert run.everything() == before


@pytest.mark.parametrize("rule", [OF_GROUPS, OF_MODEL])
@pytest.mark.parametrize("kind", RUNS)
def test_the_whole_file_is_taken(kind: Any, rule: str, saved: dict[str, Saved], tmp_path: Path) -> None:
    """What the refusals above begin from."""
    file = tmp_path / "run.safetensors"
    tensors, metadata = saved[rule]
    write_file(file, tensors, {key: text for key, text in metadata.items() if key != "checksum"})
    run = kind(rule).steps(range(3)).load(file)
    assert run.now()["bias"].astype(np.float32).tobytes() == tensors["parameter/bias"].data.tobytes()


# What had not been updated


@pytest.mark.parametrize("rule", ["adamw", OF_GROUPS, OF_MODEL])
@pytest.mark.parametrize("kind", RUNS)
def test_what_was_never_updated_begins_again(kind: Any, rule: str, tmp_path: Path) -> None:
    """A state that was saved before the first step makes a trained run one that has not begun."""
    file = tmp_path / "run.safetensors"
    kind(rule).save(file)
    straight, gone_back = kind(rule).steps(range(3, 5)), kind(rule).steps(range(3)).load(file).steps(range(3, 5))
    for name in first_parameters():
        assert straight.now()[name].tobytes() == gone_back.now()[name].tobytes()


@pytest.mark.parametrize("rule", ["adamw", OF_GROUPS])
@pytest.mark.parametrize("way", ["load", "load_state_dict"])
def test_an_array_that_was_not_updated_begins_again(way: str, rule: str, tmp_path: Path) -> None:
    """One of two was, when the state was saved; the receiver has moments and counts of both."""
    straight, receiver = ArrayRun(rule).steps(range(2), only="bias"), ArrayRun(rule).steps(range(3))
    if way == "load":
        straight.save(tmp_path / "run.safetensors")
        receiver.load(tmp_path / "run.safetensors")
    else:
        for name, array in straight.params.items():
            receiver.params[name][...] = array
        receiver.optimizer.load_state_dict(straight.optimizer.state_dict())
    assert receiver.everything() == straight.everything()
    assert receiver.optimizer.state("kernel") == {}
    assert receiver.steps(range(3, 5)).everything() == straight.steps(range(3, 5)).everything()


def test_a_parameter_of_torch_that_was_not_updated_begins_again(tmp_path: Path) -> None:
    file = tmp_path / "run.safetensors"
    straight, receiver = ArrayRun("adamw").steps(range(2), only="bias"), OurTorchRun("adamw").steps(range(3))
    straight.save(file)
    receiver.load(file)
    assert [*receiver.optimizer.state_dict()["state"]] == [0]


@pytest.mark.parametrize("rule", ["adamw", OF_GROUPS, OF_MODEL])
def test_a_state_of_jax_that_others_are_made_like_lends_no_values(rule: str, tmp_path: Path) -> None:
    file = tmp_path / "run.safetensors"
    ArrayRun(rule).save(file)
    fresh, trained = OurJaxRun(rule), OurJaxRun(rule).steps(range(3))
    found = rulec.jax.load(file, rule, fresh.params, like=trained.state)
    assert jax.tree.all(jax.tree.map(np.array_equal, found, fresh.state))


@pytest.mark.parametrize(
    ("part", "value"),
    [
        ("counts", {"group": np.zeros(3), "model": 0.0}),
        ("counts", {"group": np.zeros(1), "model": np.zeros((1, 1))}),
        ("shared", {}),
        ("shared", {"lr_max": np.zeros(1)}),
        ("shared", {"lr_max": np.zeros(1), "weight_sum": np.zeros(2)}),
        ("shared", {"lr_max": np.zeros(1), "weight_sum": np.array(["1"])}),
    ],
)
def test_a_dict_whose_parts_do_not_fit_changes_nothing(part: str, value: Any) -> None:
    saved, receiver = ArrayRun(OF_GROUPS).steps(range(2)), ArrayRun(OF_GROUPS).steps(range(3), only="bias")
    before = receiver.everything()
    with pytest.raises(StateMismatch, match="saved"):
        receiver.optimizer.load_state_dict({**saved.optimizer.state_dict(), part: value})
    assert receiver.everything() == before


def test_states_of_complex_numbers_or_texts_are_refused() -> None:
    receiver = ArrayRun("adamw").steps(range(1))
    before = receiver.everything()
    for kind in (np.complex64, "U3", object):
        saved = receiver.optimizer.state_dict()
        saved["state"]["kernel"]["v"] = saved["state"]["kernel"]["v"].astype(kind)
        with pytest.raises(StateMismatch, match=r"^v of kernel was saved as an array of .*, which is no number$"):
            receiver.optimizer.load_state_dict(saved)
        assert receiver.everything() == before
