"""Folders and files that machine code is taken from: nobody may write there but the user and root.

What was opened is looked at, not what has its name. A folder is held open while it is used: the path that `held` gives
leads to that folder even where another takes its name meanwhile, as somebody may who can write into a folder above.
"""

from __future__ import annotations

import errno
import os
import stat
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path


class Distrusted(OSError):
    """Somebody else could have written here; `strerror` says why."""

    def __init__(self, reason: str) -> None:
        super().__init__(errno.EPERM, reason)


def check(found: os.stat_result, shown: Path | str) -> None:
    """Distrusted where somebody else than the user and root owns what has this status, or may write into it."""
    if not hasattr(os, "geteuid"):
        return
    if found.st_uid not in (os.geteuid(), 0):
        raise Distrusted(f"{shown} belongs to another user")
    if found.st_mode & 0o022:
        raise Distrusted(f"other users may write into {shown} (mode {stat.S_IMODE(found.st_mode):o})")


@contextmanager
def held(folder: Path, *, follow: bool = False, trusted: bool = True) -> Iterator[Path]:
    """A path to a folder that is held open, and where it is to be `trusted` was checked.

    OSError where there is none, and for a link unless it is to be followed.
    """
    if not hasattr(os, "O_DIRECTORY"):
        yield folder
        return
    handle = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | (0 if follow else os.O_NOFOLLOW))
    try:
        if trusted:
            check(os.fstat(handle), folder)
        here = Path(f"/proc/self/fd/{handle}")
        yield here if here.is_dir() else folder
    finally:
        os.close(handle)


def below(root: Path, names: Sequence[str], shown: Path, *, make: bool = False) -> Path:
    """The folder of this path below one that is held; with `make` those that are missing are made, with mode 0700.

    Distrusted where one of them is a link or could have been written by others; `shown` is the root's name for users.
    """
    for name in names:
        root, shown = root / name, shown / name
        if make:
            with suppress(FileExistsError):
                root.mkdir(mode=0o700)
        found = root.lstat()
        if not stat.S_ISDIR(found.st_mode):
            raise Distrusted(f"{shown} is not a folder itself")
        check(found, shown)
    return root


def contents(file: Path, shown: Path) -> bytes | None:
    """What a file holds; None where there is none, Distrusted where it is a link or others could have written it."""
    flags = os.O_RDONLY | getattr(os, "O_NOFOLLOW", 0) | getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_BINARY", 0)
    try:
        handle = os.open(file, flags)
    except FileNotFoundError:
        return None
    except OSError as error:
        if error.errno == errno.ELOOP:
            raise Distrusted(f"{shown} is a link") from error
        raise
    with open(handle, "rb") as opened:
        found = os.fstat(handle)
        if not stat.S_ISREG(found.st_mode):
            raise Distrusted(f"{shown} is not a file itself")
        check(found, shown)
        return opened.read()
