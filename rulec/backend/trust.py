"""Trust in folders and files with machine code: nobody but the user and root may write there.

The opened file is checked, not its name. A folder is held open while it is used: the path from `held` leads to this
folder even where another folder takes its name meanwhile, by somebody with write access to a folder above.

The files of the cache are counted and removed here too, without touching other files.
"""

from __future__ import annotations

import errno
import os
import re
import stat
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from rulec.errors import RulecError
from rulec.files import PART, is_unlocked, opened_as_it_is, wanted_folder


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


#: Paths below the cache's folder: of folders above kernels, of the folder of one kernel, of files.
_ABOVE = re.compile(r"\w+(/[0-9a-f]{2})?", re.ASCII)
_KERNEL = re.compile(r"\w+/([0-9a-f]{2})/\1[0-9a-f]{62}", re.ASCII)
_FILE = re.compile(
    # In a kernel's folder a source, kernel or digest, or a partial file of a killed process.
    rf"{_KERNEL.pattern}(\.lock|/(\w+\.{{S}}([a-z0-9_]{{8}})?|\.\w+\.{{S}}{PART}))"
    # The table of Triton's block sizes, and rule files that were fetched.
    rf"|triton/(blocks\.json|\.blocks\.json{PART})"
    rf"|rules/\.?[0-9a-f]{{64}}\.yaml({PART})?".replace("{S}", "(py|c|cu|o|so|cubin|sha256)"),
    re.ASCII,
)


@dataclass(frozen=True)
class Cleared:
    """The number of kernels removed, and the paths left: they are in use or not the cache's.

    A folder without a removed file stands for all its content.
    """

    kernels: int
    left: tuple[str, ...]


def clear() -> Cleared:
    """Removes the files of the cache in its folder. Links in it are not followed.

    RulecError where the folder cannot be read.
    """
    folder = wanted_folder()
    if not os.path.exists(folder):
        return Cleared(0, ())
    try:
        with held(folder, follow=True, trusted=False) as root:
            _, kernels, left = _cleared(root, "")
    except OSError as error:
        raise RulecError(f"the kernel cache {folder} cannot be cleared: {error.strerror}") from error
    return Cleared(kernels, tuple(left))


def _cleared(here: Path, shown: str) -> tuple[int, int, list[str]]:
    """Clears a folder held open. Returns the number of files removed, of kernels removed, and the paths left."""
    files, kernels, left = 0, 0, list[str]()
    for name in sorted(os.listdir(here)):
        path, below, mode = here / name, shown + name, os.lstat(here / name).st_mode
        one = _KERNEL.fullmatch(below) is not None
        if stat.S_ISDIR(mode) and (one or _ABOVE.fullmatch(below)) and not (one and _in_use(here / f"{name}.lock")):
            with held(path, trusted=False) as inner:
                removed, inside, rest = _cleared(inner, f"{below}/")
            files, kernels = files + removed, kernels + (removed > 0 if one else inside)
            left += rest if removed else [f"{below}/"]
            if removed and not rest:
                os.rmdir(path)
        elif stat.S_ISREG(mode) and _FILE.fullmatch(below) and not _in_use(path):
            os.unlink(path)
            files += 1
        else:
            left.append(below)
    return files, kernels, left


def _in_use(path: Path) -> bool:
    """Whether another process holds the lock of a file."""
    if os.name == "nt":
        return False
    try:
        with open(path, "rb", opener=opened_as_it_is) as opened:
            return not is_unlocked(opened.fileno())
    except OSError:
        return False


# Counts


def kept() -> dict[str, dict[str, int]]:
    """Backend -> the number of its kernels in the cache and their size in bytes."""
    totals: dict[str, dict[str, int]] = {}
    folder = wanted_folder()
    for kernel in (kernel for kind in _files(folder) for pair in _files(kind) for kernel in _files(pair)):
        if _KERNEL.fullmatch(kernel.relative_to(folder).as_posix()) and os.path.isdir(kernel):
            of_kind = totals.setdefault(kernel.parent.parent.name, {"kernels": 0, "bytes": 0})
            of_kind["kernels"] += 1
            of_kind["bytes"] += sum(map(_size, _files(kernel)))
    return totals


def _size(file: Path) -> int:
    try:
        return file.lstat().st_size
    except OSError:  # another process has removed it
        return 0


def _files(parent: Path) -> list[Path]:
    """The paths in a folder; none for a link, or where there is no folder."""
    try:
        return [] if parent.is_symlink() and parent != wanted_folder() else sorted(parent.iterdir())
    except OSError:
        return []
