"""The wheel holds every package, and every requirement is pinned: both are lists that are easily forgotten."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
import sysconfig
import tomllib
import venv
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


def run(*command: object, cwd: Path) -> str:
    done = subprocess.run(
        [str(part) for part in command], cwd=cwd, stdin=subprocess.DEVNULL, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, f"{' '.join(map(str, command))}\n{done.stdout}{done.stderr}"
    return done.stdout


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The wheel, built from a copy: a build/ folder left in the checkout would put deleted files into it."""
    source, out = tmp_path_factory.mktemp("source"), tmp_path_factory.mktemp("wheel")
    for name in ("pyproject.toml", "LICENSE", "README.md"):
        shutil.copy(ROOT / name, source)
    for folder in FOLDERS.values():
        shutil.copytree(ROOT / folder, source / folder, ignore=shutil.ignore_patterns("__pycache__"))
    run(sys.executable, "-m", "build", "--wheel", "--no-isolation", "--outdir", out, source, cwd=source)
    (built,) = out.glob("*.whl")
    return built


@pytest.mark.slow
def test_wheel_works_in_a_fresh_environment(wheel: Path, tmp_path: Path) -> None:
    """Installed without network: the dependencies are borrowed from this environment, rulec itself is not.

    A .pth file puts the borrowed folder behind the new environment's own, and the .pth files inside that folder are
    not read, so that an editable installation of rulec there does not hide the wheel.
    """
    fresh = tmp_path / "venv"
    venv.create(fresh, with_pip=True, symlinks=True)
    python = fresh / "bin" / "python"
    run(python, "-m", "pip", "install", "--no-deps", "--no-index", wheel, cwd=tmp_path)
    (site,) = (fresh / "lib").glob("python*/site-packages")
    (site / "borrowed.pth").write_text(sysconfig.get_path("purelib") + "\n")
    shutil.copy(ROOT / "tests" / "smoke.py", tmp_path)
    assert "numpy and cpu backends step" in run(python, "-I", "smoke.py", cwd=tmp_path)
