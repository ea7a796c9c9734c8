"""Where float32 numbers are those of torch's fused kernels to the last bit.

Kernels here round every product and every sum. torch's are compiled for several processors, and for those that have a
fused multiply-add leave products unrounded that a sum takes.
"""

from __future__ import annotations

import os
import subprocess
import sys
from typing import Any

import pytest
import torch
from torch import Tensor

import rulec.torch

pytestmark = pytest.mark.peer

#: More than one vector of any processor, and a rest.
SIZE = 1007

#: What has torch's bits wherever neither side fuses a multiply-add.
SGD: list[dict[str, Any]] = [
    {"lr": 0.7}, {"lr": 0.7, "weight_decay": 0.01}, {"lr": 0.7, "maximize": True}, {"lr": 0.7, "momentum": 0.9},
    {"lr": 0.7, "momentum": 0.9, "dampening": 0.3, "weight_decay": 0.01},
    {"lr": 0.7, "momentum": 0.9, "nesterov": True, "weight_decay": 0.01},
]  # fmt: skip

#: Numbers whose products with float32 are exact, so that fusing makes no difference.
EXACT: list[dict[str, Any]] = [
    {"lr": 0.125}, {"lr": 0.125, "weight_decay": 0.0625}, {"lr": 0.125, "momentum": 0.5},
    {"lr": 0.125, "momentum": 0.5, "dampening": 0.5, "weight_decay": 0.0625},
    {"lr": 0.125, "momentum": 0.5, "nesterov": True, "weight_decay": 0.0625},
]  # fmt: skip

#: The second moments of the other classes that torch fuses. Their parameters differ in their last bits.
MOMENTS: list[tuple[str, str, dict[str, Any]]] = [
    ("Adam", "exp_avg_sq", {}), ("AdamW", "exp_avg_sq", {}), ("Adam", "max_exp_avg_sq", {"amsgrad": True}),
    ("Adagrad", "sum", {}),
]  # fmt: skip


def stepped(library: Any, kind: str, keywords: dict[str, Any]) -> tuple[Tensor, dict[str, Any]]:
    """A parameter after 25 steps, and its state."""
    drawn = torch.Generator().manual_seed(3)
    params = [torch.nn.Parameter(torch.randn(SIZE, generator=drawn))]
    optimizer = getattr(library, kind)(params, fused=True, **keywords)
    for _ in range(25):
        params[0].grad = torch.randn(SIZE, generator=drawn)
        optimizer.step()
    return params[0].detach(), optimizer.state[params[0]]


def check_sgd(keywords: dict[str, Any]) -> None:
    """The parameter and the momentum have torch's bits."""
    (ours, state), (theirs, other) = (stepped(library, "SGD", keywords) for library in (rulec.torch, torch.optim))
    assert torch.equal(ours, theirs), keywords
    assert "momentum" not in keywords or torch.equal(state["momentum_buffer"], other["momentum_buffer"]), keywords


@pytest.mark.parametrize("keywords", EXACT, ids=str)
def test_sgd_where_products_are_exact(keywords: dict[str, Any]) -> None:
    check_sgd(keywords)


@pytest.mark.slow
def test_where_torch_fuses_nothing() -> None:
    """In a process of its own: torch looks once at what the environment says of the processor."""
    command = [sys.executable, "-m", "tests.torch.test_fused"]
    environment = {**os.environ, "ATEN_CPU_CAPABILITY": "default"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr


def main() -> None:
    """What the manual says of a torch that fuses nothing."""
    assert torch.backends.cpu.get_cpu_capability() == "DEFAULT"
    for keywords in SGD:
        check_sgd(keywords)
    for kind, name, keywords in MOMENTS:
        states = [stepped(library, kind, keywords)[1] for library in (rulec.torch, torch.optim)]
        assert torch.equal(states[0][name], states[1][name]), (kind, name)


if __name__ == "__main__":
    main()
