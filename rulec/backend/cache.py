"""The on-disk cache of generated sources and compiled kernels.

One folder per kernel is named by the SHA-256 of everything that its machine code depends on. A folder is filled under a
lock, files appear by rename, and a damaged folder is thrown away and made again. Code runs from the cache, so files
that users other than the user and root could have written are not used (`trust`). Without a usable cache, kernels are
compiled anew, with one warning. They then use a folder of this process alone, which is removed when the process ends.
"""

from __future__ import annotations

import atexit
import errno
import functools
import hashlib
import os
import re
import shutil
import stat
import tempfile
import warnings
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple, TypeVar

from rulec.backend import trust
from rulec.errors import RulecError
from rulec.files import is_unlocked, wanted_folder, written_whole

T = TypeVar("T")


class Source(NamedTuple):
    """A generated source: the name of its file, and its text."""

    name: str
    text: str


def cache_folder() -> Path:
    """The folder of kernels: the configured one, made with mode 0700 where missing.

    If it cannot be used (`cache_trouble` has the reason), it is a folder of this process alone, with a warning: then
    every process compiles anew.
    """
    folder, trouble = wanted_folder(), cache_trouble()
    if trouble is None:
        return folder
    _warn(folder, trouble)
    return process_folder()


def cache_trouble() -> str | None:
    """Why the configured folder cannot be used, and what to do, as a sentence; None where it can."""
    folder = wanted_folder()
    try:
        with _opened(folder):
            return None
    except OSError as error:
        return _trouble(folder, error)


@contextmanager
def _opened(folder: Path) -> Iterator[Path]:
    """A path to a folder of kernels, held open and made where missing. OSError where it cannot be used."""
    if not os.path.isdir(folder):
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
    with trust.held(folder, follow=True) as root:
        if not os.access(root, os.W_OK | os.X_OK):
            raise OSError(errno.EACCES, os.strerror(errno.EACCES))
        yield root


def _trouble(folder: Path, error: OSError) -> str:
    """The sentence on a cache that cannot be used."""
    if isinstance(error, trust.Distrusted):
        return (
            f"the kernel cache {folder} is not used, as code runs from there and {error.strerror}: set RULEC_CACHE_DIR "
            f"to a folder of your own, or run `rulec cache clear` and `chmod -R go-w` it"
        )
    full = error.errno in (errno.ENOSPC, errno.EDQUOT)
    advice = "make room there, or set RULEC_CACHE_DIR to another folder" if full else _ELSEWHERE
    verb = "written" if os.path.isdir(folder) else "made"
    return f"the kernel cache {folder} cannot be {verb} ({error.strerror}): {advice}"


_ELSEWHERE = "set RULEC_CACHE_DIR to a folder of your own"

_warned: set[Path] = set()


def _warn(folder: Path, trouble: str) -> None:
    """Warns of a cache that cannot be used, once in a process."""
    if folder not in _warned:
        _warned.add(folder)
        warnings.warn(f"{trouble}; until then kernels are compiled anew in every process", stacklevel=4)


# Kernels


def cache_key(source: str, *facts: str) -> str:
    """The name of a kernel's folder: a digest of its source and of `facts` (versions, flags, architecture)."""
    return hashlib.sha256("\0".join((source, *facts)).encode()).hexdigest()


def file_name(name: str) -> str:
    """A name without an ending for the source of a program: letters and digits of ASCII, which every disk takes."""
    return re.sub(r"\W", "_", name.lower(), flags=re.ASCII)[:60] or "kernel"


def kernel(
    kind: str, key: str, file: str, source: Source, make: Callable[[Path], bytes],
    load: Callable[[bytes, Path | None], T],
) -> T:  # fmt: skip
    """A backend's kernel, loaded: from the cache where it is whole, else made and kept there, under its lock.

    `make` compiles: from the path of the source, a file for people to read, it gives the content of the kernel's file.
    `load` takes this content and the path of the file, None where no folder has room for it. Their errors pass through
    and must not be OSErrors.
    """
    once = _Once(functools.partial(_observed, kind, source.name, make))
    for place in (wanted_folder, process_folder):
        with ExitStack() as stack:
            try:
                entry = _Entry(stack.enter_context(_opened(place())), place(), kind, key)
                content = entry.whole(file)
                if content is None:
                    content = entry.filled(file, source, once)
            except OSError as error:
                _warn(wanted_folder(), _trouble(wanted_folder(), error))
                continue
            return load(content, entry.folder() / file)
    return load(once(Path(source.name)), None)


#: A context around the compilation of a kernel, of the kind of its backend and the file of its source.
Observer = Callable[[str, str], AbstractContextManager[None]]

_OBSERVERS: list[Observer] = []


@contextmanager
def observed(observer: Observer) -> Iterator[None]:
    """Within the block every compilation of the process runs inside a context of the observer."""
    _OBSERVERS.append(observer)
    try:
        yield
    finally:
        _OBSERVERS.remove(observer)


def _observed(kind: str, name: str, make: Callable[[Path], bytes], path: Path) -> bytes:
    with ExitStack() as stack:
        for observer in _OBSERVERS:
            stack.enter_context(observer(kind, Path(name).stem))
        return make(path)


class _Once:
    """A function called once: later calls give the first result."""

    def __init__(self, make: Callable[[Path], bytes]) -> None:
        self._make, self._content = make, list[bytes]()

    def __call__(self, path: Path) -> bytes:
        if not self._content:
            self._content.append(self._make(path))
        return self._content[0]


@dataclass(frozen=True)
class _Entry:
    """The folder of one kernel below `root`, a folder of kernels held open. `shown` is the root's name for users."""

    root: Path
    shown: Path
    kind: str
    key: str

    @property
    def _names(self) -> tuple[str, str, str]:
        return self.kind, self.key[:2], self.key

    def folder(self, *, make: bool = False) -> Path:
        return trust.below(self.root, self._names, self.shown, make=make)

    @contextmanager
    def locked(self) -> Iterator[None]:
        """Holds the lock of the folder against other processes: who holds it may take the folder away."""
        from filelock import FileLock

        *above, name = self._names
        folder = trust.below(self.root, above, self.shown, make=True)
        with FileLock(folder / f"{name}.lock", mode=0o600):
            yield

    def path(self, name: str) -> Path:
        """The path of a file of the entry, under its name for users."""
        return self.shown.joinpath(*self._names, name)

    def read(self, name: str) -> bytes | None:
        """A file's content; None where it is missing."""
        try:
            return trust.contents(self.folder() / name, self.path(name))
        except FileNotFoundError:
            return None

    def write(self, name: str, content: bytes) -> None:
        write_atomically(self.folder(make=True) / name, content)

    def whole(self, file: str) -> bytes | None:
        """A file's content, where it matches the digest beside it; None otherwise, as in another kernel's folder."""
        content = self.read(file)
        right = content is not None and digest(self.kind, self.key, file, content) == self.read(_digest_of(file))
        return content if right else None

    def filled(self, file: str, source: Source, make: Callable[[Path], bytes]) -> bytes:
        """A file's content, made and written where it is not whole."""
        with self.locked():
            content = self.whole(file)
            if content is None:
                shutil.rmtree(self.folder(make=True), ignore_errors=True)
                self.write(source.name, source.text.encode())
                content = make(self.path(source.name))
                self.write(file, content)
                self.write(_digest_of(file), digest(self.kind, self.key, file, content))
            return content


def digest(kind: str, key: str, file: str, content: bytes) -> bytes:
    """The digest beside a kernel's file: with the same content, the file of another kernel has another digest."""
    return hashlib.sha256("\0".join((kind, key, file, "")).encode() + content).digest()


def _digest_of(file: str) -> str:
    return f"{Path(file).stem}.sha256"


def write_atomically(path: Path, content: bytes) -> None:
    """Writes a file whole or not at all. Only the user can read or write it."""
    with written_whole(path, 0o600, durable=False) as opened:
        opened.write(content)


def source_file(kind: str, key: str, source: Source) -> Path:
    """The generated source as a real file, so that tracebacks and debuggers can show it."""
    for place in (wanted_folder, process_folder):
        try:
            with _opened(place()) as root:
                entry, text = _Entry(root, place(), kind, key), source.text.encode()
                if entry.read(source.name) != text:  # missing or damaged
                    with entry.locked():
                        entry.write(source.name, text)
                return entry.path(source.name)
        except OSError as error:
            _warn(wanted_folder(), _trouble(wanted_folder(), error))
    return Path(source.name)


# Single files


def read_single(kind: str, name: str) -> bytes | None:
    """A file of a backend outside the folders of kernels; None where there is no usable one."""
    try:
        with _opened(wanted_folder()) as root:
            folder = trust.below(root, (kind,), wanted_folder())
            return trust.contents(folder / name, wanted_folder() / kind / name)
    except FileNotFoundError:
        return None
    except OSError as error:
        _warn(wanted_folder(), _trouble(wanted_folder(), error))
        return None


def write_single(kind: str, name: str, content: bytes) -> None:
    """Writes a file of a backend outside the folders of kernels. RulecError where the cache cannot be used."""
    try:
        with _opened(wanted_folder()) as root:
            write_atomically(trust.below(root, (kind,), wanted_folder(), make=True) / name, content)
    except OSError as error:
        raise RulecError(_trouble(wanted_folder(), error)) from error


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
