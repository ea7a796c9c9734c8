"""Gradients, parameters and states at addresses that are no multiples of 16 bytes, each beside aligned others.

With FSDP2's reduction in bfloat16 gradients lie so. They alone are then read by single elements: the bits are those of
aligned gradients, and the machine code has as many accesses of 16 bytes as for them, without those of the gradient.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from rulec.backend.protocol import Rows
from rulec.compiler.layout import ITEM_SIZE, kernel_for
from rulec.compiler.pipeline import compile
from rulec.compiler.view import matrix_view
from rulec.language.expr.node import Op, walk
from rulec.testing import CupyKind
from rulec.testing.cases import gradients, loaded, parameters
from rulec_backends.cupy import CupyBackend
from rulec_backends.cupy.plan import kernel_name, pack_width
from rulec_backends.cupy.print import kernel_source
from rulec_backends.triton.print import program_source
from rulec_backends.triton.stage import has_narrow
from tests import ledger
from tests.backends import cuda_assembly, triton_compiled
from tests.backends.here import needs_compiler
from tests.backends.test_cuda_code import moved, needs_nvrtc, programs
from tests.backends.triton_process import check_in_interpreter, in_a_process

TRAINED = """
import torch
import rulec.torch
from rulec_backends.triton.work import StageWork

taken = []
run_odd = StageWork.is_odd

def noted(self, words, capturing=False):
    taken.append(run_odd(self, words, capturing))
    return taken[-1]

StageWork.is_odd = noted

def at(values, skip):
    memory = torch.empty(values.numel() + 16, dtype=values.dtype)
    memory = memory[-memory.data_ptr() % 16 // values.element_size():]
    view = memory[skip:skip + values.numel()].view(values.shape)
    return view.copy_(values)

def trained(name, dtype, skips, grad=None):
    taken.clear()
    drawn = torch.Generator().manual_seed(0)
    shapes = [(40, 48), (5000,), (9, 7)]
    params = [torch.nn.Parameter(at(torch.randn(s, generator=drawn).to(dtype), skips.get("p", 0))) for s in shapes]
    optimizer = rulec.torch.optimizer(name)(params, backend="triton")
    for step in range(4):
        for p in params:
            p.grad = at(torch.randn(p.shape, generator=drawn).to(dtype), skips.get("g", 0))
        if step == 1:
            for state in optimizer.state.values():
                for key, x in state.items():
                    if getattr(x, "dim", lambda: 0)() and "m" in skips:
                        x.data = at(x, skips["m"])
        optimizer.step()
    return params, [*taken]

def same(name, dtype, skips):
    (aligned, never), (odd, took) = trained(name, dtype, {}), trained(name, dtype, skips)
    return [all(torch.equal(a, b) for a, b in zip(aligned, odd)), any(never), any(took)]
"""


def check_bits(name: str, dtype: str, skips: Sequence[dict[str, int]]) -> None:
    """Trains with arrays so many elements off, and compares with aligned ones."""
    found = check_in_interpreter(TRAINED, f"[same({name!r}, torch.{dtype}, skips) for skips in {[*skips]}]")
    for each, (bits, never, took) in zip(skips, found, strict=True):
        assert bits, each
        assert not never
        assert took == ("g" in each), each


def test_gradients_at_any_address_in_triton() -> None:
    check_bits("adamw", "bfloat16", [{"g": 1}, {"p": 1}, {"m": 3}, {"g": 5, "p": 1}])


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize("name", ["adamw", "lion", "adafactor", "lamb", "came"])
def test_gradients_at_every_address_in_triton(name: str, dtype: str) -> None:
    check_bits(name, dtype, [{"g": skip} for skip in range(1, 16 // ITEM_SIZE[dtype])])


class Bound:
    """A rule's kernels over arrays, `skips` elements off an aligned address by the letter of their kind."""

    SHAPES = ((40, 48), (1, 5000), (9, 7))

    def __init__(self, name: str, dtype: str, skips: dict[str, int]) -> None:
        rule, kind = loaded(name), CupyKind()
        program, layout = kernel_for(compile(rule, matrix_view(self.SHAPES[0], rule.view).facts), dtype)
        make = lambda values, letter: kind.make(values.astype(dtype), skips.get(letter, 0))  # noqa: E731
        self.params = [make(p, "p") for p in parameters(self.SHAPES, 3)]
        names = [b.name for b in program.states]
        assert all(b.axes.elementwise for b in program.states)
        states = [{s: make(np.zeros(shape), "m") for s in names} for shape in self.SHAPES]
        self.grads = [make(g, "g") for g in gradients(self.SHAPES, 1).values()]
        kernel = CupyBackend().build(program, layout, CupyBackend().emit(program, layout))
        self.call = kernel.bind(self.params, states, [matrix_view(shape, rule.view) for shape in self.SHAPES])
        self.rows = Rows(np.full((1, len(program.columns)), 0.5), np.zeros(len(self.SHAPES), np.int64))

    def bits(self) -> list[bytes]:
        for _ in range(2):
            self.call(0, self.grads, self.rows)
        return [CupyKind().read(p).tobytes() for p in self.params]


@needs_compiler
@pytest.mark.parametrize("name", ["adamw", "lion"])
def test_arrays_at_any_address_in_cuda(cupy: Any, name: str) -> None:
    wanted = Bound(name, "float32", {}).bits()
    for skips in ({"g": 1}, {"g": 3}, {"p": 1}, {"m": 2}, {"g": 1, "p": 2}):
        bound = Bound(name, "float32", skips)
        assert bound.bits() == wanted, skips
        assert (bound.call._narrow_functions is not None) == ("g" in skips), skips


RULES = ("adamw", "lion", "adafactor", "lamb", "adamp", "came")

MACHINE = """
import json
from dataclasses import asdict
from tests.backends import triton_compiled
from rulec_backends.triton.print import program_source

triton_compiled.TritonBackend.emit = lambda self, program, layout: program_source(program, layout, narrow=True)
print(json.dumps([asdict(f) for rule in RULES for f in triton_compiled._compile(TARGET, DTYPES, [rule])]))
"""


def _gradients(rule: str, dtype: str, states: str) -> list[bool]:
    """Whether each stage of a rule reads gradients beside other wide arrays."""
    (program, layout), *_ = triton_compiled.programs(rule, dtype, states)
    return [has_narrow(program, stage, layout) for stage in program.stages if stage.roots]


def check_triton(rules: Sequence[str], dtype: str, states: str) -> None:
    """Proves that the kernels have all other accesses of 16 bytes, and do not spill."""
    text = MACHINE.replace("RULES", repr([*rules])).replace("TARGET", "'cuda:90'")
    found = in_a_process(text.replace("DTYPES", repr(f"{dtype},{states}")))
    narrow = [each for rule in rules for each in _gradients(rule, dtype, states)]
    for facts, reads_gradients in zip(found, narrow, strict=True):
        accesses = facts["block"] / facts["threads"] / 16
        read = facts["read"] - ITEM_SIZE[dtype] * reads_gradients
        wanted = [read * accesses, facts["written"] * accesses]
        loops = [[loop["wide_loads"], loop["wide_stores"]] for loop in facts["loops"]]
        assert loops == [wanted] * (1 + facts["shaped"]) * any(wanted), facts["kernel"]
        assert facts["local"] == 0, facts["kernel"]


@pytest.mark.slow
@pytest.mark.proof
@pytest.mark.parametrize(
    ("dtype", "states"), [("bfloat16", "bfloat16"), ("bfloat16", "float32"), ("float32", "float32")]
)
def test_only_the_gradient_is_read_by_elements_in_triton(dtype: str, states: str) -> None:
    known = ledger.checker(Path(__file__), *triton_compiled.CHECKERS)
    texts = {rule: triton_compiled.programs(rule, dtype, states) for rule in RULES}
    claims = {
        rule: ledger.digest(known, *(program_source(*one, narrow=True) for one in each)) for rule, each in texts.items()
    }
    ledger.prove(claims, lambda changed: check_triton(changed, dtype, states))


def check_cuda(rule: str, dtype: str) -> None:
    """Asserts the same of kernels in CUDA C."""
    for program, layout in programs(rule, dtype):
        stages = [kernel_name(program, i) for i, stage in enumerate(program.stages) if stage.roots]
        found = cuda_assembly.kernels(kernel_source(program, layout, narrow=True), "sm_90", stages)
        for index, stage in enumerate(program.stages):
            if not stage.roots:
                continue
            code, wide = found[kernel_name(program, index)], pack_width(program, layout, stage)
            read, written = moved(program, layout, stage)
            read -= ITEM_SIZE[layout.dtype("g")] * any(n.op is Op.LOAD and n.arg == "g" for n in walk(stage.roots))
            title = f"{rule} in {dtype}, stage {index}"
            assert (code.local(), code.stack) == ([], 0), title
            assert not read + written or (wide * read, wide * written) in code.wide_accesses(), title


@needs_nvrtc
@pytest.mark.proof
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_only_the_gradient_is_read_by_elements_in_cuda(dtype: str) -> None:
    known = ledger.checker(Path(__file__), *cuda_assembly.CHECKERS)
    claims = {
        rule: ledger.digest(known, *(kernel_source(*one, narrow=True) for one in programs(rule, dtype)))
        for rule in RULES
    }  # fmt: skip
    ledger.prove(claims, lambda changed: [check_cuda(rule, dtype) for rule in changed])
