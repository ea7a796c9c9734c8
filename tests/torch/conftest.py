"""What torch imports late is there before the first test."""

from __future__ import annotations

import importlib

import pytest


@pytest.fixture(scope="session", autouse=True)
def torchs_compiler() -> None:
    """torch imports it where a state is first saved or loaded, for more than a second: of a process, and of no test."""
    importlib.import_module("torch._dynamo")
