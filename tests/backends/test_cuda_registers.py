"""Kernels of CUDA C that hold more at once than others: a thread of theirs has twice the registers."""

from __future__ import annotations

import re

import pytest

import rulec
from rulec.compiler.ir import Memory
from rulec.compiler.layout import layout_for, scheduled
from rulec.compiler.pipeline import compile
from rulec_backends.cupy import CupyBackend
from rulec_backends.cupy.plan import kernel_name
from rulec_backends.cupy.print import kernel_source
from tests.backends.cuda_assembly import kernels
from tests.backends.test_cuda_code import check_machine_code, needs_nvrtc, programs

#: Rules with a stage that has more arrays than fit in 128 registers, with a dtype and a GPU for which they did not.
MANY = [("adashift", "bfloat16", "sm_100"), ("lbfgs_direction", "float64", "sm_80"), ("ranger21", "float64", "sm_80")]


def blocks(name: str, dtype: str) -> set[int]:
    """The blocks that a multiprocessor must have room for, of all kernels of a rule's stages."""
    texts = [kernel_source(*program) for program in programs(name, dtype)]
    return {int(n) for text in texts for n in re.findall(r"__launch_bounds__\(256, (\d)\) (?:stage_\d+|step)\b", text)}


def test_a_multiprocessor_has_two_blocks_but_of_kernels_with_many_arrays() -> None:
    assert blocks("adamw", "float32") == blocks("ranger21", "bfloat16") == blocks("dadapt_adan", "float64") == {2}
    assert [blocks(name, dtype) for name, dtype, _ in MANY] == [{1, 2}] * 3


@needs_nvrtc
@pytest.mark.slow
@pytest.mark.proof
@pytest.mark.parametrize(("name", "dtype", "architecture"), MANY)
def test_many_arrays_stay_in_registers(name: str, dtype: str, architecture: str) -> None:
    check_machine_code([name], dtype, [architecture])


@needs_nvrtc
@pytest.mark.slow
@pytest.mark.parametrize("states", ["bfloat16", "float32"])
def test_sixteen_elements_of_split_weights_stay_in_registers(states: str) -> None:
    program = compile(rulec.load("adapnm"), memory=Memory("split24"))
    stored = {b.name: states for b in program.states if b.role == "state" and b.name in rulec.load("adapnm").state}
    program, layout = scheduled(program, layout_for(program, "bfloat16", states=stored))
    (code,) = kernels(CupyBackend().emit(program, layout), "sm_100", [kernel_name(program, 0)]).values()
    assert (code.local(), code.stack) == ([], 0)
