"""optax's own tests pass with our functions under optax's names, but for what the table says."""

from __future__ import annotations

import json
import subprocess
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]

#: What of optax's tests may be left out: other functions, and what no rule of ours is about.
REASONS = ("rulec has no", "is about no", "parameters are real", "not among the few")


def report(*arguments: str) -> dict[str, Any]:
    """Runs the program and reads what it prints; nothing failed, and what was left out has a known reason."""
    command = [sys.executable, "-m", "tests.jax.optax_suite", *arguments]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    found: dict[str, Any] = json.loads(done.stdout)
    assert not found["failed"], "\n\n".join(f"{name}\n{trace}" for name, trace in found["failed"].items())
    assert all(why.startswith(REASONS) for why in found["left_out"].values())
    return found


def test_some_of_optax_s_tests_pass() -> None:
    found = report("optax._src.alias_test", "--few", "test_optimizers_can_be_wrapped_in_inject_hyperparams")
    assert found["run"] == 4
    assert not found["skipped"]


ALIAS = {
    "test_optimization": 51, "test_optimizers_accept_extra_args": 25, "test_preserve_dtype": 50,
    "test_optimizers_can_be_wrapped_in_inject_hyperparams": 25, "test_explicit_dtype": 18,
    "test_state_shape_dtype_shard_stability": 100, "test_gradient_accumulation": 50,
}  # fmt: skip
