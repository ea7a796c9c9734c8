"""From a C source to functions: finding the system's compiler, compiling into the cache, loading with ctypes.

A library is loaded from the opened and checked folder of the cache: its name may lead elsewhere by that time.
"""

from __future__ import annotations

import ctypes
import functools
import os
import platform
import shlex
import shutil
import subprocess
import tempfile
from collections.abc import Sequence
from pathlib import Path

from rulec.backend import cache
from rulec.backend.cache import Source, process_folder
from rulec.errors import BackendUnavailable

from ..common.processor import is_x86

#: IEEE arithmetic as in the source. No code reads errno or the flags of exceptions, so compilers may use vector
#: instructions for square roots and choices; this changes no result.
FLAGS = ("-std=c99", "-O3", "-fPIC", "-shared", "-ffp-contract=off", "-fno-math-errno", "-fno-trapping-math")

#: Further flags, tried in order until the compiler accepts them: all instructions of the processor with OpenMP's
#: threads; with OpenMP's vectors alone, for a compiler without the library of threads; none.
WAYS = (("-march=native", "-fopenmp"), ("-march=native", "-fopenmp-simd"), ())


def compiler() -> list[str] | None:
    """The command of the C compiler: `CC`, or the first of cc, gcc and clang on the path; None where there is none."""
    chosen = os.environ.get("CC", "").strip()
    for command in [_words(chosen)] if chosen else [["cc"], ["gcc"], ["clang"]]:
        path = shutil.which(command[0])
        if path is not None:
            return [path, *command[1:]]
    return None


def _words(command: str) -> list[str]:
    """The words of a command; one word where its quotes are not closed."""
    try:
        return shlex.split(command) or [command]
    except ValueError:
        return [command]


def missing() -> str | None:
    """None with a compiler on this machine, else one sentence with the remedy."""
    if compiler() is not None:
        return None
    chosen = os.environ.get("CC", "").strip()
    if chosen:
        return f"the C compiler CC={chosen!s:.100} is not on the path: set CC to one that is, or unset it"
    return "there is no C compiler: install gcc or clang, or set CC to the command of one"


@functools.lru_cache(maxsize=1024)
def library(name: str, source: str) -> ctypes.CDLL:
    """The functions of a source: from the cache where the library is whole, else compiled under its lock.

    BackendUnavailable without a compiler, where it fails, or where its library cannot be loaded.
    """
    text = Source(f"{cache.file_name(name)}.c", source)
    return cache.kernel(
        "c", cache.cache_key(source, *_facts()), "kernel.so", text, lambda path: _compiled(path, source), _loaded
    )


def _loaded(_: bytes, file: Path | None) -> ctypes.CDLL:
    if file is None:
        raise BackendUnavailable(
            "backend 'c' cannot run here: there is room for its library neither in the kernel cache nor in the folder "
            "of temporary files: set TMPDIR to a folder that has room"
        )
    try:
        return ctypes.CDLL(str(file))
    except OSError as error:
        raise BackendUnavailable(
            f"the kernel {file.name} cannot be loaded ({error}): set RULEC_CACHE_DIR to a folder that may hold programs"
        ) from error


def assembly(name: str, source: str) -> str:
    """The assembly of a source, for this processor: of the code that `library` has. BackendUnavailable as there."""
    syntax = ("-masm=intel",) if is_x86() else ()
    flags = (*(flag for flag in FLAGS if flag != "-shared"), "-S", *syntax)
    return _compiled(Path(f"{cache.file_name(name)}.c"), source, flags).decode()


def _compiled(path: Path, source: str, flags: Sequence[str] = FLAGS) -> bytes:
    """The shared library of a source, as bytes. The compiler reads the text from a pipe; `path` is for the message."""
    command = compiler()
    if command is None:
        raise BackendUnavailable(f"backend 'c' cannot run here: {missing()}")
    message = ""
    try:
        with tempfile.TemporaryDirectory(dir=process_folder()) as folder:
            target = Path(folder) / "kernel.so"
            for way in WAYS:
                done = subprocess.run(
                    [*command, *flags, *way, "-x", "c", "-", "-o", str(target), "-lm"], input=source, check=False,
                    capture_output=True, encoding="utf-8", errors="replace", env={**os.environ, "LC_ALL": "C"},
                )  # fmt: skip
                if done.returncode == 0 and target.exists():
                    return target.read_bytes()
                message = done.stderr or ("it makes no file" if done.returncode == 0 else "")
    except OSError as error:
        raise BackendUnavailable(
            f"the C compiler {shlex.join(command)} cannot be run ({error.strerror}): set TMPDIR to a folder that has "
            f"room, or CC to another compiler"
        ) from error
    first = next((line.strip() for line in message.splitlines() if line.strip()), "it says nothing")
    raise BackendUnavailable(
        f"the C compiler {shlex.join(command)} fails on {path} ({first}): set CC to a compiler of C99, or TMPDIR to a "
        f"folder that has room"
    )


def _facts() -> tuple[str, ...]:
    """The facts that machine code depends on beside the source: the compiler, its flags, and the processor."""
    command = compiler() or []
    file = Path(command[0]).resolve() if command else None
    known = file.stat() if file else None
    version = f"{file} {known.st_size} {known.st_mtime_ns}" if known else ""
    return shlex.join(command), version, shlex.join([*FLAGS, *(flag for way in WAYS for flag in way)]), processor()


@functools.cache
def processor() -> str:
    """The processor and its instructions: machine code for one may not run on another."""
    try:
        text = Path("/proc/cpuinfo").read_text(errors="replace").partition("\n\n")[0]
    except OSError:
        text = platform.processor()
    kept = ("vendor_id", "model name", "flags", "Features", "CPU implementer", "CPU part")
    lines = [line for line in text.splitlines() if line.startswith(kept)] or [text]
    return "\n".join([platform.machine(), *lines])
