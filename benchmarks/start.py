"""`rulec bench start`: the time from the import to the end of the first step, each in a process of its own."""

from __future__ import annotations

import importlib.util
import json
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Callable
from typing import Any

from benchmarks.kernels import threads
from benchmarks.result import Result, Row
from rulec.errors import RulecError

ROUNDS, QUICK_ROUNDS = 9, 2
COLD_ROUNDS = 3

#: Seconds: what `import rulec` may add to `import numpy`; from `import rulec` to the end of the first step; the
#: compilation of one rule into an empty cache.
IMPORT, FIRST_STEP, COLD = 0.1, 0.5, 3.0

FIRST = "import of rulec to the end of the first step"

#: Packages that importing rulec, or a step from the cache, has no use for.
HEAVY = ("sympy", "mpmath", "numba", "pydantic", "typer", "rich", "torch", "jax", "matplotlib")

_IMPORT = """
import sys, time
import numpy
begin, before = time.perf_counter(), set(sys.modules)
import rulec
seconds = time.perf_counter() - begin
"""

_ARRAY_STEP = """
import sys, time
begin, before = time.perf_counter(), set(sys.modules)
import rulec.array
import numpy
parameter = numpy.ones(1000, numpy.float32)
rulec.array.Optimizer("adamw", [parameter]).step([parameter.copy()])
seconds = time.perf_counter() - begin
"""

_TORCH_STEP = """
import sys, time
import torch
parameter = torch.ones(1000, requires_grad=True)
parameter.grad = torch.ones(1000)
torch.optim.SGD([parameter])  # torch loads a second's worth of its own modules for its first optimizer
begin, before = time.perf_counter(), set(sys.modules)
import rulec.torch
rulec.torch.AdamW([parameter]).step()
seconds = time.perf_counter() - begin
"""

_REPORT = f"""
import json
added = sorted(name for name in {HEAVY!r} if name in sys.modules and name not in before)
print(json.dumps({{"seconds": seconds, "modules": len(set(sys.modules) - before), "heavy": added}}))
"""


def measure(quick: bool, advance: Callable[[], object] = lambda: None) -> Result:
    """The measurement; `advance` is called after each of its `parts`."""
    rounds = QUICK_ROUNDS if quick else ROUNDS
    rows = [_row("import rulec", "added to import numpy", _IMPORT, IMPORT, rounds)]
    advance()
    with tempfile.TemporaryDirectory(prefix="rulec-bench-") as cache:
        for what, program in programs():
            _run(program, cache)  # fills the cache
            rows.append(_row(what, FIRST, program, FIRST_STEP, rounds, cache))
            advance()
    rows.append(_cold(1 if quick else COLD_ROUNDS))
    advance()
    return Result("start", rows, quick, threads(), ["every figure is the median of new processes"])


def programs() -> list[tuple[str, str]]:
    """The programs of the first steps: on arrays, and where torch is installed in torch, imported before the clock."""
    steps = [("arrays", _ARRAY_STEP)]
    if importlib.util.find_spec("torch") is not None:
        steps.append(("torch, whose own first optimizer was made before", _TORCH_STEP))
    return steps


def parts() -> int:
    """The number of figures."""
    return len(programs()) + 2


def _row(subject: str, measure: str, program: str, target: float, rounds: int, cache: str | None = None) -> Row:
    runs = [_run(program, cache) for _ in range(rounds)]
    detail = {"seconds": [r["seconds"] for r in runs], "modules": runs[-1]["modules"], "heavy": runs[-1]["heavy"]}
    return Row(subject, measure, statistics.median(detail["seconds"]), target, "at most", "s", detail)


def _cold(rounds: int) -> Row:
    """The first step into an empty cache: it compiles."""
    seconds = []
    for _ in range(rounds):
        with tempfile.TemporaryDirectory(prefix="rulec-bench-") as cache:
            seconds.append(_run(_ARRAY_STEP, cache)["seconds"])
    measure = f"{FIRST}, which compiles"
    return Row("arrays, empty cache", measure, statistics.median(seconds), COLD, "at most", "s", {"seconds": seconds})


def _run(program: str, cache: str | None) -> dict[str, Any]:
    """The report of a program in a process of its own; RulecError where it fails."""
    environment = {**os.environ, **({"RULEC_CACHE_DIR": cache} if cache else {})}
    done = subprocess.run(
        [sys.executable, "-c", program + _REPORT], env=environment,
        stdin=subprocess.DEVNULL, capture_output=True, text=True, check=False,
    )  # fmt: skip
    if done.returncode:
        last = (done.stderr.strip().splitlines() or ["no message"])[-1]
        raise RulecError(f"a process that measures the start failed: {last}")
    report: dict[str, Any] = json.loads(done.stdout)
    return report
