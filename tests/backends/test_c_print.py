"""The element functions that C99 and CUDA C share: their text, and that both languages take it."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

from rulec.compiler.layout import Layout, layout_for, scheduled
from rulec.errors import BackendUnsupported
from rulec.language.expr.node import Op
from rulec_backends.cstyle import element as c_print
from rulec_backends.cstyle.dialect import Dialect
from rulec_backends.cstyle.element import ElementWriter
from rulec_backends.cstyle.words import WORDS, words_used
from tests.backends.c_programs import every_element
from tests.backends.cpu_programs import program_of
from tests.backends.kinds import AWKWARD, KINDS

DIALECT = Dialect("c")

#: What the file around element functions provides. A function that nobody calls is no mistake here.
HEAD = """\
#include <math.h>
#include <stdbool.h>
#include <stdint.h>
#define RULEC_FUNCTION static inline __attribute__((unused))
"""


def writer(text: str, layout: Layout | None = None, dtype: str = "float32", stage: int = 0) -> ElementWriter:
    program, scheduled_layout = scheduled(program_of(text), layout or layout_for(program_of(text), dtype))
    return ElementWriter(program, scheduled_layout, program.stages[stage], DIALECT)


def lines(text: str, dtype: str = "float32") -> list[str]:
    return writer(text, dtype=dtype).body()


def test_the_function_of_adamw() -> None:
    text = writer("adamw").text()
    assert text.startswith("RULEC_FUNCTION void element(\n    int64_t i, float *p_at, const float *g_at, float *m_at,")
    for line in (
        "    const float m_new = beta1 * m + one_minus_beta1 * g;  // beta1*m + (1 - beta1)*g",
        "    const float m_hat = m_new / one_minus_beta1_t;  // m_new/(1 - beta1**t)",
        "    const float direction = adam_direction + decay_direction;",
        "    p_at[i] = p_new;",
    ):
        assert f"\n{line}\n" in text
    assert max(map(len, text.splitlines())) <= c_print.WIDTH


@pytest.mark.parametrize(("expression", "printed"), [
    ("g - (p - a)", "g - (p - a)"), ("(g - p) - a", "g - p - a"), ("g/(p/a)", "g / (p / a)"), ("g*p/a", "g * p / a"),
    ("g*(p/a)", "g * (p / a)"), ("-(g + p)", "-(g + p)"), ("g - -p", "g - -p"), ("-g*p", "-g * p"),
    ("g**3", "g * g * g"), ("g**0.5", "rootf(g)"), ("g**-0.5", "1.0f / rootf(g)"),
    ("(g + p)**-1", "1.0f / (g + p)"), ("(g + p)**-2", "inverse_squaref(g + p)"), ("g**a", "powf(g, a)"),
    ("rsqrt(g)*p", "1.0f / sqrtf(g) * p"), ("p*rsqrt(g)", "p * (1.0f / sqrtf(g))"),
    ("g // p", "floorf(g / p)"), ("g // (p - a)", "floorf(g / (p - a))"), ("g % p", "modulof(g, p)"),
    ("where(g > p and p > 0 or g < 0, g, p)", "(g > p && p > 0.0f) || g < 0.0f ? g : p"),
    ("where(g > 0 and (p > 0 or g < p), g, p)", "g > 0.0f && (p > 0.0f || g < p) ? g : p"),
    ("where(not g > p, where(p > 0, g, 1), p)", "!(g > p) ? (p > 0.0f ? g : 1.0f) : p"),
    ("2*where(isfinite(g), g, p)", "2.0f * (isfinite(g) ? g : p)"), ("abs(g) + exp(p)", "fabsf(g) + expf(p)"),
])  # fmt: skip
def test_no_more_parentheses_than_needed(expression: str, printed: str) -> None:
    assert any(line.startswith(f"const float direction = {printed};") for line in lines(f"direction = {expression}"))


@pytest.mark.parametrize(("number", "float32", "float64"), [
    ("0.1", "0.1f", "0.1"), ("3", "3.0f", "3.0"), ("1e-300", "0.0f", "1e-300"), ("1e300", "INFINITY", "1e+300"),
    ("16777217", "1.6777216e+07f", "16777217.0"), ("1e-45", "1e-45f", "1e-45"),
])  # fmt: skip
def test_constants_are_the_nearest_of_the_type(number: str, float32: str, float64: str) -> None:
    assert f"const float direction = g * {float32};" in "\n".join(lines(f"direction = g*{number}"))
    assert f"const double direction = g * {float64};" in "\n".join(lines(f"direction = g*{number}", "float64"))


def test_storage_is_converted_where_it_is_loaded_and_stored() -> None:
    layout = Layout((("p", "float32"), ("g", "bfloat16"), ("m", "float16"), ("v", "float64")))
    text = writer("adam", layout).text()
    assert "float *p_at, const uint16_t *g_at, uint16_t *m_at, double *v_at" in text
    for line in (
        "const double p = p_at[i];", "const double g = from_bfloat16(g_at[i]);",
        "const double m = from_float16(m_at[i]);",
        "m_at[i] = to_float16(to_odd(m_new));", "v_at[i] = v_new;", "p_at[i] = (float)p_new;",
    ):  # fmt: skip
        assert f"    {line}\n" in text
    narrow = writer("adam", dtype="bfloat16").text()
    assert "p_at[i] = to_bfloat16(p_new);" in narrow


def test_gradients_are_negated_and_unscaled() -> None:
    program = program_of("sgd")
    layout = layout_for(program, "bfloat16", maximize=True)
    scaled = ElementWriter(program, layout, program.stages[0], DIALECT, scaled=True)
    assert "const float g = -from_bfloat16(g_at[i]) * unscale;" in scaled.body()
    assert scaled.parameters()[-1].declaration == "float unscale"


def test_a_call_takes_what_it_is_given() -> None:
    call = writer("lamb").call({"i": "i + lane", "sum_p_squared": "&sum_p_squared[lane]"})
    assert call[1].startswith("    i + lane, p_at, g_at, m_at, v_at,")
    assert call[-1] == "    &sum_p_squared[lane], sum_adamw_direction_squared);"


def test_parameters_say_what_they_are_of() -> None:
    found = {p.name: (p.kind, p.type, p.place) for p in writer("adafactor", stage=1).parameters()}
    assert found["g_at"] == ("buffer", "const float *", "")
    assert (found["a"], found["b"]) == (("vector", "float", "row"), ("vector", "float", "col"))
    assert found["sum_u_squared"] == ("total", "double *", "")


def test_names_of_a_rule_hide_nothing_that_is_called() -> None:
    names = ["expf", "exp", "restrict", "template", "int64_t", "bool", "element", "i", "p_at", "INFINITY", "signf"]
    text = "\n".join([*(f"{n} = g*{k + 2} + exp(p)" for k, n in enumerate(names)), f"direction = {' + '.join(names)}"])
    printed = writer(text).text()
    for name in names:
        assert f" {name}_ = " in printed


def test_an_operation_without_a_spelling_is_refused_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(c_print, "SPELLINGS", {k: v for k, v in c_print.SPELLINGS.items() if k is not Op.SQRT})
    with pytest.raises(BackendUnsupported, match=r"'c' cannot express 'sqrt' of rule 'AdamW'"):
        writer("adamw").text()


def test_words_are_printed_before_those_that_call_them_and_in_a_dialects_own_spelling() -> None:
    plain = "\n".join(words_used("x = to_float16(to_odd(y));", DIALECT))
    places = [plain.index(f"{name}(") for name in ("float_of", "bits_of", "to_odd", "to_float16")]
    assert places == sorted(places)
    own = Dialect("cuda", words={"bits_of": "uint32_t bits_of(float x) { return __float_as_uint(x); }\n"})
    assert "__float_as_uint" in "\n".join(words_used("to_bfloat16(y)", own))
    assert "union { float" not in "\n".join(words_used("to_bfloat16(y)", own))
    assert words_used("bits_offset(y) + my_signf(z)", DIALECT) == []


C = ["cc", "-std=c99", "-pedantic"]
C_PLUS_PLUS = ["c++", "-std=c++17", "-x", "c++"]


def assert_no_warning(code: str, compiler: list[str], folder: Path) -> None:
    if shutil.which(compiler[0]) is None:
        pytest.skip(f"there is no {compiler[0]}")
    source = folder / "elements.c"
    source.write_text(HEAD + code)
    command = [*compiler, "-Wall", "-Wextra", "-Werror", "-fsyntax-only", str(source)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize(("dtype", "compiler"), [("bfloat16", C), ("float16", C_PLUS_PLUS)])
def test_rules_of_every_kind_are_c_and_c_plus_plus_without_a_warning(
    dtype: str, compiler: list[str], tmp_path: Path
) -> None:
    """CUDA C is C++ where the two differ."""
    assert_no_warning(every_element(DIALECT, dtype, (*KINDS, *AWKWARD)), compiler, tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("dtype", "compilers"),
    [
        ("float32", [C]),
        ("bfloat16", [C_PLUS_PLUS]),
        *(pytest.param(d, [C, C_PLUS_PLUS], marks=pytest.mark.whole, id=d) for d in ("float64", "float16")),
    ],
)
def test_every_rule_is_c_and_c_plus_plus_without_a_warning(
    dtype: str, compilers: list[list[str]], tmp_path: Path
) -> None:
    code = every_element(DIALECT, dtype)
    for compiler in compilers:
        assert_no_warning(code, compiler, tmp_path)


def test_every_word_is_c_without_a_warning(tmp_path: Path) -> None:
    assert_no_warning("\n".join(words_used(" ".join(f"{name}(" for name in WORDS), DIALECT)), C, tmp_path)
