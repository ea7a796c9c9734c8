"""Figures of measurements that a page has typed: each names its source, or is written by a maker.

A figure is a number with a unit of time, of memory, of a rate, of a ratio of times, or of rules or tests. A source is a
day, a machine, a command, a page of results, or the word that it is assumed. It stands in the same paragraph, item or
table, or in the paragraph that leads to it. A bound, such as `at most 30 seconds`, a default, and a bar in a column of
bars are no measurements.
"""

from __future__ import annotations

import re
from collections.abc import Iterator

from tests.docs.markdown import blocks

_NUMBER = r"(?<![\w.-])\d[\d,.]*(?:[ \u00a0]|(?=%))"
_UNIT = (
    r"(?:[µun]s|ms|[GMk]B/s|TFLOP/s|[GMk]i?B|%|seconds|minutes|hours|times (?:as (?:fast|long|slow|much)|that|torch)"
    r"|rules|tests)(?!\w)(?! by default)"
)
_BOUND = (
    r"(?:at (?:most|least)|up to|within|(?:less|more) than|(?:at|on|of) (?:the|a) rate of|every|last|may take|over) "
)
_FIGURE = re.compile(rf"(?P<bound>{_BOUND})?(?P<figure>{_NUMBER}{_UNIT})")
_SOURCE = re.compile(
    r"\d{4}-\d\d-\d\d|H200|EPYC|Xeon|on paper|assume[ds]|`(?:rulec|make|python -m) [^`]+`|`[^`]+\.json`"
    r"|\]\((?:docs/)?(?:benchmarks|gpu)[\w/-]*\.md"
)
_GENERATED = re.compile(r"<!-- generated: (?P<name>[\w-]+) -->\n.*?<!-- end of (?P=name) -->", re.DOTALL)


def paragraphs(page: str) -> Iterator[tuple[int, str]]:
    """The number of the first line and the text of every paragraph, item and table of a page that is not generated."""
    page = _GENERATED.sub(lambda m: "\n" * m[0].count("\n"), page)
    lines = page.splitlines()
    for block in blocks(page):
        lines[block.first : block.last + 1] = [""] * (block.last + 1 - block.first)
    start = 0
    for number, line in enumerate([*lines, ""]):
        if not line.strip() or re.match(r" *(?:[-*]|\d+\.) ", line):
            if any(each.strip() for each in lines[start:number]):
                yield start + 1, "\n".join(lines[start:number])
            start = number if line.strip() else number + 1


def typed(page: str) -> Iterator[tuple[int, str]]:
    """The line and the text of every figure without a source."""
    leads = ""
    for first, text in paragraphs(page):
        body = "" if _is_of_bars(text) else text
        if not _SOURCE.search(body) and not _SOURCE.search(leads):
            for match in _FIGURE.finditer(re.sub(r"\s", " ", body)):
                if not match["bound"]:
                    yield first + body.count("\n", 0, match.start()), match["figure"]
        is_item = re.match(r" *(?:[-*]|\d+\.) ", text) is not None
        leads = text if text.rstrip().endswith(":") else leads if is_item else ""


def _is_of_bars(text: str) -> bool:
    head = [cell.strip() for cell in text.partition("\n")[0].strip("| ").split("|")]
    return text.lstrip().startswith("|") and "bar" in head
