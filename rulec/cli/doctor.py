"""`rulec doctor`: whether rulec can work here, and what is in its way."""

from __future__ import annotations

import os
from typing import Any

import typer

from rulec.cli.arguments import JsonFlag
from rulec.cli.console import console, print_json, print_table


def doctor(json: JsonFlag = False) -> None:
    """Say what runs here, and what does not and why.

    Each backend, versions, cores and the cache of kernels. Exit code 1 where rulec cannot work.
    """
    found = examine()
    if json:
        print_json(found)
    else:
        _print(found)
    if found["problems"]:
        raise typer.Exit(1)


def examine() -> dict[str, Any]:
    """What doctor says, as data."""
    from rulec.compare.machine import facts

    machine = facts()
    backends = _backends()
    cache, problem = _cache()
    problems = [problem] if problem else []
    if not any(reason is None for reason in backends.values()):
        problems.append("no backend runs here: install numba for the cpu backend")
    threads = os.environ.get("RULEC_NUM_THREADS")
    return {"backends": backends, **machine, "rulec_num_threads": threads, "cache": cache, "problems": problems}


def _backends() -> dict[str, str | None]:
    """Each installed backend: None where it runs here, else why not."""
    from rulec.backend import registry
    from rulec.errors import BackendUnavailable

    found: dict[str, str | None] = {}
    for name in registry.names():
        try:
            found[name] = registry.get(name).unavailable_reason()
        except BackendUnavailable as error:
            found[name] = str(error)
    return found


def _cache() -> tuple[dict[str, Any], str | None]:
    """What the cache holds, and what is wrong with it."""
    from rulec.cli.cache import cache_info

    found = cache_info()
    trouble = found.pop("trouble")
    return ({}, trouble) if trouble else (found, None)


def _print(found: dict[str, Any]) -> None:
    rows = [[name, "[green]ok[/]" if reason is None else f"[yellow]no[/]: {reason}"]
            for name, reason in found["backends"].items()]  # fmt: skip
    print_table(("backend", "here"), rows)
    out = console()
    out.print()
    threads = found["rulec_num_threads"]
    size = found["last_level_cache_bytes"]
    machine = f"{found['cpu']}, {found['cores']} cores" + (f", {size / 2**20:.0f} MiB cache" if size else "")
    out.print(machine + (f", RULEC_NUM_THREADS={threads}" if threads else ""), markup=False)
    installed = [f"{name} {version}" for name, version in found["versions"].items() if version]
    out.print(", ".join(installed), markup=False)
    if found["cache"]:
        cache = found["cache"]
        out.print(f"cache {cache['folder']}: {cache['kernels']} kernels, {cache['bytes'] / 1e6:.1f} MB", markup=False)
    for problem in found["problems"]:
        out.print(f"[red]problem[/]: {problem}")
