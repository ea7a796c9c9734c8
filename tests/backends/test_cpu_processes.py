"""Kernels across processes: the disk cache, damage to it, compiling at the same time, forking, PyTorch's threads."""

from __future__ import annotations

import ast
import importlib.util
import os
import stat
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from rulec.backend import cache
from rulec.compiler.layout import layout_for
from rulec_backends import cpu
from rulec_backends.common import threads as cpu_threads
from rulec_backends.cpu import CpuBackend, machine
from tests.backends.cpu_programs import bucket_of, program_of

#: One AdamW step of an array; prints the sum, the modules that matter, and how long `build` took.
STEP = """
import sys
import numpy as np
import rulec
from rulec.compiler.layout import layout_for
from rulec.backend.protocol import Rows
from rulec_backends.cpu import CpuBackend

program = rulec.compile(rulec.load("adamw"))
layout = layout_for(program, "float32")
backend = CpuBackend()
kernel = backend.build(program, layout, backend.emit(program, layout))

def step(size):
    p, m, v = (np.full(size, x, np.float32) for x in (1, 0, 0))
    rows = Rows(np.full((1, len(program.scalars.columns)), 0.5), np.zeros(1, np.int64))
    kernel.bind([p], [{"m": m, "v": v}])(0, [np.full(size, 0.25, np.float32)], rows)
    return float(p[0]), float(p[-1])
"""
REPORT = """
first, last = step(1000)
assert first == last
print([first, sorted({"numba", "llvmlite", "sympy", "torch"} & set(sys.modules))])
"""


def environment(folder: Path, **more: str) -> dict[str, str]:
    return {**os.environ, "RULEC_CACHE_DIR": str(folder), **more}


def start(folder: Path, program: str = STEP + REPORT) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-c", program], env=environment(folder), stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
    )  # fmt: skip


def finish(process: subprocess.Popen[str]) -> tuple[float, list[str]]:
    out, err = process.communicate(timeout=120)
    assert process.returncode == 0, err
    value, modules = ast.literal_eval(out.strip().splitlines()[-1])
    return value, modules


def objects(folder: Path) -> list[Path]:
    return sorted(folder.glob("cpu/*/*/kernel.o"))


@pytest.mark.slow
def test_processes_at_once_then_one_from_the_cache(tmp_path: Path) -> None:
    cold = [finish(process) for process in [start(tmp_path) for _ in range(3)]]
    assert len(objects(tmp_path)) == 1
    left = {p.name for p in objects(tmp_path)[0].parent.iterdir()}
    assert left == {"kernel.o", "kernel.sha256", "adamw.py"}
    assert stat.S_IMODE(objects(tmp_path)[0].parent.stat().st_mode) == 0o700
    value, modules = finish(start(tmp_path))
    assert {v for v, _ in cold} == {value}
    assert modules == ["llvmlite"], "a kernel from the cache needs no compiler"


@pytest.fixture
def compiled(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A cache of its own with one kernel in it: the object file's path."""
    monkeypatch.setenv("RULEC_CACHE_DIR", str(tmp_path))
    machine.loaded.cache_clear()
    build()
    (file,) = objects(tmp_path)
    return file


def build() -> cpu.CpuKernel:
    program = program_of("adamw")
    layout = layout_for(program, "float32")
    return CpuBackend().build(program, layout, CpuBackend().emit(program, layout))


@pytest.mark.parametrize(
    "damage",
    ["flipped", "missing", *(pytest.param(d, marks=pytest.mark.slow) for d in ("truncated", "empty", "foreign"))],
)
def test_a_damaged_entry_is_made_again(damage: str, compiled: Path) -> None:
    whole = compiled.read_bytes()
    if damage == "missing":
        compiled.unlink()
    else:
        flipped = bytes([*whole[:1000], whole[1000] ^ 1, *whole[1001:]])
        contents = {
            "truncated": whole[: len(whole) // 2],
            "empty": b"",
            "flipped": flipped,
            "foreign": b"#!/bin/sh\n" * 99,
        }
        compiled.write_bytes(contents[damage])
    machine.loaded.cache_clear()
    bucket = bucket_of("adamw", [100])
    wanted = bucket.expected(0)
    build().bind(bucket.params, bucket.states)(0, bucket.grads, bucket.rows)
    assert np.array_equal(bucket.params[0], wanted["p"])
    digest = cache.digest("cpu", compiled.parent.name, compiled.name, compiled.read_bytes())
    assert digest == compiled.with_suffix(".sha256").read_bytes()


def test_what_a_killed_process_leaves_is_ignored(compiled: Path) -> None:
    half = compiled.with_name("kernel.ohalf_written")
    half.write_bytes(compiled.read_bytes()[:700])
    before = compiled.read_bytes()
    machine.loaded.cache_clear()
    build()
    assert compiled.read_bytes() == before


def test_the_source_in_the_cache_is_a_module(compiled: Path) -> None:
    file = compiled.with_name("adamw.py")
    spec = importlib.util.spec_from_file_location("a_printed_kernel", file)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    assert callable(module.kernel)
    assert file.read_text() == CpuBackend().emit(program_of("adamw"), layout_for(program_of("adamw"), "float32"))


def test_the_key_depends_on_compilers_words_and_processor() -> None:
    facts = machine._facts()
    keys = {
        cache.cache_key("source", *(f if i != j else "other" for i, f in enumerate(facts))) for j in range(len(facts))
    }
    assert len(keys | {cache.cache_key("source", *facts)}) == len(facts) + 1


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="GNU OpenMP is Linux's")
def test_pytorchs_threads_run_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("torch")
    cpu_threads._openmp.cache_clear()
    openmp = cpu_threads._openmp(True)
    assert openmp is not None
    used: list[int] = []

    def counted(address: int, job: int, threads: int, flags: int) -> None:
        used.append(threads)
        openmp(address, job, threads, flags)

    monkeypatch.setattr(cpu_threads, "_openmp", lambda loaded: counted)
    bucket = bucket_of("adamw", [300_000, 5])
    wanted = [bucket.expected(i) for i in range(2)]
    bucket.call()(0, bucket.grads, bucket.rows)
    assert used == [0], "0 threads are as many as PyTorch was told to use"
    for tensor in range(2):
        for name, values in wanted[tensor].items():
            assert np.array_equal(bucket.buffers(tensor)[name], values)


FORK = """
import os
step(300_000)
child = os.fork()
if child == 0:
    os._exit(0 if step(300_000) == step(7) else 1)
assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
first, last = step(300_000)
print([first, sorted({"numba", "llvmlite", "sympy", "torch"} & set(sys.modules))])
"""


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
@pytest.mark.parametrize("loaded", [pytest.param("import torch", marks=pytest.mark.slow), ""])
def test_a_forked_child_steps_too(loaded: str) -> None:
    """A child has none of its parent's threads, and GNU OpenMP would wait for them for ever."""
    build()
    _, modules = finish(start(cache.cache_folder(), f"{loaded}\n{STEP}{FORK}"))
    compilers = set(modules) - {"sympy", "torch"}  # PyTorch imports sympy in some versions
    assert compilers == {"llvmlite"}, "a kernel from the cache needs no compiler"
