"""A folder of this process alone, for kernels without a cache; it is removed when the process ends."""

from __future__ import annotations

import atexit
import functools
import os
import re
import shutil
import stat
import tempfile
from contextlib import suppress
from pathlib import Path

from rulec.files import is_unlocked

_PREFIX = "rulec-kernels-"

#: The file that is locked as long as a folder's process lives.
_LOCK = "process.lock"


def process_folder() -> Path:
    """The folder, with mode 0700. Folders of killed processes are removed first.

    OSError where the folder cannot be made.
    """
    return _folder(os.getpid())


@functools.cache
def _folder(process: int) -> Path:
    """The folder of one process. A forked child has its own: it may outlive its parent."""
    _remove_left_over(Path(tempfile.gettempdir()))
    folder = Path(tempfile.mkdtemp(prefix=_PREFIX))
    handle = os.open(folder / _LOCK, os.O_RDWR | os.O_CREAT, 0o600)  # open, and so locked, to the end
    is_unlocked(handle)
    atexit.register(_remove, folder, process)
    return folder


def _remove(folder: Path, process: int) -> None:
    if os.getpid() == process:
        shutil.rmtree(folder, ignore_errors=True)


def _remove_left_over(parent: Path) -> None:
    with suppress(OSError):
        for name in os.listdir(parent):
            if re.fullmatch(rf"{_PREFIX}\w{{8}}", name):
                with suppress(OSError):
                    _remove_ended(parent / name)


def _remove_ended(folder: Path) -> None:
    """Removes a folder of this user, where its process has ended."""
    status = folder.lstat()
    if not (hasattr(os, "geteuid") and stat.S_ISDIR(status.st_mode) and status.st_uid == os.geteuid()):
        return
    handle = os.open(folder / _LOCK, os.O_RDWR | os.O_NOFOLLOW)
    try:
        if is_unlocked(handle):
            shutil.rmtree(folder, ignore_errors=True)
    finally:
        os.close(handle)
