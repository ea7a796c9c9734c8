"""The reduction of runs of a vector in Triton: in its interpreter, and in the assembly of GPUs that are not here."""

from __future__ import annotations

import pytest

from tests.backends.triton_process import check_in_interpreter, in_a_process


def test_runs_are_reduced_each_to_its_own_number() -> None:
    assert check_in_interpreter("from tests.backends.segments import wrong\nfailed = wrong()", "failed") == []


def test_a_run_has_the_same_bits_whatever_its_neighbours_are() -> None:
    program = "from tests.backends.segments import depends_on_neighbours\nfailed = depends_on_neighbours()"
    assert check_in_interpreter(program, "failed") == []


STEPS = """
import torch
import rulec.torch
from rulec_backends.triton import segments

runs = []
call = segments.Segments.__call__

def counted(self, op, values, ends):
    runs.append(len(ends) - 1)
    return call(self, op, values, ends)

def trained(backend, chosen):
    drawn = torch.Generator().manual_seed(0)
    params = [torch.nn.Parameter(torch.randn(shape, generator=drawn)) for shape in ((40, 24), (24, 40), (40, 24))]
    grads = [torch.randn(p.shape, generator=drawn) for p in params]
    opt = rulec.torch.Adafactor([params[i] for i in chosen], lr=0.02, backend=backend)
    for still in ((), (), (1,), (2,)):
        for i, (p, g) in enumerate(zip(params, grads)):
            p.grad = None if i in still else g
        opt.step()
    return [params[i].detach() for i in chosen]

segments.Segments.__call__ = counted
together = trained('triton', [0, 1, 2])
counts = [*runs]
alone = [trained('triton', [i])[0] for i in range(3)]
same = all(torch.equal(a, b) for a, b in zip(together, alone))
far = max(float((a - b).abs().max()) for a, b in zip(together, trained('cpu', [0, 1, 2])))
"""


def test_a_step_of_adafactor_reduces_the_rows_of_all_tensors_at_once() -> None:
    counts, same, far = check_in_interpreter(STEPS, "[counts, same, far]")
    assert counts == [3, 3, 2, 2]
    assert same
    assert far < 1e-6


COMPILED = """
import json, re
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from rulec_backends.triton import TritonBackend
from rulec_backends.triton.segments import LANES, WARPS

backend = TritonBackend()
kernel = backend.build_segments(backend.emit_segments())._kernel
types = {"values": "*fp64", "ends": "*i64", "results": "*fp64", "KIND": "constexpr", "LANES": "constexpr"}
found = []
for architecture in (80, 90):
    for kind in (0, 1, 2):
        source = ASTSource(kernel, types, {"KIND": kind, "LANES": LANES})
        options = {"num_warps": WARPS, "enable_fp_fusion": False}
        text = triton.compile(source, target=GPUTarget("cuda", architecture, 32), options=options).asm["ptx"]
        found.append([len(re.findall(r"\\bfma|\\batom|\\bred\\.", text)), "add.f64" in text or "add.rn.f64" in text])
print(json.dumps(found))
"""


@pytest.mark.slow
def test_a_gpu_adds_in_float64_without_contraction_and_atomics() -> None:
    """Only then is the order of adding that of the text."""
    found = in_a_process(COMPILED)
    assert [bad for bad, _ in found] == [0] * 6
    assert [adds for _, adds in found] == [True, False, False] * 2
