"""What torch's own database of wrong inputs says of its optimizers is so of the classes here, in the same words."""

from __future__ import annotations

import re
import sys
import unittest
import warnings
from collections.abc import Iterator
from types import ModuleType
from typing import Any

import pytest
import torch

import rulec.array
import rulec.torch
from rulec.errors import HyperError, RulecError, TensorError


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
        ("Muon", {"adjust_lr_fn": "x"}, "leave it at None (Adjust learning rate function x is not supported)"),
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
