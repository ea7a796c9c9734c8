"""A first look at a GPU, in minutes: correctness by risk, or the figures that matter most, of several parts.

The sections are of named parts, and all they hold is measured as those parts measure it. A first look has a file of its
own, for it has a few rows of each part.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

from benchmarks.gpu import check as gpu_check
from benchmarks.gpu import host as gpu_host
from benchmarks.gpu import jax as gpu_jax
from benchmarks.gpu import layers as gpu_layers
from benchmarks.gpu import muon as gpu_muon
from benchmarks.gpu import offload as gpu_offload
from benchmarks.gpu import rules as gpu_rules
from benchmarks.gpu import sizes as gpu_sizes
from benchmarks.gpu import states as gpu_states
from benchmarks.gpu import tests as gpu_tests
from benchmarks.gpu import watch as gpu_watch
from benchmarks.gpu import weights as gpu_weights
from benchmarks.gpu.part import Part, Section
from benchmarks.gpu.peers import FUSED
from benchmarks.gpu.tensors import SIZES

#: Rules of every kind: of matrices, of rows and columns, with fitted numbers, elementwise, and transforms.
RULES = (
    "muon", "adafactor", "came", "sm3", "adamp", "adam_mini", "apollo", "normuon", "lamb", "prodigy", "soap", "kron",
    "nadam", "adan", "lion", "adamw", "transforms/clip_by_global_norm", "transforms/skip_not_finite",
)  # fmt: skip

#: The most that the tests of each name in `gpu_tests.FILES` may take of a first look.
TESTING = (0.3, 0.2, 0.15, 0.25, 0.25)

#: The states that a first look times, and the sizes at which AdamW runs beside torch's fused step.
STATES, AT = gpu_states.FIRST, SIZES[:3]


def sections(first: str, backends: Sequence[str], unusable: Sequence[str], budget: float) -> list[Section]:
    """The sections of a first look, a name of `asked.FIRST`, within a budget of seconds."""
    return _correctness(backends, unusable, budget) if first == "correctness" else _speed(budget)


def _correctness(backends: Sequence[str], unusable: Sequence[str], budget: float) -> list[Section]:
    """Tests of what is newest, rules, operations and rules made to be hard, then the other tests."""
    missing = gpu_tests.missing()
    first, second, third, *last = (Section("correctness", *each) for each in _tests(missing, budget))
    notes = [*unusable, *([missing] if missing else [])]
    kinds = (
        partial(gpu_check.rule_parts, names=RULES), gpu_check.statistics_parts, gpu_check.operation_parts,
        gpu_check.hard_parts,
    )  # fmt: skip
    checks = [part for kind in kinds for backend in backends for part in kind(backend)]
    slow = [part for backend in backends for part in gpu_check.rule_parts(backend, gpu_check.SLOW)]
    checked = Section("correctness", [*slow, *checks], 0.5 * budget, together=True, notes=notes)
    return [first, second, third, checked, *last]


def _tests(missing: str | None, budget: float) -> list[tuple[list[Part], float]]:
    """The tests of each name, and the seconds that they may take."""
    seconds = {name: share * budget for name, share in zip(gpu_tests.FILES, TESTING, strict=True)}
    return [([] if missing else [gpu_tests.part(name, limit)], limit) for name, limit in seconds.items()]


def _speed(budget: float) -> list[Section]:
    """Host, many matrices, Muon, states and AdamW, then statistics, JAX, single matrices, and steps on the host."""
    fused = [part for part in gpu_sizes.judged_parts(()) if part.arguments[::2] in {(at, FUSED.name) for at in AT}]
    states = [part for part in gpu_states.parts(()) if part.arguments[0] in STATES and len(part.arguments) == 1]
    muon = [part for part in gpu_muon.parts(()) if part.arguments in ((), ("torch.optim.Muon",))]
    plan: list[tuple[str, list[Part], float]] = [
        ("rules", [gpu_rules.copy_part()], 0.1),
        ("host", gpu_host.parts(())[: 1 + len(gpu_host.COUNTS)], 0.1),
        ("reductions", gpu_layers.parts(()), 0.3),
        ("muon", muon, 0.2),
        ("states", [*states, *gpu_weights.parts(())], 0.15),
        ("fused", fused, 0.1),
        ("watch", gpu_watch.parts(()), 0.1),
        ("jax", gpu_jax.parts(()), 0.15),
        ("reductions", gpu_rules.reducing_parts(gpu_rules.LINES), 0.15),
        ("offload", gpu_offload.parts(())[:1], 0.5),
    ]
    notes = {"jax": gpu_jax.missing(())}
    return [Section(name, parts, share * budget, notes=notes.get(name, ())) for name, parts, share in plan]
