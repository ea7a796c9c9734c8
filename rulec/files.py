"""The folder of the cache, and files written as a whole or not at all, even where the writing process is killed."""

from __future__ import annotations

import functools
import os
import re
import stat
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO

try:
    import fcntl
except ImportError:  # Windows, which neither deletes nor replaces files that are open
    fcntl = None  # type: ignore[assignment]

#: The end of a file's name while it is written, after a dot and the file's own name.
PART = r"\.[0-9a-f]{16}\.part"


@functools.cache
def _default_folder() -> Path:
    import platformdirs

    return Path(platformdirs.user_cache_dir("rulec"))


def wanted_folder() -> Path:
    """The configured folder of the cache: RULEC_CACHE_DIR, or the user's cache folder."""
    chosen = os.environ.get("RULEC_CACHE_DIR")
    return Path(chosen) if chosen else _default_folder()


@contextmanager
def written_whole(file: Path, mode: int = 0o666, durable: bool = True) -> Iterator[IO[bytes]]:
    """A new file to write beside `file`, which takes its place in the end; with `durable`, once it is on the disk.

    Its mode is `mode` less the umask. Parts of the same file left by ended processes are removed first. OSError where
    it cannot be written; then the old file stays.
    """
    remove_left_over(file)
    part, opened = _new_part(file, mode)
    try:
        with opened:
            yield opened
            opened.flush()
            if durable:
                os.fsync(opened.fileno())
            if fcntl is None:
                opened.close()
            os.replace(part, file)  # with its lock still held, or it would be taken for a left-over
    except BaseException:
        part.unlink(missing_ok=True)
        raise


def remove_left_over(file: Path) -> None:
    """Removes the parts of a file with a free lock: no living process writes them."""
    if fcntl is None:
        return
    pattern = re.compile(rf"\.{re.escape(file.name)}{PART}")
    with suppress(OSError):
        for part in [file.parent / name for name in os.listdir(file.parent) if pattern.fullmatch(name)]:
            with suppress(OSError), open(part, "rb", opener=opened_as_it_is) as opened:
                if stat.S_ISREG(os.fstat(opened.fileno()).st_mode) and is_unlocked(opened.fileno()):
                    part.unlink()


def is_unlocked(handle: int) -> bool:
    """Takes the lock of an open file. False where another process holds it, or on a system without locks."""
    if fcntl is None:
        return False
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        return False
    return True


def _new_part(file: Path, mode: int) -> tuple[Path, IO[bytes]]:
    """A new file under this process's lock."""
    flags = os.O_RDWR | os.O_CREAT | os.O_EXCL | getattr(os, "O_BINARY", 0)
    while True:
        part = file.with_name(f".{file.name}.{os.urandom(8).hex()}.part")
        opened = open(os.open(part, flags, mode), "wb")  # noqa: SIM115 - the caller closes it
        if fcntl is not None:
            with suppress(OSError):  # a file system without locks: nobody removes what it cannot lock
                fcntl.flock(opened.fileno(), fcntl.LOCK_EX)
        if fcntl is None or os.fstat(opened.fileno()).st_nlink:
            return part, opened
        opened.close()  # between the two lines another process took it for a left-over


def opened_as_it_is(name: str, flags: int) -> int:
    """Opens without following a link, and without waiting for the writer of a pipe."""
    return os.open(name, flags | os.O_NOFOLLOW | os.O_NONBLOCK)
