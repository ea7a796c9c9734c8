"""Random numbers of rules in Triton: in its interpreter, and in the assembly of GPUs that are not here."""

from __future__ import annotations

import pytest

from tests.backends.triton_process import check_in_interpreter, in_a_process


@pytest.mark.slow
def test_a_kernel_has_the_numbers_of_the_stream() -> None:
    """In everyday tests the two next ones show the same."""
    program = "from tests.backends.draws import unlike_the_stream\nfailed = unlike_the_stream()"
    assert check_in_interpreter(program, "failed") == []


def test_normal_numbers_have_the_bits_of_noise() -> None:
    program = "from tests.backends.draws import unlike_noise\nfailed = unlike_noise()"
    assert check_in_interpreter(program, "failed") == []


def test_steps_on_the_device_are_rounded_towards_zero() -> None:
    program = "from tests.backends.draws import unlike_known_steps\nfailed = unlike_known_steps()"
    assert check_in_interpreter(program, "failed") == []


STEPS = """
import torch
import rulec.torch
from rulec.torch.tensors.library import DeviceLibrary
from rulec_backends.triton import draws

counts = []
call = draws.Draws.__call__

def counted(self, op, out, *arguments, **position):
    counts.append(len(out))
    call(self, op, out, *arguments, **position)

SHAPES = ((6, 16), (16, 6), (6, 16), (9, 9))

def trained(backend, size=1 << 18):
    DeviceLibrary.most_in_set = size
    drawn = torch.Generator().manual_seed(0)
    params = [torch.nn.Parameter(torch.randn(shape, generator=drawn)) for shape in SHAPES]
    grads = [torch.randn(p.shape, generator=drawn) for p in params]
    opt = rulec.torch.Apollo(params, lr=0.02, rank=3, gap=2, backend=backend)
    for step in range(2):
        for p, g in zip(params, grads):
            p.grad = g
        opt.step()
    return [p.detach() for p in params]

draws.Draws.__call__ = counted
together = trained('triton')
launches = [*counts]
counts.clear()
single = trained('triton', 0)
apart = [*counts]
same = all(torch.equal(a, b) for a, b in zip(together, single))
far = max(float((a - b).abs().max()) for a, b in zip(together, trained('cpu')))
"""


def test_a_step_of_apollo_draws_once_for_all_tensors_of_a_layout() -> None:
    """Two steps of two matrices of 6 by 16, one of 16 by 6 and one of 9 by 9; in the second run each on its own."""
    launches, apart, same, far = check_in_interpreter(STEPS, "[launches, apart, same, far]")
    assert sorted(launches) == [18] * 2 + [63] * 2
    assert sorted(apart) == [18] * 6 + [27] * 2
    assert same
    assert far < 1e-6


COMPILED = """
import json, re
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from rulec_backends.triton import TritonBackend
from rulec_backends.triton.draws import BLOCKS, WARPS

backend = TritonBackend()
kernel = backend.build_draws(backend.emit_draws())._kernel
found = []
for out in ("*fp32", "*fp64"):
    for uniform in (False, True):
        types = {"out": out, "ends": "*i64", "tensors": "*i64", "steps": "*fp64"}
        types |= dict.fromkeys(["step", "seed", "draw", "block", "before", "chunks"], "i32")
        types |= dict.fromkeys(["EACH", "UNIFORM", "BLOCKS"], "constexpr")
        source = ASTSource(kernel, types, {"EACH": 1, "UNIFORM": uniform, "BLOCKS": BLOCKS})
        options = {"num_warps": WARPS, "enable_fp_fusion": False}
        compiled = triton.compile(source, target=GPUTarget("cuda", 90, 32), options=options)
        text = compiled.asm["ptx"]
        found.append([len(re.findall(r"mul.hi.u32", text)) > 0, ".local" in text])
print(json.dumps(found))
"""


@pytest.mark.slow
def test_a_gpu_multiplies_words_and_spills_nothing() -> None:
    assert in_a_process(COMPILED) == [[True, False]] * 4
