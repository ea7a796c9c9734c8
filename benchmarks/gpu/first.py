"""A first look at a GPU, in minutes: correctness by risk, or the figures that matter most, of several parts.

The sections are of named parts, and all they hold is measured as those parts measure it. A first look has a file of its
own, for it has a few rows of each part.
"""

from __future__ import annotations

from collections.abc import Sequence

from benchmarks.gpu import check as gpu_check
from benchmarks.gpu import host as gpu_host
from benchmarks.gpu import layers as gpu_layers
from benchmarks.gpu import muon as gpu_muon
from benchmarks.gpu import rules as gpu_rules
from benchmarks.gpu import sizes as gpu_sizes
from benchmarks.gpu import states as gpu_states
from benchmarks.gpu import tests as gpu_tests
from benchmarks.gpu import weights as gpu_weights
from benchmarks.gpu.part import Part, Section
from benchmarks.gpu.peers import FUSED
from benchmarks.gpu.tensors import SIZES

#: Rules of every kind: of matrices, of rows and columns, with fitted numbers, elementwise, and transforms.
RULES = (
    "muon", "adafactor", "came", "sm3", "adamp", "adam_mini", "apollo", "normuon", "lamb", "prodigy", "soap", "kron",
    "nadam", "adan", "lion", "adamw", "transforms/clip_by_global_norm", "transforms/skip_not_finite",
)  # fmt: skip

#: The states that a first look times, and the sizes at which AdamW runs beside torch's fused step.
STATES, AT = gpu_states.FIRST, SIZES[:3]


def sections(first: str, backends: Sequence[str], unusable: Sequence[str], budget: float) -> list[Section]:
    """The sections of a first look, a name of `asked.FIRST`, within a budget of seconds."""
    return _correctness(backends, unusable, budget) if first == "correctness" else _speed(budget)


def _correctness(backends: Sequence[str], unusable: Sequence[str], budget: float) -> list[Section]:
    """Tests of what is newest, rules, operations and rules made to be hard, then the other tests."""
    missing = gpu_tests.missing()
    first, second, last = (Section("correctness", tests, share * budget) for tests, share in _tests(missing, budget))
    notes = [*unusable, *([missing] if missing else [])]
    checks = [
        *(part for backend in backends for part in gpu_check.rule_parts(backend, RULES)),
        *(part for backend in backends for part in gpu_check.operation_parts(backend)),
        *(part for backend in backends for part in gpu_check.hard_parts(backend)),
    ]
    return [first, second, Section("correctness", checks, 0.55 * budget, together=True, notes=notes), last]


def _tests(missing: str | None, budget: float) -> list[tuple[list[Part], float]]:
    """The tests of each name, and the share of the budget that they may take."""
    shares = dict(zip(gpu_tests.FILES, (0.3, 0.2, 0.25), strict=True))
    return [([] if missing else [gpu_tests.part(name, share * budget)], share) for name, share in shares.items()]


def _speed(budget: float) -> list[Section]:
    """Host, many matrices, Muon and states, then AdamW and single matrices."""
    fused = [part for part in gpu_sizes.judged_parts(()) if part.arguments[::2] in {(at, FUSED.name) for at in AT}]
    states = [part for part in gpu_states.parts(()) if part.arguments[0] in STATES and len(part.arguments) == 1]
    muon = [part for part in gpu_muon.parts(()) if part.arguments in ((), ("torch.optim.Muon",))]
    plan: list[tuple[str, list[Part], float]] = [
        ("rules", gpu_rules.parts(())[:1], 0.1),
        ("host", gpu_host.parts(())[: 1 + len(gpu_host.COUNTS)], 0.1),
        ("reductions", gpu_layers.parts(()), 0.3),
        ("muon", muon, 0.25),
        ("states", [*states, *gpu_weights.parts(())], 0.25),
        ("fused", fused, 0.15),
        ("reductions", gpu_rules.reducing_parts(gpu_rules.LINES), 0.25),
    ]
    return [Section(name, parts, share * budget) for name, parts, share in plan]
