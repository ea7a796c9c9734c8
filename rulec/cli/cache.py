"""`rulec cache`: the compiled kernels on disk."""

from __future__ import annotations

from typing import Any

import typer

from rulec.cli.arguments import JsonFlag
from rulec.cli.console import print_json
from rulec.cli.examples import epilog

app = typer.Typer(no_args_is_help=True, help="Say what compiled kernels are kept, or clear them.")


@app.command(epilog=epilog("cache info"))
def info(json: JsonFlag = False) -> None:
    """Say where compiled kernels are kept, how many there are and how much room they take."""
    facts = cache_info()
    if json:
        print_json(facts)
    else:
        print(f"{facts['folder']}: {facts['kernels']} kernels, {facts['bytes'] / 1e6:.1f} MB")
        if facts["trouble"]:
            print(facts["trouble"])


@app.command(epilog=epilog("cache clear"))
def clear(json: JsonFlag = False) -> None:
    """Throw every compiled kernel away, and every rule file that was fetched.

    They are compiled and fetched again when they are needed. Other files in the folder are left.
    """
    from rulec.backend.trust import clear as clear_cache
    from rulec.files import wanted_folder

    folder, cleared = wanted_folder(), clear_cache()
    if json:
        print_json({"folder": str(folder), "cleared": cleared.kernels, "left": list(cleared.left)})
        return
    print(f"{folder}: {cleared.kernels} kernels thrown away")
    if cleared.left:
        more = f" and {len(cleared.left) - 5} more" if len(cleared.left) > 5 else ""
        print(f"left, as the cache did not make it or it is in use: {', '.join(cleared.left[:5])}{more}")


def cache_info() -> dict[str, Any]:
    """The cache's folder, how many kernels it holds and their size in bytes, by backend and in all."""
    from rulec.backend.cache import cache_trouble
    from rulec.backend.trust import kept
    from rulec.files import wanted_folder

    backends = kept()
    total = {key: sum(b[key] for b in backends.values()) for key in ("kernels", "bytes")}
    return {"folder": str(wanted_folder()), **total, "backends": backends, "trouble": cache_trouble()}
