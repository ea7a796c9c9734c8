"""`make device-bundle`: the wheels that a machine without network needs beside its own packages, in one folder.

The command prints the packages that the machine must have itself, and two commands that install the wheels and measure.
"""

from __future__ import annotations

import argparse
import re
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from benchmarks.gpu.asked import FIRST

ROOT = Path(__file__).parents[2]

#: The folder of wheels, which git ignores; the Python of the machine; where wheels are installed there.
FOLDER, PYTHON, SITE = "device-bundle", "3.12", "/tmp/site"

#: Packages that images with PyTorch often lack, beside rulec; pydantic's core is the one that pydantic asks for.
PACKAGES = ("platformdirs", "pydantic", "annotated-types", "typing-extensions", "typing-inspection")
CORE = "pydantic-core"

#: What packages of PyTorch bring along.
PLATFORMS = ("manylinux_2_28_x86_64", "manylinux_2_17_x86_64", "manylinux2014_x86_64")

INSTALL = (
    f"python3 -m pip install -q --no-index --no-deps --no-compile --no-cache-dir --upgrade --target {SITE} "
    f"{{folder}}/*.whl && export PYTHONPATH={SITE} PYTHONUNBUFFERED=1"
)
MEASURE = "python3 -m rulec bench gpu --first {first} --json {results}"

Run = Callable[[Sequence[str]], None]


def pip(words: Sequence[str]) -> None:
    """Runs pip of this Python."""
    subprocess.run([sys.executable, "-m", "pip", *words], check=True, stdin=subprocess.DEVNULL)


def fill(folder: Path, python: str = PYTHON, run: Run = pip) -> list[Path]:
    """Fills the folder with wheels, in place of those of an earlier bundle: two versions of one stop the install."""
    folder.mkdir(parents=True, exist_ok=True)
    for wheel in folder.glob("*.whl"):
        wheel.unlink()
    with tempfile.TemporaryDirectory() as scratch:
        copy_tracked(Path(scratch))
        run(["wheel", "-q", "--no-deps", "-w", str(folder), scratch])
    download(folder, PACKAGES, python, run)
    (pydantic,) = folder.glob("pydantic-*.whl")
    download(folder, [need for need in needs(pydantic) if name_of(need) == CORE], python, run)
    return sorted(folder.glob("*.whl"))


def copy_tracked(target: Path) -> None:
    """Copies the files that git tracks, as they are now: a folder `build` would bring files that are no more."""
    listed = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, check=True, capture_output=True, text=True).stdout
    for name in filter(None, listed.split("\0")):
        if (ROOT / name).is_file():
            (target / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / name, target / name)


def download(folder: Path, packages: Sequence[str], python: str, run: Run) -> None:
    """Downloads the wheels of packages, and nothing that they need, for another Python on Linux."""
    platforms = [word for platform in PLATFORMS for word in ("--platform", platform)]
    options = ["--no-deps", "--only-binary=:all:", "--python-version", python, "--implementation", "cp", *platforms]
    run(["download", "-q", *options, "-d", str(folder), *packages])


def needs(wheel: Path) -> list[str]:
    """The requirements of a wheel that hold everywhere: none of its extras, and none for other systems."""
    with zipfile.ZipFile(wheel) as archive:
        (name,) = (name for name in archive.namelist() if name.endswith(".dist-info/METADATA"))
        lines = archive.read(name).decode().partition("\n\n")[0].splitlines()
    stated = [line.removeprefix("Requires-Dist: ") for line in lines if line.startswith("Requires-Dist: ")]
    return [requirement for requirement in stated if ";" not in requirement]


def name_of(text: str) -> str:
    """The name of a package in a requirement or in the name of a wheel, in the form of package indexes."""
    match = re.match(r"[A-Za-z0-9._-]*[A-Za-z0-9]", text)
    assert match is not None, text
    return re.sub(r"[._-]+", "-", match[0]).lower()


def needed_there(wheels: Sequence[Path]) -> list[str]:
    """What the machine must have itself: the requirements of all wheels that are not in the bundle."""
    here = {name_of(wheel.name.partition("-")[0]) for wheel in wheels}
    return sorted({need for wheel in wheels for need in needs(wheel) if name_of(need) not in here})


def report(folder: str, wheels: Sequence[Path]) -> Iterator[str]:
    """The lines about the bundle: its size, the packages that it lacks, and the commands to run on the machine."""
    size = sum(wheel.stat().st_size for wheel in wheels)
    yield f"{folder}: {len(wheels)} wheels, {size / 2**20:.1f} MiB"
    yield f"needed on the machine: torch and triton; {', '.join(needed_there(wheels))}"
    yield "there, in a copy of this checkout with the folder:"
    for first in FIRST:
        yield f"  {INSTALL.format(folder=folder)} && {MEASURE.format(first=first, results='results')}"


def main(words: Sequence[str] | None = None) -> None:
    """Makes the bundle and prints the commands."""
    parser = argparse.ArgumentParser(prog="make device-bundle", description=__doc__)
    parser.add_argument("--folder", default=FOLDER, help="where the wheels go")
    parser.add_argument("--python", default=PYTHON, help="the Python of the machine")
    chosen = parser.parse_args(words)
    wheels = fill(ROOT / chosen.folder, chosen.python)
    print("\n".join(report(chosen.folder, wheels)))


if __name__ == "__main__":
    main()
