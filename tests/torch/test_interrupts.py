"""KeyboardInterrupt inside a step: the step is whole, or the next call says that it is not."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

import rulec
from rulec.errors import PartialUpdate
from tests.torch.moving import Run


def _interrupted(run: Run, place: int) -> bool:
    """Whether KeyboardInterrupt came into a step, at the line of rulec's with this number."""
    count = 0

    def trace(frame: Any, event: str, _: Any) -> Any:
        nonlocal count
        if "/rulec/" not in frame.f_code.co_filename and "/backends/" not in frame.f_code.co_filename:
            return None
        if event in ("line", "return"):
            count += 1
            if count == place:
                raise KeyboardInterrupt
        return trace

    sys.settrace(trace)
    try:
        run.step(9)
    except KeyboardInterrupt:
        return True
    finally:
        sys.settrace(None)
    return False


def _places(kind: str) -> Iterator[tuple[Run, int]]:
    place = 0
    while True:
        place += 7  # every line would take minutes
        run = Run(kind)
        for number in range(5):
            run.step(number)
        if not _interrupted(run, place):
            return
        yield run, place


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["AdamW", "AdamW, split", "LAMB", "clipped", "Prodigy"])
def test_an_interrupted_step_is_whole_or_the_next_call_says_it(kind: str) -> None:
    before, after = (_end_of(kind, steps) for steps in (5, 6))
    told = 0
    for run, place in _places(kind):
        end = run.end()
        whole = all(map(torch.equal, end, before)) or all(map(torch.equal, end, after))
        try:
            run.optimizer.state_dict()
            assert whole, f"{kind}, interrupted at line {place}: a part of a step, and no word of it"
        except PartialUpdate:
            told += 1
            run.step(10)  # it says it once
    assert told == 0 or kind not in ("AdamW", "AdamW, split"), "a repeated step is whole"


def _end_of(kind: str, steps: int) -> list[Tensor]:
    """The end of a run of five steps, and another with the gradients of the interrupted one."""
    run = Run(kind)
    for number in range(5):
        run.step(number)
    if steps > 5:
        run.step(9)
    return run.end()


def test_a_repeated_step_is_whole_wherever_an_interrupt_comes() -> None:
    before, after = (_end_of("AdamW", steps) for steps in (5, 6))
    for place in (3, 12, 20, 28, 34):
        run = Run("AdamW")
        for number in range(5):
            run.step(number)
        _interrupted(run, place)
        end = run.end()
        assert all(map(torch.equal, end, before)) or all(map(torch.equal, end, after)), f"line {place}"


def test_an_interrupted_step_of_arrays_is_told() -> None:
    """The interrupt comes after the kernel, and before the count of a caller."""
    array = np.ones(5)
    optimizer = rulec.array.Optimizer("adamw", {"w": array}, lr=0.1)
    optimizer.step({"w": np.ones(5)})
    (bucket,) = optimizer._engine.buckets.values()
    call = bucket.version().call

    def interrupted(*arguments: Any, **keywords: Any) -> Any:
        call(*arguments, **keywords)
        raise KeyboardInterrupt

    bucket.version().call = interrupted
    with pytest.raises(KeyboardInterrupt):
        optimizer.step({"w": np.ones(5)})
    bucket.version().call = call
    with pytest.raises(PartialUpdate, match="the last step of AdamW was interrupted while it was written"):
        optimizer.state_dict()
    optimizer.step({"w": np.ones(5)})
