"""The stubs are fresh, and a type checker knows the classes by them."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.torch.stubs import STUB_FILE, main, stub_text
from tests.type_checker import checked

PROGRAM = """
import torch
import rulec
import rulec.torch

model = torch.nn.Linear(2, 2)
optimizer = rulec.torch.AdamW(model.parameters(), lr=1e-3, betas=(0.9, 0.99), state_dtype={"exp_avg": torch.bfloat16})
rulec.torch.SGD(model.named_parameters(), 0.1, 0.9, nesterov=True)
rulec.torch.Lion([{"params": model.parameters(), "lr": 1e-3}], lr=torch.tensor(0.1))
rulec.torch.optimizer(rulec.load("adam"))(model.parameters(), lr=0.1)
loss: float = optimizer.step(lambda: 1.0)
torch.optim.lr_scheduler.StepLR(optimizer, 2)
"""

WRONG = """
import torch
import rulec.torch

model = torch.nn.Linear(2, 2)
rulec.torch.AdamW(model.parameters(), learning_rate=1e-3)
rulec.torch.AdamW(model.parameters(), betas=0.9)
rulec.torch.AdamX(model.parameters())
"""


def test_the_stub_file_is_what_would_be_written() -> None:
    assert STUB_FILE.read_text(encoding="utf-8") == stub_text(), "run python -m tests.torch.stubs"
    assert main(["--check"]) == 0


@pytest.mark.slow
def test_a_type_checker_accepts_what_is_right_and_nothing_else(tmp_path: Path) -> None:
    right, wrong = tmp_path / "right.py", tmp_path / "wrong.py"
    right.write_text(PROGRAM)
    wrong.write_text(WRONG)
    failed, said = checked(right)
    assert failed == 0, said
    failed, said = checked(wrong)
    assert failed == 1
    assert 'Unexpected keyword argument "learning_rate" for "AdamW"' in said
    assert 'Argument "betas" to "AdamW" has incompatible type "float"' in said
    assert 'has no attribute "AdamX"' in said
