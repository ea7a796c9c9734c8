"""Measures rulec by another project's tests: `python -m tests.suites SUITE TREE [PYTEST ARGUMENTS]`.

SUITE is one of `SUITES`, and TREE a source tree of that project, with its tests; none of their code is copied. What
these tests need beside this project's environment stands in folders of PYTHONPATH. The outcome is kept in
docs/data/suites.json, from which the table of docs/suites.md is made.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tests.docs.markdown import ROOT

FILE = ROOT / "docs" / "data" / "suites.json"

#: Suite -> its tests in the source tree, and the file that says its version.
SUITES = {
    "pytorch_optimizer": ("tests/test_optimizers.py", "pyproject.toml"),
    "timm": ("tests/test_optim.py", "timm/version.py"),
    "torch": ("test/optim/test_lrscheduler.py", "version.txt"),
    "optax": ("optax/_src/alias_test.py", "optax/__init__.py"),
}


def outcomes(suite: str, tree: Path, arguments: list[str]) -> dict[str, Any]:
    """The outcome of every test of the suite, from a process of its own."""
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder) / "report.json"
        path = os.pathsep.join(part for part in (str(tree), os.environ.get("PYTHONPATH", "")) if part)
        script = str(Path(__file__).with_name("inside.py"))
        command = [sys.executable, "-P", script, suite, str(report), SUITES[suite][0], "--tb=no", *arguments]
        environment = os.environ | {"PYTHONPATH": path, "TORCH_DEVICE": "cpu"}
        subprocess.run(command, cwd=tree, env=environment, check=False)
        return dict(json.loads(report.read_text()))


def summary(found: Mapping[str, Any], version: str) -> dict[str, Any]:
    """The counts of the tests that meet a class of ours, and the failed ones by what they were told."""
    met = {name: each for name, each in found.items() if each["met"] and each["outcome"] != "skipped"}
    failed: dict[str, list[str]] = {}
    for name, each in met.items():
        if each["outcome"] == "failed":
            failed.setdefault(f"{each['reason']}: {told(each['message'])}", []).append(name)
    passed = sum(each["outcome"] == "passed" for each in met.values())
    return {"version": version, "tests": len(met), "passed": passed, "failed": dict(sorted(failed.items()))}


def told(message: str) -> str:
    """The first clause of an error message, without its numbers."""
    clause = re.split(r"; |: |\n", message.strip())[0]
    return re.sub(r"\d+(\.\d+)?(e-?\d+)?", "N", clause)[:160]


def version_of(suite: str, tree: Path) -> str:
    """The version that the source tree names; empty where it has no such file."""
    file = tree / SUITES[suite][1]
    text = file.read_text() if file.exists() else ""
    named = re.search(r"""(?:^|\n)(?:__version__|version) *= *["']([^"']+)""", text)
    return named.group(1) if named else text.strip().partition("\n")[0][:20]


def main(arguments: list[str]) -> None:
    """Runs a suite and keeps its counts."""
    if len(arguments) < 2 or arguments[0] not in SUITES:
        sys.exit(f"give one of {', '.join(SUITES)}, and a source tree of it")
    suite, tree, *rest = arguments
    folder = Path(tree).resolve()
    if not (folder / SUITES[suite][0]).is_file():
        sys.exit(f"{folder} has no file {SUITES[suite][0]}: give a source tree of {suite} with its tests")
    kept = json.loads(FILE.read_text()) if FILE.exists() else {}
    kept[suite] = summary(outcomes(suite, folder, rest), version_of(suite, folder))
    FILE.write_text(json.dumps(kept, indent=1, sort_keys=True) + "\n")
    print(f"{suite}: {kept[suite]['passed']} of {kept[suite]['tests']} pass with rulec's classes")


if __name__ == "__main__":
    main(sys.argv[1:])
