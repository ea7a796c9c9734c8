"""`rulec bench gpu`: correctness, bandwidth, memory, peers and host time on one GPU, a part at a time or all that fit.

A run ends within the seconds that it is given, or in less than nine minutes, whatever is asked for.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
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
from benchmarks.gpu.part import Findings, Part, Section
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
        *_correctness_first(only, backends, unusable), *_timed(only), *_of_models(only), *_of_libraries(only),
    ]  # fmt: skip
    share = budget / len({*chosen}) if chosen else 0.0
    limits = [(one, max(share, one.seconds * budget / BUDGET)) for one in every if not chosen or one.name in chosen]
    return [replace(one.section(), seconds=seconds) for one, seconds in limits]


Listed = Callable[[Sequence[str]], Sequence[Any]]


@dataclass(frozen=True)
class _Kind:
    """A section whose parts, and what is left out, are listed when it is chosen: to list all rules takes seconds."""

    name: str
    only: Sequence[str]
    parts: Listed
    seconds: float
    together: bool = False
    notes: Listed = lambda _: ()

    def section(self) -> Section:
        """The section with its parts."""
        return Section(self.name, self.parts(self.only), self.seconds, self.together, self.notes(self.only))


def _correctness_first(only: Sequence[str], backends: Sequence[str], unusable: Sequence[str]) -> list[_Kind]:
    """Correctness, and bits past 32 bits."""
    checks: Listed = partial(gpu_check.parts, backends)
    return [
        _Kind("correctness", only, checks, 210.0, True, lambda _: unusable),
        _Kind("large", only, gpu_large.parts, 40.0),
    ]


def _timed(only: Sequence[str]) -> list[_Kind]:
    """Steps of rules, states, statistics and JAX."""
    return [
        _Kind("fused", only, gpu_sizes.judged_parts, 90.0, notes=gpu_sizes.not_installed),
        _Kind("host", only, gpu_host.parts, 40.0),
        _Kind("seed", only, gpu_seed.parts, 30.0, notes=lambda _: [note for note in (gpu_seed.missing(),) if note]),
        _Kind("rules", only, gpu_rules.warm_parts, 30.0, True),
        _Kind("rules", only, gpu_rules.parts, 120.0),
        _Kind("reductions", only, gpu_rules.reducing_warm_parts, 30.0, True),
        _Kind("reductions", only, gpu_layers.parts, 60.0),
        _Kind("reductions", only, gpu_rules.reducing_parts, 80.0),
        _Kind("states", only, _state_parts, 60.0, notes=gpu_states.missing),
        _Kind("watch", only, gpu_watch.parts, 30.0),
        _Kind("jax", only, gpu_jax.parts, 60.0, notes=gpu_jax.missing),
    ]


def _state_parts(only: Sequence[str]) -> list[Part]:
    return [*gpu_states.parts(only), *gpu_weights.parts(only)]


def _of_models(only: Sequence[str]) -> list[_Kind]:
    """Training steps of models, populations, and a few rules in other ways."""
    return [
        _Kind("eager", only, gpu_eager.parts, 60.0),
        _Kind("llama", only, gpu_llama.parts, 90.0),
        _Kind("offload", only, gpu_offload.parts, 120.0),
        _Kind("lowrank", only, gpu_lowrank.parts, 30.0, notes=gpu_lowrank.missing),
        _Kind("noise", only, gpu_es.parts, 45.0),
        _Kind("ways", only, gpu_rules.other_parts, 25.0),
    ]


def _of_libraries(only: Sequence[str]) -> list[_Kind]:
    """The measurements beside other libraries, some of which compile their steps."""
    return [
        _Kind("muon", only, gpu_muon.parts, 150.0, notes=gpu_muon.missing),
        _Kind("matrices", only, gpu_matrices.parts, 150.0, notes=gpu_matrices.missing),
        _Kind("peers", only, gpu_sizes.peer_parts, 240.0, notes=gpu_sizes.not_installed),
    ]


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
