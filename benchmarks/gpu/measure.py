"""`rulec bench gpu`: correctness, bandwidth, memory, peers and host time on one GPU, a part at a time or all that fit.

A run ends within the seconds that it is given, or in less than nine minutes, whatever is asked for.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from benchmarks.gpu import check as gpu_check
from benchmarks.gpu import eager as gpu_eager
from benchmarks.gpu import es as gpu_es
from benchmarks.gpu import first as gpu_first
from benchmarks.gpu import host as gpu_host
from benchmarks.gpu import jax as gpu_jax
from benchmarks.gpu import large as gpu_large
from benchmarks.gpu import layers as gpu_layers
from benchmarks.gpu import llama as gpu_llama
from benchmarks.gpu import lowrank as gpu_lowrank
from benchmarks.gpu import matrices as gpu_matrices
from benchmarks.gpu import muon as gpu_muon
from benchmarks.gpu import offload as gpu_offload
from benchmarks.gpu import rules as gpu_rules
from benchmarks.gpu import seed as gpu_seed
from benchmarks.gpu import sizes as gpu_sizes
from benchmarks.gpu import states as gpu_states
from benchmarks.gpu import tune as gpu_tune
from benchmarks.gpu import watch as gpu_watch
from benchmarks.gpu import weights as gpu_weights
from benchmarks.gpu.asked import BUDGET, Asked
from benchmarks.gpu.crew import Processes
from benchmarks.gpu.device import Bench, gpu_facts, missing
from benchmarks.gpu.part import Findings, Section
from benchmarks.gpu.run import Run
from benchmarks.result import Record, Result
from rulec.errors import RulecError
from rulec.tools.compare.measure import cores, facts, memory, version

#: Processes that check rules at once, and memory of the machine for each.
MOST_WORKERS, WORKER_BYTES = 16, 6 * 2**30

#: Packages with peers, whose versions are recorded.
PEERS = (
    "heavyball", "torch-optimi", "apex", "bitsandbytes", "dion", "emerging-optimizers", "pytorch_optimizer",
    "kron-torch", "apollo-torch", "galore-torch", "hyperscalees", "torchao",
)  # fmt: skip

Advance = Callable[[], object]
Keep = Callable[[Result], object]


def sections(
    only: Sequence[str], backends: Sequence[str], chosen: Sequence[str] = (), unusable: Sequence[str] = (),
    budget: float = BUDGET,
) -> list[Section]:  # fmt: skip
    """The sections of the measurement, the most important first, or of the chosen parts alone.

    Rules are checked on `backends`; `unusable` says why not on others. A section has a limit, to leave time
    to the next ones: those below, for a budget of `BUDGET` seconds. Chosen parts share all time.
    """
    every = [
        Section("correctness", gpu_check.parts(backends, only), 210.0, together=True, notes=unusable),
        Section("large", gpu_large.parts(only), 40.0),
        Section("fused", gpu_sizes.judged_parts(only), 90.0, notes=gpu_sizes.not_installed(only)),
        Section("host", gpu_host.parts(only), 40.0),
        Section("seed", gpu_seed.parts(only), 30.0, notes=[note for note in (gpu_seed.missing(),) if note]),
        Section("rules", gpu_rules.warm_parts(only), 30.0, together=True),
        Section("rules", gpu_rules.parts(only), 120.0),
        Section("reductions", gpu_rules.reducing_warm_parts(only), 30.0, together=True),
        Section("reductions", gpu_layers.parts(only), 60.0),
        Section("reductions", gpu_rules.reducing_parts(only), 80.0),
        Section("states", [*gpu_states.parts(only), *gpu_weights.parts(only)], 60.0, notes=gpu_states.missing(only)),
        Section("watch", gpu_watch.parts(only), 30.0),
        Section("jax", gpu_jax.parts(only), 60.0, notes=gpu_jax.missing(only)),
        Section("eager", gpu_eager.parts(only), 60.0),
        Section("llama", gpu_llama.parts(only), 90.0),
        Section("offload", gpu_offload.parts(only), 120.0),
        Section("lowrank", gpu_lowrank.parts(only), 30.0, notes=gpu_lowrank.missing(only)),
        Section("noise", gpu_es.parts(only), 45.0),
        Section("ways", gpu_rules.other_parts(only), 25.0),
        Section("muon", gpu_muon.parts(only), 150.0, notes=gpu_muon.missing(only)),
        Section("matrices", gpu_matrices.parts(only), 150.0, notes=gpu_matrices.missing(only)),
        Section("peers", gpu_sizes.peer_parts(only), 240.0, notes=gpu_sizes.not_installed(only)),
    ]
    share = budget / len({*chosen}) if chosen else 0.0
    limits = [(one, max(share, one.seconds * budget / BUDGET)) for one in every if not chosen or one.name in chosen]
    return [replace(one, seconds=seconds) for one, seconds in limits]


def parts(only: Sequence[str], asked: Asked | None = None) -> int:
    """The number of calls of `advance` in `measure`, where every backend is there. RulecError as of `Asked.check`."""
    planned = _planned(only, gpu_check.BACKENDS, (), asked or Asked())
    return sum(len(section.parts) for section in planned)


def _planned(
    only: Sequence[str], backends: Sequence[str], unusable: Sequence[str], asked: Asked
) -> list[Section]:  # fmt: skip
    asked.check(only)
    if asked.tune:
        return [Section("block sizes", gpu_tune.parts(), asked.budget)]
    if asked.first:
        return gpu_first.sections(asked.first, backends, unusable, asked.budget)
    return sections(only, backends, asked.parts, unusable, asked.budget)


class Ledger:
    """The findings of each part and the seconds it took: the result so far, at any time."""

    def __init__(self, quick: bool, only: Sequence[str], asked: Asked) -> None:
        self.quick, self.only, self.asked = quick, list(only), asked
        self.machine = _machine()
        self.findings: dict[str, Findings] = {}
        self._seconds: dict[str, float] = {}
        self._ran: dict[str, bool] = {}

    def run(self, run: Run, crew: Processes, section: Section) -> None:
        """Runs a section, a timed one with the device to itself."""
        begin = time.monotonic()
        findings = self.findings.setdefault(section.name, Findings())
        for note in section.notes:
            findings.say(note)
        if not section.together:
            crew.close(first=1)
        self._ran[section.name] = True  # while it is under way: the result so far has its rows
        self._ran[section.name] = run.section(section, findings) > 0
        self._seconds[section.name] = self._seconds.get(section.name, 0.0) + time.monotonic() - begin

    def result(self) -> Result:
        """All rows, each with its part; of `--tune` without parts."""
        rows = {name: [*one.correctness(), *one.rows] for name, one in self.findings.items()}
        if self.asked.tune:
            plain = [row for of_part in rows.values() for row in of_part]
            notes = [note for one in self.findings.values() for note in one.notes]
            return Result(self.asked.result, plain, self.quick, cores(), notes, self.machine)
        named = [replace(row, part=name) for name, of_part in rows.items() for row in of_part]
        records = {name: self._record(name, one) for name, one in self.findings.items()}
        return Result(self.asked.result, named, self.quick, cores(), [], self.machine, parts=records)

    def _record(self, name: str, findings: Findings) -> Record:
        return Record(self._ran[name], self._seconds.get(name, 0.0), list(findings.notes), self.only, self.machine)


def measure(
    quick: bool, only: Sequence[str], advance: Advance = lambda: None, keep: Keep = lambda _: None,
    asked: Asked | None = None,
) -> Result:  # fmt: skip
    """The measurement, or what is asked of it; after every piece `advance` is called.

    `keep` takes the result so far after every finding, and every piece. Block sizes are written unless `quick`.
    RulecError where there is no GPU.
    """
    asked = asked or Asked()
    reason = missing()
    if reason is not None:
        raise RulecError(reason)
    backends, unusable = gpu_check.usable_backends()
    ledger = Ledger(quick, only, asked)

    def write() -> None:
        keep(ledger.result())

    def changed() -> None:
        advance()
        write()

    planned = _planned(only, backends, unusable, asked)
    crew = Processes(1 if asked.tune else workers(), Bench(quick))
    run = Run(crew, asked.left(), time.monotonic, changed, write)
    try:
        for section in planned:
            ledger.run(run, crew, section)
    finally:
        crew.close()
    if asked.tune and not quick:
        _save_blocks(ledger)
    return ledger.result()


def _save_blocks(ledger: Ledger) -> None:
    device = ledger.machine["gpu"]["name"]
    for findings in ledger.findings.values():
        blocks = gpu_tune.table(findings.rows)
        if blocks:
            gpu_tune.save(device, blocks)
            findings.say(f"the triton backend has these blocks on {device} from now on")


def workers() -> int:
    """The number of processes that check rules at once."""
    return max(1, min(MOST_WORKERS, cores() - 1, (memory() or WORKER_BYTES) // WORKER_BYTES))


def _machine() -> dict[str, Any]:
    """The facts of the machine, its GPU, and the versions of peers."""
    machine = facts()
    return {**machine, "gpu": gpu_facts(), "versions": {**machine["versions"], **{p: version(p) for p in PEERS}}}
