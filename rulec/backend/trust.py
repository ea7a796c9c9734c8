"""Folders and files with machine code: nobody but the user and root may write there.

The opened file is checked, not its name. A folder is held open while it is used: the path from `held` leads to this
folder even where another folder takes its name meanwhile, by somebody with write access to a folder above.
"""

from __future__ import annotations

import errno
import os
import stat
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path


class Distrusted(OSError):
    """A folder or file that somebody else could have written; `strerror` has the reason."""

    def __init__(self, reason: str) -> None:
        super().__init__(errno.EPERM, reason)


def check(status: os.stat_result, shown: Path | str) -> None:
    """Distrusted for the status of a file or folder that others than the user and root own, or may write into."""
    if not hasattr(os, "geteuid"):
        return
    if status.st_uid not in (os.geteuid(), 0):
        raise Distrusted(f"{shown} belongs to another user")
    if status.st_mode & 0o022:
        raise Distrusted(f"other users may write into {shown} (mode {stat.S_IMODE(status.st_mode):o})")


@contextmanager
def held(folder: Path, *, follow: bool = False, trusted: bool = True) -> Iterator[Path]:
    """A path to a folder, held open, and checked where `trusted`.

    OSError for a missing folder, and for a link without `follow`.
    """
    if not hasattr(os, "O_DIRECTORY"):
        yield folder
        return
    handle = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | (0 if follow else os.O_NOFOLLOW))
    try:
        if trusted:
            check(os.fstat(handle), folder)
        here = Path(f"/proc/self/fd/{handle}")
        yield here if os.path.isdir(here) else folder
    finally:
        os.close(handle)


def below(root: Path, names: Sequence[str], shown: Path, *, make: bool = False) -> Path:
    """The folder at a path below `root`, a folder held open; with `make`, missing folders are made with mode 0700.

    Distrusted where a folder on the path is a link or could have been written by others. `shown` is the root's name
    for users.
    """
    for name in names:
        root, shown = root / name, shown / name
        if make:
            with suppress(FileExistsError):
                root.mkdir(mode=0o700)
        status = root.lstat()
        if not stat.S_ISDIR(status.st_mode):
            raise Distrusted(f"{shown} is not a folder itself")
        check(status, shown)
    return root


def contents(file: Path, shown: Path) -> bytes | None:
    """A file's content; None for a missing file, Distrusted for a link and for a file others could have written."""
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
        status = os.fstat(handle)
        if not stat.S_ISREG(status.st_mode):
            raise Distrusted(f"{shown} is not a file itself")
        check(status, shown)
        return opened.read()
