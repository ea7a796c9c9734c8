"""Steps with operands and results of `newton_schulz` in 16 bits, in Triton's interpreter: the same bits as without."""

from __future__ import annotations

import pytest

from tests.backends.triton_process import check_in_interpreter

TRAINED = """
import torch
import rulec.torch
from rulec.runtime.stages.kernel_arguments import KernelArguments
from rulec_backends.triton import TritonBackend, quintic_call

quintic_call._WORTH_HALVING = 32
dtypes = set()
vectors = KernelArguments.vectors

def noted(self, result, arrays):
    handed = vectors(self, result, arrays)
    dtypes.update(str(x.dtype) for x in handed if x.dim() == 2 and min(x.shape) > 1)
    return handed

KernelArguments.vectors = noted

def trained(narrow, dtype):
    TritonBackend.narrow = narrow
    dtypes.clear()
    drawn = torch.Generator().manual_seed(0)
    shapes = [(40, 48), (8, 8), (40, 48)]
    params = [torch.nn.Parameter(torch.randn(shape, generator=drawn).to(dtype)) for shape in shapes]
    optimizer = rulec.torch.optimizer(RULE)(params, backend='triton')
    for _ in range(STEPS):
        for p in params:
            p.grad = torch.randn(p.shape, generator=drawn).to(dtype)
        optimizer.step()
    return params, sorted(dtypes)

found = []
for dtype in DTYPES:
    (ours, with_), (plain, without) = trained(True, dtype), trained(False, dtype)
    found.append([all(torch.equal(a, b) for a, b in zip(ours, plain)), with_, without])
"""


def check(rule: str, dtypes: str, steps: int) -> None:
    """Runs steps of a rule with narrow memory and without."""
    program = TRAINED.replace("RULE", repr(rule)).replace("DTYPES", dtypes).replace("STEPS", str(steps))
    for same, narrow, wide in check_in_interpreter(program, "found"):
        assert same
        assert narrow == ["torch.bfloat16"]
        assert wide == ["torch.float32"]


def test_a_step_of_muon_has_the_same_bits_with_memory_of_16_bits() -> None:
    check("muon", "(torch.float32,)", 1)


@pytest.mark.slow
@pytest.mark.parametrize("rule", ["muon", "normuon", "adamuon", "spel"])
def test_steps_of_rules_have_the_same_bits_with_memory_of_16_bits(rule: str) -> None:
    check(rule, "(torch.float32, torch.bfloat16)", 2)
