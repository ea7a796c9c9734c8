"""Programs in Rust around the C that `rulec build` writes, compiled by the system's compilers without crates."""

from __future__ import annotations

import re
import shutil
import subprocess
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

import pytest

import rulec
from rulec.runtime.storage.options import Storage
from rulec.standalone.prose import written
from tests.backends.cuda_stand_in import kept, version
from tests.standalone.c_library import FLAGS

#: The first version with the edition of 2024, in which some of the programs are compiled too.
LEAST = (1, 85)


def missing() -> str:
    """Why no program in Rust can be compiled here; empty where one can."""
    absent = [name for name in ("rustc", "gcc") if shutil.which(name) is None]
    if absent:
        return f"{absent[0]} is not installed"
    numbers = re.match(r"rustc (\d+)\.(\d+)", version("rustc"))
    if numbers is None or (int(numbers[1]), int(numbers[2])) < LEAST:
        return f"{version('rustc').strip()} is older than 1.85"
    return ""


needs_rustc = pytest.mark.skipif(bool(missing()), reason=missing())

SOURCES = Path(__file__).parent / "rust"

#: Warnings are errors.
RUSTC = ("rustc", "--edition", "2021", "-O", "-D", "warnings")


@dataclass(frozen=True)
class Module:
    """A rule as C with a module in Rust."""

    rule: rulec.Rule
    dtype: str = "float32"
    storage: Storage = field(default_factory=Storage)

    def texts(self, name: str) -> Mapping[str, str]:
        """The files under a name, by file name."""
        return written(self.rule, "c", name=name, dtype=self.dtype, storage=self.storage, bindings=["rust"])


def run(folder: Path, *command: str) -> str:
    """Whatever a command in a folder prints; AssertionError where it fails."""
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False)
    assert done.returncode == 0, f"{command}\n{done.stdout}{done.stderr}"
    return done.stdout


def program(folder: Path, source: str, modules: Mapping[str, Module], *options: str) -> str:
    """The path of `source`, a file in `rust/`, compiled in a folder with the modules that it names."""
    texts = {source: (SOURCES / source).read_text()}
    for name, module in modules.items():
        texts |= module.texts(name)
    objects = [f"link-arg={name}.o" for name in modules]
    command = [*RUSTC, *options, *(word for x in objects for word in ("-C", x)), source]

    def make(path: Path) -> None:
        for name, text in texts.items():
            (folder / name).write_text(text)
        run(folder, "gcc", *FLAGS, "-c", *(f"{name}.c" for name in modules))
        run(folder, *command, "-o", str(path))

    return str(kept(Path(source).stem, (version("gcc"), version("rustc"), *FLAGS, *command, *texts.values()), make))
