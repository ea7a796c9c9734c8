"""Which modules import one another in circles: only those that CONTRIBUTING.md names, with why."""

from __future__ import annotations

import re

import pytest

from tests.shape import circles, circles_of, folder_graph
from tests.test_layering import ROOT


def named() -> list[set[str]]:
    """The modules of each point under "Circles"."""
    _, _, rest = (ROOT / "CONTRIBUTING.md").read_text().partition("### Circles\n")
    section = rest.partition("\n## ")[0]
    points = re.findall(r"^- ((?:`[\w.]+`(?:, )?)+):", section, re.MULTILINE)
    return [set(re.findall(r"[\w.]+", point)) - {""} for point in points]


def test_modules_import_one_another_in_those_circles_alone_that_are_named() -> None:
    assert [set(circle) for circle in circles()] == named()
    assert len(named()) == 1


@pytest.mark.parametrize("package", ["rulec.runtime", "rulec.torch", "rulec_backends"])
def test_the_folders_of_a_package_import_one_another_in_one_direction(package: str) -> None:
    assert circles_of(folder_graph(package)) == []
