"""The machine code and the C of products of packed bits."""

from __future__ import annotations

import functools
from pathlib import Path

import numpy as np
import pytest

from rulec.es.binary import pack, product
from rulec_backends.c.binary import source as c_source
from rulec_backends.common import threads
from rulec_backends.cpu.binary import product_source
from rulec_backends.cpu.machine import architecture, compile_text, emit_assembly
from tests.es.test_binary_products import bits


@pytest.mark.slow
def test_bits_are_counted_by_instructions_of_the_processor(tmp_path: Path) -> None:
    """Of vectors where it has them: four words of eight outputs each are one pass over eight results."""
    features = architecture()
    if "+popcnt" not in features:
        pytest.skip("this processor counts no bits")
    code = emit_assembly(compile_text(product_source(), tmp_path / "kernel.py"))
    assert "popcnt" in code
    if "+avx512vpopcntdq" in features:
        assert code.count("vpopcntq") >= 4


def test_python_threads_give_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without PyTorch's OpenMP, as many spans as there are parts are shared by threads of Python."""
    a, b = pack(bits(3, 200, 1500)), pack(bits(3, 300, 1500, seed=1))
    expected = product(a, b, 1500, backend="numpy")
    monkeypatch.setattr(threads, "_openmp", lambda torch_is_loaded: None)
    monkeypatch.setattr(threads, "thread_count", lambda: 3)
    monkeypatch.setattr(threads, "_team", functools.cache(lambda: threads._Team(2)))
    for _ in range(3):
        assert (product(a, b, 1500, backend="cpu") == expected).all()
    assert expected.dtype == np.int32


def test_the_c_text_is_complete_and_reads_well() -> None:
    text = c_source()
    assert "<" not in text.replace("<stdint.h>", "").replace("<<", "").replace(" < ", "").replace(" <= ", "")
    for line in (
        "    const int64_t inside = kind[0];",
        "    for (; at + 4 <= inside; at += 4) {",
        "#pragma omp parallel for schedule(dynamic) num_threads((int)p->threads)",
        "    const int64_t member = line / draw->rows, row = line - member * draw->rows;",
    ):
        assert line in text.splitlines()
