"""The JSON Schema of rule files: what editors are told is what the loader takes."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import jsonschema
import pytest

import rulec
from rulec.language.library.folder import library_folder
from rulec.language.yaml.document import read_document
from rulec.language.yaml.schema import RuleFile
from tests.language.test_mistakes import TABLE

ROOT = Path(__file__).resolve().parents[2]
FILES = sorted([*library_folder().rglob("*.yaml"), *(ROOT / "tests/compiler/examples").glob("*.yaml")])
SCHEMA = rulec.json_schema()

#: What the schema can know to be wrong: the shape of the data, not what an expression means.
OF_SHAPE = re.compile(
    r"unknown key|^[\w.\[\]]+ must be (?!at |above|below)|^the key '\w+' is missing|^a rule has exactly|"
    r"^a rule made by|^otherwise is for|is no name: use letters|which is no level"
)


def refuses(data: Any) -> bool:
    return not jsonschema.Draft202012Validator(SCHEMA).is_valid(data)


def read(text: str) -> Any:
    return read_document(text, "r.yaml").data


def test_is_a_schema() -> None:
    jsonschema.Draft202012Validator.check_schema(SCHEMA)


def test_file_is_fresh() -> None:
    written = json.loads((ROOT / "docs" / "rule.schema.json").read_text("utf-8"))
    assert written == SCHEMA, "run: rulec schema -o docs/rule.schema.json"


def test_says_something_about_every_key() -> None:
    assert SCHEMA["properties"].keys() == RuleFile.model_fields.keys()
    for key, value in SCHEMA["properties"].items():
        # A reference describes itself.
        assert value.get("description") or "$ref" in value, key


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.stem)
def test_takes_every_rule(file: Path) -> None:
    assert not refuses(read(file.read_text("utf-8")))
    assert not refuses(read(rulec.load(file).to_yaml()))


@pytest.mark.parametrize(
    "text",
    [
        "name: R\nstep: |\n  direction = g\n",
        "name: R\nplus: [adam, {decay: {weight_decay: 0.1}}, lion: {beta1: 2*b}]\nhyper: {lr: {default: 1, min: 0}}\n",
        "name: R\nuses: {first: adam, second: {adam: {beta1: 0.5}}}\nstep: |\n  direction = first(g) + second(g)\n",
        "name: R\nhyper: {k: {default: null}}\nstep: |\n  direction = k*g\n",
        "name: R\nstate: {m: {shape: [4, 2*cols], if: ndim > 1}}\nstep: |\n  direction = m\n",
        "name: R\napplies_to: ndim == 2\notherwise: {adam: {lr: 3}}\nview: {flatten: rest}\nstep: |\n  direction = g\n",
    ],
)
def test_takes(text: str) -> None:
    assert not refuses(read(text))


#: Mistakes of shape, but for those in the text of a step.
MISSHAPEN = [row for row in TABLE if OF_SHAPE.search(row["says"]) and row["text"].split("\n")[3:4] != ["step: |"]]


@pytest.mark.parametrize("row", MISSHAPEN, ids=lambda row: row["case"])
def test_refuses(row: dict[str, Any]) -> None:
    assert refuses(read(row["text"]))


def test_there_are_enough_misshapen_rules() -> None:
    assert len(MISSHAPEN) > 50
