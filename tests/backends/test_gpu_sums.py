"""Sums that statistics alone read, in the kernels of GPUs: where they are in float32, and in which order."""

from __future__ import annotations

import re

import numpy as np
import pytest

import rulec
from rulec.compiler.ir import Program
from rulec.compiler.layout import layout_for, scheduled
from rulec.compiler.pipeline import compile
from rulec.compiler.view import view_of
from rulec.language.statistics import Watch, watched
from rulec_backends.cupy.print import kernel_source
from rulec_backends.triton.print import program_source
from tests.backends.triton_process import in_a_process

PRINTERS = {"cupy": kernel_source, "triton": program_source}

#: A rule with a sum of its own in the stage in which statistics are measured.
SUMMED = """
name: Summed
hyper: {lr: 0.1}
state: {n: {init: 0, per: tensor}}
step: |
  n = sum(p*g)
  direction = g
"""


def program_of(rule: rulec.Rule, watch: Watch) -> Program:
    return compile(rule, view_of(rule, (64, 48)).facts, watch=watched(rule, watch))


def printed(backend: str, rule: rulec.Rule, watch: Watch, dtype: str = "float32") -> str:
    program = program_of(rule, watch)
    return PRINTERS[backend](*scheduled(program, layout_for(program, dtype)))


def in_float32(backend: str, source: str) -> set[str]:
    """The sums of a file with parts in float32."""
    part = r"^ +float (\w+)_part = 0;" if backend == "cupy" else r"^ +(\w+) = \1 \+ pack_(?:sums|products)\("
    return set(re.findall(part, source, re.MULTILINE))


@pytest.mark.parametrize("backend", PRINTERS)
@pytest.mark.parametrize("name", ["adamw", "lamb", "adafactor", "muon"])
def test_sums_of_statistics_alone_have_parts_in_float32(backend: str, name: str) -> None:
    rule = rulec.load(name)
    measured = program_of(rule, "norms").measured
    assert in_float32(backend, printed(backend, rule, "norms")) == measured != set()
    assert in_float32(backend, printed(backend, rule, "")) == set()
    assert in_float32(backend, printed(backend, rule, "norms", "float64")) == set()


@pytest.mark.parametrize("backend", PRINTERS)
def test_a_sum_of_the_rule_is_added_up_as_without_statistics(backend: str) -> None:
    rule = rulec.parse(SUMMED)
    (stage,) = program_of(rule, "").stages
    (own,) = stage.reduces
    plain, watched_too = (printed(backend, rule, watch) for watch in ("", {"size": "norm(update)", "own": "sum(p*g)"}))
    statements = [
        [line for line in source.splitlines() if re.search(rf"\b{own.name}\b.* \+?= .*\bp\b", line)]
        for source in (plain, watched_too)
    ]
    assert statements[0] == statements[1] != []
    assert in_float32(backend, watched_too) == program_of(rule, {"size": "norm(update)"}).measured != set()


PACKS = """
import json
import numpy as np, torch, triton
import triton.language as tl
SOURCE
@triton.jit
def kernel(x_at, y_at, sums_at, products_at, size, ALL: tl.constexpr):
    i = tl.arange(0, 32)
    inside = None if ALL else i < size
    x, y = tl.load(x_at + i), tl.load(y_at + i)
    pack = tl.arange(0, 8)
    tl.store(sums_at + pack, pack_sums(in_packs(x, inside), 4))
    tl.store(products_at + pack, pack_products(in_packs(x, inside), in_packs(y, inside), None, 4))

random = np.random.default_rng(0)
x, y = (torch.tensor(random.standard_normal(32), dtype=torch.float32) for _ in range(2))
found = []
for size in (32, 27):
    x[size:], y[size:] = float("nan"), float("inf")
    sums, products = torch.zeros(8), torch.zeros(8)
    kernel[(1,)](x, y, sums, products, size, size == 32)
    found.append([x[:size].tolist(), y[:size].tolist(), sums.tolist(), products.tolist()])
print(json.dumps(found))
"""


def test_packs_are_neighbouring_elements_without_those_outside(tmp_path_factory: pytest.TempPathFactory) -> None:
    from rulec_backends.triton.packs import PACKS as WORDS

    file = tmp_path_factory.mktemp("packs") / "packs.py"
    file.write_text(PACKS.replace("SOURCE", "\n".join(WORDS.values())))
    program = f"import runpy; runpy.run_path({str(file)!r})"
    for x, y, sums, products in in_a_process(program, TRITON_INTERPRET="1"):
        values = np.zeros((2, 32))
        values[:, : len(x)] = x, y
        packs = values.reshape(2, 8, 4)
        error = 3 * 2.0**-24 * np.abs(packs).sum(2)[0]
        assert (np.abs(np.array(sums) - packs[0].sum(1)) <= error).all()
        error = 8 * 2.0**-24 * np.abs(packs[0] * packs[1]).sum(1)
        assert (np.abs(np.array(products) - (packs[0] * packs[1]).sum(1)) <= error).all()
