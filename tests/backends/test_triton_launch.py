"""Launches of stages without rows and columns: blocks, registers and chunks by what a stage stores."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

import rulec
from rulec.compiler.ir import Memory
from rulec.compiler.layout import layout_for, scheduled
from rulec.kernel.multi_tensor.cut import rows_of
from rulec_backends.triton import work
from rulec_backends.triton.blocks import Block
from rulec_backends.triton.work import MANY_CHUNKS, Blocks
from tests.backends.coded_training import signed, training, unsigned

#: A rule and the formats of its states: what is launched on a GPU without a table of its own.
KERNELS = {
    "floats": ("adamw", {}),
    "codes": ("adamw", {"m": signed("int8"), "v": unsigned("dynamic8")}),
    "softsign": ("adamw", {"m": signed("softsign8"), "v": unsigned("softsign8")}),
    "reductions": ("lamb", {"m": signed("int8")}),
}


def launched(kind: str, monkeypatch: pytest.MonkeyPatch) -> tuple[Block, dict[str, int]]:
    """The block of a kernel's first stage on a GPU of NVIDIA, and the bound of registers."""
    monkeypatch.setattr(work, "_device_name", lambda device: "a GPU")
    monkeypatch.setattr(work, "_is_cuda", lambda device: True)
    if kind == "random":
        program = rulec.compile(rulec.load("adamw"), memory=Memory("stochastic"))
        program, layout = scheduled(program, layout_for(program, "bfloat16"))
    else:
        rule, formats = KERNELS[kind]
        case = training(rule, formats, (4096,))
        program, layout = case.program, case.layout
    stage = program.stages[0]
    held: Any = SimpleNamespace(
        device=None, flat_block=work.StageWork.flat_block, _shaped=False, _program=program, _block=None
    )  # fmt: skip
    coded = bool(work.coded_in(program, stage, layout))
    return work.StageWork._chosen(held, 28, stage, coded), work.StageWork._bounds(held, stage, layout)


def test_blocks_and_registers(monkeypatch: pytest.MonkeyPatch) -> None:
    assert launched("floats", monkeypatch) == (Block(1024, 128), {})
    assert launched("random", monkeypatch) == (Block(512, 128), {})
    assert launched("codes", monkeypatch) == (Block(512, 64), {"maxnreg": 96})
    assert launched("softsign", monkeypatch) == (Block(512, 64), {"maxnreg": 96})
    assert launched("reductions", monkeypatch) == (Block(1024, 128), {})


def test_chunks_have_several_blocks_where_there_are_many_of_them() -> None:
    block = 512
    sizes = [block, MANY_CHUNKS * block, 2 * MANY_CHUNKS * block, 100 * 2**20, 2**31 + 17]
    blocks = Blocks(block, False, 16)
    _, spans = blocks.known(blocks.cut(rows_of(sizes)))
    assert spans.tolist() == [1, 1, 2, 16, 65]
    _, spans = Blocks(block, True, 16).known(Blocks(block, True, 16).cut(rows_of(sizes)))
    assert spans.tolist() == [1, 2, 4, 50, 1025]
