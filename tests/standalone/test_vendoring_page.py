"""The programs of the manual's page on vendoring in languages that the test of pages does not run."""

from __future__ import annotations

import json
import re
import shlex
import shutil
import subprocess
from pathlib import Path

import numpy as np
import pytest

import rulec
from rulec.compiler.reference import ReferenceOptimizer
from rulec.standalone.prose import written
from tests.docs.markdown import ROOT, Block, blocks
from tests.standalone.c_library import CRule, CRun, drawn
from tests.standalone.rust_program import RUSTC, SOURCES, needs_rustc
from tests.standalone.rust_program import run as run_command
from tests.standalone.test_fortran import needs_gfortran


def page() -> list[Block]:
    return blocks((ROOT / "docs" / "vendoring.md").read_text())


def vendored(folder: Path, *bindings: str) -> None:
    (folder / "optimizers").mkdir()
    for rule in ("adamw", "lion"):
        for name, text in written(rulec.load(rule), "c", bindings=bindings).items():
            (folder / "optimizers" / name).write_text(text)


@needs_gfortran
def test_the_fortran_program(tmp_path: Path) -> None:
    vendored(tmp_path)
    (source,) = (block for block in page() if block.language == "fortran")
    assert source.title is not None
    (tmp_path / source.title).write_text(source.text)
    lines = (line for block in page() if block.language == "sh" for line in block.text.splitlines())
    (command,) = (line for line in lines if line.startswith("gfortran"))
    subprocess.run(shlex.split(command), cwd=tmp_path, check=True, capture_output=True)
    done = subprocess.run(["./step"], cwd=tmp_path, check=True, capture_output=True, text=True)
    words, figure, told = re.fullmatch(r"(.*): +(\S+)\n(.*)\n", done.stdout).groups()  # type: ignore[union-attr]
    assert words == "the largest weight"
    assert 0 <= float(figure) < 0.1
    assert f"`{told}`" in (ROOT / "docs" / "vendoring.md").read_text()


@needs_gfortran
@pytest.mark.parametrize("rule", ["adafactor", "schedule_free_adamw", "lookahead(adam, k=2)"])
def test_fortran_modules_of_other_rules(rule: str, tmp_path: Path) -> None:
    for name, text in written(rulec.load(rule), "c", name="other").items():
        (tmp_path / name).write_text(text)
    command = ["gfortran", "-std=f2018", "-Wall", "-Wextra", "-Werror", "-c", "rulec_float32.f90", "other.f90"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "other_rule.mod").is_file()


AWKWARD = """
name: Awkward
hyper: {lr: 0.1, k: 1, K: 2, end: 3, double: 0.5}
state: {m: 0, M: 0, head: 0, param: {init: 1, per: tensor}}
step: |
  m = k*m + g
  M = K*M + m
  head = 0.5*head + M
  param = param + 1
  direction = m + M/end + head*double/param
"""


@needs_gfortran
def test_names_that_languages_have_for_themselves(tmp_path: Path) -> None:
    rule = rulec.parse(AWKWARD)
    built = CRule(rule, tmp_path, "float64")
    params, steps = drawn(15, ((4, 3),), 3)
    run, reference = CRun(built, params), ReferenceOptimizer(rule, params)
    for grads in steps:
        run.step(grads)
        reference.step(grads)
    np.testing.assert_allclose(run.arrays[0], reference.params[0], rtol=1e-12)
    command = ["gfortran", "-std=f2018", "-Wall", "-Wextra", "-Werror", "-c", "rulec_float64.f90", "awkward.f90"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def rust_files(folder: Path) -> None:
    """The page's files in Rust, beside the rule's."""
    vendored(folder, "rust")
    for block in page():
        if block.language == "rust":
            assert block.title is not None
            (folder / block.title).write_text(block.text)


PRINTED = "after 200 steps: [0.5, 0.5, 0.5, 0.5]\n"


@needs_rustc
def test_the_rust_program(tmp_path: Path) -> None:
    rust_files(tmp_path)
    (commands,) = (block.text for block in page() if block.language == "sh" and "rustc" in block.text)
    for command in commands.splitlines():
        run_command(tmp_path, *shlex.split(command), *(["-D", "warnings"] if command.startswith("rustc") else []))
    assert run_command(tmp_path, "./train") == PRINTED


MANIFEST = """
[package]
name = "train"
version = "0.1.0"
edition = "2024"

[[bin]]
name = "train"
path = "train.rs"
"""


@pytest.mark.slow
@needs_rustc
@pytest.mark.skipif(shutil.which("cargo") is None, reason="cargo is not installed")
def test_the_package_of_cargo(tmp_path: Path) -> None:
    rust_files(tmp_path)
    (tmp_path / "Cargo.toml").write_text(MANIFEST)
    assert run_command(tmp_path, "cargo", "run", "--offline", "--quiet") == PRINTED


@pytest.mark.slow
@needs_rustc
def test_the_optimizer_for_candle(tmp_path: Path) -> None:
    """It has the bits of the C functions. `rust/candle_core.rs` stands in for candle."""
    rust_files(tmp_path)
    for name in ("candle_core", "candle_nn", "with_candle"):
        shutil.copy(SOURCES / f"{name}.rs", tmp_path)
    run_command(tmp_path, "gcc", "-c", "-std=c99", "-O2", "optimizers/adamw.c")
    externs: list[str] = []
    for name in ("candle_core", "candle_nn"):
        run_command(tmp_path, *RUSTC, "-L", ".", *externs, "--crate-type", "rlib", f"{name}.rs")
        externs += ["--extern", f"{name}=lib{name}.rlib"]
    run_command(tmp_path, *RUSTC, "-L", ".", *externs, "-C", "link-arg=adamw.o", "with_candle.rs")
    printed = [json.loads(line) for line in run_command(tmp_path, "./with_candle").splitlines()]
    params = [np.array([[1, -2, 3], [-4, 5, -6]], np.float32), np.array([[0.5, 0.25]], np.float32)]
    run = CRun(CRule(rulec.load("adamw"), tmp_path), params, {"lr": 0.05})
    for step in range(6):
        grads = [2 * x - 1 for x in run.arrays]
        run.step([grads[0], grads[1] if step % 2 else None], {"lr": 0.05})
    for ours, theirs in zip(printed, run.arrays, strict=True):
        assert np.array(ours, np.float32).tobytes() == theirs.tobytes()


def test_the_header_is_also_cpp(tmp_path: Path) -> None:
    if shutil.which("g++") is None:
        pytest.skip("g++ is not installed")
    vendored(tmp_path)
    program = '#include "adamw.h"\nint main() { adamw_hyper h = ADAMW_DEFAULTS; return h.lr > 0 ? 0 : 1; }\n'
    (tmp_path / "program.cpp").write_text(program)
    command = ["g++", "-Wall", "-Wextra", "-Werror", "-Ioptimizers", "-c", "program.cpp"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
