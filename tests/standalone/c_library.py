"""A rule written as C, compiled by the system's compiler and called through ctypes: what a C program would do."""

from __future__ import annotations

import ctypes
import shutil
import subprocess
from collections.abc import Mapping, Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from rulec import Rule
from rulec.array.arrays import numpy_dtype
from rulec.runtime.storage.options import Storage
from rulec.standalone.prose import file_name, written
from rulec_backends.c.compile import processor
from rulec_backends.c.standalone.model import CFile
from tests.backends.cuda_stand_in import kept, version

Array = NDArray[Any]

#: Everything a strict reader of C would ask for.
FLAGS = ("-std=c99", "-O2", "-Wall", "-Wextra", "-Werror", "-pedantic")


def compiled(folder: Path, name: str, *more: str) -> Path:
    """The shared library of `name`.c and `name`.h in a folder; the test is skipped where there is no GCC."""
    if shutil.which("gcc") is None:
        pytest.skip("gcc is not installed")
    command = ["gcc", *FLAGS, *more, "-shared", "-fPIC", f"{name}.c", "-lm"]

    def make(library: Path) -> None:
        done = subprocess.run([*command, "-o", str(library)], cwd=folder, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr

    texts = [(folder / f"{name}{suffix}").read_text() for suffix in (".c", ".h")]
    return kept(f"lib{name}.so", (version("gcc"), processor(), *command, *texts), make)


def storage_of(state_dtype: str | Mapping[str, str] = "", weights: str = "") -> Storage:
    """The storage with one word for all states, or words by name."""
    words = state_dtype if isinstance(state_dtype, Mapping) else {"": state_dtype} if state_dtype else {}
    return Storage(words, weights)


class CRule:
    """The C functions of a rule, for tensors of one dtype."""

    def __init__(
        self, rule: Rule, folder: Path, dtype: str = "float32", state_dtype: str | Mapping[str, str] = "", *flags: str,
        weights: str = "",
    ) -> None:  # fmt: skip
        self.name, self.dtype, storage = file_name(rule, ""), dtype, storage_of(state_dtype, weights)
        self.file = CFile(rule, self.name, dtype, storage)
        for name, text in written(rule, "c", dtype=dtype, storage=storage).items():
            (folder / name).write_text(text)
        self.library = ctypes.CDLL(str(compiled(folder, self.name, *flags)))
        self.fields = [field for field, _ in self.file.defaults]
        self.function("state_bytes").restype = ctypes.c_size_t
        self.function("steps").restype = ctypes.c_int64
        self.function("message").restype = ctypes.c_char_p

    def function(self, word: str) -> Any:
        """The function `<rule>_<word>`."""
        return getattr(self.library, f"{self.name}_{word}")

    def hyper(self, given: Mapping[str, float]) -> Any:
        """The struct of hyper-parameters, with defaults for those not given."""
        values = {**dict(self.file.defaults), **{self.file.hyper[k]: v for k, v in given.items()}}
        return (ctypes.c_double * len(values))(*values.values())

    def size(self, shape: Sequence[int]) -> list[Any]:
        """The arguments that say how large a tensor is."""
        if not self.file.shaped:
            return [ctypes.c_int64(int(np.prod(shape)))]
        return [ctypes.c_int(len(shape)), (ctypes.c_int64 * max(1, len(shape)))(*shape)]


class CRun:
    """Tensors updated by the C functions of a rule."""

    def __init__(
        self, rule: CRule, params: Sequence[Array], hyper: Mapping[str, float] | None = None, seed: int = 0
    ) -> None:
        self.rule, self.arrays = rule, [np.array(p, numpy_dtype(rule.dtype), order="C") for p in params]
        self.states: list[Array] = []
        for number, array in enumerate(self.arrays):
            words = [ctypes.c_int64(word) for word in (seed, number)] * rule.file.family.seeded
            size = rule.size(array.shape)
            # More than is asked for, filled with a pattern: what is written beyond the block would show.
            block = np.full(rule.function("state_bytes")(*size) + 64, 0xA5, np.uint8)
            status = rule.function("init")(address(block), address(array), *size, rule.hyper(hyper or {}), *words)
            assert status == 0, rule.function("message")(status)
            self.states.append(block)

    def step(self, grads: Sequence[Array | None], hyper: Mapping[str, float] | None = None) -> None:
        """One step of those tensors that have a gradient."""
        given = self.rule.hyper(hyper or {})
        for array, grad, state in zip(self.arrays, grads, self.states, strict=True):
            if grad is not None:
                own = np.array(grad, numpy_dtype(self.rule.dtype), order="C")
                before = own.copy()
                status = self.rule.function("step")(
                    address(array), address(own), address(state), *self.rule.size(array.shape), given
                )
                assert status == 0, self.rule.function("message")(status)
                assert own.tobytes() == before.tobytes()
                assert (state[-64:] == 0xA5).all()

    def move(self, word: str, hyper: Mapping[str, float] | None = None) -> None:
        """Moves every tensor to its evaluation point or back."""
        for array, state in zip(self.arrays, self.states, strict=True):
            size = self.rule.size(array.shape)
            status = self.rule.function(word)(address(array), address(state), *size, self.rule.hyper(hyper or {}))
            assert status == 0, self.rule.function("message")(status)


def address(array: Array) -> ctypes.c_void_p:
    return ctypes.c_void_p(array.ctypes.data)


@lru_cache(maxsize=256)
def drawn(seed: int, shapes: tuple[tuple[int, ...], ...], steps: int) -> tuple[list[Array], list[list[Array]]]:
    """Parameters, and gradients for each step, with numbers that float32 has."""
    rng = np.random.default_rng(seed)

    def draw(scale: float) -> list[Array]:
        return [np.asarray(scale * rng.standard_normal(s), np.float32).astype(np.float64) for s in shapes]

    return draw(1.0), [draw(0.1) for _ in range(steps)]
