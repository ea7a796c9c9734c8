"""`rulec cache`: the compiled kernels on disk."""

from __future__ import annotations

from typing import Any

import typer

from rulec.cli.arguments import JsonFlag
from rulec.cli.console import print_json

app = typer.Typer(no_args_is_help=True, help="Say what compiled kernels are kept, or clear them.")


@app.command()
def info(json: JsonFlag = False) -> None:
    """Say where compiled kernels are kept, how many there are and how much room they take."""
    found = cache_info()
    if json:
        print_json(found)
    else:
        print(f"{found['folder']}: {found['kernels']} kernels, {found['bytes'] / 1e6:.1f} MB")


@app.command()
def clear(json: JsonFlag = False) -> None:
    """Throw every compiled kernel away; they are compiled again when they are needed."""
    from rulec.backend.cache import cache_folder
    from rulec.backend.cache import clear as clear_cache

    folder, held = cache_folder(), clear_cache()
    if json:
        print_json({"folder": str(folder), "cleared": held})
    else:
        print(f"{folder}: {held} kernels thrown away")


def cache_info() -> dict[str, Any]:
    """The cache's folder, how many kernels it holds and their size in bytes, by backend and in all."""
    from rulec.backend.cache import cache_folder

    folder = cache_folder()
    backends = {
        kind.name: {"kernels": sum(1 for _ in kind.glob("*/*/")), "bytes": _size(kind)}
        for kind in sorted(folder.iterdir())
        if kind.is_dir()
    }
    total = {key: sum(b[key] for b in backends.values()) for key in ("kernels", "bytes")}
    return {"folder": str(folder), **total, "backends": backends}


def _size(folder: Any) -> int:
    """Bytes of all files below; one that another process removes meanwhile counts nothing."""
    total = 0
    for file in folder.rglob("*"):
        try:
            total += file.stat().st_size if file.is_file() else 0
        except OSError:
            continue
    return total
