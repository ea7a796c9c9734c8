"""The kernel cache: whose folder it is, and what happens where there can be none."""

from __future__ import annotations

import ast
import errno
import os
import re
import shutil
import stat
import subprocess
import sys
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import rulec
import rulec.array
from rulec.backend import cache, trust
from rulec.errors import BackendUnavailable
from rulec.files import written_whole

STEP = """
import numpy as np, rulec
p = np.ones(3)
rulec.array.Optimizer("sgd", [p], "c", lr=1.0).step([p.copy()])
print(p)
"""


@pytest.fixture
def elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("RULEC_CACHE_DIR", str(tmp_path / "cache"))
    cache._warned.clear()
    return tmp_path / "cache"


def test_the_folder_is_made_for_its_user_alone(elsewhere: Path) -> None:
    assert cache.cache_folder() == elsewhere
    assert elsewhere.stat().st_mode & 0o777 == 0o700


@pytest.mark.parametrize("name", ["x" * 300, "/".join(["x"] * 5000)])
def test_a_path_that_no_disk_takes_is_worked_around(name: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("RULEC_CACHE_DIR", str(tmp_path / name))
    cache._warned.clear()
    trouble = cache.cache_trouble()
    assert trouble is not None
    assert "cannot be made (File name too long): set RULEC_CACHE_DIR" in trouble
    param, rule = np.ones(3), rulec.parse(f"name: A\nstep: p = p - {len(name)}*g\n")
    with pytest.warns(UserWarning, match="File name too long"):
        rulec.array.Optimizer(rule, [param], "numpy").step([np.full(3, 1 / len(name))])
    assert param.tolist() == [0.0] * 3
    assert trust.kept() == {}
    assert trust.clear() == trust.Cleared(0, ())


@pytest.mark.parametrize("backend", ["cpu", "c", "numpy"])
def test_a_rule_with_a_name_of_any_letters_is_kept_and_cleared(backend: str, elsewhere: Path) -> None:
    """Four bytes for each of its letters would be more than a file's name may have."""
    rule = rulec.parse(f"name: {chr(0x1D49C) * 100}\nstep: p = p - {0.25 + 0.5 * len(backend)}*g\n")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        rulec.array.Optimizer(rule, [np.ones(3)], backend).step([np.ones(3)])
    assert trust.clear().left == ()


def test_folders_of_kernels_that_were_exchanged_are_made_anew(elsewhere: Path) -> None:
    """The digest beside a kernel is of its key as well; nor is another file of the same folder a kernel."""
    names = ["sgd", "lion"]
    keys = [cache.cache_key(name) for name in names]

    def loaded() -> list[bytes]:
        source = cache.Source("kernel.c", "")
        return [
            cache.kernel("c", key, "kernel.so", source, lambda _, name=name: name.encode(), lambda content, _: content)
            for key, name in zip(keys, names, strict=True)
        ]

    places = [elsewhere / "c" / key[:2] / key for key in keys]
    for _ in range(2):
        assert loaded() == [b"sgd", b"lion"]
        _exchange(*places)
    assert loaded() == [b"sgd", b"lion"]


def _exchange(first: Path, second: Path) -> None:
    held = first.with_name("held")
    first.rename(held)
    second.rename(first)
    held.rename(second)


@pytest.mark.slow
@pytest.mark.parametrize("backend", ["cpu", "c"])
def test_a_rule_steps_as_itself_after_kernels_were_exchanged(backend: str, elsewhere: Path) -> None:
    steps = {"sgd": [0.75], "lion": [0.0]}
    for _ in range(2):
        for name, after in steps.items():
            assert _stepped(name, backend) == after
        places = sorted(file.parent for file in elsewhere.rglob("kernel.*o"))
        _exchange(places[0], places[-1])


def _stepped(name: str, backend: str) -> list[float]:
    """A step of a rule in a new process: from the number 1, whose gradient is 0.25, at a rate of 1."""
    text = f"""
import numpy as np, rulec.array
p = np.ones(1)
rulec.array.Optimizer({name!r}, [p], {backend!r}, lr=1.0).step([np.full(1, 0.25)])
print(p.tolist())
"""
    done = subprocess.run([sys.executable, "-c", text], capture_output=True, text=True, check=True)
    numbers: list[float] = ast.literal_eval(done.stdout)
    return numbers


def test_a_file_in_its_place_is_worked_around_with_a_warning(elsewhere: Path) -> None:
    elsewhere.write_text("not a folder")
    with pytest.warns(UserWarning, match="cannot be made .*: set RULEC_CACHE_DIR to a folder of your own; until then"):
        found = cache.cache_folder()
    assert found != elsewhere
    assert found.is_dir()
    assert cache.cache_folder() == found


@pytest.mark.skipif(not hasattr(os, "geteuid"), reason="users are told apart by number")
def test_another_users_folder_is_not_trusted(elsewhere: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    elsewhere.mkdir()
    monkeypatch.setattr(os, "geteuid", lambda: elsewhere.stat().st_uid + 1)
    if elsewhere.stat().st_uid == 0:
        os.chown(elsewhere, 12345, 12345)
    with pytest.warns(UserWarning, match="belongs to another user"):
        assert cache.cache_folder() != elsewhere


def test_a_process_without_a_cache_still_steps(elsewhere: Path) -> None:
    elsewhere.write_text("not a folder")
    done = subprocess.run([sys.executable, "-c", STEP], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[0. 0. 0.]"
    assert "set RULEC_CACHE_DIR" in done.stderr


# Whose code is run

KEY = cache.cache_key("a rule")
PATH = ("cpu", KEY[:2], KEY)
HONEST, FOREIGN = b"honest", b"foreign"

needs_owners = pytest.mark.skipif(not hasattr(os, "geteuid"), reason="users are told apart by number")


def taken(make: Callable[[Path], bytes] = lambda _: HONEST) -> bytes:
    """The content of the kernel that a process would run."""
    return cache.kernel("cpu", KEY, "kernel.o", cache.Source("rule.py", "a rule"), make, lambda content, _: content)


def compiles_nothing(_: Path) -> bytes:
    raise AssertionError("the cache has it")


@pytest.fixture
def planted(elsewhere: Path) -> Path:
    """A cache with a whole kernel in it, of other content; nothing tells it from one of ours but who could write it."""
    assert taken(lambda _: FOREIGN) == FOREIGN
    assert taken(compiles_nothing) == FOREIGN
    return elsewhere


def given_away(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Another user owns it; where this one may give nothing away, the system says so."""
    if os.geteuid() == 0:
        os.chown(path, 12345, 12345)
        return
    found, status, everything = path.stat(), os.fstat, os.lstat

    def of_another(result: os.stat_result) -> os.stat_result:
        same = (result.st_ino, result.st_dev) == (found.st_ino, found.st_dev)
        return os.stat_result((*result[:4], 12345, *result[5:])) if same else result

    monkeypatch.setattr(os, "fstat", lambda handle: of_another(status(handle)))
    monkeypatch.setattr(Path, "lstat", lambda path: of_another(everything(path)))


PLACES = {"root": (), "kind": PATH[:1], "pair": PATH[:2], "entry": PATH, "kernel": (*PATH, "kernel.o"),
          "digest": (*PATH, "kernel.sha256")}  # fmt: skip


@needs_owners
@pytest.mark.parametrize("mode", [0o1777, 0o775, 0o722, "owner"])
@pytest.mark.parametrize("place", PLACES)
def test_what_others_could_have_written_is_not_run(
    place: str, mode: int | str, planted: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = planted.joinpath(*PLACES[place])
    if isinstance(mode, int):
        path.chmod(mode)
    else:
        given_away(path, monkeypatch)
    with pytest.warns(UserWarning, match="is not used, as code runs from there and .*: set RULEC_CACHE_DIR"):
        assert taken() == HONEST
    with warnings.catch_warnings(action="error"):  # once is enough
        assert taken(compiles_nothing) == HONEST, "compiled once in this process"
    assert planted.joinpath(*PATH, "kernel.o").read_bytes() == FOREIGN


@needs_owners
@pytest.mark.parametrize("place", [place for place in PLACES if place != "root"])
def test_links_in_the_cache_are_not_followed(place: str, planted: Path, tmp_path: Path) -> None:
    path = planted.joinpath(*PLACES[place])
    path.rename(tmp_path / "moved")
    path.symlink_to(tmp_path / "moved")
    with pytest.warns(UserWarning, match="is not used, as code runs from there and .* is (a link|not a folder itself)"):
        assert taken() == HONEST


@needs_owners
@pytest.mark.parametrize("umask", [0o002, 0o000, 0o077])
def test_what_the_cache_makes_it_trusts_whatever_the_umask(umask: int, elsewhere: Path) -> None:
    before = os.umask(umask)
    try:
        taken()
        cache.write_single("triton", "blocks.json", b"{}")
        cache.source_file("numpy", KEY, cache.Source("rule.py", "a rule"))
    finally:
        os.umask(before)
    for path in (elsewhere, *elsewhere.rglob("*")):
        assert stat.S_IMODE(path.stat().st_mode) == (0o700 if path.is_dir() else 0o600), path
    assert taken(compiles_nothing) == HONEST


@pytest.mark.skipif(not Path("/proc/self/fd").is_dir(), reason="only there a path leads to what was opened")
def test_a_folder_that_takes_the_caches_name_meanwhile_is_not_read(planted: Path, tmp_path: Path) -> None:
    """As somebody may make who can write into a folder above."""

    def load(content: bytes, path: Path | None) -> bytes:
        shutil.copytree(planted, tmp_path / "other")
        (tmp_path / "other").joinpath(*PATH, "kernel.o").write_bytes(b"swapped")
        planted.rename(tmp_path / "away")
        (tmp_path / "other").rename(planted)
        assert path is not None
        return path.read_bytes()

    found = cache.kernel("cpu", KEY, "kernel.o", cache.Source("rule.py", "a rule"), compiles_nothing, load)
    assert found == FOREIGN
    assert planted.joinpath(*PATH, "kernel.o").read_bytes() == b"swapped"


def test_single_files_that_others_could_have_written_are_not_read(elsewhere: Path) -> None:
    cache.write_single("triton", "blocks.json", b"{}")
    assert cache.read_single("triton", "blocks.json") == b"{}"
    (elsewhere / "triton" / "blocks.json").chmod(0o666)
    with pytest.warns(UserWarning, match="other users may write into"):
        assert cache.read_single("triton", "blocks.json") is None


# Disks that are full


def full(monkeypatch: pytest.MonkeyPatch, folders: tuple[Path, ...] = ()) -> None:
    """From now on nothing can be written, in these folders or anywhere."""

    def refuse(path: Path, content: bytes, write: Callable[[Path, bytes], None] = cache.write_atomically) -> None:
        if not folders or any(path.parent.resolve().is_relative_to(folder) for folder in folders):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        write(path, content)

    monkeypatch.setattr(cache, "write_atomically", refuse)


def stepped(backend: str, lr: float) -> Any:
    """A parameter after one step of a rule that no other test has compiled, by its name."""
    rule = rulec.parse(f"name: Full{str(lr)[2:]}\nhyper: {{lr: {lr}}}\nstep: direction = g*{lr}")
    param = np.ones(3)
    rulec.array.Optimizer(rule, [param], backend=backend).step([np.ones(3)])
    return param


@pytest.mark.parametrize("backend", ["cpu", "c", "numpy"])
def test_a_full_cache_is_worked_around_with_one_warning(
    backend: str, elsewhere: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    full(monkeypatch, (elsewhere,))
    with pytest.warns(UserWarning, match=r"cannot be written \(No space left on device\): make room there, or"):
        assert (stepped(backend, 0.125) == 1 - 0.125**2).all()
    with warnings.catch_warnings(action="error"):
        assert (stepped(backend, 0.25) == 1 - 0.25**2).all()


def test_where_no_disk_has_room_kernels_are_kept_in_memory(elsewhere: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    full(monkeypatch)
    with pytest.warns(UserWarning, match="No space left on device"):
        assert (stepped("cpu", 0.375) == 1 - 0.375**2).all()
    with warnings.catch_warnings(action="error"):
        assert (stepped("numpy", 0.375) == 1 - 0.375**2).all()
        with pytest.raises(BackendUnavailable, match=r"neither in the kernel cache nor .*: set TMPDIR to a folder"):
            stepped("c", 0.375)


# What killed processes leave

pytest.importorskip("fcntl")


def killed(program: str, **environment: str) -> list[str]:
    """The lines that a program prints before it is killed."""
    text = f"import os, signal\n{program}\nos.kill(os.getpid(), signal.SIGKILL)"
    done = subprocess.run(
        [sys.executable, "-c", text], capture_output=True, text=True, check=False, env={**os.environ, **environment}
    )
    assert done.returncode == -9, done.stderr
    return done.stdout.split()


def test_a_folder_of_a_kernel_is_made_under_its_lock_alone(elsewhere: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Who holds the lock takes the folder away: another process that made it before would find it gone."""
    events: list[str] = []
    below, locked = cache.trust.below, cache._Entry.locked

    def noted(root: Path, names: Any, shown: Path, *, make: bool = False) -> Path:
        if make and len(names) == 3:
            events.append("made")
        return below(root, names, shown, make=make)

    @contextmanager
    def held(entry: Any) -> Iterator[None]:
        with locked(entry):
            events.append("locked")
            yield
            events.append("free")

    monkeypatch.setattr(cache.trust, "below", noted)
    monkeypatch.setattr(cache._Entry, "locked", held)
    source = cache.Source("source.c", "text")
    assert cache.kernel("c", "ab" * 32, "kernel.so", source, lambda path: b"code", lambda code, file: code) == b"code"
    assert cache.source_file("c", "cd" * 32, source).read_text() == "text"
    assert re.fullmatch(r"(locked( made)+ free ?)+", " ".join(events)), events
    assert elsewhere.is_dir()


def test_a_file_half_written_goes_with_the_next_writer(tmp_path: Path) -> None:
    file = tmp_path / "kernel.o"
    killed(
        f"from pathlib import Path; from rulec.files import written_whole\n"
        f"writing = written_whole(Path({str(file)!r})); opened = writing.__enter__()\n"
        f"opened.write(b'half'); opened.flush()"
    )
    (left,) = tmp_path.iterdir()
    assert re.fullmatch(r"\.kernel\.o\.[0-9a-f]{16}\.part", left.name)
    others = [tmp_path / name for name in (f".kernel.so.{'0' * 16}.part", ".kernel.o.mine.part", "kernel.o.part")]
    for other in others:
        other.touch()
    with written_whole(file) as opened:
        assert not left.exists()
        with written_whole(file) as other_writer:
            other_writer.write(b"second")
        opened.write(b"first")
    assert file.read_bytes() == b"first"
    assert {*tmp_path.iterdir()} == {file, *others}


@pytest.mark.slow
def test_a_folder_of_a_killed_process_goes_with_the_next_one(tmp_path: Path) -> None:
    program = "from rulec.backend.cache import process_folder; print(process_folder(), flush=True)"
    wait = f"{program}; input()"
    with subprocess.Popen(
        [sys.executable, "-c", wait], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
        env={**os.environ, "TMPDIR": str(tmp_path)},
    ) as living:  # fmt: skip
        assert living.stdout is not None
        alive = Path(living.stdout.readline().strip())
        dead, second = (Path(killed(program, TMPDIR=str(tmp_path))[0]) for _ in range(2))
        (tmp_path / "rulec-kernels-of_mine").mkdir()
        assert [dead.exists(), second.exists(), alive.exists()] == [False, True, True]
        living.communicate("\n")
    assert not alive.exists()


def test_a_write_is_whole_or_not_at_all(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "kernel"
    cache.write_atomically(path, b"before")

    def killed(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(os, "replace", killed)
    with pytest.raises(KeyboardInterrupt):
        cache.write_atomically(path, b"after")
    assert path.read_bytes() == b"before"
    assert [p.name for p in tmp_path.iterdir()] == ["kernel"]
