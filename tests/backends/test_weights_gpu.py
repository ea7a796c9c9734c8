"""Weights in 16 bits in the text of GPU kernels, run on the CPU: the bits are those of the cpu backend."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import rulec
import rulec.torch
from rulec.array import Optimizer
from rulec.compiler.ir import Memory
from rulec.compiler.layout import layout_for, scheduled
from rulec.compiler.pipeline import compile
from rulec.compiler.weights import DTYPES, PARTS
from rulec_backends.cupy import CupyBackend
from rulec_backends.cupy.plan import kernel_name
from tests.backends import cuda_stand_in
from tests.backends.cuda_assembly import kernels, missing
from tests.backends.here import BRAIN, needs_compiler
from tests.backends.test_chance import KEPT, of_parts
from tests.backends.triton_process import check_in_interpreter, in_a_process

TRITON = """
import torch
import rulec.torch
from rulec.array_api.slices import piece_of
from rulec.runtime.distributed.shards import GlobalTensor
from rulec.compiler.weights import DTYPES

def train(backend, kind, rule, large=40, **words):
    draws = torch.Generator().manual_seed(0)
    params = [torch.nn.Parameter(torch.randn(n, generator=draws).bfloat16()) for n in ((large, 50), (7,), (7,))]
    optimizer = getattr(rulec.torch, rule)(params, lr=1e-4, weights=kind, backend=backend, **words)
    for _ in range(3):
        for p in params:
            p.grad = torch.randn(p.shape, generator=draws).bfloat16()
        optimizer.step()
    return [(p, *(v for k, v in optimizer.state[p].items() if "param" in k)) for p in params]

for rule, kinds in (("AdamW", [*DTYPES]), ("LAMB", ["split", "master"])):
    for kind in kinds:
        for ours, theirs in zip(train("triton", kind, rule), train("cpu", kind, rule), strict=True):
            for a, b in zip(ours, theirs, strict=True):
                assert a.dtype == b.dtype and torch.equal(a, b), (rule, kind, a, b)
# Parts of tensors: rows, and an uneven share of the columns.
def moved(backend, cut):
    p = torch.nn.Parameter(torch.ones(70, 91).bfloat16()[cut].contiguous())
    optimizer = rulec.torch.AdamW([p], lr=2.0**-10, weights="stochastic", backend=backend, weight_decay=0)
    (tensor,) = optimizer._build().engines[0].tensors
    if cut != whole:
        piece = piece_of((70, 91), p.shape, [c.indices(n)[0] for c, n in zip(cut, (70, 91))])
        indices = tuple(range(*c.indices(n)) for c, n in zip(cut, (70, 91)))
        tensor.whole = GlobalTensor((70, 91), (), piece, indices)
    p.grad = -torch.ones_like(p)
    optimizer.step()
    return p > 1

whole = slice(None), slice(None)
for cut in ((slice(13, 40), slice(None)), (slice(5, 66), slice(31, 61))):
    assert torch.equal(moved("triton", cut), moved("cpu", whole)[cut]), cut

# Scalars on the device, and states in codes beside the weights.
coded = {"large": 90, "state_dtype": "int8"}
for there, here in (({"capturable": True}, {}), (coded, coded)):
    ours, theirs = train("triton", "stochastic", "AdamW", **there), train("cpu", "stochastic", "AdamW", **here)
    assert all(torch.equal(a, b) for a, b in zip(sum(ours, ()), sum(theirs, ()), strict=True)), there
"""


@pytest.mark.slow
def test_triton_has_the_bits_of_the_cpu() -> None:
    check_in_interpreter(TRITON)


COMPILED = """
import json
import rulec
from rulec.compiler.ir import Memory
from rulec.compiler.layout import layout_for, scheduled
from rulec.compiler.pipeline import compile
from rulec.language.expr.node import RANGE, ROWS
from rulec_backends.triton import TritonBackend
from rulec_backends.triton.blocks import block_for
from rulec_backends.triton.plan import moved
from tests.backends.triton_compiled import approximate, constants, made_for, memory

def facts(target, places):
    program = compile(rulec.load("adamw"), memory=Memory("stochastic", places=places))
    program, layout = scheduled(program, layout_for(program, "bfloat16"))
    kernel = TritonBackend().build(program, layout, TritonBackend().emit(program, layout)).kernels["stage_0"]
    block = block_for(sum(moved(program, program.stages[0], layout)), target)
    made = made_for(target, kernel, constants(program, layout, 0, block), block.threads)
    return [*memory(made), approximate(made.asm.get("ptx") or made.asm["amdgcn"])]
"""


@pytest.mark.parametrize("places", ["RANGE", "ROWS"])
def test_places_of_parts_compile_for_gpus_without_local_memory(places: str) -> None:
    facts = f"facts('cuda:90', {places})"
    assert in_a_process(f"{COMPILED}\nprint(json.dumps({facts}))\n") == [0, 0, []]


@needs_compiler
@pytest.mark.parametrize("words", [{}, {"state_dtype": {"m": "int8"}}], ids=["floats", "codes"])
def test_cuda_knows_the_places_of_parts(cupy: Any, words: dict[str, Any]) -> None:
    whole, parts = of_parts(KEPT, "cupy", cuda_stand_in.asarray, **words)
    assert all(np.array_equal(whole[name], parts[name]) for name in whole)


def arrays(kind: str, backend: str, make: Any) -> list[np.ndarray[Any, Any]]:
    """The weights, and what lies beside them, after three steps."""
    draws = np.random.default_rng(0)
    params = {"w": make(draws.standard_normal((40, 50)).astype(BRAIN))}
    optimizer = Optimizer("adamw", params, backend, lr=1e-4, weights=kind)
    for _ in range(3):
        optimizer.step({"w": make(draws.standard_normal((40, 50)).astype(BRAIN))})
    beside = [optimizer.state("w")[PARTS[kind].name]] if kind in PARTS else []
    return [np.asarray(x.get() if hasattr(x, "get") else x) for x in (params["w"], *beside)]


@needs_compiler
@pytest.mark.parametrize("kind", DTYPES)
def test_cuda_has_the_bits_of_the_cpu(cupy: Any, kind: str) -> None:
    ours, theirs = arrays(kind, "cupy", cuda_stand_in.asarray), arrays(kind, "cpu", np.array)
    for a, b in zip(ours, theirs, strict=True):
        assert np.array_equal(a.view(np.uint8), b.view(np.uint8))


@pytest.mark.skipif(bool(missing()), reason=missing() or "NVRTC is here")
@pytest.mark.parametrize("kind", PARTS)
def test_machine_code_keeps_a_split_weight_in_registers(kind: str) -> None:
    program = compile(rulec.load("adamw"), memory=Memory(kind))
    kernel = scheduled(program, layout_for(program, "bfloat16", states={"m": "float32", "v": "float32"}))
    source = CupyBackend().emit(*kernel)
    code = kernels(source, "sm_90", [kernel_name(kernel.program, 0)])
    for each in code.values():
        assert (each.local(), each.stack) == ([], 0)
        assert each.wide_accesses()


@pytest.mark.gpu
@pytest.mark.parametrize("backend", ["triton", "cupy"])
@pytest.mark.parametrize("kind", DTYPES)
def test_a_gpu_has_the_bits_of_the_cpu(backend: str, kind: str) -> None:
    """But for weights at the middle of two that a contraction moves by an ulp of float32."""
    weights, first = trained("cuda", kind, backend=backend), trained("cpu", kind, steps=0)
    for ours, theirs, before in zip(weights, trained("cpu", kind), first, strict=True):
        assert ((ours - theirs).abs() <= 2.0**-7 * theirs.abs() + 1e-6).all()
        assert (ours != theirs).float().mean() < 0.01
        assert (ours != before).float().mean() > 0.5


def trained(device: str, kind: str, steps: int = 3, **words: Any) -> list[Any]:
    """The bfloat16 weights, as floats, after some steps of AdamW."""
    torch = pytest.importorskip("torch")
    draws = torch.Generator().manual_seed(0)
    params = [torch.nn.Parameter(torch.randn(n, generator=draws).bfloat16().to(device)) for n in ((300, 500), (70,))]
    optimizer = rulec.torch.AdamW(params, lr=1e-2, weights=kind, **words)
    for _ in range(steps):
        for p in params:
            p.grad = torch.randn(p.shape, generator=draws).bfloat16().to(device)
        optimizer.step()
    return [p.detach().cpu().float() for p in params]
