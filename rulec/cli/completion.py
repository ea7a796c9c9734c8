"""What a shell offers for the arguments of commands: rules, files of rules, backends."""

from __future__ import annotations

import os
from glob import escape
from pathlib import Path


def rule_words(incomplete: str) -> list[str]:
    """Rules of the library and of packages, and rule files and folders, that begin so."""
    from rulec.language.library.load import rules

    names = sorted({*rules(), *(name.rpartition("/")[2] for name in rules())})
    return [name for name in names if name.startswith(incomplete)] + _files(incomplete)


def backend_words(incomplete: str) -> list[str]:
    """Backends that begin so."""
    from rulec.backend import registry

    return [name for name in registry.names() if name.startswith(incomplete)]


def _files(incomplete: str) -> list[str]:
    """Files in YAML or Python, and folders with a slash behind them."""
    folder, _, begin = incomplete.rpartition("/")
    paths = sorted(Path(f"{folder}/" if incomplete.startswith("/") else folder).glob(f"{escape(begin)}*"))
    above = f"{folder}/" if "/" in incomplete else ""
    files = [f"{above}{path.name}" for path in paths if path.suffix in (".yaml", ".yml", ".py")]
    hidden = begin.startswith(".")
    folders = [f"{above}{path.name}/" for path in paths if os.path.isdir(path) and (hidden or path.name[0] != ".")]
    return files + folders
