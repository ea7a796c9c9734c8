"""Steps on the host have the bits of steps where the parameters are."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import rulec.torch
from tests.torch.offload.runs import BUFFER, assert_same_bits, parameters, take_steps

#: Rules of one stage, of several, over groups and the model, with matrix functions, and with branches.
RULES = ("AdamW", "Lion", "SGD", "LAMB", "Adafactor", "Prodigy", "SOAP", "RAdam", "LARS", "CAME", "Adan")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64])
@pytest.mark.parametrize("rule", RULES)
def test_bits_are_those_of_the_step_without_offload(rule: str, dtype: torch.dtype) -> None:
    made: Any = getattr(rulec.torch, rule)
    plain, moved = parameters(dtype), parameters(dtype)
    weights = "master" if dtype in (torch.bfloat16, torch.float16) else None
    one, other = made(plain, weights=weights), made(moved, offload="step", offload_buffer=BUFFER)
    take_steps(one, plain, 4)
    take_steps(other, moved, 4)
    assert_same_bits(moved, plain)
    assert_same_bits(other.state_dict()["state"], one.state_dict()["state"])
