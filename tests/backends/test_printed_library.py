"""Which rules of the library the backends print: all of them, on each of the five that run everywhere."""

from __future__ import annotations

from collections.abc import Iterable

import pytest

import rulec
from rulec.backend import registry
from rulec.compiler.layout import layout_for
from rulec.errors import BackendUnsupported
from rulec.testing.cases import loaded
from tests.backends.kinds import BETWEEN, KINDS

BACKENDS = ("numpy", "cpu", "c", "triton", "jax")


def refusals(names: Iterable[str]) -> list[tuple[str, str]]:
    """The rules, with the backend, that are refused in float32."""
    refused = []
    for name in names:
        program = rulec.compile(loaded(name))
        layout = layout_for(program, "float32")
        for backend in BACKENDS:
            try:
                registry.get(backend).emit(program, layout)
            except BackendUnsupported:
                refused.append((name, backend))
    return refused


def test_rules_of_every_kind() -> None:
    assert refusals([*KINDS, *BETWEEN]) == []


@pytest.mark.slow
def test_every_rule() -> None:
    assert refusals(rulec.rules()) == []
    assert len(rulec.rules()) >= 200
