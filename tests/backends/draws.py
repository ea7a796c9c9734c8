"""Random numbers of rules by Triton beside the stream and beside noise, in its interpreter or on a device."""

from __future__ import annotations

from typing import Any

import torch

from rulec.backend import registry
from rulec.backend.capabilities import capabilities_of
from rulec.language.expr.node import Op
from rulec.runtime.stages.sources import Draw
from rulec.testing import IEEE
from rulec.testing.capabilities import CHECKS
from rulec.testing.kinds import kind_of
from rulec.testing.trial import Subject
from tests.backends.segments import ends_of

#: Counts of tensors in one draw: a part of a block, more than one program, and none.
COUNTS = (3, 1500, 0, 7)

TENSORS = (4, 2**31 + 9, 1, 0)


def kernel() -> Any:
    """The triton backend's."""
    backend: Any = registry.get("triton")
    return backend.build_draws(backend.emit_draws())


def drawn(op: Op, dtype: torch.dtype, steps: Any, first: int = 0, device: str = "cpu") -> torch.Tensor:
    """The numbers of all tensors, and one more place of memory, in which the kernel must write nothing."""
    out = torch.full((sum(COUNTS) + 1,), 7.0, dtype=dtype, device=device)
    ends, tensors = ends_of(COUNTS, device), torch.tensor(TENSORS, device=device)
    kernel()(op, out[:-1], ends, tensors, steps, most=max(COUNTS), seed=-5, draw=3, first=first)
    return out


def unlike_the_stream() -> list[str]:
    """The sentences of the conformance suite about the kernel."""
    backend: Any = registry.get("triton")
    return [*CHECKS["draws"](Subject(backend, kind_of(backend), IEEE), capabilities_of(backend))]


def unlike_noise(device: str = "cpu") -> list[str]:
    """Normal numbers of float64 with other bits than the backend's noise; and memory that was written too much."""
    backend: Any = registry.get("triton")
    failed = []
    for step, first in ((11, 0), (2**32 - 1, 6)):
        found = drawn(Op.NORMAL, torch.float64, step, first, device)
        if found[-1] != 7:
            failed.append(f"a number behind the last tensor's at step {step}")
        for tensor, numbers in zip(TENSORS, found[:-1].split(COUNTS), strict=True):
            wanted = torch.empty_like(numbers)
            noise = Draw("normal", -5, tensor, step, torch.ones(1).numpy(), first=3)
            if len(numbers):
                backend.fill_noise(wanted, noise, first)
            if not torch.equal(numbers, wanted):
                failed.append(f"tensor {tensor} at step {step} from number {first} on")
    return failed


def unlike_known_steps(device: str = "cpu") -> list[str]:
    """Numbers that differ by whether the host knows the step: in either dtype, of either kind."""
    failed = []
    for op in (Op.NORMAL, Op.UNIFORM):
        for dtype in (torch.float32, torch.float64):
            one, same = torch.tensor([9.0]).double().to(device), torch.full((4,), 9.75).double().to(device)
            wanted, *others = (drawn(op, dtype, steps, device=device) for steps in (9, one, same))
            failed += [f"{op.name} in {dtype}" for x in others if not torch.equal(x, wanted)]
    return failed
