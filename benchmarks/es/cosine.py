"""The cosine of estimates with the gradient, family by family: with equal members, and with equal forward time.

Shared noise is fast because its directions are not independent: speed alone would flatter it. The network is a
perceptron on the handwritten digits with first weights of a fixed seed; the gradient is autograd's on the same samples.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from benchmarks.es.turns import Turn, by_turns
from benchmarks.result import Row
from rulec.es import Perturbation

if TYPE_CHECKING:
    import torch

WIDTHS = (64, 128, 10)

#: Samples that every member sees, members where all families have as many, steps of an estimate each.
SAMPLES, MEMBERS, STEPS = 32, 256, 24
QUICK_SAMPLES, QUICK_MEMBERS, QUICK_STEPS = 8, 16, 3

#: The scale of noise: small against weights of 0.1, large against what float32 rounds.
SIGMA = 0.01

#: Steps that the network is trained before: of the gradient at its first weights a bias has the most.
TRAINED = 40

#: At as long a forward nobody has more members than this many times `MEMBERS`, nor fewer than two pairs.
MOST = 8

ROUNDS, QUICK_ROUNDS, SECONDS = 9, 1, 1.0

#: What rows say.
EQUAL_MEMBERS = "cosine with the gradient, at as many members"
EQUAL_TIME = "cosine with the gradient, at as long a forward"

#: Whose forward time the others are given.
REFERENCE = "lowrank, rank 1"

FAMILIES: dict[str, dict[str, Any]] = {
    "independent": {"family": "independent"},
    "independent, rademacher": {"family": "independent", "values": "rademacher"},
    "independent, popcount": {"family": "independent", "values": "popcount"},
    "lowrank, rank 1": {"family": "lowrank"},
    "lowrank, rank 4": {"family": "lowrank", "rank": 4},
    "permuted": {"family": "permuted"},
    "permuted, both sides": {"family": "permuted", "sides": "both"},
    "permuted, in_sparsity 0.1": {"family": "permuted", "in_sparsity": 0.1},
    "signflip": {"family": "signflip", "sides": "rows"},
    "signflip, both sides": {"family": "signflip", "sides": "both"},
    "sparse, k=2": {"family": "sparse", "sparsity": 2},
    "dropout, keep 0.5": {"family": "dropout"},
}


@dataclass(frozen=True)
class Task:
    """A network, its inputs and labels, and the gradient of the mean loss, flat."""

    model: torch.nn.Module
    inputs: torch.Tensor
    labels: torch.Tensor
    gradient: torch.Tensor


def parts() -> int:
    """The number of families."""
    return len(FAMILIES)


def rows(quick: bool, advance: Callable[[], object] = lambda: None) -> Iterator[Row]:
    """For each family two cosines: with equal members, and with the members that fit the reference's forward time.

    A cosine is the mean over steps, each with noise of its own; the standard deviation is in `detail`. `advance` is
    called after each family.
    """
    members, steps = (QUICK_MEMBERS, QUICK_STEPS) if quick else (MEMBERS, STEPS)
    at_hand = task(QUICK_SAMPLES if quick else SAMPLES)
    for name, family in FAMILIES.items():
        yield _row(name, EQUAL_MEMBERS, cosines(at_hand, _perturbation(family, members), steps), {"members": members})
        afforded, detail = affordable(at_hand, family, members, QUICK_ROUNDS if quick else ROUNDS)
        values = cosines(at_hand, _perturbation(family, afforded), steps)
        yield _row(name, EQUAL_TIME, values, {"members": afforded, **detail})
        advance()


def task(samples: int) -> Task:
    """The network after some steps of gradient descent, and its gradient on `samples` images."""
    import torch

    from rulec.tools.demo import digits

    data = digits.load()
    torch.manual_seed(0)
    model = torch.nn.Sequential(
        torch.nn.Linear(WIDTHS[0], WIDTHS[1]), torch.nn.ReLU(), torch.nn.Linear(WIDTHS[1], WIDTHS[2])
    )
    images, labels = torch.from_numpy(data.images), torch.from_numpy(data.labels)
    for _ in range(TRAINED):
        _descend(model, images, labels)
    chosen = images[:samples], labels[:samples]
    gradient = torch.cat([g.flatten() for g in _gradients(model, *chosen)])
    return Task(model, *chosen, gradient)


def _gradients(model: torch.nn.Module, images: torch.Tensor, labels: torch.Tensor) -> tuple[torch.Tensor, ...]:
    import torch

    return torch.autograd.grad(torch.nn.functional.cross_entropy(model(images), labels), list(model.parameters()))


def _descend(model: torch.nn.Module, images: torch.Tensor, labels: torch.Tensor) -> None:
    import torch

    gradients = _gradients(model, images, labels)
    with torch.no_grad():
        for param, gradient in zip(model.parameters(), gradients, strict=True):
            param.sub_(gradient, alpha=0.5)


def _perturbation(family: Mapping[str, Any], members: int) -> Perturbation:
    return Perturbation(**family, directions=members // 2, sigma=SIGMA, seed=0)


def cosines(at_hand: Task, perturbation: Perturbation, steps: int) -> list[float]:
    """The cosine of the estimate with the gradient, step by step; unperturbed parameters count as 0."""
    import torch

    import rulec.torch

    es = rulec.torch.perturb(at_hand.model, perturbation)
    labels, batch = es.member_batch(at_hand.labels), es.member_batch(at_hand.inputs)
    values = []
    for _ in range(steps):
        loss = torch.nn.functional.cross_entropy(es(batch), labels, reduction="none")
        es.update(loss=loss)
        params = list(at_hand.model.parameters())
        estimate = torch.cat([(torch.zeros_like(p) if p.grad is None else p.grad).flatten() for p in params])
        values.append(float(torch.nn.functional.cosine_similarity(estimate, at_hand.gradient, dim=0)))
        at_hand.model.zero_grad()
    return values


def affordable(
    at_hand: Task, family: Mapping[str, Any], members: int, rounds: int = ROUNDS
) -> tuple[int, dict[str, float]]:
    """The number of members, an even one, whose forward takes the time of the reference's, both with noise drawn anew.

    The time is measured with the reference's number of members and scaled: all members cost the same.
    """
    import rulec.torch

    turns = {}
    for name, fields in (("reference", FAMILIES[REFERENCE]), ("forward", family)):
        es = rulec.torch.perturb(at_hand.model, _perturbation(fields, members))
        turns[name] = _forward(es, es.member_batch(at_hand.inputs))
    times = by_turns(turns, rounds, SECONDS)
    ratio = times.ratio("reference", "forward")
    afforded = min(max(4, round(members * ratio / 2) * 2), MOST * members)
    return afforded, {"seconds": times.median("forward"), "reference": times.median("reference")}


def _forward(es: Any, batch: torch.Tensor) -> Turn:
    return Turn(lambda: es(batch), before=es.free_memory)


def _row(name: str, measure: str, values: list[float], detail: Mapping[str, float]) -> Row:
    spread = statistics.stdev(values)
    return Row(name, measure, statistics.fmean(values), detail={**detail, "spread": spread, "steps": len(values)})
