"""The stubs are fresh, and a type checker knows the functions by them."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.jax.stubs import FOLDER, main, stub_texts
from tests.type_checker import checked

PROGRAM = """
import optax
import rulec.jax

schedule = optax.cosine_decay_schedule(1e-3, 100)
rulec.jax.adamw(schedule, b1=0.8, weight_decay=0.1, mask=lambda tree: tree, mu_dtype="bfloat16")
optax.chain(optax.clip(1.0), rulec.jax.scale_by_adam(), optax.scale(-1e-3))
rulec.jax.contrib.prodigy().init({"w": 1.0})
"""

WRONG = """
import rulec.jax

rulec.jax.adamw(1e-3, beta1=0.9)
rulec.jax.adanw(1e-3)
rulec.jax.contrib.prodigy(betas=0.9)
"""


def test_the_stub_files_are_what_would_be_written() -> None:
    for name, text in stub_texts().items():
        assert (FOLDER / name).read_text(encoding="utf-8") == text, "run python -m tests.jax.stubs"
    assert main(["--check"]) == 0


@pytest.mark.slow
def test_a_type_checker_accepts_what_is_right_and_nothing_else(tmp_path: Path) -> None:
    right, wrong = tmp_path / "right.py", tmp_path / "wrong.py"
    right.write_text(PROGRAM)
    wrong.write_text(WRONG)
    failed, said = checked(right, "--ignore-missing-imports")
    assert failed == 0, said
    failed, said = checked(wrong, "--ignore-missing-imports")
    assert failed == 1
    assert 'Unexpected keyword argument "beta1" for "adamw"' in said
    assert 'has no attribute "adanw"' in said
    assert 'Argument "betas" to "prodigy" has incompatible type "float"' in said
