"""The files of the page: CodeMirror is the version that package.json names, and everything is installed."""

from __future__ import annotations

import fnmatch
import json
import re
import tomllib
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent.parent
PLAY = ROOT / "rulec" / "tools" / "playground"


def test_the_bundle_is_of_the_named_versions() -> None:
    named = json.loads((PLAY / "codemirror" / "package.json").read_text())["devDependencies"]
    banner = (PLAY / "page" / "codemirror.js").read_text().partition("\n")[0]
    bundled = dict(re.findall(r"([@/\w-]+) (\d+\.\d+\.\d+)", banner))
    assert {name: bundled.get(name) for name in named if name != "esbuild"} == {
        name: version for name, version in named.items() if name != "esbuild"
    }
    licences = (PLAY / "page" / "codemirror.LICENSE").read_text()
    assert [name for name, version in bundled.items() if f"{name} {version}: MIT" not in licences] == []


def test_files_of_the_page_and_of_formulas_are_installed() -> None:
    patterns = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]["package-data"]["rulec"]
    folders = (PLAY / "page", ROOT / "rulec" / "tools" / "display" / "katex")
    files = [
        path.relative_to(ROOT / "rulec").as_posix() for each in folders for path in each.rglob("*") if path.is_file()
    ]
    assert len(files) > 30
    assert [file for file in files if not any(fnmatch.fnmatch(file, pattern) for pattern in patterns)] == []


def test_nothing_is_fetched_from_elsewhere() -> None:
    for file in (
        "index.html",
        "play.css",
        "play.js",
        "ask.js",
        "editor.js",
        "link.js",
        "path.js",
        "race.js",
        "chart.js",
    ):
        text = (PLAY / "page" / file).read_text().replace("http://www.w3.org/2000/svg", "")
        assert not re.search(r"https?://", text), file
