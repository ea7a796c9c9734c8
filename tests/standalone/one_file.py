"""Runs a written one-file optimizer in a process of its own, in which rulec cannot be imported."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

import rulec
from rulec.standalone.files import written

Array = NDArray[Any]

_BLOCKED = """\
import sys


class Absent:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in ("rulec", "rulec_backends", "rulec_rules"):
            raise ModuleNotFoundError(f"{name} is not to be imported here", name=name)


sys.meta_path.insert(0, Absent())
import numpy as np

given = np.load("given.npz")
params = [given[f"p{i}"] for i in range(int(given["count"]))]
steps = [[given[f"g{s}_{i}"] for i in range(len(params))] for s in range(int(given["steps"]))]


def leave(arrays):
    np.savez("found.npz", **{f"p{i}": np.asarray(a) for i, a in enumerate(arrays)})


"""


def ran(
    folder: Path, rule: str, backend: str, program: str, params: Sequence[Array], steps: Sequence[Sequence[Array]],
    dtype: str = "float32", state_dtype: str = "",
) -> list[Array]:  # fmt: skip
    """The arrays that `program` leaves: it is given `params` and `steps`, and imports the file as `rule`."""
    ((name, text),) = written(rulec.load(rule), backend, name="rule", dtype=dtype, state_dtype=state_dtype).items()
    assert name == "rule.py"
    (folder / name).write_text(text)
    arrays = {f"p{i}": p for i, p in enumerate(params)}
    arrays |= {f"g{s}_{i}": g for s, grads in enumerate(steps) for i, g in enumerate(grads)}
    np.savez(folder / "given.npz", count=np.array(len(params)), steps=np.array(len(steps)), **arrays)
    (folder / "program.py").write_text(_BLOCKED + program)
    done = subprocess.run(
        [sys.executable, "program.py"], cwd=folder, env={**os.environ, "TRITON_INTERPRET": "1"}, capture_output=True,
        text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    with np.load(folder / "found.npz") as found:
        return [found[f"p{i}"] for i in range(len(params))]
