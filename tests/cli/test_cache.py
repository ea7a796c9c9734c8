"""`rulec cache`."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from rulec.backend.cache import Source, cache_key, kernel
from tests.cli.running import error, run, run_json


@pytest.fixture
def own_cache(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    folder = tmp_path / "cache"
    folder.mkdir(mode=0o700)
    monkeypatch.setenv("RULEC_CACHE_DIR", str(folder))
    return folder


def keep(text: str, kind: str = "cpu", file: str = "kernel.o") -> str:
    """Puts a kernel of 100 bytes into the cache; its key."""
    key = cache_key(text)
    kernel(kind, key, file, Source("rule.py", text), lambda _: b"x" * 100, lambda content, _: content)
    return key


def tree(folder: Path) -> set[str]:
    return {str(path.relative_to(folder)) for path in folder.rglob("*")}


def test_kernels_are_counted_and_cleared(own_cache: Path) -> None:
    for text in ("one", "two"):
        keep(text)
    found, of_both = run_json("cache", "info"), 2 * (100 + 32 + 3)
    assert (found["folder"], found["kernels"], found["bytes"]) == (str(own_cache), 2, of_both)
    assert found["backends"] == {"cpu": {"kernels": 2, "bytes": of_both}}
    assert "2 kernels, 0.0 MB" in run("cache", "info")
    assert run_json("cache", "clear") == {"folder": str(own_cache), "cleared": 2, "left": []}
    assert tree(own_cache) == set()
    assert run_json("cache", "info")["kernels"] == 0


def test_an_empty_cache_is_no_error(own_cache: Path) -> None:
    assert run("cache", "info") == f"{own_cache}: 0 kernels, 0.0 MB\n"
    assert run("cache", "clear") == f"{own_cache}: 0 kernels thrown away\n"


def test_only_what_the_cache_made_is_cleared(own_cache: Path) -> None:
    """The folder is one of work, by mistake: with files and folders that look a little like the cache's."""
    key = keep("one")
    entry, other = f"cpu/{key[:2]}/{key}", "0" * 64
    theirs = [
        "thesis.tex", "src/main.py", ".git/kernel.o", "cpu/notes.txt", "cpu/blocks.json", f"cpu/11/{other}/kernel.o",
        f"{other}.lock", f"cpu/{key[:2]}/notes.o", f"cpu/{key[:2]}/{'a' * 63}/x", f"{entry}/notes.txt",
        f"{entry}/sub/kernel.o",
    ]  # fmt: skip
    for name in theirs:
        (own_cache / name).parent.mkdir(parents=True, exist_ok=True)
        (own_cache / name).write_text("mine")
    found = run_json("cache", "clear")
    assert {name for name in tree(own_cache) if (own_cache / name).is_file()} == set(theirs)
    assert found["cleared"] == 1
    assert {"thesis.tex", "src/", ".git", f"{entry}/notes.txt", f"{entry}/sub", "cpu/11/"} <= set(found["left"])
    assert "left, as the cache did not make it or it is in use: .git, 0000" in run("cache", "clear")


def test_links_lead_nowhere_but_for_the_folder_itself(
    own_cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    key = keep("one")
    outside = tmp_path / "outside"
    (outside / key[:2] / key).mkdir(parents=True)
    for name in (f"{key[:2]}/{key}/kernel.o", "kernel.o", f"{key}.lock"):
        (outside / name).write_text("mine")
    before = tree(outside)
    links = {"c": outside, "cpu/11": outside / key[:2], f"cpu/{key[:2]}/{key}/other.o": outside / "kernel.o"}
    for name, target in links.items():
        (own_cache / name).symlink_to(target)
    (tmp_path / "link").symlink_to(own_cache)
    monkeypatch.setenv("RULEC_CACHE_DIR", str(tmp_path / "link"))
    assert run_json("cache", "clear")["cleared"] == 1
    assert tree(outside) == before
    assert {name for name in links if (own_cache / name).is_symlink()} == set(links)
    assert (tmp_path / "link").is_symlink()


def test_what_was_written_when_a_process_was_killed_is_cleared(own_cache: Path) -> None:
    key = keep("one")
    folder = own_cache / "cpu" / key[:2] / key
    for name in (f".kernel.o.{'0' * 16}.part", "kernel.oab12cd_9"):
        (folder / name).write_text("half")
    (own_cache / "triton").mkdir()
    (own_cache / "triton" / f".blocks.json.{'1' * 16}.part").write_text("half")
    assert run_json("cache", "clear")["left"] == []
    assert tree(own_cache) == set()


def test_a_kernel_that_is_being_compiled_stays(own_cache: Path) -> None:
    fcntl = pytest.importorskip("fcntl")
    key = keep("one")
    with (own_cache / "cpu" / key[:2] / f"{key}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        found = run_json("cache", "clear")
    assert found["cleared"] == 0
    assert (own_cache / "cpu" / key[:2] / key / "kernel.o").exists()
    assert run_json("cache", "clear")["cleared"] == 1


def test_a_cache_that_others_may_write_into_is_told_and_cleared(own_cache: Path) -> None:
    keep("one")
    os.chmod(own_cache, 0o1777)
    assert "other users may write into" in run("cache", "info")
    assert run_json("cache", "info")["kernels"] == 1
    assert run_json("cache", "clear")["cleared"] == 1


def test_a_file_in_the_place_of_the_folder_is_no_cache(own_cache: Path) -> None:
    own_cache.rmdir()
    own_cache.write_text("mine")
    assert "cannot be cleared: Not a directory" in error("cache", "clear")
    assert own_cache.read_text() == "mine"
