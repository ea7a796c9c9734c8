"""The optimizers that are compared: each is a way to take a step from a loss."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

import rulec.torch
from examples.gpt.model import GPT

#: Numbers that all of them share.
WEIGHT_DECAY, MAX_NORM, MUON_LR = 0.1, 1.0, 0.02


@dataclass
class Trainer:
    """A model's backward pass and step: `backward` and `step` are called once for each batch, in this order."""

    backward: Callable[[Tensor], None]
    step: Callable[[], None]

    def train(self, loss: Tensor) -> float:
        """Takes one step; the seconds of what came after the backward pass."""
        self.backward(loss)
        _wait(loss)
        start = time.perf_counter()
        self.step()
        _wait(loss)
        return time.perf_counter() - start


def _wait(tensor: Tensor) -> None:
    if tensor.is_cuda:
        torch.cuda.synchronize(tensor.device)


def _deferred(*optimizers: torch.optim.Optimizer, before: Callable[[], object] = lambda: None) -> Trainer:
    def step() -> None:
        before()
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()

    return Trainer(torch.autograd.backward, step)


def torch_adamw(net: GPT, lr: float) -> Trainer:
    """torch.optim.AdamW, fused."""
    return _deferred(torch.optim.AdamW(net.parameters(), lr=lr, weight_decay=WEIGHT_DECAY, fused=True))


def torch_foreach(net: GPT, lr: float) -> Trainer:
    """torch.optim.AdamW again, by its other code: how far two codes of one formula part."""
    return _deferred(torch.optim.AdamW(net.parameters(), lr=lr, weight_decay=WEIGHT_DECAY, foreach=True))


def rulec_adamw(net: GPT, lr: float) -> Trainer:
    """rulec.torch.AdamW."""
    return _deferred(rulec.torch.AdamW(net.parameters(), lr=lr, weight_decay=WEIGHT_DECAY))


def rulec_eager(net: GPT, lr: float) -> Trainer:
    """The same inside the backward pass: each gradient is freed before the next is there."""
    optimizer = rulec.torch.EagerUpdate(net, "adamw", lr=lr, weight_decay=WEIGHT_DECAY)

    def backward(loss: Tensor) -> None:
        with optimizer.backward():
            torch.autograd.backward(loss)

    return Trainer(backward, optimizer.step)


def torch_clip(net: GPT, lr: float) -> Trainer:
    """torch's clip_grad_norm_, then its AdamW."""
    parameters = list(net.parameters())
    optimizer = torch.optim.AdamW(parameters, lr=lr, weight_decay=WEIGHT_DECAY, fused=True)
    return _deferred(optimizer, before=lambda: torch.nn.utils.clip_grad_norm_(parameters, MAX_NORM))


def rulec_clip(net: GPT, lr: float) -> Trainer:
    """`clip_by_global_norm >> adamw`: one rule."""
    clipped = rulec.torch.optimizer(f"clip_by_global_norm(max_norm={MAX_NORM}) >> adamw")
    return _deferred(clipped(net.parameters(), lr=lr, weight_decay=WEIGHT_DECAY))


def torch_muon(net: GPT, lr: float) -> Trainer:
    """torch.optim.Muon for the matrices of the blocks, and AdamW for all else."""
    matrices = [p for p in net.blocks.parameters() if p.ndim == 2]
    ids = {id(p) for p in matrices}
    rest = [p for p in net.parameters() if id(p) not in ids]
    muon = torch.optim.Muon(matrices, lr=MUON_LR, weight_decay=WEIGHT_DECAY)
    return _deferred(muon, torch.optim.AdamW(rest, lr=lr, weight_decay=WEIGHT_DECAY, fused=True))


def rulec_muon(net: GPT, lr: float) -> Trainer:
    """rulec.torch.Muon: one optimizer that gives embeddings, head, norms and biases to AdamW."""
    return _deferred(
        rulec.torch.Muon(rulec.torch.tagged_groups(net), lr=MUON_LR, adamw_lr=lr, weight_decay=WEIGHT_DECAY)
    )


#: Name -> what makes the trainer of a model.
CONTENDERS: Mapping[str, Callable[[GPT, float], Trainer]] = {
    "torch AdamW": torch_adamw,
    "torch AdamW, foreach": torch_foreach,
    "rulec AdamW": rulec_adamw,
    "rulec AdamW, eager": rulec_eager,
    "torch clip, AdamW": torch_clip,
    "rulec clip >> AdamW": rulec_clip,
    "torch Muon": torch_muon,
    "rulec Muon": rulec_muon,
}

#: Contender -> the contender of torch with the same formulas.
PAIRS = {
    "torch AdamW, foreach": "torch AdamW",
    "rulec AdamW": "torch AdamW",
    "rulec AdamW, eager": "torch AdamW",
    "rulec clip >> AdamW": "torch clip, AdamW",
    "rulec Muon": "torch Muon",
}
