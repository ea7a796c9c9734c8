"""What backends print for a rule whose gradient is noise, kept as the sources of other kernels are."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

import rulec
from rulec.backend import registry
from rulec.compiler.layout import layout_for

ESTIMATES = Path(__file__).parent / "estimates"

#: The backends that have such kernels, with their files' suffixes.
SUFFIXES = {"cpu": "py"}


@pytest.mark.parametrize("backend", SUFFIXES)
def test_kernels_are_those_that_were_kept(backend: str, request: pytest.FixtureRequest) -> None:
    program = rulec.compile(rulec.load("lion"))
    made: Any = registry.get(backend)
    text = made.emit_estimate(program, layout_for(program, "bfloat16", states={"m": "float32"}), "popcount")
    path = ESTIMATES / f"lion_{backend}.{SUFFIXES[backend]}"
    if request.config.getoption("--refresh-golden"):
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
        return
    kept = path.read_text(encoding="utf-8") if path.exists() else None
    assert text == kept, f"{path.name} has changed: look at it, and run pytest with --refresh-golden"
