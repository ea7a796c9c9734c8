"""The manual's table of versions that rulec was tried with: floors, the newest of a day, and those of all tests."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping

from packaging.utils import canonicalize_name

from tests.docs.table import table
from tests.versions.__main__ import RECORD
from tests.versions.requirements import CORE, pins, requirements


def tested() -> str:
    """A row for each requirement: the extras that need it, and the three versions."""
    record, pinned = json.loads(RECORD.read_text()), pins()
    extras: dict[str, list[str]] = {}
    for extra, lines in requirements().items():
        for line in lines:
            of = extras.setdefault(canonicalize_name(line.name), [])
            if extra not in of:
                of.append(extra)
    rows = [
        [name, ", ".join(f"`{each}`" for each in of if each != CORE), _cell(record["oldest"][name]),
         _cell(record["newest"][name]), pinned.get(name, "")]
        for name, of in extras.items()
    ]  # fmt: skip
    return table(["requirement", "extra", "oldest (Python)", "newest (Python)", "in all tests"], rows)


def _cell(tried: Mapping[str, str]) -> str:
    return f"{tried['version']} ({tried['python']})"


MAKERS: Mapping[str, Callable[[], str]] = {"tested": tested}
