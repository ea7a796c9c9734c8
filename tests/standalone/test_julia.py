"""The module in Julia is not run here: its blocks are balanced, and its calls are those that the header declares."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping

import pytest

import rulec
from rulec.runtime.storage.options import Storage
from rulec.standalone.prose import written

#: Rules, with the dtype and the storage of weights: with states, shapes, moves, inputs, and random bits.
CASES = [
    ("adamw", "float32", ""), ("lion", "float64", ""), ("adafactor", "float32", ""),
    ("schedule_free_adamw", "float32", ""), ("sophia", "float32", ""), ("aegd", "float64", ""),
    ("adamw", "bfloat16", "stochastic"), ("signum", "float16", ""),
]  # fmt: skip

OPENS = {"module", "function", "struct", "if", "for", "while", "let", "begin", "try", "do", "quote", "macro"}

REALS = {"float": "Cfloat", "double": "Cdouble", "uint16_t": "UInt16"}

#: The types of Julia for those of C.
TYPES = {
    "int": "Cint", "int64_t": "Int64", "double": "Cdouble", "void *": "Ptr{UInt8}", "int64_t *": "Ptr{Int64}",
    "other_hyper *": "Ref{Rule}", "char *": "Cstring", "size_t": "Csize_t",
    **{f"{c} *": f"Ptr{{{julia}}}" for c, julia in REALS.items()},
}  # fmt: skip


def files(rule: str, dtype: str = "float32", weights: str = "") -> Mapping[str, str]:
    return written(rulec.load(rule), "c", name="other", dtype=dtype, storage=Storage(weights=weights))


def bare(text: str) -> str:
    """The text without comments, and with empty strings."""
    text = re.sub(r'"""(?:\\.|[^\\])*?"""|"(?:\\.|[^"\\\n])*"', '""', text)
    return re.sub(r"#=.*?=#|#[^\n]*", "", text, flags=re.DOTALL)


def check_blocks(text: str) -> None:
    """AssertionError where a block or a bracket is not closed, or another is."""
    opened: list[str] = []
    for word in re.findall(r"[\w!@:.]+|[()\[\]{}]", bare(text)):
        if word in "([{":
            opened.append({"(": ")", "[": "]", "{": "}"}[word])
        elif word in ")]}" or word == "end":
            assert opened, f"{word} closes nothing"
            assert opened.pop() == word, word
        elif word in OPENS and not (opened and opened[-1] in ")]}"):
            opened.append("end")
    assert not opened, opened


def c_type(declared: str) -> str:
    """The type of a parameter or a result in Julia."""
    kind = re.sub(r"\bconst\b|\w+$", "", declared).strip() if declared != "size_t" else declared
    return TYPES[re.sub(r"\s+", " ", kind)]


def declarations(header: str) -> dict[str, tuple[str, list[str]]]:
    """The result and the parameters of each function, in types of Julia."""
    functions = {}
    for result, name, listed in re.findall(r"^(\w[\w ]*[ *])(\w+)\(([^()]*)\);", header, re.MULTILINE):
        if not result.startswith("other_hyper"):
            functions[name] = (c_type(f"{result}x"), [c_type(x.strip()) for x in listed.split(",")])
    return functions


def split(text: str) -> list[str]:
    """The parts between commas outside brackets."""
    parts, depth = [""], 0
    for character in text:
        depth += (character in "([{") - (character in ")]}")
        if character == "," and depth == 0:
            parts.append("")
        else:
            parts[-1] += character
    return [part.strip() for part in parts if part.strip()]


def calls(julia: str) -> Iterator[tuple[str, str, list[str], list[str]]]:
    """The function, the result, the types and the arguments of each ccall."""
    text = " ".join(bare(julia).split())
    for match in re.finditer(r"ccall\(", text):
        depth, end = 1, match.end()
        while depth:
            depth += (text[end] == "(") - (text[end] == ")")
            end += 1
        symbol, result, types, *arguments = split(text[match.end() : end - 1])
        name = re.fullmatch(r"\(:(\w+), library\)", symbol)
        assert name, symbol
        yield name[1], result, split(types[1:-1]), arguments


@pytest.mark.parametrize(("rule", "dtype", "weights"), CASES)
def test_calls_have_the_types_of_the_header(rule: str, dtype: str, weights: str) -> None:
    texts = files(rule, dtype, weights)
    declared = declarations(texts["other.h"])
    called = list(calls(texts["other.jl"]))
    assert {"other_init", "other_step", "other_state_bytes", "other_message"} <= {name for name, *_ in called}
    for name, result, types, arguments in called:
        assert (result, types) == declared[name], name
        assert len(arguments) == len(types), name


@pytest.mark.parametrize(("rule", "dtype", "weights"), CASES)
def test_blocks_are_balanced(rule: str, dtype: str, weights: str) -> None:
    text = files(rule, dtype, weights)["other.jl"]
    check_blocks(text)
    with pytest.raises(AssertionError):
        check_blocks(text.rstrip().removesuffix("end"))
    with pytest.raises(AssertionError):
        check_blocks(f"{text}end\n")
    with pytest.raises(AssertionError):
        check_blocks(text.replace("return state", "return (state"))


def test_the_struct_has_the_fields_of_c_in_their_order() -> None:
    for rule in ("adamw", "adafactor", "schedule_free_adamw"):
        texts = files(rule)
        struct = re.search(r"typedef struct \{(.*?)\} other_hyper;", texts["other.h"], re.DOTALL)
        fields = re.search(r"struct Rule <: Parent\n(.*?)\nend", texts["other.jl"], re.DOTALL)
        assert struct
        assert fields
        assert re.findall(r"double (\w+);", struct[1]) == re.findall(r"(\w+)::Cdouble", fields[1])


def test_a_rule_of_optimisers_has_its_methods() -> None:
    """Rules with inputs, seeds or elements of 16 bits have none: Optimisers.jl has no place for these."""
    for rule, dtype, weights in CASES:
        text = files(rule, dtype, weights)["other.jl"]
        methods = re.findall(r"function optimisers\.([\w!]+)\(rule::Rule", text)
        fits = rule not in ("sophia", "aegd") and dtype in ("float32", "float64")
        assert methods == (["init", "apply!", "adjust"] if fits else []), (rule, dtype)
        assert "No test of rulec runs this file" in text
