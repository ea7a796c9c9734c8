"""Which tests run when: `make test` and `.ci/run` take their shares of all tests, by names and by what tests cost.

A test function with parameters stands for many tests, its cases. Each function is allowed some time of the processor,
in `make test` less than in `.ci/run`, and as many of its cases run as it has time for by `golden/costs.txt`. A function
whose one case takes longer is left out of `make test`, but never all of a file; `.ci/run` runs one case at least, and a
part of the slow functions. `make whole` runs every case. The cases are chosen by their names alone.

A function marked `each` has a claim about every rule, backend or adapter: all its cases run, in `make test` too.
"""

from __future__ import annotations

import zlib
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from functools import cache
from pathlib import Path

import pytest

#: The functions of which a case takes some time in a fresh clone, each with its hundredths of a second.
COSTS = Path(__file__).parent / "golden" / "costs.txt"

#: The marks of what `make test` leaves to `.ci/run`, and of what this leaves to `make whole`.
LATER, WHOLE = "later", "whole"

#: The hundredths of a second that a function is allowed in `make test` and in `.ci/run`.
FIRST, EVERYDAY = 10, 100

#: Of the slow functions of a file, `.ci/run` takes one in so many, and one at least; of each it runs so many cases.
SLOW_FUNCTIONS, SLOW_CASES = 3, 1

#: How many tests are left out, and all that were collected, in the stashes of pytest.
LEFT, COLLECTED = pytest.StashKey[tuple[int, int]](), pytest.StashKey[list[pytest.Item]]()


def rank(items: Sequence[pytest.Item]) -> None:
    """Marks `later` what `make test` leaves out, and `whole` what `.ci/run` leaves out."""
    for functions in _by_file(items).values():
        everyday = {name: some for name, cases in functions.items() if (some := _ranked(cases, slow=False))}
        slow = {name: some for name, cases in functions.items() if (some := _ranked(cases, slow=True))}
        _rank_everyday({name: cases for name, cases in everyday.items() if not _is_for_each(cases)})
        names = sorted(slow, key=_digest)[: -(-len(slow) // SLOW_FUNCTIONS)]
        for name, cases in slow.items():
            if not _is_for_each(cases):
                _mark(cases, WHOLE, chosen(cases, SLOW_CASES if name in names else 0))
    for item in items:
        slow_here = item.get_closest_marker("slow") is not None and item.get_closest_marker("each") is None
        if slow_here or item.get_closest_marker(WHOLE) is not None:
            item.add_marker(LATER)


def _rank_everyday(functions: Mapping[str, Sequence[pytest.Item]]) -> None:
    """Ranks the everyday tests of one file."""
    cheapest = min(functions, key=lambda name: (cost_of(name), _digest(name)), default="")
    for name, cases in functions.items():
        cost = cost_of(name)
        _mark(cases, WHOLE, chosen(cases, max(EVERYDAY // cost, 1)))
        _mark(cases, LATER, chosen(cases, max(FIRST // cost, int(name == cheapest))))


def chosen(cases: Sequence[pytest.Item], count: int) -> list[pytest.Item]:
    """So many cases of one function: those first that meet choices of parameters for the first time.

    They come in the order of the digests of their names.
    """
    ordered = sorted(cases, key=lambda case: _digest(case.nodeid))
    met: set[tuple[str, int]] = set()
    new: list[pytest.Item] = []
    others: list[pytest.Item] = []
    for case in ordered:
        (others if met.issuperset(_indices(case).items()) else new).append(case)
        met.update(_indices(case).items())
    return [*new, *others][:count]


def left(items: Iterable[pytest.Item]) -> tuple[int, int]:
    """How many tests `make test` leaves to `.ci/run`, and how many these two leave to `make whole`."""
    counts = [0, 0]
    for item in items:
        if item.get_closest_marker("gpu") is None and item.get_closest_marker(LATER) is not None:
            counts[item.get_closest_marker(WHOLE) is not None] += 1
    return counts[0], counts[1]


def function_of(item: pytest.Item) -> str:
    """The name of the function of a case, with its file."""
    return item.nodeid.partition("[")[0]


def cost_of(function: str) -> int:
    """The hundredths of a second that a case takes; 1 where `golden/costs.txt` has none."""
    return _costs().get(function, 1)


@cache
def _costs() -> Mapping[str, int]:
    lines = [line.split() for line in COSTS.read_text().splitlines()]
    return {name: int(hundredths) for hundredths, name in lines}


def _by_file(items: Sequence[pytest.Item]) -> dict[str, dict[str, list[pytest.Item]]]:
    files: dict[str, dict[str, list[pytest.Item]]] = defaultdict(lambda: defaultdict(list))
    for item in items:
        name = function_of(item)
        files[name.partition("::")[0]][name].append(item)
    return files


def _ranked(cases: Iterable[pytest.Item], slow: bool) -> list[pytest.Item]:
    """The slow cases or the others, without those that are left to `make whole` already."""
    return [
        case for case in cases
        if (case.get_closest_marker("slow") is not None) is slow and case.get_closest_marker(WHOLE) is None
    ]  # fmt: skip


def _is_for_each(cases: Sequence[pytest.Item]) -> bool:
    return cases[0].get_closest_marker("each") is not None


def _indices(case: pytest.Item) -> Mapping[str, int]:
    """The place of each parameter of a case among the choices of this parameter."""
    indices: Mapping[str, int] = getattr(getattr(case, "callspec", None), "indices", {})
    return indices


def _mark(cases: Iterable[pytest.Item], mark: str, without: Sequence[pytest.Item]) -> None:
    run = {case.nodeid for case in without}
    for case in cases:
        if case.nodeid not in run:
            case.add_marker(mark)


def _digest(name: str) -> int:
    return zlib.crc32(name.encode())
