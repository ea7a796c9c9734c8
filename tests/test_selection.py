"""What `make test` and `.ci/run` run: of every folder, file, backend, adapter and rule something."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from importlib.metadata import entry_points
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

import rulec
from tests import selection
from tests.faults import ROOT
from tests.planted import FAULTS

TESTS = Path(__file__).parent

#: The folders with tests, without the one whose tests all need a device.
FOLDERS = {file.parent for file in TESTS.rglob("test_*.py")} - {TESTS / "gpu"}

#: Tests of uneven shards in several processes: sums and owners, a matrix of several owners, errors, states, sections.
SHARDS = (
    "test_meshes.py::test_two_processes_have_the_numbers_of_one",
    "test_exchange.py::test_two_processes_share_the_work_on_a_matrix",
    "test_failures.py::test_one_of_two_processes_fails_in_work_for_both",
    "test_shards.py::test_shards_of_two_processes_are_those_of_whole_parameters",
    "test_sections.py::test_sections_of_dtensors",
)

#: The folders of tests of the adapters.
ADAPTERS = ("array", "jax", "keras", "mlx", "torch")


@pytest.fixture
def first(request: pytest.FixtureRequest) -> list[pytest.Item]:
    """The tests of `make test`, where all tests were collected."""
    collected = request.session.stash[selection.COLLECTED]
    if FOLDERS - {item.path.parent for item in collected}:
        pytest.skip("asks about all tests, and some were not collected")
    return [item for item in collected if item.get_closest_marker(selection.LATER) is None]


def test_make_test_meets_every_file_with_everyday_tests(
    first: Sequence[pytest.Item], request: pytest.FixtureRequest
) -> None:
    met = {item.path for item in first}
    collected = request.session.stash[selection.COLLECTED]
    everyday = {item.path for item in collected if not {"slow", "gpu"} & {mark.name for mark in item.iter_markers()}}
    assert everyday - met == set()


def test_make_test_meets_every_folder(first: Sequence[pytest.Item]) -> None:
    # All tests of benchmarks are slow.
    assert FOLDERS - {item.path.parent for item in first} == {TESTS / "benchmarks"}


def test_make_test_meets_every_backend_and_adapter(first: Sequence[pytest.Item]) -> None:
    files = {item.path.relative_to(TESTS).as_posix() for item in first}
    backends = {entry.name for entry in entry_points(group="rulec.backends")}
    assert {name for name in backends if not any(re.match(rf"backends/test_{name}\b", x) for x in files)} == set()
    assert {name for name in ADAPTERS if not any(file.startswith(f"{name}/") for file in files)} == set()


def test_make_test_meets_uneven_shards_in_several_processes(first: Sequence[pytest.Item]) -> None:
    assert {f"tests/torch/{name}" for name in SHARDS} <= {item.nodeid for item in first}


def test_make_test_compares_every_rule_with_its_peer(first: Sequence[pytest.Item]) -> None:
    met = {name for item in first if item.get_closest_marker("each") is not None for name in named_in(item)}
    assert {name for name in rulec.rules() if name.removeprefix("transforms/") not in met} == set()


def test_every_fault_can_be_planted_and_has_tests_near_it() -> None:
    for fault in FAULTS:
        assert (ROOT / fault.file).read_text().count(fault.old) == 1, fault
        assert [path for path in fault.near.split() if not (TESTS / path).exists()] == []


def named_in(item: pytest.Item) -> set[str]:
    """The words of what is composed on our side, without folders."""
    parameters: dict[str, Any] = item.callspec.params  # type: ignore[attr-defined]
    composed = [str(getattr(value, "composed", "")) for value in parameters.values()]
    return {*re.findall(r"\w+", " ".join(composed))}


@dataclass
class Case:
    """What the selection asks of a test."""

    nodeid: str
    indices: dict[str, int] = field(default_factory=dict)
    marks: set[str] = field(default_factory=set)

    @property
    def callspec(self) -> SimpleNamespace:
        return SimpleNamespace(indices=self.indices)

    def get_closest_marker(self, name: str) -> str | None:
        return name if name in self.marks else None

    def add_marker(self, name: str) -> None:
        self.marks.add(name)


def cases(function: str, *axes: int, marks: Sequence[str] = ()) -> list[Any]:
    """The cases of a function with parameters of so many choices."""
    indices: list[dict[str, int]] = [{}]
    for number, choices in enumerate(axes):
        indices = [{**each, f"axis {number}": choice} for each in indices for choice in range(choices)]
    return [Case(f"{function}[{'-'.join(map(str, each.values()))}]", each, {*marks}) for each in indices]


def test_cases_that_meet_new_choices_come_first() -> None:
    chosen = selection.chosen(cases("a.py::test", 4, 4), 7)
    assert len(chosen) == 7
    for axis in ("axis 0", "axis 1"):
        assert {case.callspec.indices[axis] for case in chosen} == {0, 1, 2, 3}  # type: ignore[attr-defined]


def test_another_case_moves_no_other() -> None:
    before = {case.nodeid for case in selection.chosen(cases("a.py::test", 40), 10)}
    after = {case.nodeid for case in selection.chosen(cases("a.py::test", 41), 10)}
    assert len(before - after) <= 1


def test_dear_functions_and_other_cases_are_left(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(selection, "FIRST", 25)
    monkeypatch.setattr(selection, "EVERYDAY", 200)
    costs = {"a.py::dear": 26, "a.py::middle": 12, "b.py::alone": 10_000}
    monkeypatch.setattr(selection, "cost_of", lambda name: costs.get(name, 1))
    items = [
        *cases("a.py::dear", 2), *cases("a.py::middle", 40), *cases("a.py::cheap", 9), *cases("b.py::alone", 3),
        *cases("a.py::each", 39, marks=["each"]), Case("a.py::each[long]", marks={"each", "slow"}),
        *cases("a.py::slow", 5, marks=["slow"]),
    ]  # fmt: skip
    selection.rank(items)

    def count(function: str, *without: str) -> int:
        return sum(selection.function_of(item) == function and not {*without} & item.marks for item in items)

    functions = ("a.py::dear", "a.py::middle", "a.py::cheap", "b.py::alone", "a.py::each", "a.py::slow")
    assert [count(function, "later") for function in functions] == [0, 2, 9, 1, 40, 0]
    assert [count(function, "whole") for function in functions[2:]] == [9, 1, 40, 1]
    assert selection.left(items) == (sum("later" in i.marks and "whole" not in i.marks for i in items), 24 + 2 + 4)
