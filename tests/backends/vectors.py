"""The width of vectors that LLVM prefers on this processor."""

from __future__ import annotations

import functools
import re

import llvmlite.binding as llvm
import pytest

from rulec_backends.cpu import machine

#: A loop that adds one to every number of an array.
_LOOP = """
define void @add_one(ptr %array, i64 %count) {
start:
  br label %loop
loop:
  %i = phi i64 [0, %start], [%next, %loop]
  %at = getelementptr float, ptr %array, i64 %i
  %number = load float, ptr %at
  %sum = fadd float %number, 1.0
  store float %sum, ptr %at
  %next = add nuw nsw i64 %i, 1
  %more = icmp ult i64 %next, %count
  br i1 %more, label %loop, label %end
end:
  ret void
}
"""


@functools.cache
def preferred_bits() -> int:
    """The bits of a vector in a plain loop, as LLVM tunes it for this processor.

    The tuning of some processors with registers of 512 bits prefers vectors of 256.
    """
    module = machine._checked(llvm, _LOOP)
    options = llvm.create_pipeline_tuning_options(speed_level=3)
    options.loop_vectorization = True
    builder = llvm.create_pass_builder(machine._target_machine(llvm), options)
    builder.getModulePassManager().run(module, builder)
    return max((32 * int(lanes) for lanes in re.findall(r"<(\d+) x float>", str(module))), default=32)


def wide_register() -> str:
    """A pattern of registers that have at least the preferred width; skips where a processor has 128 bits or none."""
    if preferred_bits() < 256 or "+avx2" not in machine.architecture():
        pytest.skip("no wide vectors on this processor")
    return "%zmm" if preferred_bits() >= 512 else "%[yz]mm"
