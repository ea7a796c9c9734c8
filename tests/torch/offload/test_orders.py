"""Every order in which copies and computing end in small cases, and random orders of large ones."""

from __future__ import annotations

import random
from dataclasses import dataclass
from typing import Any

import pytest
import torch

import rulec
from rulec.language.library.load import parse
from rulec.language.rule import Rule
from tests.torch.offload.protocol import Protocol
from tests.torch.offload.runs import assert_same_bits
from tests.torch.offload.scripted import Choose, chosen, latest, orders
from tests.torch.offload.training import Training

CLIPPED = "clip_by_global_norm >> adamw"


@dataclass(frozen=True)
class Case:
    """A rule, one tensor for each of `sizes`, and the turns of its launches.

    `runs` has the order of the launches; without it each runs once. 64 bytes are the smallest
    transfer buffer; a tensor that is larger than the buffer moves in `pieces`. The tensors with the indices in
    `missing` have no gradient.
    """

    rule: Rule | str
    dtype: torch.dtype
    sizes: tuple[int | tuple[int, ...], ...]
    turns: tuple[int, ...]
    steps: int = 1
    buffer: int = 64
    runs: tuple[int, ...] = ()
    pieces: tuple[int, ...] = ()
    grad_dtypes: tuple[torch.dtype, ...] = ()
    missing: tuple[int, ...] = ()

    def training(self, steps: int = 2, cuda: bool = False) -> Training:
        """The training, after some steps."""
        shapes = [(size,) if isinstance(size, int) else size for size in self.sizes]
        return Training(self.rule, shapes, self.dtype, self.buffer, steps, cuda, self.grad_dtypes, self.missing)

    def protocol(self, training: Training) -> Protocol:
        buffers = 2 if self.dtype is torch.bfloat16 else 3
        return Protocol(self.turns, training.reads, buffers, self.runs or range(len(self.turns)), self.pieces)


#: Matrices take part in a norm of all of them, vectors do not.
MIXED = parse("""
name: Mixed
hyper: {lr: {default: 1e-3, min: 0}}
applies_to: ndim == 2
otherwise: {adamw: {}}
step: |
  direction = g*minimum(1, 1/norm(g, per="model")) + 0.1*p
""")

F32, BF16 = torch.float32, torch.bfloat16

#: Groups of one launch, weights that are read or master copies, two rounds, launches of one group, and pieces.
SMALL = {
    "two groups": Case("adamw", F32, (8, 8), (0, 1)),
    "three groups": Case("adamw", F32, (8, 8, 8), (0, 1, 2)),
    "master copies": Case("adamw", BF16, (8, 8, 8), (0, 1, 2)),
    "steps in a row": Case("adamw", BF16, (8,), (0,), steps=3),
    "two rounds": Case(CLIPPED, F32, (8, 8, 8), (0, 1, 2), runs=(0, 1, 2) * 2),
    "a sum after the last stage": Case("avagrad", F32, (8, 8, 8), (0, 1, 2)),
    "two launches of a group": Case("lion", F32, (8, 8, 8), (0, 0, 1), buffer=128, grad_dtypes=(F32, BF16, F32)),
    "a gradient is missing": Case("adamw", F32, (8, 8, 8, 8), (0, 2, 3), missing=(1,)),
    "two of one buffer": Case("adamw", F32, (8, 8, 8, 8), (0, 3), missing=(1, 2)),
    "two pieces": Case("adamw", F32, (128,), (0,), buffer=256, pieces=(2,)),
}

LARGE = {
    "evicted": Case(MIXED, F32, ((4, 2), 8, 8, (4, 2)), (0, 1, 2, 3), runs=(0, 1, 0, 1, 2, 3)),
    "evicted weights": Case(MIXED, F32, ((4, 2), (4, 2), (4, 2), 8), (0, 2, 3), runs=(0, 1, 0, 1, 2), missing=(1,)),
    "four groups": Case("adamw", F32, (8, 8, 8, 8), (0, 1, 2, 3)),
    "two steps": Case("adamw", F32, (8, 8), (0, 1), steps=2),
    "four master copies": Case("adamw", BF16, (8, 8, 8, 8), (0, 1, 2, 3)),
    "two steps of master copies": Case("adamw", BF16, (8, 8), (0, 1), steps=2),
    "two rounds of master copies": Case(CLIPPED, BF16, (8, 8), (0, 1), steps=2, runs=(0, 1) * 2),
    "four groups in two rounds": Case(CLIPPED, F32, (8, 8, 8, 8), (0, 1, 2, 3), runs=(0, 1, 2, 3) * 2),
    "three pieces": Case("adamw", F32, (192,), (0,), buffer=256, pieces=(3,)),
    "groups and pieces": Case("adamw", F32, (8, 8, 128, 8), (0, 1, 2), buffer=256, pieces=(1, 2, 1)),
    "pieces between groups": Case("adamw", F32, (8, 128, 8), (0, 1, 2), buffer=256, pieces=(1, 2, 1)),
}


def find_orders(case: Case, cuda: bool = False) -> tuple[int, int]:
    """Runs every order of a case, each with the bits of the plain run; their number, and that of the queues."""
    training = case.training(cuda=cuda)
    count = orders(lambda choose: training.run(choose, case.steps))
    training.check_states()
    return count, case.protocol(training).orders(case.steps)


@pytest.mark.parametrize("name", SMALL)
def test_every_order_has_the_bits_of_the_step_without_offload(name: str) -> None:
    count, expected = find_orders(SMALL[name])
    assert count == expected


@pytest.mark.parametrize("name", ["two groups", "steps in a row", "a gradient is missing", "two pieces"])
def test_streams_and_events_of_cuda_have_the_same_orders(name: str) -> None:
    count, expected = find_orders(SMALL[name], cuda=True)
    assert count == expected


@pytest.mark.slow
@pytest.mark.parametrize("name", LARGE)
def test_every_order_of_larger_cases(name: str) -> None:
    count, expected = find_orders(LARGE[name])
    assert count == expected


#: Rules of other kinds, and storages of states and weights.
STORAGES: tuple[tuple[str, torch.dtype, dict[str, Any]], ...] = (
    ("adamw", F32, {}),
    ("adamw", BF16, {}),
    ("adamw", torch.float16, {"state_dtype": "bfloat16_sr"}),
    ("adamw", torch.float64, {}),
    ("adamw", F32, {"state_dtype": "dynamic8"}),
    ("adamw", BF16, {"state_dtype": "dynamic8", "weights": "master"}),
    ("adamw", BF16, {"weights": "split"}),
    ("adamw", BF16, {"weights": "split24"}),
    ("adamw", BF16, {"weights": "kahan"}),
    ("adamw", BF16, {"weights": "stochastic", "seed": 3}),
    (CLIPPED, BF16, {}),
    ("lamb", F32, {}),
    ("adafactor", BF16, {}),
    ("adapnm", F32, {}),
    ("avagrad", F32, {}),
)


@pytest.mark.parametrize(("rule", "dtype", "words"), STORAGES, ids=str)
def test_random_orders_of_a_hundred_tensors(rule: str, dtype: torch.dtype, words: dict[str, Any]) -> None:
    """Matrices and vectors of a transformer: groups of many tensors, and matrices in pieces."""
    layer = [(16,), (48, 16), (16, 16), (16,), (64, 16), (16, 64)]
    training = Training(rule, [(200, 16), *layer * 17, (16,)], dtype, 8192, **words)
    for seed in range(3):
        training.run(random.Random(seed).randrange, 2)
    training.check_states()


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [F32, BF16], ids=str)
@pytest.mark.parametrize("rule", rulec.rules())
def test_random_orders_of_every_rule(rule: str, dtype: torch.dtype) -> None:
    loaded = rulec.load(rule)
    if loaded.wraps or loaded.inputs or rule == "muon":
        pytest.skip("needs another rule, inputs, or matrices alone")
    training = Training(rule, [(8, 6), (6,), (3, 4, 2), (70,), (40, 30)], dtype, 1024)
    for seed in range(2):
        training.run(random.Random(seed).randrange, 2)
    training.check_states()


@pytest.mark.parametrize("dtype", [F32, BF16], ids=str)
def test_evaluation_points_wait_for_what_the_device_reads(dtype: torch.dtype) -> None:
    """`eval()` writes weights without a gradient. Work of the device reads the old weights before."""

    def run(choose: Choose) -> None:
        with chosen(training.device, choose), training.linked():
            for change in ("eval", "train"):
                read: list[torch.Tensor] = []
                training.device.compute(training.params, [], lambda read=read: read.extend(_copies(training)))  # type: ignore[misc]
                before = [param.detach().clone() for param in training.others]
                getattr(training.optimizer, change)()
                getattr(training.other, change)()
                seen.append((read, before))
            training.take(1)
        training.take_other(1)
        training.check()

    training, seen = Training("schedule_free_adamw", [(8,), (8,), (128,)], dtype, 256), []
    for number in range(20):
        run(random.Random(number).randrange)
    run(latest)
    for read, before in seen:
        assert_same_bits(read, before)
    training.check_states()


def _copies(training: Training) -> list[torch.Tensor]:
    return [param.detach().clone() for param in training.params]
