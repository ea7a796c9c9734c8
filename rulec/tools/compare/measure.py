"""The machine behind the figures: enough facts to judge them, and nothing that identifies it."""

from __future__ import annotations

import importlib.metadata
import os
import platform
from pathlib import Path
from typing import Any

#: Packages whose versions change the results of measurements and checks.
PACKAGES = ("numpy", "numba", "llvmlite", "torch", "jax", "jaxlib", "optax", "mlx", "triton", "cupy", "sympy")

#: The names under which some of them are installed, beside their own.
_WHEELS = {"cupy": ("cupy-cuda13x", "cupy-cuda12x", "cupy-cuda11x")}


def versions() -> dict[str, str | None]:
    """The version of Python, of rulec and of each package that matters; None where it is not installed."""
    return {"python": platform.python_version(), **{name: version(name) for name in ("rulec", *PACKAGES)}}


def version(package: str) -> str | None:
    """The version of an installed package; None where it is not installed."""
    for name in (package, *_WHEELS.get(package, ())):
        try:
            return importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return None


def cores() -> int:
    """The processors this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def cpu_model() -> str:
    """The processor's own name of itself."""
    for line in _read("/proc/cpuinfo").splitlines():
        if line.startswith("model name"):
            return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()


def last_level_cache() -> int | None:
    """Bytes of the largest cache of the first processor; None where the system does not say."""
    sizes = [_read(str(file)).strip() for file in Path("/sys/devices/system/cpu/cpu0/cache").glob("index*/size")]
    units = {"K": 2**10, "M": 2**20}
    return max((int(size[:-1]) * units[size[-1]] for size in sizes if size[-1:] in units), default=None)


def _read(path: str) -> str:
    try:
        return Path(path).read_text(encoding="utf-8")
    except OSError:
        return ""


def facts() -> dict[str, Any]:
    """Processor, cores, cache, memory, system and versions."""
    return {
        "cpu": cpu_model(),
        "cores": cores(),
        "last_level_cache_bytes": last_level_cache(),
        "memory_bytes": memory(),
        "system": f"{platform.system()} {platform.machine()}",
        "versions": versions(),
    }


def memory() -> int | None:
    """Bytes of main memory; None where the system does not say."""
    try:
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    except (AttributeError, ValueError, OSError):
        return None
