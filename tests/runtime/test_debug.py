"""RULEC_DEBUG says, on standard error, what a step did."""

from __future__ import annotations

import os
import runpy
import subprocess
import sys

import numpy as np
import pytest

import rulec
from rulec import environment as debug
from rulec.array import Optimizer
from rulec.runtime.buckets import bucket
from rulec.runtime.stages import step

PROGRAM = "import numpy as np, rulec; rulec.array.Optimizer('adamw', [np.ones(1000)]).step([np.ones(1000)])"


def in_a_process(level: int) -> str:
    environment = {**os.environ, "RULEC_DEBUG": str(level)}
    done = subprocess.run([sys.executable, "-c", PROGRAM], env=environment, capture_output=True, text=True, check=True)
    assert done.stdout == ""
    return done.stderr


@pytest.mark.slow
def test_the_environment_says_how_much() -> None:
    assert in_a_process(0) == ""
    assert "AdamW by cpu on cpu, p:f64 g:f64 m:f64 v:f64: 1 tensors\n" in in_a_process(1)
    assert "def " in in_a_process(4)


def test_each_level_adds_to_the_one_before(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    def output(level: int) -> str:
        monkeypatch.setenv("RULEC_DEBUG", str(level))
        found = runpy.run_path(str(debug.__file__))["LEVEL"]
        assert found == level
        for module in (bucket, step):
            monkeypatch.setattr(module, "LEVEL", found)
        rule = rulec.parse(rulec.load("adamw").to_yaml())
        Optimizer(rule, [np.ones(1000)], "numpy").step([np.ones(1000)])
        out, err = capsys.readouterr()
        assert out == ""
        return err

    first, second, third, fourth = map(output, range(1, 5))
    assert output(0) == ""
    assert "AdamW by numpy on cpu, p:f64 g:f64 m:f64 v:f64: 1 tensors\n" in first
    assert "GB/s" in second
    assert "GB/s" not in first
    for name in ("lower", "infer_axes", "hoist_scalars", "split_stages"):
        assert f"--- {name}\n" in third
    assert "def " not in third
    assert "m_hat" in fourth
    assert "def " in fourth
