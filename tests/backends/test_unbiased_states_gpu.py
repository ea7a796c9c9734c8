"""States in bfloat16 that are rounded at random, in the text of GPU kernels run on the CPU: bits of the cpu backend."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import rulec.torch
from rulec.array import Optimizer
from tests.backends import cuda_stand_in
from tests.backends.here import BRAIN, needs_compiler
from tests.backends.triton_process import check_in_interpreter

TRITON = """
import torch
import rulec.torch

def train(backend, rule, **words):
    draws = torch.Generator().manual_seed(0)
    params = [torch.nn.Parameter(torch.randn(n, generator=draws)) for n in ((40, 50), (7,), (7,), (2, 30, 9))]
    words = {"state_dtype": "bfloat16_sr", "seed": 70000, **words}
    optimizer = getattr(rulec.torch, rule)(params, lr=1e-2, backend=backend, **words)
    for _ in range(3):
        for p in params:
            p.grad = torch.randn(p.shape, generator=draws)
        optimizer.step()
    states = [dict(optimizer.state[p]) for p in params]
    return [{k: v for k, v in of_one.items() if v.numel() > 1} for of_one in states]

for rule, there in (("AdamW", {"capturable": True}), ("Adagrad", {}), ("Lion", {}), ("Adafactor", {})):
    for ours, theirs in zip(train("triton", rule, **there), train("cpu", rule), strict=True):
        assert ours.keys() == theirs.keys() and ours
        for name, state in ours.items():
            assert state.dtype is torch.bfloat16 and torch.equal(state, theirs[name]), (rule, there, name)
"""


@pytest.mark.slow
def test_triton_has_the_bits_of_the_cpu() -> None:
    check_in_interpreter(TRITON)


def states(rule: str, backend: str, make: Any) -> list[np.ndarray[Any, Any]]:
    """The states after three steps."""
    draws = np.random.default_rng(0)
    shapes = {"w": (40, 50), "b": (70,)}
    params = {name: make(draws.standard_normal(shape).astype(np.float32)) for name, shape in shapes.items()}
    optimizer = Optimizer(rule, params, backend, lr=1e-2, state_dtype="bfloat16_sr", seed=4)
    for _ in range(3):
        optimizer.step({k: make(draws.standard_normal(shape).astype(np.float32)) for k, shape in shapes.items()})
    arrays = [v for name in shapes for k, v in optimizer.state(name).items() if k != "step"]
    return [np.asarray(x.get() if hasattr(x, "get") else x) for x in arrays]


@needs_compiler
@pytest.mark.parametrize("rule", ["adamw", "adagrad", "lion", "adafactor"])
def test_cuda_has_the_bits_of_the_cpu(cupy: Any, rule: str) -> None:
    ours, theirs = states(rule, "cupy", cuda_stand_in.asarray), states(rule, "cpu", np.array)
    for a, b in zip(ours, theirs, strict=True):
        assert a.dtype == BRAIN
        assert np.array_equal(a.view(np.uint16), b.view(np.uint16))


@pytest.mark.gpu
@pytest.mark.parametrize("backend", ["triton", "cupy"])
@pytest.mark.parametrize("rule", ["AdamW", "Adafactor"])
@pytest.mark.parametrize("capturable", [False, True])
def test_a_gpu_has_the_bits_of_the_cpu(backend: str, rule: str, capturable: bool) -> None:
    """But for values on a threshold of their random number that a contraction moves by an ulp of float32."""
    torch = pytest.importorskip("torch")
    kept = []
    for device, words in (("cuda", {"backend": backend, "capturable": capturable}), ("cpu", {})):
        draws = torch.Generator().manual_seed(0)
        params = [torch.nn.Parameter(torch.randn(n, generator=draws).to(device)) for n in ((300, 500), (70,))]
        optimizer = getattr(rulec.torch, rule)(params, lr=1e-2, state_dtype="bfloat16_sr", seed=70000, **words)
        for _ in range(3):
            for p in params:
                p.grad = torch.randn(p.shape, generator=draws).to(device)
            optimizer.step()
        states = [x for p in params for x in optimizer.state[p].values() if x.numel() > 1]
        kept.append([x.cpu().view(torch.int16).int() for x in states])
    for ours, theirs in zip(*kept, strict=True):
        assert (ours - theirs).abs().max() <= 1
        assert (ours != theirs).float().mean() < 0.01
