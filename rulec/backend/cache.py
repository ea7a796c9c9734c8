"""The on-disk cache of generated sources and compiled kernels.

One folder per kernel, named by the SHA-256 of everything its machine code depends on. A folder is made under a lock,
files appear by rename, and a damaged one is thrown away and made again.
"""

from __future__ import annotations

import atexit
import functools
import hashlib
import os
import shutil
import tempfile
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


@functools.cache
def _default_folder() -> Path:
    import platformdirs

    return Path(platformdirs.user_cache_dir("rulec"))


def cache_folder() -> Path:
    """Where kernels are kept: RULEC_CACHE_DIR, or the user's cache folder. Made with mode 0700 where missing.

    Where it cannot be used (`cache_trouble` says why), kernels are kept in a folder of this process alone, with a
    warning: every process then compiles anew.
    """
    trouble = cache_trouble()
    return _wanted_folder() if trouble is None else _process_folder(trouble)


def cache_trouble() -> str | None:
    """Why the cache cannot be kept where it should be, and what to do; None where it can.

    Machine code is loaded from the folder, so it must be this user's own.
    """
    folder = _wanted_folder()
    try:
        if not folder.is_dir():
            folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        if hasattr(os, "getuid") and folder.stat().st_uid not in (os.getuid(), 0):
            reason = "belongs to another user"
        elif os.access(folder, os.W_OK | os.X_OK):
            return None
        else:
            reason = "cannot be written"
    except OSError as error:
        reason = f"cannot be made ({error.strerror})"
    return f"the kernel cache {folder} {reason}: set RULEC_CACHE_DIR to a folder of your own"


def _wanted_folder() -> Path:
    given = os.environ.get("RULEC_CACHE_DIR")
    return Path(given) if given else _default_folder()


@functools.cache
def _process_folder(trouble: str) -> Path:
    warnings.warn(f"{trouble}; until then kernels are compiled anew in every process", stacklevel=3)
    folder = Path(tempfile.mkdtemp(prefix="rulec-"))
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    return folder


def cache_key(source: str, *facts: str) -> str:
    """The name of a kernel's folder: a digest of its source, and of versions, flags and architecture."""
    return hashlib.sha256("\0".join((source, *facts)).encode()).hexdigest()


def entry(kind: str, key: str) -> Path:
    """The folder of one kernel of a backend; it may not exist."""
    return cache_folder() / kind / key[:2] / key


@contextmanager
def locked(folder: Path) -> Iterator[None]:
    """Holds the lock of a kernel's folder against other processes; the folder exists inside."""
    from filelock import FileLock

    folder.mkdir(parents=True, exist_ok=True, mode=0o700)
    with FileLock(str(folder) + ".lock", mode=0o600):
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        yield


def write_atomically(path: Path, content: bytes) -> None:
    """`path` with this content, or as it was: never half of it."""
    path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
    handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=path.name)
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(content)
        os.replace(temporary, path)
    except BaseException:
        Path(temporary).unlink(missing_ok=True)
        raise


def source_file(kind: str, key: str, name: str, source: str) -> Path:
    """The generated source as a real file, so that tracebacks and debuggers can show it."""
    path = entry(kind, key) / name
    try:
        if path.read_text(encoding="utf-8") == source:
            return path
    except (OSError, UnicodeDecodeError):
        pass  # missing or damaged: written again below
    write_atomically(path, source.encode())
    return path


def discard(folder: Path) -> None:
    """Throws a damaged entry away."""
    shutil.rmtree(folder, ignore_errors=True)


def clear() -> int:
    """Empties the whole cache; returns how many kernels it held."""
    folder = cache_folder()
    held = sum(1 for _ in folder.glob("*/*/*/"))
    shutil.rmtree(folder, ignore_errors=True)
    return held
