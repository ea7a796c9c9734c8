"""The entries of all rules, made in several processes and kept until the code or a rule changes."""

from __future__ import annotations

import hashlib
import json
import multiprocessing
import os
import shutil
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict
from pathlib import Path

import rulec
from gallery.page import Entry, entry

ROOT = Path(__file__).resolve().parent.parent
KEPT = ROOT / "build" / "gallery"
#: Names of rules, with spaces between, where not all are wanted.
VARIABLE = "RULEC_GALLERY"
#: Fewest rules that are worth another process.
FEW = 6


def names() -> list[str]:
    """The rules of the library; with RULEC_GALLERY, the rules named there."""
    chosen = os.environ.get(VARIABLE, "").split()
    return chosen or [name for name in rulec.rules() if (ROOT / "rules" / f"{name}.yaml").is_file()]


def entries(rules: Sequence[str]) -> list[Entry]:
    """The entries of these rules, in their order."""
    folder = _folder()
    kept = {name: _read(folder / f"{name.replace('/', '-')}.json") for name in rules}
    missing = [name for name in rules if kept[name] is None]
    for name, new in zip(missing, _new_entries(missing), strict=True):
        (folder / f"{new.slug}.json").write_text(json.dumps(asdict(new)))
        kept[name] = new
    return [one for one in kept.values() if one is not None]


def _new_entries(rules: list[str]) -> list[Entry]:
    processes = min(len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else 1, 8)
    if processes == 1 or len(rules) < FEW:
        return [entry(name) for name in rules]
    with ProcessPoolExecutor(processes, multiprocessing.get_context("spawn")) as pool:
        return list(pool.map(entry, rules, chunksize=4))


def _folder() -> Path:
    """The folder of entries made by the code and the rules of now; older folders are removed."""
    digest = hashlib.sha256()
    for part in ("rulec", "backends", "rules", "gallery", "docs/data"):
        for file in sorted((ROOT / part).rglob("*")):
            if file.suffix in (".py", ".yaml", ".json"):
                digest.update(file.read_bytes())
    folder = KEPT / digest.hexdigest()[:16]
    for old in KEPT.glob("*"):
        if old != folder:
            shutil.rmtree(old, ignore_errors=True)
    folder.mkdir(parents=True, exist_ok=True)
    return folder


def _read(file: Path) -> Entry | None:
    try:
        return Entry(**json.loads(file.read_text()))
    except (OSError, ValueError, TypeError):
        return None
