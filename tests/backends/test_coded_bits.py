"""Kernels on every code, and on values next to a change of the code: as `rulec.formats` decodes and encodes them."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import rulec
from rulec.backend import registry
from rulec.backend.protocol import Backend
from rulec.compiler.layout import scale_name
from rulec.formats import NAMES, Format, decode, encode
from rulec.runtime.storage.quantized import kernel_of
from tests.backends.coded_training import HERE, Memory, training
from tests.formats.kinds import edges

Array = np.ndarray[Any, Any]

#: In the blocks of eight that `edges` gives.
FORMATS = {
    f"{name}_{'signed' if signed else 'unsigned'}": Format(name, 8, signed, floor=not signed)
    for name in NAMES for signed in (True, False)
} | {f"{name}_floor": Format(name, 8, signed=True, floor=True) for name in ("dynamic8", "dynamic4")}  # fmt: skip

#: Every state keeps the gradient in codes, and its copy what the state was before.
STEP = """\
  copy_of_NAME = where(copy_of_NAME > 1, 1, NAME)
  NAME = g
"""
RULE = f"""
name: Copies
state: {{{", ".join(f"{name}: 0, copy_of_{name}: 0" for name in FORMATS)}}}
step: |
{"".join(STEP.replace("NAME", name) for name in FORMATS)}  p = p - g
"""


def values() -> Array:
    """Rows of blocks: values next to changes of the code in every format, of every magnitude, not finite, and zero."""
    rng = np.random.default_rng(5)
    scales = np.exp(rng.uniform(-70, 70, 60)).astype(np.float32)
    rows = [edges(form, scales, rng) for form in FORMATS.values()]
    drawn = rng.integers(0, 2**32, (400, 8), np.uint32).view(np.float32)
    with np.errstate(invalid="ignore"):
        drawn[100:] *= 10.0 ** rng.uniform(-30, 0, (300, 8)).astype(np.float32)
    ends = np.float32([[0] * 8, [-0.0] * 8, [3.4028235e38, -3.4028235e38, 1, 0, -1, 1e-45, -1e-45, 1e38]])
    kept = np.concatenate([*rows, *(-row for row in rows), drawn, ends])
    turned: Array = np.concatenate([kept, np.where(np.isfinite(kept), kept, 0)])
    return turned.reshape(-1)


def any_codes(form: Format, count: int) -> tuple[Array, Array]:
    """Every code under scales of every magnitude, and under those that are not finite."""
    rng = np.random.default_rng(6)
    codes = np.resize(np.arange(256, dtype=np.uint8), count * form.bits // 8).view(form.code_dtype)
    scales = np.exp(rng.uniform(-70, 70, form.scales(count))).astype(np.float32)
    scales[::50] = np.nan
    return codes, scales


def same(values: Array, wanted: Array) -> bool:
    """Whether two arrays have the same bits, up to those of NaNs."""
    numbers = ~np.isnan(wanted)
    return bool((np.isnan(values) != numbers).all()) and values[numbers].tobytes() == wanted[numbers].tobytes()


def check_every_code(backend: Backend, memory: Memory = HERE) -> None:
    """AssertionError unless a backend decodes every code, and encodes such values, as the formats do."""
    grad = values()
    case = training(rulec.parse(RULE), FORMATS, grad.shape, memory)
    case.grads[0] = grad
    arrays = {"p": case.first.copy(), **case.states()}
    for name, form in FORMATS.items():
        arrays[name], arrays[scale_name(name)] = any_codes(form, grad.size)
    before = {name: array.copy() for name, array in arrays.items()}
    _, kernel = kernel_of(backend, case.program, case.layout, lambda _, like: np.empty_like(like))
    case.steps(kernel, arrays, range(1, 2))
    for name, form in FORMATS.items():
        codes, scales = encode(form, grad)
        assert arrays[name].tobytes() == codes.tobytes(), name
        assert arrays[scale_name(name)].tobytes() == scales.tobytes(), name
        decoded = decode(form, before[name], before[scale_name(name)], grad.shape)
        assert same(arrays[f"copy_of_{name}"], decoded), name


@pytest.mark.parametrize("backend", ["c", "cpu"])
def test_every_code_and_values_beside_every_change_of_one(backend: str) -> None:
    check_every_code(registry.get(backend))
