"""`rulec bench gpu`: correctness, bandwidth, peers and host time on one GPU, in less than nine minutes."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any

from benchmarks.gpu import check as gpu_check
from benchmarks.gpu import eager as gpu_eager
from benchmarks.gpu import es as gpu_es
from benchmarks.gpu import host as gpu_host
from benchmarks.gpu import jax as gpu_jax
from benchmarks.gpu import large as gpu_large
from benchmarks.gpu import rules as gpu_rules
from benchmarks.gpu import seed as gpu_seed
from benchmarks.gpu import sizes as gpu_sizes
from benchmarks.gpu import states as gpu_states
from benchmarks.gpu import tune as gpu_tune
from benchmarks.gpu.crew import Processes
from benchmarks.gpu.device import Bench, gpu_facts, missing
from benchmarks.gpu.part import Findings, Section
from benchmarks.gpu.run import Run
from benchmarks.result import Result
from rulec.compare.machine import cores, facts, memory, version
from rulec.errors import RulecError

#: Seconds in which all is over, the start and the end of processes included.
BUDGET = 500.0

#: Processes that check rules at once, and memory of the machine for each.
MOST_WORKERS, WORKER_BYTES = 16, 6 * 2**30

#: Packages with peers, whose versions are recorded.
PEERS = ("heavyball", "torch-optimi", "apex", "bitsandbytes")

Advance = Callable[[], object]
Keep = Callable[[Result], object]


def sections(only: Sequence[str], backends: Sequence[str]) -> list[Section]:
    """The sections of the measurement, the most important first; rules are checked on `backends`."""
    return [
        Section("correctness", gpu_check.parts(backends, only), 210.0, together=True),
        Section("compiling", gpu_rules.warm_parts(only), 60.0, together=True),
        Section("fused", [*gpu_sizes.fused_parts(only), *gpu_large.parts(only)], 60.0),
        Section("host", gpu_host.parts(only), 40.0),
        Section("seed", gpu_seed.parts(only), 30.0),
        Section("rules", gpu_rules.parts(only), 120.0),
        Section("reducing rules", gpu_rules.reducing_parts(only), 80.0),
        Section("states in codes", gpu_states.parts(only), 40.0),
        Section("jax", gpu_jax.parts(only), 60.0),
        Section("eager", gpu_eager.parts(only), 60.0),
        Section("noise", gpu_es.parts(only), 45.0),
        Section("other ways", gpu_rules.other_parts(only), 25.0),
        Section("peers", gpu_sizes.peer_parts(only), 240.0),
    ]


def parts(only: Sequence[str], tune: bool = False) -> int:
    """The number of calls of `advance` in `measure`, where every backend is there."""
    planned = tuning() if tune else sections(only, gpu_check.BACKENDS)
    return sum(len(section.parts) for section in planned)


def tuning() -> list[Section]:
    """The sections of `--tune`."""
    return [Section("block sizes", gpu_tune.parts(), BUDGET)]


def measure(
    quick: bool, only: Sequence[str], advance: Advance = lambda: None, keep: Keep = lambda _: None, tune: bool = False
) -> Result:
    """The measurement; after every part `keep` takes the result so far, and `advance` is called.

    With `tune` block sizes are measured instead, and unless `quick` written. RulecError where there is no GPU.
    """
    begin = time.monotonic()
    reason = missing()
    if reason is not None:
        raise RulecError(reason)
    backends, unusable = gpu_check.usable_backends()
    notes = [] if tune else [*unusable, *_left_out(only)]
    findings, machine, spent = Findings(notes=notes), _machine(), dict[str, float]()

    def result() -> Result:
        rows = [*findings.correctness(), *findings.rows]
        where = {**machine, "seconds": dict(spent)}
        return Result("gpu_blocks" if tune else "gpu", rows, quick, cores(), list(findings.notes), where)

    def changed() -> None:
        advance()
        keep(result())

    crew = Processes(1 if tune else workers(), Bench(quick))
    run = Run(crew, findings, BUDGET - (time.monotonic() - begin), time.monotonic, changed)
    try:
        for section in tuning() if tune else sections(only, backends):
            spent[section.name] = _seconds_of(run, crew, section)
    finally:
        crew.close()
    if tune and not quick:
        _save_blocks(findings, machine["gpu"]["name"])
    return result()


def _seconds_of(run: Run, crew: Processes, section: Section) -> float:
    """Runs a section, a timed one with the device to itself, and returns its seconds."""
    begin = time.monotonic()
    if not section.together:
        crew.close(first=1)
    run.section(section)
    return time.monotonic() - begin


def _save_blocks(findings: Findings, device: str) -> None:
    chosen = gpu_tune.table(findings.rows)
    if chosen:
        gpu_tune.save(device, chosen)
        findings.say(f"the triton backend has these blocks on {device} from now on")


def workers() -> int:
    """The number of processes that check rules at once."""
    return max(1, min(MOST_WORKERS, cores() - 1, (memory() or WORKER_BYTES) // WORKER_BYTES))


def _left_out(only: Sequence[str]) -> list[str]:
    seed = gpu_seed.missing()
    return [*gpu_sizes.not_installed(only), *gpu_jax.missing(only), *([seed] if seed else [])]


def _machine() -> dict[str, Any]:
    """The facts of the machine, its GPU, and the versions of peers."""
    machine = facts()
    return {**machine, "gpu": gpu_facts(), "versions": {**machine["versions"], **{p: version(p) for p in PEERS}}}
