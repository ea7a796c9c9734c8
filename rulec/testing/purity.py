"""Printing is pure: the same text every time, in a process where no framework can be imported."""

from __future__ import annotations

import hashlib
import subprocess
import sys
from collections.abc import Sequence

from rulec.backend.protocol import Backend
from rulec.compiler.layout import layout_for
from rulec.compiler.pipeline import compile
from rulec.errors import BackendUnsupported, RulecError
from rulec.testing.cases import loaded

FRAMEWORKS = (
    "cupy", "jax", "jaxlib", "llvmlite", "mlx", "mxnet", "numba", "optax", "sympy", "tensorflow", "torch", "triton",
)  # fmt: skip

_CHILD = """
import importlib, sys
from functools import reduce

class Absent:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in FRAMEWORKS:
            raise ModuleNotFoundError(f"{name} is a framework: import it inside `build`", name=name)

sys.meta_path.insert(0, Absent())
backend = reduce(getattr, CLASS.split("."), importlib.import_module(MODULE))()
from rulec.testing.purity import digests
print("\\n".join(digests(backend, RULES, DTYPES)))
"""


def digests(backend: Backend, rules: Sequence[str], dtypes: Sequence[str]) -> list[str]:
    """A line for each library rule and dtype: the two and a digest of the source, or `refused`."""
    lines = []
    for name in rules:
        program = compile(loaded(name))
        for dtype in dtypes:
            try:
                source = backend.emit(program, layout_for(program, dtype))
                digest = hashlib.sha256(source.encode()).hexdigest()
            except BackendUnsupported:
                digest = "refused"
            lines.append(f"{name} {dtype} {digest}")
    return lines


def check_emit_is_pure(backend: Backend, rules: Sequence[str], dtypes: Sequence[str]) -> None:
    """AssertionError where `emit` gives another text a second time or in another process, or imports a framework.

    The other process makes the backend from its class: this must be importable and take no arguments.
    """
    here = digests(backend, rules, dtypes)
    _compare(backend, here, digests(backend, rules, dtypes), "a second time")
    kind = type(backend)
    if kind.__module__ == "__main__" or "<locals>" in kind.__qualname__:
        raise RulecError(
            f"the class of backend {backend.name!r} cannot be imported by another process, which checks that `emit` "
            "needs no framework: define it at the top of a module"
        )
    program = "\n".join(
        f"{name} = {value!r}"
        for name, value in {
            "CLASS": kind.__qualname__, "MODULE": kind.__module__, "FRAMEWORKS": FRAMEWORKS, "RULES": list(rules),
            "DTYPES": list(dtypes),
        }.items()
    )  # fmt: skip
    path = f"import sys; sys.path[:] = {sys.path!r}\n"
    command = [sys.executable, "-c", path + program + _CHILD]
    done = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        last = done.stderr.strip().splitlines()[-1]
        raise AssertionError(f"backend {backend.name!r} does not print where frameworks cannot be imported: {last}")
    _compare(backend, here, done.stdout.splitlines(), "in another process")


def _compare(backend: Backend, first: Sequence[str], second: Sequence[str], where: str) -> None:
    for a, b in zip(first, second, strict=True):
        if a != b:
            rule, dtype, _ = a.split()
            raise AssertionError(f"backend {backend.name!r} prints {rule} in {dtype} differently {where}")
