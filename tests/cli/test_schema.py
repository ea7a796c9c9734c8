"""`rulec schema`."""

from __future__ import annotations

import json
from pathlib import Path

import jsonschema
import yaml

from rulec.language.library.folder import library_folder
from tests.cli.running import error, run


def test_the_schema_accepts_a_rule_and_refuses_a_misspelt_key() -> None:
    schema = json.loads(run("schema"))
    rule = yaml.safe_load((library_folder() / "lion.yaml").read_text())
    rule["hyper"] = {"lr": 1e-4}  # PyYAML reads 1e-4 as text
    jsonschema.validate(rule, schema)
    rule["sumary"] = rule.pop("summary")
    assert not jsonschema.Draft202012Validator(schema).is_valid(rule)


def test_it_can_be_written_to_a_file(tmp_path: Path) -> None:
    file = tmp_path / "rule.schema.json"
    assert run("schema", "--output", str(file)) == ""
    assert json.loads(file.read_text()) == json.loads(run("schema"))
    assert "cannot be written" in error("schema", "--output", str(file / "below"))
