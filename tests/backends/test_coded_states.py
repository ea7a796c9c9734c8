"""States in codes: every kernel equals the plain kernel between `decode` and `encode` of `rulec.formats`."""

from __future__ import annotations

import numpy as np
import pytest

import rulec
from rulec.backend import registry
from rulec.backend.capabilities import capabilities_of, scalars_of
from rulec.compiler.ir import Program
from rulec.compiler.layout import Layout
from rulec.formats import NAMES, parse
from rulec.runtime.storage.quantized import kernel_of
from rulec_backends.numpy import NumpyBackend
from tests.backends.coded_training import Training, signed, training, unsigned
from tests.backends.coded_training import check as check_bits
from tests.backends.here import BACKENDS
from tests.pairs import paired


def check(case: Training, backend: str) -> None:
    check_bits(case, registry.get(backend))


@pytest.mark.parametrize(("backend", "name"), paired(BACKENDS, NAMES))
def test_both_states_of_adamw_in_one_format(backend: str, name: str) -> None:
    check(training("adamw", {"m": signed(name), "v": unsigned(name)}, (5003,)), backend)


@pytest.mark.parametrize(("backend", "name"), paired(BACKENDS, NAMES))
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
    assert capabilities_of(registry.get(backend)).decodes(case.program, case.layout)


@pytest.mark.parametrize("backend", ["c", "cpu"])
def test_values_may_have_the_names_of_variables_of_parts(backend: str) -> None:
    rule = rulec.parse("""
name: Named
hyper: {count: 0.9, first: 0.5, last: 0.25, part: 2.0}
state: {m: 0}
step: |
  m = count*m + first*g
  p = p - last*m*part
""")
    check(training(rule, {"m": signed("int8")}, (5003,)), backend)


class WithoutScalars(NumpyBackend):
    """On a device, with kernels for codes of one state alone, and without one for the scalar table."""

    name, on_device = "without-scalars", True

    def decodes(self, program: Program, layout: Layout) -> bool:
        return program.name == "Codes"


def test_operations_compute_the_scalars_where_the_kernel_of_floats_does_not() -> None:
    case = training("adamw", {"m": signed("int8")}, (5003,))
    _, kernel = kernel_of(WithoutScalars(), case.program, case.layout, lambda _, like: np.empty_like(like))
    arrays = case.states()
    call = kernel.bind([case.first], [arrays])
    assert scalars_of(call) is None
