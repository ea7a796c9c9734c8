"""RULEC_DEBUG says, on standard error, what a step did."""

from __future__ import annotations

import os
import subprocess
import sys

PROGRAM = "import numpy as np, rulec; rulec.array.Optimizer('adamw', [np.ones(1000)]).step([np.ones(1000)])"


def output(level: int) -> str:
    environment = {**os.environ, "RULEC_DEBUG": str(level)}
    done = subprocess.run([sys.executable, "-c", PROGRAM], env=environment, capture_output=True, text=True, check=True)
    assert done.stdout == ""
    return done.stderr


def test_each_level_adds_to_the_one_before() -> None:
    assert output(0) == ""
    assert "AdamW by cpu on cpu, p:f64 g:f64 m:f64 v:f64: 1 tensors\n" in output(1)
    assert "GB/s" in output(2)
    assert "GB/s" not in output(1)
    third = output(3)
    for name in ("lower", "infer_axes", "hoist_scalars", "split_stages"):
        assert f"--- {name}\n" in third
    assert "def " not in third
    assert "m_hat" in output(4)
    assert "def " in output(4)
