"""The suite names what is wrong with a backend that works on the device, and passes what is right."""

from __future__ import annotations

import pytest

from rulec.testing import IEEE, NumpyKind
from rulec.testing.cases import MATRIX_SHAPES, loaded
from rulec.testing.conformance import check_on_device
from rulec.testing.trial import Subject
from tests.testing import broken
from tests.testing import broken_device as faults


@pytest.mark.parametrize("rule", ["adamw", "lamb", "muon", "sm3"])
def test_the_backend_without_a_fault_passes(rule: str) -> None:
    check_on_device(Subject(faults.OnTheDevice(), NumpyKind(), IEEE), loaded(rule), "float64", MATRIX_SHAPES)


@pytest.mark.parametrize("rule", ["adamw", "lamb"])
@pytest.mark.parametrize(
    ("backend", "message"),
    [
        (faults.NeverStays(), "stays or was not among `tensors`, yet its"),
        (faults.StaysByTensor(), "stays or was not among `tensors`, yet its"),
        (faults.Unscaled(), "where the reference has"),
        (faults.ScaledTwice(), "where the reference has"),
    ],
)
def test_a_fault_is_named(backend: faults.OnTheDevice, message: str, rule: str) -> None:
    with pytest.raises(AssertionError) as caught:
        check_on_device(Subject(backend, NumpyKind(), IEEE), loaded(rule), "float32")
    assert message in str(caught.value)
    assert str(caught.value).startswith(f"backend {backend.name!r}, ")


def test_nothing_is_asked_of_backends_that_do_not_say_so() -> None:
    check_on_device(Subject(broken.WrongSign(), NumpyKind(), IEEE), loaded("adamw"), "float32")
