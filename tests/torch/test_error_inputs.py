"""What torch's own database of wrong inputs says of its optimizers is so of the classes here, in the same words."""

from __future__ import annotations

import inspect
import re
import sys
import unittest
import warnings
from collections.abc import Iterator
from itertools import product
from types import ModuleType
from typing import Any

import pytest
import torch

import rulec.array
import rulec.torch
from rulec.errors import HyperError, RulecError, TensorError
from rulec.torch.classes import torch_classes


@pytest.fixture(scope="module")
def database() -> Iterator[list[Any]]:
    """Torch's records of its optimizers; they are kept with its own tests, which want a package for snapshots."""
    with pytest.MonkeyPatch.context() as patch:
        if "expecttest" not in sys.modules:
            stand_in = ModuleType("expecttest")
            stand_in.TestCase = unittest.TestCase  # type: ignore[attr-defined]
            patch.setitem(sys.modules, "expecttest", stand_in)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            from torch.testing._internal.common_optimizers import optim_db
        yield optim_db


#: What torch refuses and a fused kernel has no trouble with: the inputs train.
TAKEN = ("lr as a Tensor is not supported", "betas must be either both", r"betas\[0\] as a Tensor")

#: What torch refuses and every elementwise rule takes, as pairs of numbers: tested below.
COMPLEX = "SparseAdam does not support complex parameters"

#: What every class refuses in words of its own, by torch's.
REWORDED: dict[str, tuple[type[Exception], str]] = {
    "SparseAdam requires dense parameter tensors": (TensorError, "only dense parameters can be optimized"),
}


def trained(library: Any, name: str, keywords: dict[str, Any]) -> torch.Tensor:
    param = torch.nn.Parameter(torch.linspace(-1, 1, 5))
    param.grad = torch.linspace(1, 2, 5)
    optimizer = getattr(library, name)([param], **keywords)
    for _ in range(3):
        optimizer.step()
    return param.detach()


def plain(value: Any) -> Any:
    return tuple(map(plain, value)) if isinstance(value, tuple) else float(value)


def report(kind: Any, case: Any) -> str:
    """What is said of wrong inputs: the type and words of a warning, and of the error."""
    inputs, said = case.optimizer_error_input, []
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        try:
            kind(inputs.params, **inputs.kwargs).step()
        except RulecError as error:
            said += [f"{wanted.__name__}: {error}" for wanted in type(error).__mro__]
        except (TypeError, ValueError) as error:  # of what is no tensor
            said.append(f"{type(error).__name__}: {error}")
    return "\n".join([*said, *(f"{w.category.__name__}: {w.message}" for w in caught)])


@pytest.mark.slow
def test_the_error_inputs_of_every_class(database: list[Any]) -> None:
    checked = set()
    for info in database:
        name = info.optim_cls.__name__
        if not hasattr(rulec.torch, name):
            continue
        checked.add(name)
        for case in info.optim_error_inputs_func(device="cpu", dtype=torch.float32):
            usual, inputs = (case.error_type, case.error_regex), case.optimizer_error_input
            error, words = REWORDED.get(case.error_regex, usual)
            if words == COMPLEX:
                continue
            if words.startswith(TAKEN):
                keywords = {k: plain(v) for k, v in inputs.kwargs.items() if k in ("lr", "betas")}
                theirs = trained(torch.optim, name, {**keywords, "foreach": False})
                torch.testing.assert_close(trained(rulec.torch, name, inputs.kwargs), theirs)
                continue
            said = report(getattr(rulec.torch, name), case)
            assert re.search(f"^{error.__name__}: .*(?:{words})", said, re.M | re.S), (inputs.desc, said)
    assert checked >= {"Adadelta", "Adafactor", "Adagrad", "Adam", "AdamW", "Adamax", "ASGD", "Muon", "NAdam", "RAdam"}
    assert checked >= {"RMSprop", "Rprop", "SGD"}


@pytest.mark.parametrize(
    ("name", "keywords", "words"),
    [
        ("Adam", {"betas": (1.0, 0.0)}, "beta1=1.0 of Adam must be at least 0 and below 1 (Invalid beta parameter at "),
        ("SGD", {"lr": -1}, "(Invalid learning rate: -1)"),
        ("SGD", {"lr": torch.tensor([0.1, 0.2])}, "Tensor lr must be 1-element, and lr of SGD has shape (2,)"),
        ("RMSprop", {"eps": -1.0}, "(Invalid epsilon value: -1.0)"),
        ("Rprop", {"etas": (1.0, 0.5)}, "(Invalid eta values: 1.0, 0.5)"),
        ("Adafactor", {"eps": (0.0, -0.1)}, "(epsilon2 should be >= 0 but is: -0.1)"),
        ("Adafactor", {"d": 0.0}, "(Clipping threshold d should be >= 1 but is: 0.0)"),
        ("Muon", {"adjust_lr_fn": "x"}, "(Adjust learning rate function x is not supported)"),
        ("Lion", {"lr": -1.0}, "lr=-1.0 of Lion must be at least 0"),
    ],
)
def test_values_are_looked_at_before_parameters(name: str, keywords: dict[str, Any], words: str) -> None:
    kind = getattr(rulec.torch, name)
    for params in (None, 3, [torch.zeros(2, dtype=torch.int32)], ["no tensor"]):
        with pytest.raises(HyperError, match=re.escape(words)):
            kind(params, **keywords)


def test_values_of_groups_are_looked_at_before_their_parameters() -> None:
    usual = torch.nn.Parameter(torch.zeros(2))
    for params in (None, ["no tensor"], [torch.zeros(2, dtype=torch.int32)]):
        with pytest.raises(HyperError, match=r"lr=-1\.0 of SGD must be at least 0 \(Invalid learning rate"):
            rulec.torch.SGD([{"params": params, "lr": -1.0}])
        optimizer = rulec.torch.SGD([usual])
        with pytest.raises(HyperError, match=r"lr=-1\.0 of SGD"):
            optimizer.add_param_group({"params": params, "lr": -1.0})
        assert len(optimizer.param_groups) == 1
    for params in (None, 3, {"w": "no array"}):
        with pytest.raises(HyperError, match=r"lr=-1\.0 of SGD"):
            rulec.array.Optimizer("sgd", params, lr=-1.0)


def test_what_has_no_parameters_in_it_is_refused() -> None:
    with pytest.raises(TensorError, match=r"cannot be made of NoneType None: give tensors"):
        rulec.torch.SGD(None, lr=0.1)  # type: ignore[arg-type]
    with pytest.raises(TensorError, match=r"cannot be made of Linear .*: give it model\.parameters\(\)"):
        rulec.torch.SGD(torch.nn.Linear(2, 2), lr=0.1)  # type: ignore[arg-type]


def test_sparse_adam_takes_complex_parameters_as_pairs() -> None:
    numbers, grads = torch.randn(2, 5, dtype=torch.complex64, generator=torch.Generator().manual_seed(0))
    params = [torch.nn.Parameter(x.clone()) for x in (numbers, torch.view_as_real(numbers))]
    for param, grad in zip(params, (grads, torch.view_as_real(grads)), strict=True):
        param.grad = grad.clone()
        optimizer = rulec.torch.SparseAdam([param], lr=0.1)  # type: ignore[attr-defined]
        for _ in range(3):
            optimizer.step()
    assert not torch.equal(params[0], numbers)
    assert torch.equal(torch.view_as_real(params[0].detach()), params[1].detach())


def test_complex_parameters_are_refused_as_by_torch() -> None:
    with pytest.raises(RuntimeError, match="Adafactor does not support complex parameters such as parameter 0") as one:
        rulec.torch.Adafactor([torch.zeros(2, 2, dtype=torch.complex64)])
    assert isinstance(one.value, TensorError)


#: Values of numbers that torch takes and a class here refuses, by class and keyword: NaN aside.
NARROWER = {
    ("ASGD", "lambd"): "below 0",
    ("ASGD", "alpha"): "below 0",
    ("ASGD", "t0"): "below 0",
    ("Muon", "ns_coefficients"): "others than Muon's",
    ("Muon", "eps"): "others than Muon's",
    ("Muon", "ns_steps"): "no whole number, or below 1",
    ("RMSprop", "alpha"): "above 1",
    ("Rprop", "step_sizes"): "below 0",
}

NUMBERS = (-3.0, -0.5, 0.0, 0.5, 1.0, 1.5, 22.0)


def numbers_of(theirs: Any) -> Iterator[tuple[str, Any]]:
    """Keywords of a class of torch that are numbers or pairs of them, each with values of all kinds."""
    for keyword, parameter in inspect.signature(theirs).parameters.items():
        default = parameter.default
        if isinstance(default, tuple):
            for place, number in product(range(len(default)), NUMBERS):
                yield keyword, tuple(number if i == place else part for i, part in enumerate(default))
        elif isinstance(default, int | float) and not isinstance(default, bool):
            yield from ((keyword, number) for number in NUMBERS)


def refusal(kind: Any, keyword: str, value: Any) -> str:
    """The words in which a class refuses a value; empty where it takes it."""
    try:
        kind([torch.nn.Parameter(torch.ones(2, 2))], **{keyword: value})
    except ValueError as error:
        return str(error)
    return ""


@pytest.mark.parametrize("name", sorted(torch_classes()))
def test_the_ranges_are_torchs(name: str) -> None:
    theirs, narrower = getattr(torch.optim, name), set()
    for keyword, value in numbers_of(theirs):
        said = refusal(getattr(rulec.torch, name), keyword, value)
        words = refusal(theirs, keyword, value)
        if said and words:
            assert f"({words})" in said
        elif said:
            narrower.add((name, keyword))
            assert "(" not in said.partition(" must be ")[2], f"torch takes {keyword}={value}, and is said not to"
    assert narrower == {key for key in NARROWER if key[0] == name}


def test_values_out_of_range_pass_where_nothing_has_a_gradient() -> None:
    param = torch.nn.Parameter(torch.ones(3))
    optimizer = rulec.torch.Adam([param])
    optimizer.param_groups[0]["betas"] = (22.0, 0.999)
    optimizer.step()
    param.grad = torch.ones(3)
    with pytest.raises(HyperError, match="beta1=22"):
        optimizer.step()
    torch.testing.assert_close(param.detach(), torch.ones(3))


def test_a_class_in_the_place_of_torchs_says_what_it_refuses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.optim, "Adam", rulec.torch.Adam)
    with pytest.raises(HyperError, match="beta1=22"):
        torch.optim.Adam([torch.nn.Parameter(torch.ones(3))], betas=(22.0, 0.999))
