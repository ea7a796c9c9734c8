"""The gallery: the page of a rule has all its parts, its programs run, and its numbers are right."""

from __future__ import annotations

import itertools
import math
import re
from pathlib import Path

import numpy as np
import pytest

import rulec
from gallery.build import names
from gallery.page import Entry, entry
from gallery.subject import Subject
from gallery.usage import programs
from rulec.tools.display import drawing, path
from rulec.tools.display import path as surface
from tests.docs.markdown import blocks
from tests.docs.running import PageRun


@pytest.fixture(scope="module")
def adamw() -> Entry:
    return entry("adamw")


def test_page_of_a_rule_has_every_part(adamw: Entry) -> None:
    languages = [block.language for block in blocks(adamw.page)]
    assert languages == ["yaml", "python", "python", "python", "c", "python", "cpp", "python", "python"]
    parts = (
        r"\hat{m}_{t} &amp;= ", "https://arxiv.org/abs/1711.05101", "| `beta2` | 0.999 | at least 0 and below 1 |",
        "| scope | elementwise |", "16 + 12 bytes per parameter", "rulec.torch.AdamW(", "torch.optim.AdamW",
        "__global__", "@triton.jit",
    )  # fmt: skip
    for part in parts:
        assert part in adamw.page, part
    assert adamw.page.count('<polyline class="track"') == 2
    assert 'data-year="2019"' in adamw.card
    assert 'data-bytes="8"' in adamw.card


def test_pages_without_a_path_say_why() -> None:
    assert path.refusal(rulec.load("muon")) == "The rule computes with matrices, and a path has two numbers."
    assert path.refusal(rulec.load("sophia")) == "The rule reads hessian besides the gradient."
    assert path.refusal(rulec.load("sam(adam)")) == "The rule evaluates the model several times in a step."


def test_paths_are_those_of_the_rule() -> None:
    rosenbrock, valley = path.paths(rulec.load("sgd"))
    assert (rosenbrock.rate, valley.rate) == (0.001, 0.01)  # 0.1 goes beyond 2/50, at which steps across grow
    w = np.array(surface.VALLEY.start)
    for _ in range(path.STEPS):
        w -= 0.01 * surface.VALLEY.gradient(w)
    np.testing.assert_allclose(valley.points[-1], w, rtol=1e-12)
    assert valley.value == pytest.approx(surface.VALLEY.value(w))


@pytest.mark.parametrize("function", path.FUNCTIONS, ids=lambda f: f.name)
def test_gradients_and_level_lines_are_those_of_the_function(function: surface.Surface) -> None:
    w, step = np.array([0.3, -0.7]), 1e-6
    for k in range(2):
        ahead, behind = w + step * np.eye(2)[k], w - step * np.eye(2)[k]
        slope = (function.value(ahead) - function.value(behind)) / (2 * step)
        assert function.gradient(w)[k] == pytest.approx(slope, rel=1e-6)
    left, bottom, side = drawing.FRAMES[function.name]
    pixel = side / drawing.SIZE
    around = list(itertools.product(np.linspace(-1, 1, 11), repeat=2))
    first = re.findall(r"(-?\d+) (-?\d+)", drawing.levels(function.name).partition("Z")[0])
    for x, y in first:  # the innermost line, to the pixel
        at = np.array([left + int(x) * pixel, bottom + (drawing.SIZE - int(y)) * pixel])
        near = [function.value(at + pixel * np.array([i, j])) for i, j in around]
        level = {"Rosenbrock's function": 0.3}.get(function.name, 0.1)
        assert min(near) <= level <= max(near)


def test_bytes_of_state_count_rows_columns_and_own_shapes() -> None:
    assert Subject("lion").state_bytes == 4
    assert Subject("sgd").state_bytes == 0
    assert Subject("adafactor").state_bytes == 4 * 2 / 1024


def test_every_rule_of_the_library_has_a_page_of_its_own() -> None:
    assert names() == [name for name in rulec.rules() if (Path("rules") / f"{name}.yaml").is_file()]
    assert len({Subject(name).slug for name in names()}) == len(names())


@pytest.mark.slow
@pytest.mark.parametrize("name", ["adamw", "muon", "sophia", "alig", "transforms/sam", "transforms/clip_by_value"])
def test_programs_of_a_page_run(name: str, tmp_path: Path) -> None:
    subject = Subject(name)
    page = blocks(programs(subject, subject.text))
    outcomes = list(PageRun(name, tmp_path).run(page))
    assert [outcome.printed for outcome in outcomes] == ["", "", ""]


def test_lines_end_where_numbers_do() -> None:
    points = np.array([[0.0, 0.0], [1.0, 1.0], [math.nan, 0.0], [5.0, 5.0]])
    assert drawing.line(surface.ROSENBROCK, points).count(",") == 2
