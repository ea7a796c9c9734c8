"""The pictures of README.md: drawn of its rule and its command, small, and described."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.docs import pictures
from tests.docs.markdown import ROOT

#: The most bytes of a picture.
MOST = 150_000


def test_pictures_of_the_readme_are_small_and_described() -> None:
    shown = re.findall(r"!\[([^\]]*)\]\(([^)]+)\)", (ROOT / "README.md").read_text())
    assert {"docs/idea.png", "docs/race.png", "docs/eager_memory.png"} <= {file for _, file in shown}
    for text, file in shown:
        assert len(text.split()) >= 5, file
        assert (ROOT / file).stat().st_size < MOST, file


@pytest.mark.slow
def test_pictures_are_drawn_of_the_command_in_the_readme(tmp_path: Path) -> None:
    line = pictures.command()
    result = pictures.run(line, rates=2, seeds=1, steps=5)
    assert {outcome.label for outcome in result.outcomes} == {"tempered.yaml", "adamw", "lion", "sgd"}
    pictures.draw_idea(result, tmp_path / "idea.png")
    pictures.draw_race(result, line, tmp_path / "race.png")
    for file in tmp_path.iterdir():
        assert file.read_bytes().startswith(b"\x89PNG")
        assert 20_000 < file.stat().st_size < MOST
