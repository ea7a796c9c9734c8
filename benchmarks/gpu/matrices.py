"""Rules with decompositions, projections and fitted factors on the weights of layers, against other libraries."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from benchmarks.gpu.device import Bench
from benchmarks.gpu.muon import versus
from benchmarks.gpu.part import Finding, Part
from benchmarks.gpu.peers import Peer
from benchmarks.gpu.rules import QUICK_ROUNDS
from benchmarks.gpu.tensors import Shape, Size, parameters
from benchmarks.peers import EVERY

ROUNDS = 12

#: The rank of projections, and steps from one to the next, as papers have them.
RANK, QUICK_RANK, GAP = 256, 8, 200

QUICK_SHAPE: Shape = (32, 48)


@dataclass(frozen=True)
class Case:
    """A rule, with keywords, on `count` matrices of a shape; `steps` are timed together.

    The row says `what` the steps contain. With `ranked` the rule and its peers have a rank.
    """

    rule: str
    what: str
    count: int
    shape: Shape
    peers: tuple[Peer, ...]
    keywords: Mapping[str, Any] = field(default_factory=dict)
    steps: int = 1
    ranked: bool = False

    @property
    def name(self) -> str:
        """The rule, and what falls into its steps."""
        return f"{self.rule}, {self.what}"


def _galore(gap: int) -> tuple[Peer, ...]:
    return (
        Peer(
            "galore_torch.GaLoreAdamW", "galore_torch", "GaLoreAdamW", {"no_deprecation_warning": True},
            group={"update_proj_gap": gap, "scale": 0.25, "proj_type": "std"},
        ),
        Peer(
            "pytorch_optimizer.GaLore", "pytorch_optimizer", "GaLore",
            group={"update_proj_gap": gap, "scale": 0.25, "projection_type": "std"},
        ),
    )  # fmt: skip


_SOAP = (
    Peer(
        "pytorch_optimizer.SOAP", "pytorch_optimizer", "SOAP", {"weight_decay": 0.0, "precondition_frequency": EVERY}
    ),
    Peer(
        "HeavyBall's SOAP", "heavyball", "SOAP",
        {"betas": (0.95, 0.95), "weight_decay": 0.0, "precondition_frequency": EVERY, "max_precond_dim": 10_000},
    ),
)  # fmt: skip

_SHAMPOO = (
    Peer("pytorch_optimizer.Shampoo", "pytorch_optimizer", "Shampoo", {"preconditioning_compute_steps": EVERY}),
)

_KRON = (
    Peer("kron_torch.Kron", "kron_torch", "Kron", {"preconditioner_update_probability": 1.0}),
    Peer(
        "pytorch_optimizer.Kron", "pytorch_optimizer", "Kron",
        {"pre_conditioner_update_probability": 1.0, "balance_prob": 0.0},
    ),
    Peer(
        "HeavyBall's PSGDKron", "heavyball", "PSGDKron",
        {"preconditioner_update_probability": 1.0, "max_size_triangular": 8192},
    ),
)  # fmt: skip

_APOLLO = (
    Peer(
        "apollo_torch.APOLLOAdamW", "apollo_torch", "APOLLOAdamW",
        group={"proj": "random", "update_proj_gap": GAP, "scale": 1, "proj_type": "std", "scale_type": "channel"},
    ),
    Peer(
        "pytorch_optimizer.APOLLO", "pytorch_optimizer", "APOLLO", {"scale_type": "channel"},
        group={"update_proj_gap": GAP, "scale": 1.0, "projection_type": "std"},
    ),
)  # fmt: skip

CASES = (
    Case("apollo", "between projections", 16, (2048, 2048), _APOLLO, {"gap": GAP}, ranked=True),
    Case("galore", "between projections", 16, (2048, 2048), _galore(GAP), {"gap": GAP}, ranked=True),
    Case("galore", "ten steps, one of which projects", 4, (1024, 1024), _galore(EVERY), {"gap": EVERY}, EVERY, True),
    Case("kron", "factors fitted in each step", 8, (1024, 1024), _KRON),
    Case("soap", "ten steps, one of which decomposes", 8, (1024, 1024), _SOAP, {"every": EVERY}, EVERY),
    Case("shampoo", "ten steps, one of which decomposes", 4, (1024, 1024), _SHAMPOO, {"every": EVERY}, EVERY),
)


def parts(only: Sequence[str]) -> list[Part]:
    """Each case against each installed library; steps of torch's compiler come last."""
    pairs = [(c, p) for c in CASES if not only or c.rule in only for p in c.peers if not p.missing]
    return [
        Part(f"{case.name}, against {peer.name}", against, (case.name, peer.name), 120.0, 20.0 if peer.slow else 8.0)
        for case, peer in sorted(pairs, key=lambda pair: pair[1].slow)
    ]


def missing(only: Sequence[str]) -> list[str]:
    """A note for each library that is not installed."""
    peers = [peer for case in CASES if not only or case.rule in only for peer in case.peers]
    return list(dict.fromkeys(peer.missing for peer in peers if peer.missing))


def against(bench: Bench, name: str, library: str) -> Iterator[Finding]:
    """Our steps beside a library's, over the same parameters and gradients."""
    (case,) = (case for case in CASES if case.name == name)
    (peer,) = (peer for peer in case.peers if peer.name == library)
    count, shape = (1, QUICK_SHAPE) if bench.quick else (case.count, case.shape)
    keywords = dict(case.keywords)
    if case.ranked:
        keywords["rank"] = QUICK_RANK if bench.quick else RANK
        peer = replace(peer, group={**peer.group, "rank": keywords["rank"]})
    rank = f" of rank {keywords['rank']}" if case.ranked else ""
    subject = f"{case.rule}{rank} on {count} of {shape[0]:,} by {shape[1]:,}, {case.what}"
    params = parameters(bench, Size("", [shape] * count))
    yield versus(
        bench, subject, peer, case.rule, params, QUICK_ROUNDS if bench.quick else ROUNDS, case.steps, **keywords
    )
