"""Training with states in codes: by a kernel, and by the plain kernel between `decode` and `encode`."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

import rulec
from rulec.backend.protocol import Backend, Call, Rows
from rulec.compiler.ir import Program
from rulec.compiler.layout import Layout, layout_for, scale_name, scheduled
from rulec.compiler.scalars import ScalarTable, resolve_hyper
from rulec.compiler.view import matrix_view
from rulec.formats import Format, decode, encode, parse
from rulec.runtime.storage.quantized import kernel_of

Array = np.ndarray[Any, Any]
Arrays = dict[str, Array]
STEPS = 3


def _same(array: Any) -> Any:
    return array


class Memory(NamedTuple):
    """Copies of NumPy's arrays to the memory of a backend, and back to NumPy's."""

    there: Callable[[Array], Any] = _same
    back: Callable[[Any], Array] = _same


#: NumPy's own memory.
HERE = Memory()


@dataclass
class Training:
    """A program with states in codes: its gradients, and the arrays that three steps leave.

    `memory` is that of the kernels.
    """

    program: Program
    layout: Layout
    shape: tuple[int, ...]
    memory: Memory

    def __post_init__(self) -> None:
        draws = np.random.default_rng(len(self.layout.text()))
        self.first = draws.standard_normal(self.shape).astype(np.float32)
        sizes = np.exp(4 * draws.standard_normal((STEPS, *self.shape)))
        self.grads = (draws.standard_normal((STEPS, *self.shape)) * sizes).astype(np.float32)
        flat = self.grads.reshape(STEPS, -1)
        flat[:, :600] = 0  # whole blocks of zeros
        flat[1, 700:1000] = 0
        flat[2, 1500:1503] = np.nan, np.inf, -np.inf

    def rows(self, t: int) -> Rows:
        """The scalar table of one step."""
        hyper = resolve_hyper(self.program.hyper, {}, 2.0**-23, self.program.name)
        facts = matrix_view(self.shape, self.program.rule.view).facts
        values, _ = ScalarTable(self.program.scalars).evaluate((), hyper, t, facts, {})
        return Rows(np.ascontiguousarray(values)[None], np.zeros(1, np.int64))

    def steps(self, built: Any, arrays: Arrays, steps: range) -> None:
        """Runs steps of a kernel over a parameter and its states, in place."""
        there = {name: self.memory.there(array) for name, array in arrays.items()}
        call: Call = built.bind([there["p"]], [{name: x for name, x in there.items() if name != "p"}])
        for t in steps:
            grads = [self.memory.there(self.grads[t - 1])]
            for stage in range(len(self.program.stages)):
                call(stage, grads, self.rows(t))
        for name, x in there.items():
            arrays[name][...] = self.memory.back(x)

    def states(self) -> dict[str, Array]:
        """The first states: zeros, in codes where the layout has a format."""
        arrays = {b.name: np.zeros(self.shape, np.float32) for b in self.program.states}
        for name, form in self.layout.formats:
            arrays[name], arrays[scale_name(name)] = encode(form, arrays[name])
        return arrays

    def by_kernel(self, backend: Backend) -> Arrays:
        """The arrays after the steps of the kernel for states in codes."""
        arrays = {"p": self.first.copy(), **self.states()}
        _, kernel = kernel_of(backend, self.program, self.layout, lambda _, like: np.empty_like(like))
        self.steps(kernel, arrays, range(1, STEPS + 1))
        return arrays

    def by_definition(self, backend: Backend) -> Arrays:
        """The arrays after steps of the plain kernel on decoded states, each encoded after the step."""
        arrays, plain = {"p": self.first.copy(), **self.states()}, self.layout.decoded
        built = backend.build(self.program, plain, backend.emit(self.program, plain))
        for t in range(1, STEPS + 1):
            held = {name: arrays[name] for name in ("p", *(b.name for b in self.program.states))}
            for name, form in self.layout.formats:
                held[name] = decode(form, arrays[name], arrays[scale_name(name)], self.shape)
            self.steps(built, held, range(t, t + 1))
            for name, form in self.layout.formats:
                arrays[name], arrays[scale_name(name)] = encode(form, held[name])
        return arrays


def training(
    rule: str | rulec.Rule, formats: Mapping[str, Format], shape: tuple[int, ...], memory: Memory = HERE
) -> Training:
    """The training of a rule's tensor of this shape, with these states in codes."""
    program = rulec.compile(rulec.load(rule) if isinstance(rule, str) else rule, matrix_view(shape, None).facts)
    return Training(*scheduled(program, layout_for(program, "float32", formats=formats)), shape, memory)


def check(case: Training, backend: Backend) -> None:
    """AssertionError unless the kernel leaves the bits of the definition."""
    kernel, definition = case.by_kernel(backend), case.by_definition(backend)
    for name, wanted in definition.items():
        assert kernel[name].tobytes() == wanted.tobytes(), f"{name}, {case.layout.text()}"


def signed(text: str) -> Format:
    """A format of a state with a sign."""
    return parse(text).for_state(signed=True, floor=False)


def unsigned(text: str) -> Format:
    """A format of a state without a sign, with the floor for denominators."""
    return parse(text).for_state(signed=False, floor=True)
