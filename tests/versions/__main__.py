"""Tries rulec with the oldest or the newest versions of its requirements: `python -m tests.versions oldest|newest`.

An environment of its own gets the wheel and the chosen extras by pip, runs tests/smoke.py and, for each extra, its
program in steps.py. `--write` records the versions in docs/data/versions.json, from which the manual's table is made.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from packaging.utils import canonicalize_name

from tests.versions.requirements import CORE, ROOT, here, oldest, pins, requirements

RECORD = ROOT / "docs" / "data" / "versions.json"

#: Packages that are not taken at their newest version: on Linux it would bring gigabytes of CUDA libraries.
HELD = ("torch",)


def constraints(which: str, extras: Sequence[str]) -> list[str]:
    """The lines that pip is constrained by."""
    if which == "oldest":
        return oldest(extras)
    return [f"{name}=={pins()[name]}" for name in HELD]


class Environment:
    """An environment of its own in a folder, with the wheel installed."""

    def __init__(self, folder: Path, python: str) -> None:
        self.folder = folder
        subprocess.run([python, "-m", "venv", str(folder / "venv")], check=True)
        self.python = folder / "venv" / "bin" / "python"

    def install(self, wheel: Path, extras: Sequence[str], lines: Sequence[str]) -> None:
        """Installs the wheel with extras; `lines` are pip's constraints. CalledProcessError where pip finds no way."""
        file = self.folder / "constraints.txt"
        file.write_text("\n".join(lines))
        chosen = [extra for extra in extras if extra != CORE and any(here_of(extra))]
        what = f"{wheel}[{','.join(chosen)}]" if chosen else str(wheel)
        pip = [self.python, "-m", "pip", "install", "-q", "--disable-pip-version-check", "--no-input", "-c", file]
        done = subprocess.run([*pip, what], capture_output=True, text=True, check=False)
        if done.returncode:
            print((done.stdout + done.stderr)[-2000:], file=sys.stderr)
        done.check_returncode()

    def run(self, program: Path, *words: str, **variables: str) -> None:
        """Runs a copy of a program with its last lines printed; CalledProcessError where it fails."""
        copy = shutil.copy(program, self.folder)
        kept = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
        surroundings = {**kept, "RULEC_CACHE_DIR": str(self.folder / "cache"), **variables}
        subprocess.run([self.python, "-I", copy, *words], check=True, cwd=self.folder, env=surroundings)

    def versions(self) -> dict[str, str]:
        """The installed packages, by their canonical names."""
        words = [self.python, "-m", "pip", "list", "--format", "json", "--disable-pip-version-check"]
        listed = json.loads(subprocess.run(words, check=True, capture_output=True, text=True).stdout)
        return {canonicalize_name(each["name"]): each["version"].partition("+")[0] for each in listed}

    def python_version(self) -> str:
        words = [self.python, "-c", "import sys; print('%d.%d' % sys.version_info[:2])"]
        return subprocess.run(words, check=True, capture_output=True, text=True).stdout.strip()


def here_of(extra: str) -> list[str]:
    """The names of an extra's requirements on this system."""
    return [line.name for line in requirements()[extra] if line.marker is None or line.marker.evaluate()]


def wheel_of(folder: Path) -> Path:
    """A wheel of this checkout."""
    pip = [sys.executable, "-m", "pip", "wheel", "-qq", "--disable-pip-version-check", "--no-deps", "-w", folder, ROOT]
    subprocess.run(pip, check=True)
    return next(folder.glob("*.whl"))


def tried(which: str, extras: Sequence[str], python: str, wheel: Path | None) -> dict[str, dict[str, str]]:
    """Every component that was tried, with its version and Python's; CalledProcessError where a program fails."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        environment = Environment(folder, python)
        environment.install(wheel or wheel_of(folder), extras, constraints(which, extras))
        environment.run(ROOT / "tests" / "smoke.py")
        steps = ROOT / "tests" / "versions" / "steps.py"
        for extra in (CORE, *extras):
            if here_of(extra):
                environment.run(steps, extra, **({"TRITON_INTERPRET": "1"} if extra == "triton" else {}))
        found, version = environment.versions(), environment.python_version()
        names = dict.fromkeys(canonicalize_name(each.name) for each in here(extras))
        return {each: {"version": found[each], "python": version} for each in names}


def recorded(before: Mapping[str, Any], which: str, now: Mapping[str, Mapping[str, str]]) -> dict[str, Any]:
    """The record with what was tried now in place of the same components of before."""
    return {**before, which: dict(sorted({**before.get(which, {}), **now}.items()))}


def main(words: Sequence[str]) -> None:
    names = [name for name in requirements() if name != CORE]
    parser = argparse.ArgumentParser(prog="python -m tests.versions", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("which", choices=["oldest", "newest"])
    parser.add_argument("--extras", nargs="*", choices=names, default=names, help="extras to try; all by default")
    parser.add_argument("--python", default=sys.executable, help="the interpreter of the environment")
    parser.add_argument("--wheel", type=Path, help="a wheel that is already built")
    parser.add_argument("--write", action="store_true", help="record the versions for the manual")
    chosen = parser.parse_args(words)
    try:
        now = tried(chosen.which, chosen.extras, chosen.python, chosen.wheel)
    except subprocess.CalledProcessError as error:
        sys.exit(f"with the {chosen.which} versions this fails: {' '.join(map(str, error.cmd))}")
    print(", ".join(f"{name} {each['version']}" for name, each in now.items()))
    if chosen.write:
        before = json.loads(RECORD.read_text()) if RECORD.is_file() else {}
        RECORD.write_text(json.dumps(recorded(before, chosen.which, now), indent=1) + "\n")


if __name__ == "__main__":
    main(sys.argv[1:])
