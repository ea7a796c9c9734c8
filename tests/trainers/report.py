"""`make trainers`: runs tests/trainers, and writes what passed with which versions to docs/data/trainers.json."""

from __future__ import annotations

import json
import sys
from importlib.metadata import version
from pathlib import Path
from typing import Any

import pytest

FILE = Path(__file__).parents[2] / "docs" / "data" / "trainers.json"
PACKAGES = (
    "accelerate", "fastai", "hydra-core", "jsonargparse", "lightning", "peft", "pytorch-ignite", "skorch", "timm",
    "torch", "torchtitan", "transformers", "trl",
)  # fmt: skip


class Outcomes:
    """The outcome of every test."""

    def __init__(self) -> None:
        self.by_test: dict[str, str] = {}

    def pytest_runtest_logreport(self, report: Any) -> None:
        if report.when == "call" or report.outcome != "passed":
            self.by_test[report.nodeid.partition("/")[2]] = report.outcome


def main() -> int:
    """The status of pytest."""
    outcomes = Outcomes()
    status = pytest.main(["-q", "-m", "slow or not slow", "tests/trainers", *sys.argv[1:]], plugins=[outcomes])
    if not sys.argv[1:]:
        result = {
            "packages": {name: version(name) for name in PACKAGES},
            "tests": dict(sorted(outcomes.by_test.items())),
        }
        FILE.write_text(json.dumps(result, indent=1) + "\n")
    return int(status)


if __name__ == "__main__":
    raise SystemExit(main())
