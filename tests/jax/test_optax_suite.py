"""optax's own tests pass with our functions under optax's names, but for what the table says."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]

#: What of optax's tests may be left out: other functions, and what no rule of ours is about.
REASONS = ("rulec has no", "is about no", "a state is complex", "not among the few")


#: How many tests of each method are ours, with optax 0.2.8: none goes missing unseen.
COUNTS: dict[str, int] = {}

#: What optax's tests skip themselves: options of its own that are not annotated so, or not supported there.
SKIPS = (
    "requires learning rate scheduling",
    "needs a non-None learning rate",
    "Optimizer doesn't accept a learning schedule",
    "reduce_on_plateau is not supported",
)


@pytest.mark.slow
def test_optax_s_tests_pass() -> None:
    command = [sys.executable, "-m", "tests.jax.optax_suite"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    found: dict[str, Any] = json.loads(done.stdout)
    assert not found["failed"], "\n\n".join(f"{name}\n{trace}" for name, trace in found["failed"].items())
    assert all(why.startswith(REASONS) for why in found["left_out"].values())
    assert found["run"] == COUNTS
    assert all(any(reason in why for reason in SKIPS) for why in found["skipped"].values()), found["skipped"]
