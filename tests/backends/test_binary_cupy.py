"""Binary layers in CUDA C: run as it is on the CPU, against NumPy's, and compiled by NVRTC for GPUs."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from rulec.es.binary import Bits, convolve, draw, pack, product, score_gradient
from rulec_backends.cupy.binary import source
from tests import ledger
from tests.backends import cuda_stand_in
from tests.backends.cuda_assembly import ARCHITECTURES, CHECKERS, kernels, missing
from tests.es.test_binary_products import CONVOLUTIONS, bits

needs_nvrtc = pytest.mark.skipif(bool(missing()), reason=missing() or "NVRTC is here")


@pytest.fixture(params=[False, True], ids=["forwards", "backwards"])
def cupy(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """The stand-in for CuPy, whose blocks and threads run in either order."""
    if cuda_stand_in.MISSING:
        pytest.skip(cuda_stand_in.MISSING)
    monkeypatch.setattr(cuda_stand_in, "backwards", request.param)
    with cuda_stand_in.installed() as module:
        yield module


@pytest.mark.parametrize(("rows", "columns", "count"), [(1, 1, 1), (65, 70, 130), (3, 64, 1100), (64, 3, 64)])
def test_products(cupy: Any, rows: int, columns: int, count: int) -> None:
    a, b = pack(bits(2, rows, count)), pack(bits(2, columns, count, seed=1))
    found = product(cupy.asarray(a), cupy.asarray(b), count, backend="cupy").get()
    assert found.dtype == np.int32
    assert (found == product(a, b, count, backend="numpy")).all()


@pytest.mark.parametrize("case", CONVOLUTIONS, ids=str)
def test_convolutions(cupy: Any, case: Any) -> None:
    count, size, outputs, kernel, stride, padding = case
    x, w = pack(bits(2, 3, *size, count)), pack(bits(2, outputs, *kernel, count, seed=1))
    given: dict[str, Any] = {"stride": stride, "padding": padding}
    found = convolve(cupy.asarray(x), cupy.asarray(w), count, backend="cupy", **given).get()
    assert (found == convolve(x, w, count, backend="numpy", **given)).all()


@pytest.mark.parametrize("shape", [(1,), (3, 7), (5, 65), (2, 3, 2, 129)], ids=str)
def test_bits_are_drawn_and_added_up(cupy: Any, shape: Any) -> None:
    theta = np.random.default_rng(0).normal(size=shape)
    position = Bits(seed=2**31 + 5, layer=3, step=2**33 + 7, directions=3, signs=2)
    words = draw(cupy.asarray(theta), position, backend="cupy")
    assert (words.get() == draw(theta, position, backend="numpy")).all()
    weights = np.random.default_rng(1).normal(size=6)
    found = score_gradient(cupy.asarray(theta), words, weights, backend="cupy").get()
    assert (found == score_gradient(theta, words.get(), weights, backend="numpy")).all()


@needs_nvrtc
@pytest.mark.proof
def test_gpus_count_bits_by_an_instruction() -> None:
    """Tiles stay in registers and shared memory: nothing goes to a thread's own memory."""
    known = ledger.checker(Path(__file__), *CHECKERS)
    claims = {architecture: ledger.digest(known, architecture, source()) for architecture in ARCHITECTURES}
    ledger.prove(claims, lambda changed: [check_code(architecture) for architecture in changed])


def check_code(architecture: str) -> None:
    found = kernels(source(), architecture, ["multiply_bits", "draw_bits", "add_bits"])
    for code in found.values():
        assert (code.local(), code.stack) == ([], 0)
    names = [name for _, name, _ in found["multiply_bits"].instructions]
    assert names.count("POPC") >= 32
    assert any(name.startswith("LDS") for name in names)
    assert any(name.startswith("BAR") for name in names)
