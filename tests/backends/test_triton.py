"""The triton backend: its contract in Triton's interpreter, and its kernels compiled for GPUs that are not here.

The interpreter must be chosen before Triton is imported, so both run in processes of their own.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import rulec
from rulec.backend.layout import layout_for
from rulec.compiler.pipeline import compile
from rulec.errors import BackendUnsupported
from rulec.testing import TorchKind, check_backend
from rulec_backends.triton import TritonBackend
from rulec_backends.triton_print import constant
from rulec_backends.triton_words import WORDS, words_used
from tests.backends.elementwise import elementwise_rules

ISSUE = ["sgd", "adamw", "lion", "radam"]


def in_a_process(program: str, **environment: str) -> Any:
    """What a Python program prints as JSON in its last line."""
    kept = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    done = subprocess.run(
        [sys.executable, "-c", program], env={**kept, **environment}, cwd=Path(__file__).parent.parent.parent,
        stdin=subprocess.DEVNULL, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout.splitlines()[-1])


def in_the_interpreter(rules: str, dtypes: str = "None") -> Any:
    call = f"check_backend('triton', rules={rules}, dtypes={dtypes})"
    program = f"import json, rulec\nfrom rulec.testing import check_backend\nr = {call}\n"
    return in_a_process(
        f"{program}print(json.dumps([r.rules, r.dtypes, r.refused, r.unmet, r.stages]))", TRITON_INTERPRET="1"
    )


def test_it_is_a_backend_in_the_interpreter() -> None:
    dtypes = ["float32", "float64", "bfloat16", "float16"]
    assert in_the_interpreter(str(ISSUE)) == [ISSUE, dtypes, [], [], False]


def test_every_rule_in_the_interpreter() -> None:
    accepted = elementwise_rules()
    refused = [name for name in rulec.rules() if name not in accepted]
    assert in_the_interpreter("None", "['float32']") == [accepted, ["float32"], refused, [], False]


COMPILE = """
import json, sys
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
import rulec
from rulec.backend.layout import layout_for
from rulec_backends.triton import CHUNK, TritonBackend

every = '''
name: Every
state: {a: 0}
step: |
  x = exp(g) + log(p) + tanh(g) + sigmoid(g) + erf(g) + cbrt(p) + abs(g)**p + g % p + g // p
  y = sign(x) + floor(x) + rsqrt(x) + minimum(x, 0.1) + clip(x, -1, p)
  a = where(isfinite(x) and not (x > y or t == 1), x, a)
  p = p - y
'''
tables = {name: "*i64" for name in ("addresses", "gradients", "sizes", "chunks", "index")} | {"table": "*fp64"}
switches = {"CHUNK": CHUNK, "ALIGNED": True, "EMULATED": False}
found = {}
for name, rule in {"every": rulec.parse(every), **{n: rulec.load(n) for n in ISSUE}}.items():
    for dtype in ("float32", "bfloat16", "float64"):
        program = rulec.compile(rule)
        layout = layout_for(program, dtype)
        kernel = TritonBackend().build(program, layout, TritonBackend().emit(program, layout))
        source = ASTSource(kernel.step, {**tables, **dict.fromkeys(switches, "constexpr")}, constexprs=switches)
        compiled = triton.compile(source, target=GPUTarget(*TARGET), options={"enable_fp_fusion": False})
        assembly = compiled.asm.get("ptx") or compiled.asm["amdgcn"]
        binary = compiled.asm.get("cubin") or compiled.asm["hsaco"]
        counted = {text: assembly.count(text) for text in TEXTS}
        found[f"{name} {dtype}"] = {**counted, "binary": len(binary)}
print(json.dumps(found))
"""


def compiled_for(target: tuple[str, int | str, int], texts: list[str], cache: Path) -> dict[str, dict[str, int]]:
    """How often each text stands in the assembly of each kernel."""
    head = f"TARGET = {target}\nTEXTS = {texts}\nISSUE = {ISSUE}\n"
    found: dict[str, dict[str, int]] = in_a_process(head + COMPILE, TRITON_CACHE_DIR=str(cache))
    assert len(found) == 15
    assert all(counts["binary"] > 0 for counts in found.values())
    return found


def test_kernels_compile_for_nvidia_without_a_gpu(tmp_path: Path) -> None:
    inexact = ["div.full.f32", "sqrt.approx", "rsqrt.approx", "div.approx"]
    vectors = ["ld.global.v4.b32", "st.global.v4.b32", "ld.global.v2.b64", "st.global.v2.b64"]
    found = compiled_for(("cuda", 90, 32), [*inexact, *vectors, "div.rn.f32", "sqrt.rn.f32", "fma.rn.f32"], tmp_path)
    for name, counts in found.items():
        assert [text for text in inexact if counts[text]] == [], name
        # 16 bytes at a time, whatever the dtype.
        load, store = vectors[2:] if name.endswith("float64") else vectors[:2]
        assert counts[load] > 0, name
        assert counts[store] > 0, name
    adamw = found["adamw float32"]
    assert (adamw["div.rn.f32"] > 0, adamw["sqrt.rn.f32"] > 0, adamw["fma.rn.f32"]) == (True, True, 0)


def test_kernels_compile_for_amd_without_a_gpu(tmp_path: Path) -> None:
    found = compiled_for(("hip", "gfx942", 64), ["global_load_dwordx4", "global_store_dwordx4"], tmp_path)
    for name in ("adamw float32", "adamw float64", "sgd float32"):
        assert found[name]["global_load_dwordx4"] > 0, name
        assert found[name]["global_store_dwordx4"] > 0, name


def test_the_code_reads_like_the_rule() -> None:
    program = compile(rulec.load("lion"))
    source = TritonBackend().emit(program, layout_for(program, "bfloat16", states={"m": "float32"}, maximize=True))
    body = [line.strip() for line in source.splitlines()]
    for line in (
        "g = -tl.load(g_at + i, mask=inside).to(tl.float32)",
        "m_new = beta2 * m + one_minus_beta2 * g",
        "direction = sign(c) + weight_decay * p",
        "tl.store(m_at + i, m_new, mask=inside)",
        "tl.store(p_at + i, to_bfloat16(p_new, EMULATED), mask=inside)",
        "p_at = tl.load(addresses + 2 * tensor + 0).to(tl.pointer_type(tl.bfloat16))",
        "lr = tl.load(row + 5).to(tl.float32)",
    ):
        assert line in body
    assert [line for line in body if line.startswith("def ")][:2] == [
        "def to_bfloat16(x, EMULATED: tl.constexpr):",
        "def sign(x):",
    ]


def test_only_the_functions_that_are_called_are_printed() -> None:
    assert words_used("x = tl.exp(a) + my_exp(b) + m.log(c)", "float32") == []
    assert words_used("x = power(a, b)", "float32") == [WORDS["float32"][n] for n in ("power_of_any", "power")]
    assert words_used("x = power(a, b)", "float64") == [
        WORDS["float64"][n] for n in ("power_of_any", "exact_product", "log_in_two", "power")
    ]


@pytest.mark.parametrize(
    ("value", "compute", "text"),
    [
        (0.5, "float64", "0.5"),
        (0.1, "float32", "0.1"),
        (0.1, "float64", "tl.full((), 0.1, tl.float64)"),
        (-0.0, "float64", "-0.0"),
        (1e-46, "float32", "tl.full((), 1e-46, tl.float32)"),
        (1e300, "float64", "tl.full((), 1e+300, tl.float64)"),
        (float("-inf"), "float32", '-float("inf")'),
        (float("nan"), "float32", 'float("nan")'),
    ],
)
def test_numbers_keep_the_compute_dtype(value: float, compute: str, text: str) -> None:
    assert constant(value, compute) == text


@pytest.mark.parametrize("name", ["lamb", "adafactor", "prodigy", "transforms/clip_by_global_norm", "muon"])
def test_programs_of_several_stages_are_refused_in_one_sentence(name: str) -> None:
    rule = rulec.load(name)
    program = compile(rule)
    with pytest.raises(BackendUnsupported) as caught:
        TritonBackend().emit(program, layout_for(program, "float32"))
    assert str(caught.value) == (
        f"backend 'triton' cannot express the reductions or matrix functions of rule {rule.name!r}: "
        "choose another backend (`rulec doctor` lists them)"
    )


def test_without_a_gpu_it_says_so_in_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    import torch

    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    reason = TritonBackend().unavailable_reason()
    assert reason == "torch finds no GPU: use another backend, or set TRITON_INTERPRET=1 to run Triton's interpreter"
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    assert TritonBackend().unavailable_reason() is None
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    assert TritonBackend().unavailable_reason() == "triton is not installed: pip install triton"


@pytest.mark.gpu
def test_it_is_a_backend_on_a_gpu() -> None:
    report = check_backend("triton", arrays=TorchKind("cuda"))
    assert (report.rules, report.unmet) == (elementwise_rules(), [])
