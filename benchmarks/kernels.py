"""Kernels by themselves: a rule's, and its limit, which moves the same bytes and computes nothing."""

from __future__ import annotations

import importlib
import sys
import zlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from rulec.backend import registry
from rulec.backend.protocol import Kernel, Rows
from rulec.compiler.ir import Program
from rulec.compiler.layout import Layout, kernel_buffers
from rulec.compiler.scalars import ScalarTable, evaluate_once, resolve_hyper
from rulec.compiler.view import view_of

Array = np.ndarray[Any, Any]

#: The step for a kernel's scalars: past the first, and early enough for bias corrections to matter.
STEP = 10


@dataclass(frozen=True)
class Pair:
    """A rule's kernel and its limit kernel for one layout of the cpu backend."""

    program: Program
    layout: Layout
    kernel: Kernel
    limit: Kernel

    @property
    def state_names(self) -> list[str]:
        """The states for which kernels have pointers, in order."""
        return self._names("state")

    @property
    def input_names(self) -> list[str]:
        """The inputs of every element, in order."""
        return self._names("input")

    def _names(self, role: str) -> list[str]:
        return [b.name for b in kernel_buffers(self.program) if b.role == role]

    def rows(self, count: int, shape: tuple[int, ...]) -> Rows:
        """The scalar table for tensors of one group, all at step `STEP`, with default hyper-parameters."""
        facts = {**view_of(self.program.rule, shape).facts, "machine_eps": 2.0**-23}
        hyper = resolve_hyper(self.program.hyper, {}, facts["machine_eps"], self.program.name)
        scalar = {s.buffer: self.program.buffer(s.buffer) for s in self.program.scalars.stores}
        states = {n: evaluate_once(b.init, hyper, facts, {}) for n, b in scalar.items() if b.init is not None}
        float_facts = {k: np.float64(v) for k, v in facts.items()}
        table, _ = ScalarTable(self.program.scalars).evaluate((1,), hyper, np.array([float(STEP)]), float_facts, states)
        return Rows(np.ascontiguousarray(table), np.zeros(count, np.int64))


def pair(program: Program, layout: Layout) -> Pair:
    """The kernel of an elementwise program on the cpu backend, and its limit; compiled or from the cache."""
    backend = registry.usable("cpu")
    kernel = backend.build(program, layout, backend.emit(program, layout))
    return Pair(program, layout, kernel, limit_kernel(program, layout))


def limit_kernel(program: Program, layout: Layout) -> Kernel:
    """The limit kernel of a program on the cpu backend: it moves the bytes of every stage and computes nothing."""
    kernel: Kernel = _cpu("cpu").limit_kernel(program, layout)
    return kernel


def _cpu(module: str) -> Any:
    """A module of the backends, for functions beyond the protocol of backends."""
    return importlib.import_module(f"rulec_backends.{module}")


def bound(
    kernel: Kernel, params: Sequence[Any], grads: Sequence[Any], states: Sequence[dict[str, Any]], rows: Rows,
    inputs: Mapping[str, Sequence[Any]] | None = None,
) -> Callable[[], object]:  # fmt: skip
    """A function for one run of the kernel over these tensors; `inputs` are those of every element, by name."""
    call = kernel.bind(params, states)
    return lambda: call(0, grads, rows, inputs)


def as_storage(numbers: Array, dtype: str) -> Array:
    """float32 numbers in a storage dtype; NumPy has no bfloat16, so it is stored as its bits in uint16."""
    if dtype == "bfloat16":
        return (numbers.view(np.uint32) >> np.uint32(16)).astype(np.uint16)
    return numbers.astype(dtype)


class Pool:
    """Arrays by name, allocated once and used for one rule after another.

    Contents are a tile of random numbers: parameters and gradients of both signs, states between 0.01 and 1.
    """

    def __init__(self, elements: int) -> None:
        self.elements = elements
        self._bytes: dict[str, Array] = {}

    def array(self, name: str, dtype: str, positive: bool) -> Array:
        """The array of that name, filled anew; arrays of one name share memory."""
        tile = as_storage(_tile(name, min(self.elements, 1 << 16), positive), dtype)
        size = self.elements * tile.itemsize
        held = self._bytes.get(name)
        if held is None or held.nbytes < size:
            self._bytes[name] = held = np.empty(size, np.uint8)
        array = held[:size].view(tile.dtype)
        whole = self.elements // tile.size * tile.size
        array[:whole].reshape(-1, tile.size)[...] = tile
        array[whole:] = tile[: self.elements - whole]
        return array

    def tensors(self, kernels: Pair) -> tuple[list[Array], list[Array], list[dict[str, Array]]]:
        """A parameter, a gradient and the states of one tensor, for a kernel's layout."""
        states = {
            name: self.array(f"state {i}", kernels.layout.dtype(name), positive=True)
            for i, name in enumerate(kernels.state_names)
        }
        param = self.array("p", kernels.layout.dtype("p"), positive=False)
        grad = self.array("g", kernels.layout.dtype("g"), positive=False)
        return [param], [grad], [states]

    def inputs(self, kernels: Pair) -> dict[str, list[Array]]:
        """The inputs of one tensor's elements by name, for a kernel's layout."""
        names = kernels.input_names
        return {name: [self.array(f"input {name}", kernels.layout.dtype(name), positive=True)] for name in names}


def _tile(name: str, size: int, positive: bool) -> Array:
    """Random numbers for an array of that name, the same in every call."""
    rng = np.random.default_rng(zlib.crc32(name.encode()))
    drawn = rng.uniform(0.01, 1.0, size) if positive else rng.normal(size=size)
    return np.asarray(drawn, np.float32)


def threads() -> int:
    """The number of threads of a kernel in this process."""
    of_python, torch = _cpu("common.threads"), sys.modules.get("torch")
    if torch is None or of_python.asked_for():
        return int(of_python.thread_count())
    return int(torch.get_num_threads())


def hyper_defaults(program: Program) -> Mapping[str, float]:
    """Every hyper-parameter's default."""
    return resolve_hyper(program.hyper, {}, 2.0**-23, program.name)
