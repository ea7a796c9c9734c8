"""Every package is listed, and every requirement pinned: both are lists that are easily forgotten.

Continuous integration builds the wheel and runs tests/smoke.py in a fresh environment."""

from __future__ import annotations

import re
import subprocess
import tomllib
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parent.parent
PROJECT: dict[str, Any] = tomllib.loads((ROOT / "pyproject.toml").read_text())
FOLDERS: dict[str, str] = PROJECT["tool"]["setuptools"]["package-dir"]


def packages_on_disk() -> set[str]:
    """Every folder with an __init__.py, under the name it is installed as."""
    found = set()
    for name, folder in FOLDERS.items():
        for file in (ROOT / folder).rglob("__init__.py"):
            found.add(".".join((name, *file.parent.relative_to(ROOT / folder).parts)))
    return found


def folders_with_modules() -> set[Path]:
    return {file.parent for folder in FOLDERS.values() for file in (ROOT / folder).rglob("*.py")}


def canonical(requirement: str) -> str:
    name = re.match(r"[A-Za-z0-9._-]+", requirement)
    assert name is not None, requirement
    return re.sub(r"[-_.]+", "-", name.group()).lower()


def test_every_package_is_listed() -> None:
    assert set(PROJECT["tool"]["setuptools"]["packages"]) == packages_on_disk()


def test_every_folder_of_modules_is_a_package() -> None:
    assert [str(folder) for folder in folders_with_modules() if not (folder / "__init__.py").exists()] == []


def test_every_requirement_is_pinned() -> None:
    pinned = {}
    for line in (ROOT / "constraints.txt").read_text().splitlines():
        if line and not line.startswith("#"):
            name, _, version = line.partition("==")
            pinned[canonical(name)] = version
    assert all(pinned.values())
    extras = PROJECT["project"]["optional-dependencies"]
    installed = [*PROJECT["project"]["dependencies"], *(r for name, rs in extras.items() if name != "cupy" for r in rs)]
    assert {canonical(r) for r in installed} - pinned.keys() == {"rulec"}


def test_the_source_distribution_is_a_checkout() -> None:
    """MANIFEST.in has every folder and every file at the top, but for those that setuptools always takes."""
    listed = subprocess.run(["git", "-C", ROOT, "ls-files"], capture_output=True, text=True, check=False)
    if listed.returncode:
        pytest.skip("this is no clone: nothing says which files are tracked")
    lines = [line.split() for line in (ROOT / "MANIFEST.in").read_text().splitlines()]
    patterns = [word for words in lines if words and words[0] in ("include", "graft") for word in words[1:]]
    tops = {name.split("/")[0] for name in listed.stdout.splitlines()} - {"LICENSE", "pyproject.toml"}
    assert sorted(top for top in tops if not any(fnmatch(top, pattern) for pattern in patterns)) == []
