"""YAML as the loader reads it: YAML 1.2's scalars, and plain data from every style."""

from __future__ import annotations

import math
from typing import Any

import pytest
import yaml

from rulec import RuleError
from rulec.language.yaml.document import read_document, use_yaml_1_2

SCALARS: list[tuple[str, Any]] = [
    ("1e-3", 0.001), ("1E-3", 0.001), ("1e3", 1000.0), ("-1e+3", -1000.0), (".5", 0.5), ("-.5", -0.5), ("1.", 1.0),
    ("+1", 1), ("-1", -1), ("+1.5", 1.5), ("0", 0), ("-0", 0), ("-0.0", -0.0), ("010", 10), ("0o17", 15), ("0x1F", 31),
    ("0x1f", 31), ("0b11", "0b11"), ("0o18", "0o18"), ("1_000", "1_000"), ("1,000", "1,000"), (".", "."), ("+", "+"),
    ("e3", "e3"), ("1e", "1e"), ("1e-", "1e-"), ("--1", "--1"), ("1e3.5", "1e3.5"),
    (".inf", math.inf), ("-.inf", -math.inf), ("+.INF", math.inf), (".Inf", math.inf), ("inf", "inf"), ("nan", "nan"),
    ("true", True), ("True", True), ("FALSE", False), ("tRUE", "tRUE"), ("yes", "yes"), ("no", "no"), ("on", "on"),
    ("off", "off"), ("y", "y"), ("n", "n"), ("No", "No"), ("OFF", "OFF"), ("~", None), ("null", None), ("Null", None),
    ("NULL", None), ("", None), ("none", "none"), ("nil", "nil"),
    ('"1e-3"', "1e-3"), ("'1'", "1"), ('"true"', "true"), ("'null'", "null"), ('""', ""), ("'~'", "~"),
    ("2015-01-01", "2015-01-01"), ("12:30:45", "12:30:45"), ("1:30", "1:30"), ("=", "="), ("<<", "<<"),
    ("a b", "a b"), ("2*lr", "2*lr"), ("sqrt(beta2)", "sqrt(beta2)"), ('"a, b"', "a, b"),
    ("9007199254740993", 9007199254740993), ("1" + "0" * 298, 10**298), ("1" + "0" * 305, 1e305),
    ("1e308", 1e308), ("5e-324", 5e-324), ("0e400", 0.0), ("0.000", 0.0),
]  # fmt: skip


def read(text: str) -> Any:
    return read_document(text, "d.yaml").data


@pytest.mark.parametrize(("text", "value"), SCALARS, ids=lambda x: repr(x)[:20])
def test_scalar(text: str, value: Any) -> None:
    found_in = [read(f"k: {text}\n")["k"], read(f"k:\n  {text}\n")["k"]]
    if text and "," not in text:
        found_in.append(read(f"k: [{text}, x]\n")["k"][0])
    for found in found_in:
        assert found == value
        assert type(found) is type(value)
        if isinstance(value, float):
            assert math.copysign(1, found) == math.copysign(1, value)


def test_nan() -> None:
    assert all(math.isnan(x) for x in read("[.nan, .NaN, .NAN]"))


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("1e400", "this number is larger than a float64 can hold: write .inf for infinity"),
        ("-1e309", "this number is larger than a float64 can hold: write .inf for infinity"),
        ("1" + "0" * 400, "this number is larger than a float64 can hold: write .inf for infinity"),
        ("0x" + "f" * 400, "this number is larger than a float64 can hold: write .inf for infinity"),
        ("1e-400", "this number is smaller than a float64 can hold: write 0"),
        ("0.0001e-330", "this number is smaller than a float64 can hold: write 0"),
    ],
    ids=lambda text: text[:12],
)
def test_numbers_beyond_float64(text: str, says: str) -> None:
    with pytest.raises(RuleError) as caught:
        read(f"k: {text}\n")
    assert caught.value.message == says
    assert caught.value.place == "d.yaml:1:4"


def test_keys_are_text() -> None:
    assert read("{1: a, true: b, ~: c, 1e-3: d, no: e}") == {"1": "a", "true": "b", "~": "c", "1e-3": "d", "no": "e"}


def test_quoted_commas_in_flow_mappings() -> None:
    text = """{k: {default: "minimum(a, b)", min: 0}, l: 'clip(a, 0, 1)', m: [1, "a, b"]}"""
    assert read(text) == {"k": {"default": "minimum(a, b)", "min": 0}, "l": "clip(a, 0, 1)", "m": [1, "a, b"]}


def test_an_unquoted_comma_ends_a_value_in_a_flow_mapping() -> None:
    with pytest.raises(RuleError) as caught:
        read("{k: minimum(a, b), l: 1}")
    assert caught.value.message == "the comma before this parts a value in two: put the whole value in quotes"
    assert caught.value.place == "d.yaml:1:16"


@use_yaml_1_2
class _Dumper(yaml.SafeDumper):
    pass


@pytest.mark.parametrize("value", ["no", "1e-3", "on", "1", "null", "", "0o17", "a: b", "# x", "- a", "1e3", ".5"])
def test_what_is_written_is_read_back(value: str) -> None:
    assert read(yaml.dump({"k": value}, Dumper=_Dumper)) == {"k": value}


def test_places() -> None:
    document = read_document("a: 1\nb:\n  - x\n  - {c: yy}\n", "d.yaml")
    assert str(document.span(("b", 1, "c"))) == "d.yaml:4:9"
    assert document.span(("b", 1, "c")).width == 2
    assert str(document.span(("b", 1, "c"), key=True)) == "d.yaml:4:6"
    # What does not exist is placed at the nearest value above it.
    assert str(document.span(("b", 1, "none", 3))) == "d.yaml:4:5"


def test_nesting_up_to_the_limit() -> None:
    assert read("k: " + "[" * 19 + "1" + "]" * 19)
    with pytest.raises(RuleError, match="nested deeper than 20 levels"):
        read("k: " + "[" * 20 + "]" * 20)
