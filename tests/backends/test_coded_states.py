"""States in codes: every kernel equals the plain kernel between `decode` and `encode` of `rulec.formats`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest

import rulec
from rulec.backend import registry
from rulec.backend.protocol import Call, Rows
from rulec.compiler.ir import Program
from rulec.compiler.layout import Layout, layout_for, scale_name, scheduled
from rulec.compiler.scalars import ScalarTable, resolve_hyper
from rulec.compiler.view import matrix_view
from rulec.formats import NAMES, Format, decode, encode, parse
from rulec.runtime.coded import decodes, kernel_of

Array = np.ndarray[Any, Any]
BACKENDS = [
    pytest.param(name, marks=pytest.mark.skipif(bool(reason), reason=str(reason)))
    for name in ("numpy", "c", "cpu")
    for reason in [registry.get(name).unavailable_reason()]
]
STEPS = 3


@dataclass
class Training:
    """A program with states in codes: its gradients, and the arrays that three steps leave."""

    program: Program
    layout: Layout
    shape: tuple[int, ...]

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

    def run(self, call: Call, t: int) -> None:
        """One step, all stages."""
        for stage in range(len(self.program.stages)):
            call(stage, [self.grads[t - 1]], self.rows(t))

    def states(self) -> dict[str, Array]:
        """The first states: zeros, in codes where the layout has a format."""
        arrays = {b.name: np.zeros(self.shape, np.float32) for b in self.program.states}
        for name, form in self.layout.formats:
            arrays[name], arrays[scale_name(name)] = encode(form, arrays[name])
        return arrays

    def by_kernel(self, backend: str) -> dict[str, Array]:
        """The arrays after the steps of the kernel for states in codes."""
        param, states = self.first.copy(), self.states()
        _, kernel = kernel_of(registry.get(backend), self.program, self.layout, lambda _, like: np.empty_like(like))
        call = kernel.bind([param], [states])
        for t in range(1, STEPS + 1):
            self.run(call, t)
        return {"p": param, **states}

    def by_definition(self, backend: str) -> dict[str, Array]:
        """The arrays after steps of the plain kernel on decoded states, each encoded after the step."""
        param, states, plain = self.first.copy(), self.states(), self.layout.decoded
        kernel = registry.get(backend)
        built = kernel.build(self.program, plain, kernel.emit(self.program, plain))
        for t in range(1, STEPS + 1):
            held = {b.name: states[b.name] for b in self.program.states}
            for name, form in self.layout.formats:
                held[name] = decode(form, states[name], states[scale_name(name)], self.shape)
            self.run(built.bind([param], [held]), t)
            for name, form in self.layout.formats:
                states[name], states[scale_name(name)] = encode(form, held[name])
        return {"p": param, **states}


def training(rule: str, formats: Mapping[str, Format], shape: tuple[int, ...]) -> Training:
    program = rulec.compile(rulec.load(rule), matrix_view(shape, None).facts)
    return Training(*scheduled(program, layout_for(program, "float32", formats=formats)), shape)


def check(case: Training, backend: str) -> None:
    kernel, definition = case.by_kernel(backend), case.by_definition(backend)
    for name, wanted in definition.items():
        assert kernel[name].tobytes() == wanted.tobytes(), f"{name}, {case.layout.text()}"


def signed(text: str) -> Format:
    return parse(text).for_state(signed=True, floor=False)


def unsigned(text: str) -> Format:
    return parse(text).for_state(signed=False, floor=True)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("backend", BACKENDS)
def test_both_states_of_adamw_in_one_format(backend: str, name: str) -> None:
    check(training("adamw", {"m": signed(name), "v": unsigned(name)}, (5003,)), backend)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("backend", BACKENDS)
def test_a_signed_state_with_a_floor(backend: str, name: str) -> None:
    check(training("adamw", {"m": parse(name).for_state(signed=True, floor=True)}, (5003,)), backend)


@pytest.mark.parametrize("backend", BACKENDS)
def test_several_chunks_and_blocks_longer_than_a_part(backend: str) -> None:
    formats = {"m": signed("int8/4096"), "v": unsigned("dynamic8/2048")}
    check(training("adamw", formats, (70_001,)), backend)


@pytest.mark.parametrize("backend", BACKENDS)
def test_one_state_in_codes_and_the_other_in_floats(backend: str) -> None:
    check(training("adamw", {"v": unsigned("dynamic4")}, (9001,)), backend)


@pytest.mark.parametrize("backend", ["c", "cpu"])
def test_kernels_in_main_memory_read_and_write_codes_themselves(backend: str) -> None:
    case = training("adamw", {"m": signed("int8"), "v": unsigned("int8")}, (5003,))
    assert decodes(registry.get(backend), case.program, case.layout)
