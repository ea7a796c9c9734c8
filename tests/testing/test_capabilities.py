"""The suite runs what a backend says it has: it passes what is right, and names what is wrong."""

from __future__ import annotations

from typing import Any

import pytest

from rulec.backend.capabilities import MEMBERS, Capabilities, capabilities_of, no_codes
from rulec.testing import IEEE, NumpyKind
from rulec.testing.capabilities import CHECKS, check_capabilities
from rulec.testing.conformance import Report, contract
from rulec.testing.trial import Subject
from rulec_backends.numpy import NumpyBackend
from tests.testing import broken_capabilities as faults
from tests.testing.broken_device import OnTheDevice


class FloatsKind(NumpyKind):
    """Arrays of the two dtypes that the faults show in."""

    dtypes = ("float32", "bfloat16")


def subject(backend: Any) -> Subject:
    return Subject(backend, FloatsKind(), IEEE)


def test_a_backend_with_all_of_them_passes_and_is_reported_with_them() -> None:
    (piece,) = (piece for piece in contract(["sgd"], ["float32"]) if piece.name == "capabilities")
    report = Report("complete")
    piece.check(subject(faults.Complete()), report)
    assert report.capabilities == [*MEMBERS]
    assert {*MEMBERS} - {*CHECKS} == {"on_device"}


@pytest.mark.parametrize("backend", faults.FAULTY, ids=lambda b: b.name)
def test_a_claim_that_does_not_hold_is_named(backend: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("rulec.testing.capabilities.CHECKS", {backend.name: CHECKS[backend.name]})
    with pytest.raises(AssertionError) as caught:
        check_capabilities(subject(backend()))
    message = str(caught.value)
    assert message.startswith(f"backend {backend.name!r}, capability {backend.name!r}: ")
    assert "raises" not in message


def test_a_capability_in_part_is_named_and_is_none() -> None:
    backend = faults.HalfAnEstimate()
    with pytest.raises(AssertionError, match="has emit_estimate and no build_estimate"):
        check_capabilities(subject(backend))
    assert capabilities_of(backend).estimate is None


def test_an_error_of_a_capability_is_named() -> None:
    class Failing(OnTheDevice):
        name = "failing"

        def fill_noise(self, out: Any, noise: Any, offset: int = 0) -> None:
            raise KeyError(offset)

    with pytest.raises(AssertionError, match=r"'fill_noise': it raises KeyError: 0"):
        check_capabilities(subject(Failing()))


def test_the_record_follows_the_attributes_of_a_backend() -> None:
    """Of its class and of itself, as they are when it is asked; None is no attribute."""
    backend = NumpyBackend()
    assert capabilities_of(backend) == Capabilities()
    assert capabilities_of(backend).decodes is no_codes
    complete = faults.Complete()
    assert capabilities_of(complete).names == [*MEMBERS]
    assert capabilities_of(complete).estimate is complete
    complete.narrow, complete.build_segments = False, None  # type: ignore[assignment, method-assign]
    assert {*MEMBERS} - {*capabilities_of(complete).names} == {"narrow", "segments"}
