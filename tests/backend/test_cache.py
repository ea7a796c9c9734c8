"""The kernel cache: whose folder it is, and what happens where there can be none."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from rulec.backend import cache

STEP = "import numpy as np, rulec; p = np.ones(3); rulec.array.Optimizer('sgd', [p], lr=1.0).step([p.copy()]); print(p)"


@pytest.fixture
def elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("RULEC_CACHE_DIR", str(tmp_path / "cache"))
    cache._process_folder.cache_clear()
    return tmp_path / "cache"


def test_the_folder_is_made_for_its_user_alone(elsewhere: Path) -> None:
    assert cache.cache_folder() == elsewhere
    assert elsewhere.stat().st_mode & 0o777 == 0o700


def test_a_file_in_its_place_is_worked_around_with_a_warning(elsewhere: Path) -> None:
    elsewhere.write_text("not a folder")
    with pytest.warns(UserWarning, match="cannot be made .*: set RULEC_CACHE_DIR to a folder of your own; until then"):
        found = cache.cache_folder()
    assert found != elsewhere
    assert found.is_dir()
    assert cache.cache_folder() == found


@pytest.mark.skipif(not hasattr(os, "getuid"), reason="users are told apart by number")
def test_another_users_folder_is_not_trusted(elsewhere: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    elsewhere.mkdir()
    monkeypatch.setattr(os, "getuid", lambda: elsewhere.stat().st_uid + 1)
    if elsewhere.stat().st_uid == 0:
        os.chown(elsewhere, 12345, 12345)
    with pytest.warns(UserWarning, match="belongs to another user"):
        assert cache.cache_folder() != elsewhere


def test_a_process_without_a_cache_still_steps(elsewhere: Path) -> None:
    elsewhere.write_text("not a folder")
    done = subprocess.run([sys.executable, "-c", STEP], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[0. 0. 0.]"
    assert "set RULEC_CACHE_DIR" in done.stderr


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
