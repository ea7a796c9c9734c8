"""`make faults`: plants faults of one line in a copy of the project, and says which tests find them.

Each fault of `tests/planted.py` is tried by the selection of `make test`, the nearest files first, until a test fails,
and where none does by that of `.ci/run`. Words choose faults by their area or file: `make faults ARGS="jax shards"`.
Set FAULT_JOBS to the number of faults that are tried at the same time, and FAULT_NEAR=1 for the nearest files alone.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from queue import SimpleQueue

from tests.planted import FAULTS, Fault

ROOT = Path(__file__).resolve().parent.parent

#: The tests of `make test`, and those that `.ci/run` has beside them.
SELECTIONS = {
    "make test": "not later and not gpu",
    ".ci/run": "later and not whole and not gpu",
}

#: The copies that faults are planted in at the same time.
JOBS = int(os.environ.get("FAULT_JOBS", "2"))

#: Points the installed packages, which are those of the checkout, at the folders of a copy.
_CUSTOM = """\
import sys

for name, module in [*sys.modules.items()]:
    if name.startswith("__editable___rulec"):
        module.MAPPING = {{package: path.replace({here!r}, {there!r}) for package, path in module.MAPPING.items()}}
"""


class Copy:
    """A copy of the tracked files, with caches of its own that stay from fault to fault."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.packages = folder / "tree", folder / "packages"
        listed = subprocess.run(
            ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"],
            cwd=ROOT, check=True, capture_output=True, text=True,
        )  # fmt: skip
        for name in filter(None, listed.stdout.split("\0")):
            target = self.folder / name
            target.parent.mkdir(parents=True, exist_ok=True)
            target.write_bytes((ROOT / name).read_bytes())
            target.chmod((ROOT / name).stat().st_mode)
        self.packages.mkdir()
        (self.packages / "sitecustomize.py").write_text(_CUSTOM.format(here=str(ROOT), there=str(self.folder)))

    def run(self, marks: str, paths: list[str]) -> str:
        """The name of the first test that fails in these files and folders; empty where none does."""
        command = [sys.executable, "-m", "pytest", "-x", "-q", "--no-header", "-p", "no:cacheprovider", "-m", marks]
        environment = {**os.environ, "PYTHONPATH": str(self.packages), "PYTHONDONTWRITEBYTECODE": "1"}
        done = subprocess.run(
            [*command, *paths], cwd=self.folder, env=environment, capture_output=True, text=True, check=False
        )
        if done.returncode in (0, 5):  # all passed, or there are none
            return ""
        failed = re.search(r"^(?:FAILED|ERROR) (\S+)", done.stdout, re.MULTILINE)
        return failed[1] if failed else f"pytest ended with {done.returncode}: {(done.stdout + done.stderr)[-300:]}"

    def found(self, fault: Fault) -> tuple[str, str]:
        """The selection that finds a fault and the test that fails; two empty texts where none does."""
        file = self.folder / fault.file
        text = file.read_text()
        if text.count(fault.old) != 1:
            return "", f"the text {fault.old!r} is {text.count(fault.old)} times in {fault.file}: name another one"
        file.write_text(text.replace(fault.old, fault.new))
        try:
            for selection, marks in SELECTIONS.items():
                for paths in portions(self.folder / "tests", fault.near.split()):
                    test = self.run(marks, paths)
                    if test:
                        return selection, test
            return "", ""
        finally:
            file.write_text(text)


def portions(tests: Path, near: list[str]) -> list[list[str]]:
    """The nearest files and folders of tests, and all others."""
    others = sorted(path.name for path in tests.iterdir() if path.is_dir() and path.name not in (*near, "__pycache__"))
    names = [*others, *sorted(path.name for path in tests.glob("test_*.py"))]
    both = [[f"tests/{path}" for path in paths] for paths in (near, names)]
    return both[:1] if os.environ.get("FAULT_NEAR") else both


def chosen(words: list[str]) -> list[Fault]:
    """The faults of which the area or the file has one of these words; all where there are none."""
    return [f for f in FAULTS if not words or any(word in f.area or word in f.file for word in words)]


def main(words: list[str]) -> int:
    """Prints a line for each fault; the number of those that no selection finds."""
    counts = dict.fromkeys([*SELECTIONS, ""], 0)
    with tempfile.TemporaryDirectory() as scratch:
        copies: SimpleQueue[Copy] = SimpleQueue()
        for number in range(JOBS):
            copies.put(Copy(Path(scratch) / str(number)))

        def tried(fault: Fault) -> tuple[Fault, str, str]:
            copy = copies.get()
            try:
                return fault, *copy.found(fault)
            finally:
                copies.put(copy)

        with ThreadPoolExecutor(JOBS) as pool:
            for fault, selection, test in pool.map(tried, chosen(words)):
                counts[selection] += 1
                print(f"{fault.area}: {fault.file}: {fault.new.strip()!r}: {selection or 'missed'} {test}", flush=True)
    print(", ".join(f"{selection or 'missed'}: {count}" for selection, count in counts.items()))
    return counts[""]


if __name__ == "__main__":
    sys.exit(bool(main(sys.argv[1:])))
