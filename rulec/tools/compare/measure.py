"""Measurements of a comparison: timing by turns, and the facts of the machine behind the figures.

By turns, every contender runs once a round: other work of the machine slows all of them alike. The
facts are enough to judge the figures, and nothing in them identifies the machine.
"""

from __future__ import annotations

import gc
import importlib.metadata
import os
import platform
import statistics
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
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


#: A sample is at least this long, in seconds, made of as many calls as that takes.
SHORTEST_SAMPLE = 2e-3


@dataclass(frozen=True)
class Times:
    """Seconds of one call of each contender, round by round."""

    seconds: Mapping[str, list[float]]

    def median(self, name: str) -> float:
        """The median time of one call."""
        return statistics.median(self.seconds[name])

    def medians(self) -> dict[str, float]:
        """Contender -> the median time of one call."""
        return {name: self.median(name) for name in self.seconds}

    def ratio(self, above: str, below: str) -> float:
        """The median over the rounds of one contender's time over another's.

        Round by round, because a machine that changes its speed in between changes it for both.
        """
        return statistics.median(self._ratios(above, below))

    def quartiles(self, above: str, below: str) -> tuple[float, float]:
        """The first and third quartile of the ratio within a round: how far it scatters."""
        ratios = self._ratios(above, below)
        if len(ratios) < 2:
            return ratios[0], ratios[0]
        first, _, third = statistics.quantiles(ratios, n=4, method="inclusive")
        return first, third

    def detail(self, above: str, below: str) -> dict[str, Any]:
        """The numbers behind a ratio: the median of each contender, and how far the ratio scatters."""
        return {**self.medians(), "scatter": self.quartiles(above, below)}

    def _ratios(self, above: str, below: str) -> list[float]:
        return [a / b for a, b in zip(self.seconds[above], self.seconds[below], strict=True)]


def interleaved(
    contenders: Mapping[str, Callable[[], object]], rounds: int, advance: Callable[[], object] = lambda: None, *,
    settled: bool = False,
) -> Times:  # fmt: skip
    """Times every contender once a round, in an order that turns; two rounds before do not count.

    With `settled` each is called once untimed before its sample. This matters where the data of one contender fits the
    cache and the data of all does not: each then finds its own data in the cache, as in training. Short calls are
    repeated for one sample. `advance` is called after each round. Garbage is collected between rounds, never within.
    """
    names = list(contenders)
    samples: dict[str, list[float]] = {name: [] for name in names}
    with without_collection():
        calls = {name: _calls(contenders[name]) for name in names}
        for number in range(-1, rounds):
            turned = names[number % len(names) :] + names[: number % len(names)]
            for name in turned:
                if settled:
                    contenders[name]()
                seconds = _sample(contenders[name], calls[name])
                if number >= 0:
                    samples[name].append(seconds)
            gc.collect()
            advance()
    return Times(samples)


def _calls(contender: Callable[[], object]) -> int:
    """The number of calls in a sample; the calls that determine it are the first warm-up."""
    contender()
    count = 1
    while True:
        seconds = _sample(contender, count) * count
        if seconds >= SHORTEST_SAMPLE:
            return count
        count = max(count + 1, min(10 * count, int(1.2 * count * SHORTEST_SAMPLE / max(seconds, 1e-9))))


def _sample(contender: Callable[[], object], calls: int) -> float:
    begin = time.perf_counter()
    for _ in range(calls):
        contender()
    return (time.perf_counter() - begin) / calls


@contextmanager
def without_collection() -> Iterator[None]:
    """Within the block Python collects no garbage by itself, and `gc.collect` spares objects from before the block."""
    enabled = gc.isenabled()
    gc.disable()
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()
        if enabled:
            gc.enable()
