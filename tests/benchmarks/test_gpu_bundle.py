"""The wheels for a machine without network: the calls of pip, which is a script here, and the printed text."""

from __future__ import annotations

import subprocess
import zipfile
from collections.abc import Sequence
from pathlib import Path

import pytest

from benchmarks.gpu import bundle

#: The requirements of each wheel that the script makes.
NEEDS = {
    "rulec": ["numpy>=2.0", "pydantic>=2.6", "torch>=2.6; extra == 'torch'"],
    "pydantic": ["pydantic-core==2.50.5", "annotated-types>=0.6", "tzdata; platform_system == 'Windows'"],
}


def made(folder: Path, name: str, version: str = "1.0") -> Path:
    """A wheel with its requirements alone."""
    file, package = folder / f"{name.replace('-', '_')}-{version}-py3-none-any.whl", name.replace("-", "_")
    lines = ["Metadata-Version: 2.4", f"Name: {name}", *(f"Requires-Dist: {need}" for need in NEEDS.get(name, []))]
    with zipfile.ZipFile(file, "w") as archive:
        archive.writestr(f"{package}-{version}.dist-info/METADATA", "\n".join([*lines, "", "Requires-Dist: no need"]))
    return file


class Pip:
    """Makes the wheels that it is asked for, and keeps the words of each call and the files of a source tree."""

    def __init__(self) -> None:
        self.calls: list[list[str]] = []
        self.files: set[str] = set()

    def __call__(self, words: Sequence[str]) -> None:
        self.calls.append([*words])
        if words[0] == "wheel":
            tree = Path(words[-1])
            self.files = {str(path.relative_to(tree)) for path in tree.rglob("*") if path.is_file()}
            made(Path(words[words.index("-w") + 1]), "rulec")
        else:
            at = words.index("-d")
            for package in words[at + 2 :]:
                name, _, version = package.partition("==")
                made(Path(words[at + 1]), name, version or "1.0")


@pytest.fixture
def checkout(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A repository with a tracked file, one that is removed since, and one of an earlier build."""
    root = tmp_path / "checkout"
    (root / "rulec").mkdir(parents=True)
    for name in ("rulec/__init__.py", "gone.py"):
        (root / name).touch()
    for words in (["init", "-q"], ["add", "-A"]):
        subprocess.run(["git", *words], cwd=root, check=True)
    (root / "gone.py").unlink()
    (root / "build").mkdir()
    (root / "build" / "stale.py").touch()
    monkeypatch.setattr(bundle, "ROOT", root)
    return root


def test_the_folder_has_one_wheel_of_each_package(checkout: Path) -> None:
    folder, pip = checkout / "wheels", Pip()
    folder.mkdir()
    made(folder, "pydantic", "0.9")
    wheels = bundle.fill(folder, "3.13", pip)
    assert {bundle.name_of(wheel.name.partition("-")[0]) for wheel in wheels} == {
        "rulec", *bundle.PACKAGES, "pydantic-core",
    }  # fmt: skip
    assert len(wheels) == 2 + len(bundle.PACKAGES)
    assert pip.files == {"rulec/__init__.py"}
    _, packages, core = pip.calls
    assert packages[-len(bundle.PACKAGES) :] == [*bundle.PACKAGES]
    assert core[-1] == "pydantic-core==2.50.5"  # the release that pydantic asks for
    for words in (packages, core):
        assert words[words.index("--python-version") + 1] == "3.13"
        assert {"--no-deps", "--only-binary=:all:", "manylinux2014_x86_64"} <= {*words}


def test_what_the_machine_must_have_and_run_is_said(checkout: Path) -> None:
    wheels = bundle.fill(checkout / "wheels", run=Pip())
    first, needed, _, *commands = bundle.report("wheels", wheels)
    assert first.startswith("wheels: 7 wheels, ")
    assert needed == "needed on the machine: torch and triton; numpy>=2.0"
    assert [command.rpartition("--first ")[2] for command in commands] == [
        "correctness --json results", "speed --json results",
    ]  # fmt: skip
    for command in commands:
        assert "--no-index --no-deps" in command
        assert f"--target {bundle.SITE} wheels/*.whl && export PYTHONPATH={bundle.SITE} " in command


def test_names_are_those_of_indexes() -> None:
    texts = ["PyYAML>=6.0", "pydantic_core", "typing-extensions >= 4", "ruamel.yaml[jinja2]", "a"]
    assert [bundle.name_of(text) for text in texts] == [
        "pyyaml", "pydantic-core", "typing-extensions", "ruamel-yaml", "a",
    ]  # fmt: skip
