"""The examples in the help of commands: each command shows some, and a shell can run them."""

from __future__ import annotations

import json
import shlex
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import typer

from benchmarks.command import app as benchmarks
from rulec.cli.app import app
from rulec.cli.examples import EXAMPLES
from tests.cli.running import invoke

#: Examples that serve until they are ended, and long ones; tests/play, editor, demo and benchmarks have these commands.
ELSEWHERE = ("rulec play", "rulec lsp", "rulec demo", "rulec bench")

#: A model of Llama's kind, for the examples of `rulec memory`.
CONFIG = {
    "model_type": "llama", "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2,
    "num_attention_heads": 4, "vocab_size": 256, "max_position_embeddings": 64,
}  # fmt: skip


def commands(group: Any, words: str = "") -> Iterator[tuple[str, Any]]:
    """Every command and group by the words that call it."""
    yield words, group
    for name, command in getattr(group, "commands", {}).items():
        yield from commands(command, f"{words} {name}".strip())


def test_every_help_ends_with_examples_of_its_command() -> None:
    known = dict(commands(typer.main.get_command(app)))
    assert known.keys() == EXAMPLES.keys()
    for words in known:
        shown = invoke(*words.split(), "--help").stdout
        assert shown.endswith("\n".join(["  Examples:", *(f"    {line}" for line in EXAMPLES[words]), ""])), words
        assert all(line.startswith(f"rulec {words}".strip()) for line in EXAMPLES[words])
        assert words == "lsp" or 2 <= len(EXAMPLES[words]) <= 3


def test_the_options_of_examples_are_those_of_their_commands() -> None:
    """Each line is read as the command reads it, and not run."""
    known = dict(commands(typer.main.get_command(app))) | {"bench": typer.main.get_command(benchmarks)}
    for line in {line for lines in EXAMPLES.values() for line in lines}:
        _, *arguments = shlex.split(line)
        words = max((w for w in known if w and arguments[: len(w.split())] == w.split()), key=len)
        context = known[words].make_context(words, arguments[len(words.split()) :])
        assert context.params.keys() >= {p.name for p in known[words].params if p.required}


@pytest.mark.slow
def test_examples_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In one folder, as they stand; the first makes mine.yaml."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("RULEC_CACHE_DIR", str(tmp_path / "cache"))
    Path("config.json").write_text(json.dumps(CONFIG))
    for line in dict.fromkeys(line for lines in EXAMPLES.values() for line in lines):
        if line.startswith(ELSEWHERE):
            continue
        result = invoke(*shlex.split(line)[1:])
        if line == "rulec new mine":
            assert Path("mine.yaml").exists()
        assert result.exit_code == 0, (line, result.output, result.exception)
