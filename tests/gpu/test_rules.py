"""Every rule, operation and hard case on the device against the float64 reference, in every dtype."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

import rulec
from benchmarks.gpu import check as gpu_check
from benchmarks.gpu.device import Bench
from benchmarks.gpu.part import Checked
from rulec.testing.cases import hostile_rules, staged_rules

pytestmark = pytest.mark.gpu

TESTS = [rule.name for rule in (*hostile_rules(), *staged_rules())]


def assert_agree(found: Iterator[Checked]) -> None:
    listed = list(found)
    assert listed
    assert [one.fault for one in listed if one.fault is not None] == []
    assert [one.refused for one in listed if one.refused is not None] == []


@pytest.mark.parametrize("name", rulec.rules())
def test_every_rule_in_every_dtype(backend: str, name: str) -> None:
    assert_agree(gpu_check.rule(Bench(), backend, name))


@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_every_operation_on_numbers_of_every_kind(backend: str, dtype: str) -> None:
    assert_agree(gpu_check.operations(Bench(), backend, dtype))


@pytest.mark.parametrize("name", TESTS)
def test_rules_made_to_be_hard(backend: str, name: str) -> None:
    assert_agree(gpu_check.stages(Bench(), backend, name))
