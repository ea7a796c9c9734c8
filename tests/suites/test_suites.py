"""What is kept of a run of another project's tests."""

from __future__ import annotations

import json

import pytest

from rulec.errors import HyperError
from tests.suites.__main__ import FILE, SUITES, main, summary, told
from tests.suites.inside import PLACES, reason


def outcome(name: str, met: bool = True, reason: str = "", message: str = "") -> dict[str, object]:
    return {"outcome": name, "met": met, "reason": reason, "message": message}


def test_tests_that_meet_no_class_of_ours_do_not_count() -> None:
    found = {
        "a": outcome("passed"), "b": outcome("passed", met=False), "c": outcome("skipped"),
        "d": outcome("failed", reason="loss", message="Loss did not decrease enough: 0.8 > 1.5 * 0.6"),
        "e": outcome("failed", reason="loss", message="Loss did not decrease enough: 0.9 > 1.4 * 0.7"),
    }  # fmt: skip
    expected = {"loss: Loss did not decrease enough": ["d", "e"]}
    assert summary(found, "4") == {"version": "4", "tests": 3, "passed": 1, "failed": expected}


def test_messages_are_told_without_their_numbers() -> None:
    assert told("PID has no rule for dampening=1.0; give another") == "PID has no rule for dampening=N"
    assert reason(HyperError("PID has no keyword 'x'")) == "keyword"
    assert reason(HyperError("PID has no rule")) == "HyperError"


def test_every_suite_has_a_place_and_an_outcome() -> None:
    assert SUITES.keys() == PLACES.keys() == json.loads(FILE.read_text()).keys()


def test_a_folder_without_the_tests_is_refused(tmp_path: object) -> None:
    with pytest.raises(SystemExit, match=r"has no file tests/test_optim\.py: give a source tree of timm"):
        main(["timm", str(tmp_path)])
    with pytest.raises(SystemExit, match="give one of pytorch_optimizer, timm, torch, optax"):
        main(["keras", "x"])
