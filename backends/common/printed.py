"""Printed source as a module: a real file in the cache, where tracebacks, debuggers and `inspect` find its lines."""

from __future__ import annotations

from typing import Any

from rulec.backend import cache
from rulec.backend.cache import Source


def run_source(backend: str, name: str, source: str) -> dict[str, Any]:
    """Runs the source printed for the program `name`. Its definitions, by name."""
    file_name = cache.file_name(name)
    path = cache.source_file(backend, cache.cache_key(source), Source(f"{file_name}.py", source))
    namespace: dict[str, Any] = {"__name__": f"rulec_printed.{file_name}", "__file__": str(path)}
    exec(compile(source, str(path), "exec"), namespace)  # noqa: S102 - printed by rulec
    return namespace
