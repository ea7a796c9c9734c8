"""`rulec bench start`: the time from the import to the end of the first step, each in a process of its own."""

from __future__ import annotations

import importlib.util
import json
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from typing import Any

from benchmarks.kernels import threads
from benchmarks.result import Result, Row
from rulec.errors import RulecError

ROUNDS, QUICK_ROUNDS = 9, 2
COLD_ROUNDS = 3

#: Seconds: what `import rulec` may add to `import numpy`; from `import rulec` to the end of the first step, with a full
#: cache and with an empty one.
IMPORT, FIRST_STEP, COLD = 0.1, 0.5, 0.5

#: Seconds for the kernels of a rule of the library, from its file to machine code: compiled, and from the cache.
COMPILED, KEPT = 1.0, 0.03

FIRST = "import of rulec to the end of the first step"

#: Packages that importing rulec, or a step from the cache, has no use for.
HEAVY = ("sympy", "mpmath", "numba", "pydantic", "typer", "rich", "torch", "jax", "matplotlib")

_IMPORT = """
import sys, time
import numpy
begin, before = time.perf_counter(), set(sys.modules)
import {package}
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

_LIBRARY = """
import gc, sys, time
import rulec
from rulec.backend import registry
from rulec.compiler.layout import layout_for
from rulec.testing.cases import buckets_of, loaded
before, backend = set(sys.modules), registry.get("cpu")

def build(name):
    for bucket in buckets_of(loaded(name), [(24, 16)]):
        layout = layout_for(bucket.program, "float32")
        backend.build(bucket.program, layout, backend.emit(bucket.program, layout))

build("sgd")  # Numba is loaded, and compiles once
gc.disable()  # a process with the kernels of one rule has no garbage of 240 others
seconds = {}
for name in sorted(rulec.rules()):
    begin = time.perf_counter()
    build(name)
    seconds[name] = time.perf_counter() - begin
"""

_REPORT = f"""
import json
added = sorted(name for name in {HEAVY!r} if name in sys.modules and name not in before)
print(json.dumps({{"seconds": seconds, "modules": len(set(sys.modules) - before), "heavy": added}}))
"""


def measure(quick: bool, advance: Callable[[], object] = lambda: None) -> Result:
    """The measurement; `advance` is called after each of its `parts`."""
    rounds = QUICK_ROUNDS if quick else ROUNDS
    rows = []
    for package, target in (("rulec", IMPORT), ("numba", None)):
        program = _IMPORT.format(package=package)
        _run(program, None)  # fills the cache of bytecode
        rows.append(_row(f"import {package}", "added to import numpy", program, target, rounds))
    advance()
    with tempfile.TemporaryDirectory(prefix="rulec-bench-") as cache:
        for what, program in programs():
            _run(program, cache)  # fills the cache
            rows.append(_row(what, FIRST, program, FIRST_STEP, rounds, cache))
            advance()
    rows.append(_cold(1 if quick else COLD_ROUNDS))
    advance()
    if not quick:
        rows += _library()
    advance()
    return Result("start", rows, quick, threads(), ["every figure is the median of new processes"])


def programs() -> list[tuple[str, str]]:
    """The programs of the first steps: on arrays, and where torch is installed in torch, imported before the clock."""
    steps = [("arrays", _ARRAY_STEP)]
    if importlib.util.find_spec("torch") is not None:
        steps.append(("torch, whose own first optimizer was made before", _TORCH_STEP))
    return steps


def parts() -> int:
    """The number of parts, after each of which `measure` calls `advance`."""
    return len(programs()) + 3


def _row(subject: str, measure: str, program: str, target: float | None, rounds: int, cache: str | None = None) -> Row:
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


def _library() -> Iterator[Row]:
    """The seconds that the kernels of each rule take, in one process with an empty cache and one after it."""
    with tempfile.TemporaryDirectory(prefix="rulec-bench-") as cache:
        for what, target in (("compiled", COMPILED), ("from the cache", KEPT)):
            seconds: dict[str, float] = _run(_LIBRARY, cache)["seconds"]
            slowest = sorted(seconds, key=lambda name: -seconds[name])
            late = [name for name in slowest if seconds[name] > target]
            subject = f"kernels of {len(seconds)} rules for a matrix, cpu, {what}"
            middle = statistics.median(seconds.values())
            yield Row(subject, "the rule in the middle", middle, target, "at most", "s", {"seconds": seconds})
            yield Row(subject, f"the slowest, {slowest[0]}", seconds[slowest[0]], target, "at most", "s")
            yield Row(subject, f"rules that take over {target:g} s", len(late), 0, "at most", "", {"rules": late})


def _run(program: str, cache: str | None) -> dict[str, Any]:
    """The report of a program in a process of its own; RulecError where it fails.

    Python keeps the bytecode of modules, as it does for users, also where the environment forbids it.
    """
    environment = {**os.environ, **({"RULEC_CACHE_DIR": cache} if cache else {})}
    environment.pop("PYTHONDONTWRITEBYTECODE", None)
    done = subprocess.run(
        [sys.executable, "-c", program + _REPORT], env=environment,
        stdin=subprocess.DEVNULL, capture_output=True, text=True, check=False,
    )  # fmt: skip
    if done.returncode:
        last = (done.stderr.strip().splitlines() or ["no message"])[-1]
        raise RulecError(f"a process that measures the start failed: {last}")
    report: dict[str, Any] = json.loads(done.stdout)
    return report
