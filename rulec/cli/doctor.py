"""`rulec doctor`: whether rulec can work here, and the problems where it cannot."""

from __future__ import annotations

import os
from typing import Any

import typer

from rulec.cli.arguments import JsonFlag
from rulec.cli.console import console, print_json, print_table, progress


def doctor(json: JsonFlag = False) -> None:
    """Say which backends run here, and why the others do not.

    With versions, cores and the cache of kernels. Exit code 1 where rulec cannot work.
    """
    facts = examine()
    if json:
        print_json(facts)
    else:
        _print(facts)
    if facts["problems"]:
        raise typer.Exit(1)


def examine() -> dict[str, Any]:
    """The report of `rulec doctor`, as data."""
    from rulec.tools.compare.measure import facts

    machine = facts()
    backends = _backends()
    cache, problem = _cache()
    problems = [problem] if problem else []
    if not any(reason is None for reason in backends.values()):
        problems.append("no backend runs here: install numba for the cpu backend")
    threads = os.environ.get("RULEC_NUM_THREADS")
    return {"backends": backends, **machine, "rulec_num_threads": threads, "cache": cache, "problems": problems}


def _backends() -> dict[str, str | None]:
    """Installed backend -> None where it runs here, else the reason."""
    from rulec.backend import registry
    from rulec.errors import BackendUnavailable

    reasons: dict[str, str | None] = {}
    names = registry.names()
    with progress() as shown:
        task = shown.add_task("backends", total=len(names))
        for name in names:
            shown.update(task, description=f"trying {name}")
            try:
                reasons[name] = registry.reason_against(registry.get(name))
            except BackendUnavailable as error:
                reasons[name] = str(error)
            shown.advance(task)
    return reasons


def _cache() -> tuple[dict[str, Any], str | None]:
    """The facts of the cache, and its problem, None where there is none."""
    from rulec.cli.cache import cache_info

    facts = cache_info()
    trouble = facts.pop("trouble")
    return ({}, trouble) if trouble else (facts, None)


def _print(facts: dict[str, Any]) -> None:
    from rich.markup import escape

    rows = [[name, "[green]ok[/]" if reason is None else f"[yellow]no[/]: {escape(reason)}"]
            for name, reason in facts["backends"].items()]  # fmt: skip
    print_table(("backend", "here"), rows)
    out = console()
    out.print()
    threads = facts["rulec_num_threads"]
    size = facts["last_level_cache_bytes"]
    machine = f"{facts['cpu']}, {facts['cores']} cores" + (f", {size / 2**20:.0f} MiB cache" if size else "")
    out.print(machine + (f", RULEC_NUM_THREADS={threads}" if threads else ""), markup=False)
    installed = [f"{name} {version}" for name, version in facts["versions"].items() if version]
    out.print(", ".join(installed), markup=False)
    if facts["cache"]:
        cache = facts["cache"]
        out.print(f"cache {cache['folder']}: {cache['kernels']} kernels, {cache['bytes'] / 1e6:.1f} MB", markup=False)
    for problem in facts["problems"]:
        out.print(f"[red]problem[/]: {problem}")
