"""States in codes in kernels of the cupy backend, by their own text on the CPU: the bits are the definition's."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from rulec.array import Optimizer
from rulec.compiler.layout import scale_name
from rulec.formats import NAMES, decode, encode, of_key, parse
from rulec_backends.cupy import CupyBackend
from rulec_backends.cupy.plan import kernel_name
from tests.backends import cuda_stand_in
from tests.backends.coded_training import Memory, check, signed, training, unsigned
from tests.backends.cuda_assembly import kernels, missing
from tests.backends.here import needs_compiler
from tests.runtime.test_coded_between import READERS, SHAPE, rule_of

needs_nvrtc = pytest.mark.skipif(bool(missing()), reason=missing() or "NVRTC is here")
BACKEND = CupyBackend()
GPU = Memory(cuda_stand_in.asarray, lambda array: np.asarray(array.get()))


@pytest.fixture(params=[False, True], ids=["ascending", "descending"])
def cupy(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """CuPy's stand-in, which runs blocks and threads in either order."""
    monkeypatch.setattr(cuda_stand_in, "backwards", request.param)
    with cuda_stand_in.installed() as module:
        yield module
        cuda_stand_in.flush()


@needs_compiler
@pytest.mark.parametrize("name", NAMES)
def test_both_states_of_adamw_in_one_format(cupy: Any, name: str) -> None:
    check(training("adamw", {"m": signed(name), "v": unsigned(name)}, (5003,), GPU), BACKEND)


@needs_compiler
@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("cupy", [True], indirect=True)
def test_a_signed_state_with_a_floor(cupy: Any, name: str) -> None:
    check(training("adamw", {"m": parse(name).for_state(signed=True, floor=True)}, (2003,), GPU), BACKEND)


@needs_compiler
@pytest.mark.parametrize("cupy", [True], indirect=True)
def test_several_chunks_and_blocks_of_formats_longer_than_packs_of_all_threads(cupy: Any) -> None:
    check(training("adamw", {"m": signed("int8/4096"), "v": unsigned("dynamic4/2048")}, (9001,), GPU), BACKEND)


def unaligned(array: Any) -> Any:
    """A copy that begins one element behind an aligned address."""
    return cuda_stand_in.asarray(np.concatenate([array.reshape(-1)[:1], array.reshape(-1)]))[1:].reshape(array.shape)


@needs_compiler
@pytest.mark.parametrize("name", ["int8", "dynamic4"])
@pytest.mark.parametrize("cupy", [False], indirect=True)
def test_arrays_at_any_address(cupy: Any, name: str) -> None:
    assert unaligned(np.zeros(3, np.int8)).data.ptr % 16 == 1
    memory = Memory(unaligned, GPU.back)
    check(training("adamw", {"m": signed(name), "v": unsigned(name)}, (5003,), memory), BACKEND)


@needs_compiler
@pytest.mark.parametrize(
    ("rule", "name", "count"), [("adamw", "int8", 2), ("lamb", "dynamic8", 2), ("adam_mini", "int8", 1)]
)
@pytest.mark.parametrize("cupy", [False], indirect=True)
def test_a_run_in_codes_is_a_run_in_floats_rounded_after_each_step(cupy: Any, rule: str, name: str, count: int) -> None:
    draws = np.random.default_rng(1)
    first = draws.standard_normal((72, 80)).astype(np.float32)
    params = [{"p": cupy.asarray(first)} for _ in range(2)]
    coded, floats = Optimizer(rule, params[0], BACKEND, state_dtype=name), Optimizer(rule, params[1], BACKEND)
    for step in range(3):
        if step == 1:
            saved = coded.state_dict()
            coded = Optimizer(rule, params[0], BACKEND, state_dtype=name)
            coded.load_state_dict(saved)
        grad = {"p": cupy.asarray(draws.standard_normal((72, 80)).astype(np.float32))}
        coded.step(grad)
        floats.step(grad)
        formats = {state: of_key(key) for state, key in coded.state_dict()["formats"].items()}
        for state, form in formats.items():
            values = floats.state("p")[state]
            values[...] = cupy.asarray(decode(form, *encode(form, values.get()), (72, 80)))
        assert params[0]["p"].get().tobytes() == params[1]["p"].get().tobytes()
    assert len(formats) == count
    for state, form in formats.items():
        codes, scales = (coded.state("p")[key].get() for key in (state, scale_name(state)))
        assert decode(form, codes, scales, (72, 80)).tobytes() == floats.state("p")[state].get().tobytes()


@needs_compiler
@pytest.mark.parametrize(("reader", "form"), [("left", "dynamic4"), ("rows", "int8")])
@pytest.mark.parametrize("cupy", [False], indirect=True)
def test_a_product_before_the_update_reads_decoded_values(cupy: Any, reader: str, form: str) -> None:
    rule, draws = rule_of(READERS[reader], "before"), np.random.default_rng(1)
    params = [{"p": cupy.asarray(np.zeros(SHAPE, np.float32))} for _ in range(2)]
    coded, floats = Optimizer(rule, params[0], BACKEND, state_dtype={"m": form}), Optimizer(rule, params[1], BACKEND)
    for _ in range(3):
        grad = {"p": cupy.asarray(draws.standard_normal(SHAPE).astype(np.float32))}
        coded.step(grad)
        floats.step(grad)
        kept, values = of_key(coded.state_dict()["formats"]["m"]), floats.state("p")["m"]
        values[...] = cupy.asarray(decode(kept, *encode(kept, values.get()), SHAPE))
        assert params[0]["p"].get().tobytes() == params[1]["p"].get().tobytes()
    assert params[0]["p"].get().any()


def test_what_a_block_of_threads_cannot_hold_is_left_to_be_refused() -> None:
    short, long = (training("adamw", {"m": signed(name)}, (5003,)) for name in ("int8/256", "int8/512"))
    mixed = training("adamw", {"m": signed("int8/8"), "v": unsigned("int8/4096")}, (5003,))
    few = CupyBackend(threads=64)
    assert few.decodes(short.program, short.layout)
    assert not few.decodes(long.program, long.layout)
    assert BACKEND.decodes(long.program, long.layout)
    assert not BACKEND.decodes(mixed.program, mixed.layout)


@needs_nvrtc
@pytest.mark.parametrize(("rule", "name"), [("adamw", "dynamic8"), ("adamw", "float8_e5m2"), ("lamb", "dynamic4")])
def test_machine_code_keeps_values_in_registers(rule: str, name: str) -> None:
    case = training(rule, {"m": signed(name), "v": unsigned(name)}, (5003,))
    names = [kernel_name(case.program, i) for i in range(len(case.program.stages))]
    found = kernels(BACKEND.emit(case.program, case.layout), "sm_90", names)
    for code in found.values():
        assert (code.local(), code.stack) == ([], 0)
        # The gradient and the parameter are loaded by 16 bytes, and the parameter is stored so.
        assert code.wide_accesses()
        assert all(loaded == 32 and stored in (0, 16) for loaded, stored in code.wide_accesses())
    assert len(found) == len(names)
