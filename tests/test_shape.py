"""Which modules import one another in circles: only those that CONTRIBUTING.md names, with why."""

from __future__ import annotations

import re

from tests.shape import circles
from tests.test_layering import ROOT

#: The layers that the circle around `Rule` lies in, and how many modules it has at most: it is not to grow.
AROUND_RULE = {"language", "compiler", "analysis"}
MOST = 42


def named() -> list[set[str]]:
    """The modules that each point under "Circles" begins with."""
    _, _, rest = (ROOT / "CONTRIBUTING.md").read_text().partition("### Circles\n")
    section = rest.partition("\n## ")[0]
    points = re.findall(r"^- ((?:`[\w.]+`(?:, )?)+):", section, re.MULTILINE)
    return [set(re.findall(r"[\w.]+", point)) - {""} for point in points]


def test_modules_import_one_another_in_those_circles_alone_that_are_named() -> None:
    found, known = circles(), named()
    assert len(known) == 2
    assert [[names for names in known if names <= set(circle)] for circle in found] == [[names] for names in known]


def test_circles_are_no_larger_than_they_are_said_to_be() -> None:
    around_rule, *others = circles()
    assert {name.split(".")[1] for name in around_rule} <= AROUND_RULE
    assert len(around_rule) <= MOST
    assert [set(circle) for circle in others] == named()[1:]
