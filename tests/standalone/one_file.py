"""Runs a written one-file optimizer in a process of its own, in which rulec cannot be imported."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

import rulec
from rulec.runtime.storage.options import Storage
from rulec.standalone.prose import written
from tests.backends.triton_process import require_interpreter

Array = NDArray[Any]

#: What runs CUDA C on the CPU.
STAND_IN = ("cuda_stand_in.py", "cuda_on_cpu.cpp", "cuda_on_cpu.h")

_BLOCKED = """\
import os
import runpy
import sys


class Absent:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in ("rulec", "rulec_backends", "rulec_rules"):
            raise ModuleNotFoundError(f"{name} is not to be imported here", name=name)


sys.meta_path.insert(0, Absent())
import numpy as np

for folder in sys.argv[1:]:
    os.chdir(folder)
    sys.path[0] = folder
    sys.modules.pop("rule", None)
    given = np.load("given.npz")
    params = [given[f"p{i}"] for i in range(int(given["count"]))]
    steps = [[given[f"g{s}_{i}"] for i in range(len(params))] for s in range(int(given["steps"]))]

    def leave(arrays):
        np.savez("left.npz", **{f"p{i}": np.asarray(a) for i, a in enumerate(arrays)})

    try:
        runpy.run_path("program.py", {"params": params, "steps": steps, "leave": leave})
    except Exception as error:
        error.add_note(f"in {folder}")
        raise
"""


@dataclass(frozen=True)
class Case:
    """A rule that is written as one file, and the arrays for a program that imports the file as `rule` and steps."""

    rule: str
    params: Sequence[Array]
    steps: Sequence[Sequence[Array]]
    dtype: str = "float32"
    storage: Storage = field(default_factory=Storage)

    def write(self, folder: Path, backend: str, program: str) -> None:
        """Writes the file, the program and the arrays into a folder."""
        rule = rulec.load(self.rule)
        ((name, text),) = written(rule, backend, name="rule", dtype=self.dtype, storage=self.storage).items()
        assert name == "rule.py"
        (folder / name).write_text(text)
        (folder / "program.py").write_text(program)
        arrays = {f"p{i}": p for i, p in enumerate(self.params)}
        arrays |= {f"g{s}_{i}": g for s, grads in enumerate(self.steps) for i, g in enumerate(grads)}
        np.savez(folder / "given.npz", count=np.array(len(self.params)), steps=np.array(len(self.steps)), **arrays)


def check_ran(folder: Path, backend: str, program: str, *cases: Case) -> list[list[Array]]:
    """The arrays that `program` leaves for each case: one process runs it for all of them, in a folder for each."""
    if backend == "triton":
        require_interpreter()
    (folder / "main.py").write_text(_BLOCKED)
    folders = [folder / str(number) for number in range(len(cases))]
    for place, case in zip(folders, cases, strict=True):
        place.mkdir()
        case.write(place, backend, program)
    done = subprocess.run(
        [sys.executable, "main.py", *map(str, folders)], cwd=folder, capture_output=True, text=True, check=False,
        env={**os.environ, "TRITON_INTERPRET": "1", "PYTHONPATH": str(folder)},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    return [_arrays(place / "left.npz") for place in folders]


def _arrays(file: Path) -> list[Array]:
    with np.load(file) as arrays:
        return [arrays[f"p{i}"] for i in range(len(arrays.files))]
