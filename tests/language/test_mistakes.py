"""Every mistake an author can make has one clear error: what is wrong, where, what to do.

The table is `mistakes.yaml`; here are the mistakes that are too long for a table, and those in whole files.
"""

from __future__ import annotations

import textwrap
from pathlib import Path
from typing import Any

import pytest
import yaml

import rulec
from rulec import RuleError
from rulec.language.source import MAX_DOCUMENT
from tests.language.work import counted

TABLE: list[dict[str, Any]] = yaml.safe_load((Path(__file__).parent / "mistakes.yaml").read_text(encoding="utf-8"))


def error_of(text: str) -> RuleError:
    """The error that the text is refused with; it has to come soon."""
    with counted(), pytest.raises(RuleError) as caught:
        rulec.parse(text, "r.yaml")
    return caught.value


def excerpt(text: str, at: str, marked: str) -> str:
    """The line of that place, and carets under `marked`, which stands there."""
    line, column = map(int, at.split(":"))
    shown = text.split("\n")[line - 1]
    assert shown[column - 1 :].startswith(marked)
    if not shown.strip():
        return ""
    shown = "".join(c if c.isprintable() else "→" if c == "\t" else "\N{REPLACEMENT CHARACTER}" for c in shown)
    return f"\n    {shown}\n    {' ' * (column - 1)}{'^' * max(1, len(marked))}"


@pytest.mark.parametrize("row", TABLE, ids=lambda row: row["case"])
def test_message_place_and_caret(row: dict[str, Any]) -> None:
    error = error_of(row["text"])
    if "at" in row:
        assert str(error) == f"r.yaml:{row['at']}: {row['says']}{excerpt(row['text'], row['at'], row['marked'])}"
    else:
        assert str(error) == row["says"]


@pytest.mark.parametrize("row", TABLE, ids=lambda row: row["case"])
def test_one_sentence(row: dict[str, Any]) -> None:
    assert "\n" not in row["says"]
    assert not row["says"].endswith(".") or row["says"].endswith("...")
    assert len(row["says"]) < 220


def step(body: str) -> str:
    return f"name: R\nhyper: {{beta: 0.9}}\nstate: {{m: 0}}\nstep: |\n{textwrap.indent(body, '  ')}\n  direction = m\n"


TOO_DEEP = "this expression is more than 150 operations deep: split it into named lines"
MANY_IFS = "if is nested deeper than 20 levels"
TOO_NESTED = "this is nested too deeply: split it into named lines"
LONG = [
    ("brackets", "m = " + "(" * 300 + "m" + ")" * 300, TOO_NESTED),
    ("calls", "m = " + "abs(" * 180 + "m" + ")" * 180, TOO_DEEP),
    ("signs", "m = " + "-" * 300 + "m", TOO_DEEP),
    ("many signs", "m = " + "-" * 50_000 + "m", TOO_NESTED),
    ("powers", "m = " + "2**" * 3000 + "m", TOO_NESTED),
    ("not", "m = where(" + "not " * 5_000 + "m, 1, 0)", TOO_NESTED),
    ("lambdas", "m = " + "lambda:" * 3000 + "m", TOO_NESTED),
    ("dots", "m = m" + ".m" * 20_000, TOO_NESTED),
    ("sum", "m = " + " + ".join(["m"] * 400), TOO_DEEP),
    ("sum of 5000", "m = " + " + ".join(["m"] * 5000), TOO_NESTED),
    ("comparisons", "m = where(" + " < ".join(["m"] * 1500) + ", 1, 0)", TOO_DEEP),
    ("and", "m = where(" + " and ".join(["m"] * 1500) + ", 1, 0)", TOO_DEEP),
    (
        "doubling",
        "m = " + "(0 < " * 40 + "m" + " < 1)" * 40,
        "this expression has more than 20000 parts: split it into named lines",
    ),
    ("integer", "m = " + "9" * 320, "this number is larger than a float64 can hold: write inf for infinity"),
    ("digits", "m = " + "9" * 5000, "this number is longer than a float64 can hold"),
    ("nested if", "".join(f"{' ' * i}if t > 1:\n" for i in range(30)) + " " * 30 + "m = m", MANY_IFS),
    ("elif", "if t == 0:\n  m = 1\n" + "elif t == m:\n  m = 2\n" * 60, MANY_IFS),
    ("many elifs", "if t == 0:\n  m = 1\n" + "elif t == m:\n  m = 2\n" * 3000, TOO_NESTED),
    ("indentation", "".join(f"{' ' * i}if t > 1:\n" for i in range(150)) + " " * 150 + "m = m", TOO_NESTED),
    ("lines", "m = m + 1\n" * 1500, "R has 1501 lines, over the limit of 1000"),
    ("text", "m = m" + " " * 90_000, "this text has 90020 characters, over the limit of 80000"),
    ("name", "m = " + "m" * 50_000, f"the name '{'m' * 37}...' has 50000 characters: use at most 100"),
    ("function", "m = " + "m" * 50_000 + "(m)", f"unknown function '{'m' * 37}...'"),
]  # fmt: skip


@pytest.mark.parametrize(("body", "says"), [row[1:] for row in LONG], ids=[row[0] for row in LONG])
def test_long_text(body: str, says: str) -> None:
    error = error_of(step(body))
    assert error.message == says
    assert error.place.startswith("r.yaml:")
    assert max(map(len, str(error).split("\n"))) <= 200


def test_many_brackets_are_no_depth() -> None:
    rule = rulec.parse(step("m = " + "(" * 180 + "m" + ")" * 180))
    assert rule.step_text() == "m = m\ndirection = m"


def test_caret_in_a_long_line() -> None:
    error = error_of(step(f"m = {'m + ' * 100}mm"))
    shown, carets = str(error).split("\n")[1:]
    assert error.place == "r.yaml:5:407"
    assert shown[carets.index("^") :][: carets.count("^")] == "mm"


def test_documents_without_bound() -> None:
    assert error_of("x" * 10_000_000).message == (
        f"r.yaml has 10000000 characters, over the limit of {MAX_DOCUMENT}: it is no rule file"
    )
    assert error_of("name: R\ninterop: " + "[" * 50_000).message == "this is nested deeper than 20 levels"
    laughs = "a: &a [lol, lol]\n" + "".join(
        f"{x}: &{x} [*{y}, *{y}]\n" for x, y in zip("bcdefgh", "abcdefg", strict=True)
    )
    assert error_of(laughs).message.startswith("an anchor or alias is not part of a rule file")
    assert error_of("? " * 50_000).message
    assert error_of("- " * 50_000).message == "this is nested deeper than 20 levels"
    assert error_of("name: R\nhyper: {" + ", ".join(f"a{i}: 1" for i in range(2000)) + "}\nstep: |\n  x = b\n").message


def write(folder: Path, name: str, text: str | bytes) -> Path:
    path = folder / name
    path.write_bytes(text.encode() if isinstance(text, str) else text)
    return path


def load_error(path: Path | str) -> str:
    with pytest.raises(RuleError) as caught:
        rulec.load(path)
    return str(caught.value)


def test_files(tmp_path: Path) -> None:
    missing, folder = tmp_path / "none.yaml", tmp_path / "folder.yaml"
    folder.mkdir()
    assert load_error(missing) == f"there is no rule file {str(missing)!r}"
    assert load_error(folder) == f"{str(folder)!r} is a folder, not a rule file"
    latin = write(tmp_path, "latin.yaml", "name: Å\n".encode("latin-1"))
    assert load_error(latin) == f"{latin} is not UTF-8 text: its byte 6 is wrong"
    wide = write(tmp_path, "wide.yaml", "name: R\n".encode("utf-16"))
    assert load_error(wide) == f"{wide} is not UTF-8 text: its byte 0 is wrong"
    huge = write(tmp_path, "huge.yaml", b"x" * 10_000_000)
    assert load_error(huge) == f"{huge} has 10000000 bytes, over the limit of 400000: it is no rule file"
    other = write(tmp_path, "rule.txt", "name: R\n")
    assert load_error(other) == f"{str(other)!r} is no rule of the library, and the name of a rule file ends in .yaml"
    empty = write(tmp_path, "empty.yaml", "")
    assert load_error(empty) == f"{empty} is empty: a rule file begins with name:"


def test_names_of_the_library() -> None:
    names_all = "(`rulec list` names them all; a file's name ends in .yaml)"
    assert load_error("adamm") == f"there is no rule 'adamm'; did you mean 'adam'? {names_all}"
    assert load_error("qwertyuiop") == f"there is no rule 'qwertyuiop' {names_all}"
    assert load_error("../adam") == f"there is no rule '../adam'; did you mean 'adam'? {names_all}"


def test_a_rule_made_of_itself(tmp_path: Path) -> None:
    write(tmp_path, "a.yaml", "name: A\nchain: [b.yaml]\n")
    b = write(tmp_path, "b.yaml", "name: B\nplus: [c.yaml, sgd]\n")
    c = write(tmp_path, "c.yaml", "name: C\nuses: [a.yaml]\nstep: |\n  direction = a(g)\n")
    assert load_error(tmp_path / "a.yaml") == (
        f"{c}:2:8: a is made of itself: a -> b -> c -> a\n    uses: [a.yaml]\n           ^^^^^^"
    )
    assert "b is made of itself: b -> c -> a -> b" in load_error(b)
    own = write(
        tmp_path, "own.yaml", "name: Own\napplies_to: ndim == 2\notherwise: own.yaml\nstep: |\n  direction = g\n"
    )
    assert "own is made of itself: own -> own" in load_error(own)


def test_rules_within_rules(tmp_path: Path) -> None:
    for i in range(30):
        write(tmp_path, f"r{i}.yaml", f"name: R{i}\nchain: [r{i + 1}.yaml]\n")
    assert "r21 stands in more than 20 rules, one within the other: write it out" in load_error(tmp_path / "r0.yaml")


def test_rules_that_double(tmp_path: Path) -> None:
    write(tmp_path, "r11.yaml", "name: R\nstep: |\n  direction = g\n")
    for i in range(11):
        write(tmp_path, f"r{i}.yaml", f"name: R{i}\nplus: [r{i + 1}.yaml, r{i + 1}.yaml]\n")
    assert "lines, over the limit of 1000" in load_error(tmp_path / "r0.yaml")


def test_a_mistake_in_a_part_is_placed_in_its_file(tmp_path: Path) -> None:
    part = write(tmp_path, "part.yaml", "name: Part\nstep: |\n  direction = gg\n")
    whole = write(tmp_path, "whole.yaml", "name: Whole\nplus:\n- part.yaml\n- missing.yaml\n")
    assert load_error(whole).startswith(f"{part}:3:15: unknown name 'gg'; did you mean 'g'?")
    write(tmp_path, "part.yaml", "name: Part\nstep: |\n  direction = g\n")
    assert load_error(whole).startswith(
        f"{whole}:4:3: there is no rule file '{tmp_path}/missing.yaml'\n    - missing.yaml\n      ^"
    )


def test_bad_values_when_a_rule_runs() -> None:
    from rulec.errors import HyperError
    from rulec.language.hyper import resolve_hyper

    adam = rulec.load("adam")
    cases: list[tuple[dict[str, Any], str]] = [
        ({"beta": 0.9}, "Adam has no hyper-parameter 'beta'; did you mean 'beta2'?"),
        ({"beta1": 1}, "beta1=1 of Adam must be at least 0 and below 1"),
        ({"beta1": float("nan")}, "beta1=nan of Adam must be at least 0 and below 1"),
        ({"beta1": "0.5"}, "beta1='0.5' of Adam must be at least 0 and below 1"),
        ({"lr": None}, "lr=None of Adam must be at least 0"),
        ({"lr": -1}, "lr=-1 of Adam must be at least 0"),
        ({"lr": 10**400}, f"lr={10**400} of Adam must be at least 0"),
    ]
    for given, says in cases:
        with pytest.raises(HyperError) as caught:
            resolve_hyper(adam.hyper, given, 2.0**-52, adam.name)
        assert str(caught.value) == says
