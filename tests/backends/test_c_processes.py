"""Compiled C across processes: the disk cache, damage to it, compiling at the same time, forking; and compilers."""

from __future__ import annotations

import os
import stat
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from rulec.backend import cache
from rulec.compiler.layout import layout_for
from rulec.errors import BackendUnavailable
from rulec_backends.c import CBackend, CKernel
from rulec_backends.c import compile as c_compile
from tests.backends.cpu_programs import bucket_of, program_of

pytestmark = pytest.mark.skipif(CBackend().unavailable_reason() is not None, reason="there is no C compiler")

#: An AdamW step of an array.
STEP = """
import sys
import numpy as np
import rulec
from rulec.compiler.layout import layout_for
from rulec.backend.protocol import Rows
from rulec_backends.c import CBackend

program = rulec.compile(rulec.load("adamw"))
layout = layout_for(program, "float32")
backend = CBackend()
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
print(first, *sorted({"numba", "llvmlite", "sympy", "torch"} & set(sys.modules)))
"""


def start(folder: Path, program: str = STEP + REPORT) -> subprocess.Popen[str]:
    environment = {**os.environ, "RULEC_CACHE_DIR": str(folder), "RULEC_NUM_THREADS": "2"}
    return subprocess.Popen(
        [sys.executable, "-c", program], env=environment, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE,
        stderr=subprocess.PIPE, text=True,
    )  # fmt: skip


def finish(process: subprocess.Popen[str]) -> list[str]:
    out, err = process.communicate(timeout=120)
    assert process.returncode == 0, err
    return out.split()


def libraries(folder: Path) -> list[Path]:
    return sorted(folder.glob("c/*/*/kernel.so"))


@pytest.mark.slow
def test_processes_at_once_then_one_from_the_cache(tmp_path: Path) -> None:
    cold = [finish(process) for process in [start(tmp_path) for _ in range(3)]]
    (library,) = libraries(tmp_path)
    assert {p.name for p in library.parent.iterdir()} == {"kernel.so", "kernel.sha256", "adamw.c"}
    assert stat.S_IMODE(library.parent.stat().st_mode) == 0o700
    made = library.stat().st_mtime_ns
    assert cold == [finish(start(tmp_path))] * 3
    assert len(cold[0]) == 1, "neither Numba nor a framework is imported"
    assert library.stat().st_mtime_ns == made


@pytest.fixture
def compiled(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A cache of its own with one kernel in it: the library's path."""
    monkeypatch.setenv("RULEC_CACHE_DIR", str(tmp_path))
    c_compile.library.cache_clear()
    build()
    (file,) = libraries(tmp_path)
    return file


def build() -> CKernel:
    program = program_of("adamw")
    layout = layout_for(program, "float32")
    return CBackend().build(program, layout, CBackend().emit(program, layout))


@pytest.mark.parametrize("damage", ["truncated", "flipped", "missing", "no digest"])
def test_a_damaged_entry_is_made_again(damage: str, compiled: Path) -> None:
    """Damaged by rename, as by another process: what this one has loaded stays whole."""
    whole = compiled.read_bytes()
    flipped = bytes([*whole[:1000], whole[1000] ^ 1, *whole[1001:]])
    contents = {"truncated": whole[: len(whole) // 2], "flipped": flipped}
    if damage in contents:
        cache.write_atomically(compiled, contents[damage])
    else:
        (compiled if damage == "missing" else compiled.with_suffix(".sha256")).unlink()
    c_compile.library.cache_clear()
    bucket = bucket_of("adamw", [100])
    wanted = bucket.expected(0)
    build().bind(bucket.params, bucket.states)(0, bucket.grads, bucket.rows)
    assert np.array_equal(bucket.params[0], wanted["p"])
    digest = cache.digest("c", compiled.parent.name, compiled.name, compiled.read_bytes())
    assert digest == compiled.with_suffix(".sha256").read_bytes()


def test_what_a_killed_process_leaves_is_ignored(compiled: Path) -> None:
    half = compiled.with_name("kernel.sohalf_written")
    half.write_bytes(compiled.read_bytes()[:700])
    before = compiled.stat().st_mtime_ns
    c_compile.library.cache_clear()
    build()
    assert compiled.stat().st_mtime_ns == before


def test_the_source_in_the_cache_is_what_was_printed(compiled: Path) -> None:
    program = program_of("adamw")
    assert compiled.with_name("adamw.c").read_text() == CBackend().emit(program, layout_for(program, "float32"))


def test_the_key_depends_on_the_compiler_its_flags_and_the_processor() -> None:
    facts = c_compile._facts()
    assert len(facts) == 4
    assert all(facts)
    keys = {cache.cache_key("source", *(f if i != j else "x" for i, f in enumerate(facts))) for j in range(len(facts))}
    assert len(keys | {cache.cache_key("source", *facts)}) == len(facts) + 1


FORK = """
import os
step(300_000)
child = os.fork()
if child == 0:
    os._exit(0 if step(300_000) == step(7) else 1)
assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
first, last = step(300_000)
print(first == last, *sorted({"numba", "llvmlite", "sympy"} & set(sys.modules)))
"""


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
@pytest.mark.parametrize(
    "loaded", [pytest.param("import torch; torch.ones(300_000).sum()", marks=pytest.mark.slow), ""]
)
def test_a_forked_child_steps_too(loaded: str) -> None:
    """GNU's OpenMP waits in a child for threads that only its parent has."""
    assert finish(start(cache.cache_folder(), f"{loaded}\n{STEP}{FORK}"))[0] == "True"


# Compilers


def command(folder: Path, script: str) -> str:
    """A program that runs this shell script."""
    file = folder / "own-cc"
    file.write_text(f"#!/bin/sh\n{script}\n")
    file.chmod(0o755)
    return str(file)


@pytest.fixture
def empty(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A cache of its own with nothing in it, and a folder for programs."""
    monkeypatch.setenv("RULEC_CACHE_DIR", str(tmp_path / "cache"))
    c_compile.library.cache_clear()
    yield tmp_path
    c_compile.library.cache_clear()


def assert_steps() -> None:
    bucket = bucket_of("adamw", [100, 5])
    wanted = [bucket.expected(i) for i in range(2)]
    build().bind(bucket.params, bucket.states)(0, bucket.grads, bucket.rows)
    assert all(np.array_equal(bucket.buffers(i)[n], v) for i in range(2) for n, v in wanted[i].items())


@pytest.mark.parametrize("refused", ["-fopenmp", "-fopenmp -fopenmp-simd -march=native"])
def test_a_compiler_without_openmp_makes_the_same_bits(
    refused: str, empty: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cases = "|".join(refused.split())
    script = (
        f'for flag in "$@"; do case "$flag" in {cases}) echo "unknown $flag" >&2; exit 1;; esac; done; exec cc "$@"'
    )
    monkeypatch.setenv("CC", command(empty, script))
    assert_steps()


def test_cc_may_have_arguments(empty: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CC", f"{command(empty, '[ $1 = -one ] || exit 1; shift; exec cc $@')} -one")
    assert_steps()


def test_a_compiler_that_fails_is_said_with_its_message_and_the_source(
    empty: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CC", command(empty, "echo; echo 'fatal: the licence ran out' >&2; exit 3"))
    with pytest.raises(BackendUnavailable) as caught:
        build()
    message = str(caught.value)
    assert "\n" not in message
    (source,) = empty.glob("cache/c/*/*/adamw.c")
    assert message == (
        f"the C compiler {empty}/own-cc fails on {source} (fatal: the licence ran out): set CC to a compiler of C99, "
        "or TMPDIR to a folder that has room"
    )


def test_no_compiler_is_said_with_what_to_install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("CC", raising=False)
    reason = "there is no C compiler: install gcc or clang, or set CC to the command of one"
    assert CBackend().unavailable_reason() == reason
    monkeypatch.setenv("CC", "icx -m64")
    reason = "the C compiler CC=icx -m64 is not on the path: set CC to one that is, or unset it"
    assert CBackend().unavailable_reason() == reason
    c_compile.library.cache_clear()
    with pytest.raises(BackendUnavailable, match="backend 'c' cannot run here: the C compiler CC=icx -m64 is not on"):
        build()


def test_a_library_that_cannot_be_loaded_is_said(empty: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CC", command(empty, 'for last; do made=$last; done; shift $(($# - 2)); echo no > "$1"'))
    with pytest.raises(
        BackendUnavailable, match=r"^the kernel .*kernel\.so cannot be loaded \(.*\): set RULEC_CACHE_D"
    ):
        build()
