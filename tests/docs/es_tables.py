"""The tables of docs/es.md, from what `rulec bench es` last wrote."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

from benchmarks import page
from benchmarks.es.cosine import EQUAL_MEMBERS, EQUAL_TIME
from benchmarks.es.fused import DIRECTIONS, OURS, RULES, TORCH, VALUES
from benchmarks.es.layers import ALONE, BASE, CONVS, DRAWN, JUDGED, KEPT, SQUARES, UPDATE, Layer, families
from benchmarks.es.spsa import ALL, TIME, WRITTEN
from benchmarks.result import Row
from tests.docs.markdown import ROOT
from tests.docs.table import table

FILE = ROOT / "docs" / "benchmarks" / "es.json"

_NONE = "No results are recorded yet: `rulec bench es --json docs/benchmarks` records them."

Rows = dict[tuple[str, str], Row]


def rows(file: Path = FILE) -> Rows:
    """The rows of a result by subject and measure; none where there is no file."""
    if not file.is_file():
        return {}
    return {(row.subject, row.measure): row for row in page.read(file).rows}


def maker(make: Callable[[Rows], str], file: Path = FILE) -> Callable[[], str]:
    """A maker of what rows make, or of a sentence where there are none."""

    def made() -> str:
        found = rows(file)
        return make(found) if found else _NONE

    return made


def layers(found: Rows) -> str:
    """Forwards over the plain layer's, and in brackets over one member at a time, by family and layer."""
    parts = []
    for group in (SQUARES, CONVS):
        head = ["forward, times the plain layer (times as fast as one by one)", *map(_short, group)]
        body = [[name, *(_pair(found, layer, name) for layer in group)] for name in families(group[0])]
        parts.append(table(head, body))
    return "\n\n".join(parts)


def _short(layer: Layer) -> str:
    return str(layer).replace("linear ", "").replace("conv ", "")


def _pair(found: Rows, layer: Layer, name: str) -> str:
    base, alone = (found.get((f"{layer}, {name}", measure)) for measure in (BASE, ALONE))
    return f"{page.figure(base)} ({page.figure(alone)})" if base and alone else ""


def judged(found: Rows) -> str:
    """All that is known of one layer: with noise drawn, the update, and what is kept."""
    measures = (BASE, DRAWN, UPDATE, KEPT)
    head = [f"{_short(JUDGED)}", "forward", "with its noise drawn", "update", "bytes kept"]
    return table(head, _lines(found, families(JUDGED), measures, f"{JUDGED}, "))


def fused(found: Rows) -> str:
    """Of the time of two steps, by rule, values and directions."""
    subjects = [
        f"{rule}, {values}, {count} direction{'s' * (count > 1)}"
        for rule in RULES for values in VALUES for count in DIRECTIONS
    ]  # fmt: skip
    head = ["noise in the kernel, of the time of", "noise as a gradient and our kernel", "and torch's fused step"]
    return table(head, _lines(found, subjects, (OURS, TORCH)))


def spsa(found: Rows) -> str:
    """What is written, and the time of a step."""
    subjects = ["MeZO in torch", *dict.fromkeys(subject for subject, measure in found if measure == TIME)]
    head = ["", "sweeps of writes over the parameters", "all writes, over the parameters", "time over MeZO's"]
    return table(head, _lines(found, subjects, (WRITTEN, ALL, TIME)))


def cosines(found: Rows) -> str:
    """Means and standard deviations of cosines, with the members that each had."""
    subjects = dict.fromkeys(subject for subject, measure in found if measure == EQUAL_MEMBERS)
    body = [
        [subject, *(_cosine(found[subject, measure]) for measure in (EQUAL_MEMBERS, EQUAL_TIME))]
        for subject in subjects
    ]
    return table(["family", "cosine at as many members", "cosine at as long a forward"], body)


def _cosine(row: Row) -> str:
    return f"{row.value:.3f} ± {row.detail['spread']:.3f}, of {row.detail['members']}"


def _lines(
    found: Rows, subjects: Iterable[str], measures: Sequence[str], before: str = ""
) -> Iterable[list[str]]:  # fmt: skip
    """A line for each subject that has any of the measures."""
    for subject in subjects:
        there = [found.get((before + subject, measure)) for measure in measures]
        if any(there):
            yield [subject, *(page.figure(row) if row else "" for row in there)]


MAKERS: dict[str, Callable[[], str]] = {
    "es-layers": maker(layers), "es-judged": maker(judged), "es-fused": maker(fused), "es-spsa": maker(spsa),
    "es-cosines": maker(cosines),
}  # fmt: skip
