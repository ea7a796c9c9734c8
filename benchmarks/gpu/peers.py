"""The peers of steps on a GPU: torch's ways to run a rule, and other libraries where they are installed."""

from __future__ import annotations

import functools
import importlib
import importlib.util
import inspect
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import rulec
from benchmarks.gpu.tensors import SIZES
from benchmarks.kernels import hyper_defaults
from benchmarks.peers import Maker, Step
from rulec.language.library.load import interop_entries
from rulec.tools.compare.target import translate

#: The keywords of AdamW in most libraries.
ADAMW = {"lr": 1e-3, "betas": (0.9, 0.999), "weight_decay": 0.01}
_LION = {"lr": 1e-4, "betas": (0.9, 0.99), "weight_decay": 0.0}


@dataclass(frozen=True)
class Peer:
    """An optimizer of another library for the same rule; `name` is for rows.

    With `compiled` its step goes through torch's compiler. `target` is the wanted speed of ours in times of this one's,
    at the sizes `at`, or at all where it is empty. `group` has keywords that it wants in its group of parameters.
    """

    name: str
    module: str
    kind: str
    keywords: Mapping[str, Any] = field(default_factory=dict)
    compiled: bool = False
    target: float | None = None
    at: tuple[str, ...] = ()
    group: Mapping[str, Any] = field(default_factory=dict)

    def target_at(self, size: str) -> float | None:
        """The target at a size, by its name in `SIZES`."""
        return self.target if not self.at or size in self.at else None

    @property
    def package(self) -> str:
        """The package that must be installed."""
        return self.module.partition(".")[0]

    @property
    def slow(self) -> bool:
        """Whether its first step may take a minute, for it is compiled."""
        return self.compiled or self.package in ("heavyball", "torchao")

    @property
    def missing(self) -> str | None:
        """A sentence where the package is not installed; None where it is."""
        if importlib.util.find_spec(self.package) is not None:
            return None
        return f"{self.package}, to compare with, is not installed"

    def optimizer(self, params: list[Any]) -> Any:
        """The optimizer of these parameters."""
        kind = getattr(importlib.import_module(self.module), self.kind)
        optimizer = kind([{"params": params, **self.group}] if self.group else params, **self.keywords)
        if hasattr(optimizer, "consume_grad"):  # HeavyBall's: else there is nothing to do from the second step on
            optimizer.consume_grad = False
        return optimizer

    def step(self, params: list[Any]) -> Step:
        """Its step of these parameters."""
        step: Step = self.optimizer(params).step
        return _compiled(step) if self.compiled else step


def _compiled(step: Step) -> Step:
    import torch

    torch.compiler.reset()
    compiled: Step = torch.compile(step, fullgraph=False)
    return compiled


#: The size at which other one-kernel steps have targets too: one large tensor, where only bandwidth counts.
_LARGE = SIZES[:1]

FUSED = Peer("torch's fused step", "torch.optim", "AdamW", {**ADAMW, "fused": True}, target=1.0)
COMPILED = Peer(
    "torch's compiled step", "torch.optim", "AdamW", {**ADAMW, "foreach": True, "capturable": True}, compiled=True,
    target=1.0, at=_LARGE,
)  # fmt: skip

#: The peers of each rule that is measured at all sizes.
PEERS: Mapping[str, tuple[Peer, ...]] = {
    "adamw": (
        FUSED,
        Peer("torch's foreach step", "torch.optim", "AdamW", {**ADAMW, "foreach": True}),
        Peer("apex", "apex.optimizers", "FusedAdam", {**ADAMW, "adam_w_mode": True}),
        Peer("bitsandbytes", "bitsandbytes.optim", "AdamW32bit", ADAMW),
        Peer("optimi", "optimi", "AdamW", {**ADAMW, "eps": 1e-8}, target=1.0, at=_LARGE),
        Peer("HeavyBall", "heavyball", "AdamW", ADAMW),
        COMPILED,
    ),
    "lion": (
        Peer("bitsandbytes", "bitsandbytes.optim", "Lion32bit", _LION),
        Peer("optimi", "optimi", "Lion", _LION, target=1.0, at=_LARGE),
    ),
    "nadam": (
        Peer("torch's foreach step", "torch.optim", "NAdam", {"lr": 2e-3, "foreach": True}),
        Peer("HeavyBall", "heavyball", "NAdam", {"lr": 2e-3}),
    ),
}


def peer_of(rule: str, name: str) -> Peer:
    """The peer of that name."""
    return next(peer for peer in PEERS[rule] if peer.name == name)


@dataclass(frozen=True)
class TorchStep:
    """torch's own optimizer for a rule, fused or foreach."""

    way: str
    name: str
    make: Maker


def torch_steps(name: str) -> list[TorchStep]:
    """The ways in which torch.optim runs a rule of the library: fused, where its class has it, and foreach."""
    import torch

    if name not in rulec.rules():
        return []
    rule = rulec.load(name).standalone()
    sections = interop_entries(rule, "torch")[:1]
    kinds = [getattr(torch.optim, entry["class"], None) for entry in sections]
    return [
        _torch_step(rule, kind, entry, way)
        for kind, entry in zip(kinds, sections, strict=True)
        for way in ("fused", "foreach")
        if kind is not None and way in inspect.signature(kind).parameters
    ]


def _torch_step(rule: Any, kind: Any, entry: Mapping[str, Any], way: str) -> TorchStep:
    fixed = {k: v for k, v in entry.get("when", {}).items() if v != "nonzero"}
    keywords = translate(hyper_defaults(rulec.compile(rule)), kind, entry, {**fixed, way: True}).keywords
    return TorchStep(way, f"torch.optim.{entry['class']}({way}=True)", functools.partial(_step_of, kind, keywords))


def _step_of(kind: Any, keywords: Mapping[str, Any], params: list[Any]) -> Step:
    step: Step = kind(params, **keywords).step
    return step
