"""The suite passes what is right (tests/backends does that for our backends) and names what is wrong."""

from __future__ import annotations

import re

import numpy as np
import pytest

import rulec
from rulec.errors import BackendUnavailable, RulecError
from rulec.testing import IEEE, NumpyKind, check_backend
from rulec.testing.conformance import check_maximize, check_rule
from rulec.testing.trial import Subject
from tests.testing import broken


@pytest.fixture(autouse=True)
def in_this_process(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Printing is checked in another process by the tests of printing alone."""
    if "printing" not in request.node.name and "process" not in request.node.name:
        monkeypatch.setattr("rulec.testing.conformance.check_emit_is_pure", lambda *_: None)


def failure(backend: broken.BrokenBackend, rule: str = "adamw", dtype: str = "float32") -> str:
    with pytest.raises(AssertionError) as caught:
        check_backend(backend, rules=[rule], dtypes=[dtype])
    message = str(caught.value)
    assert "\n" not in message
    assert message.startswith(f"backend {backend.name!r}")
    return message


def test_a_step_uphill_is_named_with_rule_dtype_shape_and_difference() -> None:
    message = failure(broken.WrongSign())
    expected = (
        r"backend 'wrong-sign', AdamW in float32: in a tensor of shape \(.*\), at its step 1, element \d+ of p became "
        r"[-\d.e]+ where the reference has [-\d.e]+ \(largest difference [\d.e-]+; allowed is [-\d.e]+ to [-\d.e]+\)"
    )
    assert re.fullmatch(expected, message), message


def test_a_backend_that_ignores_tensors_is_caught() -> None:
    message = failure(broken.IgnoresTensors(), "sgd")
    assert "SGD in float32: in a tensor of shape (7,), at its step 2" in message
    assert "largest difference" in message
    assert "SGD in float32: a step raises ValueError: could not broadcast" in failure(broken.CountsOn(), "sgd")


def test_a_backend_that_keeps_nan_out_is_caught() -> None:
    assert "where the reference has nan" in failure(broken.NoNan())


def test_a_wrong_bias_correction_is_caught() -> None:
    assert "element" in failure(broken.WrongConstant())


@pytest.mark.parametrize("backend", [broken.OtherRows(), broken.Uphill()], ids=lambda b: b.name)
def test_wrong_rows_and_directions_are_caught(backend: broken.BrokenBackend) -> None:
    assert "where the reference has" in failure(backend, "sgd")


def test_a_wrong_rounding_of_what_is_stored_is_caught() -> None:
    assert "in bfloat16" in failure(broken.Truncates(), "sgd", "bfloat16")


def test_a_backend_that_writes_gradients_is_caught() -> None:
    assert "writes into a gradient" in failure(broken.WritesGradients(), "sgd")


def test_a_backend_that_returns_copies_is_caught() -> None:
    assert "returns other arrays" in failure(broken.Copies(), "sgd")


def test_printing_that_is_not_pure_is_caught() -> None:
    assert "differently a second time" in failure(broken.Counts(), "sgd")
    assert "torch is a framework: import it inside `build`" in failure(broken.Imports(), "sgd")


def test_an_error_of_another_kind_for_what_is_not_elementwise_is_caught() -> None:
    assert "raises KeyError" in failure(broken.Crashes(), "sgd")


def test_a_reason_is_one_line() -> None:
    with pytest.raises(AssertionError, match="one line is wanted"):
        check_backend(broken.Chatty())


def test_a_backend_that_cannot_run_here_is_not_called_wrong(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(broken.Chatty, "unavailable_reason", lambda self: "there is no GPU")
    with pytest.raises(BackendUnavailable, match="backend 'chatty' cannot be checked here: there is no GPU"):
        check_backend(broken.Chatty())


def test_something_else_is_no_backend() -> None:
    with pytest.raises(AssertionError, match="is no backend: it needs a name, unavailable_reason, emit and build"):
        check_backend(object())  # type: ignore[arg-type]


def test_a_class_that_no_other_process_can_import_is_refused() -> None:
    class Local(broken.BrokenBackend):
        name = "local"

    with pytest.raises(RulecError, match="define it at the top of a module"):
        check_backend(Local(), rules=["sgd"], dtypes=["float32"])


@pytest.mark.slow
def test_the_same_suite_passes_the_backend_without_the_fault() -> None:
    report = check_backend(broken.BrokenBackend(), rules=["sgd", "adamw"], dtypes=["float32", "bfloat16"])
    assert (report.rules, report.refused, report.unmet) == (["sgd", "adamw"], [], [])


def test_refused_rules_are_reported() -> None:
    report = check_backend(broken.Elementwise(), rules=["sgd", "lamb"], dtypes=["float32"])
    assert (report.rules, report.refused, report.unmet, report.stages) == (["sgd"], ["lamb"], [], False)
    with pytest.raises(ValueError, match="arrays are numpy, torch, jax"):
        check_backend("numpy", arrays="lists")


def test_arrays_are_made_off_their_alignment() -> None:
    kind = NumpyKind()
    values = np.arange(5, dtype=np.float32)
    aligned, shifted = kind.make(values), kind.make(values, 1)
    assert (shifted.ctypes.data - 4) % 16 == aligned.ctypes.data % 16
    assert np.array_equal(kind.read(shifted), values)


def test_single_checks_can_be_called_alone() -> None:
    subject = Subject(broken.Uphill(), NumpyKind(), IEEE)
    check_rule(subject, rulec.load("sgd"), "float32")
    with pytest.raises(AssertionError, match="maximize"):
        check_maximize(subject, rulec.load("sgd"), "float32")
