"""Makes a release: `python -m tests.versions.release 0.2.0` tries it, and with `--write` its commit and tag stay.

The version is written in rulec/__init__.py and CITATION.cff; *Unreleased* of CHANGELOG.md becomes the section of the
version. Source distribution and wheel are built from a clone of that commit, checked by twine, and copied to dist/.
Nothing is pushed or uploaded.
"""

from __future__ import annotations

import argparse
import datetime
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from tests.versions.requirements import ROOT

_VERSION = re.compile(r"(0|[1-9]\d*)\.(0|[1-9]\d*)\.(0|[1-9]\d*)")
_WRITTEN = re.compile(r'^__version__ = "(.+)"$', re.MULTILINE)
_CITED = re.compile(r"^version: .*\ndate-released: .*$", re.MULTILINE)
_UNRELEASED = "## Unreleased\n"


class NoRelease(Exception):
    """Why a release is not made, in one sentence."""


def numbers(version: str) -> tuple[int, ...]:
    """The numbers of a version; NoRelease where it is not three of them."""
    if not _VERSION.fullmatch(version):
        raise NoRelease(f"the version is {version!r}: give three numbers, as in make release VERSION=0.2.0")
    return tuple(int(part) for part in version.split("."))


def cut(changelog: str, version: str, day: str) -> str:
    """The changelog with *Unreleased* as the section of a version; NoRelease where there is nothing to release.

    A section that the version already has gets the day, where *Unreleased* is empty: it was cut by hand.
    """
    before, unreleased, rest = changelog.partition(_UNRELEASED)
    if not unreleased:
        raise NoRelease("CHANGELOG.md has no section Unreleased: add the line '## Unreleased'")
    lines, heading, older = rest.partition("\n## ")
    has_lines = re.search(r"^- ", lines, re.MULTILINE) is not None
    is_cut = re.search(rf"^{re.escape(version)}(,|$)", older, re.MULTILINE) is not None
    if is_cut and has_lines:
        raise NoRelease(f"CHANGELOG.md has lines in Unreleased, and a section {version}: put them into one of the two")
    if is_cut:
        return re.sub(rf"^## {re.escape(version)}(,.*)?$", f"## {version}, {day}", changelog, flags=re.MULTILINE)
    if not has_lines:
        raise NoRelease("CHANGELOG.md has no line in Unreleased: write down what users see of this version")
    return f"{before}{_UNRELEASED}\n## {version}, {day}\n{lines}{heading}{older}"


def git(root: Path, *words: str) -> str:
    """What a command of git prints; NoRelease with git's own words where it fails."""
    done = subprocess.run(["git", "-C", root, *words], capture_output=True, text=True, check=False)
    if done.returncode:
        raise NoRelease(f"git {words[0]}: {done.stderr.strip()}")
    return done.stdout


def check(root: Path, version: str) -> None:
    """NoRelease for a tree with changes, a tag that is there, and a version that is not above the last one."""
    wanted = numbers(version)
    if changes := git(root, "status", "--porcelain").splitlines():
        raise NoRelease(
            f"the working tree has {len(changes)} changes, the first of {changes[0][3:]}: commit them first"
        )
    tags = [tag.removeprefix("v") for tag in git(root, "tag", "--list", "v*").split()]
    if version in tags:
        raise NoRelease(f"the tag v{version} is there: choose a version above it")
    written = _WRITTEN.search((root / "rulec" / "__init__.py").read_text())
    assert written is not None
    released = [tag for tag in tags if _VERSION.fullmatch(tag)]
    last = max([written[1], *released], key=numbers)
    if wanted < numbers(last):
        raise NoRelease(f"the version {version} is below {last}: choose a version above it")


def write(root: Path, version: str, day: str) -> None:
    """Writes version and changelog into a tree."""
    package, citation, changelog = (root / name for name in ("rulec/__init__.py", "CITATION.cff", "CHANGELOG.md"))
    package.write_text(_WRITTEN.sub(f'__version__ = "{version}"', package.read_text()))
    citation.write_text(_CITED.sub(f'version: {version}\ndate-released: "{day}"', citation.read_text()))
    changelog.write_text(cut(changelog.read_text(), version, day))


def commit(root: Path, version: str) -> None:
    """Commits what was written; a commit of its own also where nothing was."""
    git(root, "commit", "--quiet", "--all", "--allow-empty", "--message", f"Release {version}")


def build(root: Path, folder: Path) -> list[Path]:
    """The source distribution and the wheel of a tree, in a folder, as twine accepts them; NoRelease otherwise."""
    tools = folder / "tools"
    subprocess.run([sys.executable, "-m", "venv", tools], check=True)
    python = tools / "bin" / "python"
    install = ["-m", "pip", "install", "-qq", "--disable-pip-version-check", "build", "twine"]
    for words in (install, ["-m", "build", "--outdir", folder / "dist", root]):
        _run([python, *words])
    files = sorted((folder / "dist").iterdir())
    _run([python, "-m", "twine", "check", "--strict", *files])
    return files


def _run(words: Sequence[str | Path]) -> None:
    """NoRelease with the last lines that a program printed, where it fails."""
    done = subprocess.run(words, stdin=subprocess.DEVNULL, capture_output=True, text=True, check=False)
    if done.returncode:
        lines = (done.stdout + done.stderr).strip().splitlines()[-5:]
        raise NoRelease(f"{' '.join(map(str, words[1:4]))} failed: " + "\n".join(lines))


def release(root: Path, version: str, *, stays: bool, day: str) -> list[str]:
    """Tries a release in a clone, and makes it in the tree itself where it `stays`; the names of the built files."""
    check(root, version)
    with tempfile.TemporaryDirectory() as name:
        clone = Path(name) / "clone"
        git(root, "clone", "--quiet", str(root), str(clone))
        write(clone, version, day)
        files = build(clone, Path(name))
        if stays:
            write(root, version, day)
            commit(root, version)
            git(root, "tag", "--annotate", f"v{version}", "--message", f"rulec {version}")
            (root / "dist").mkdir(exist_ok=True)
            for file in files:
                shutil.copy(file, root / "dist")
        return [file.name for file in files]


def main(words: Sequence[str]) -> None:
    parser = argparse.ArgumentParser(prog="make release", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("version", help="three numbers, as 0.2.0")
    parser.add_argument("--write", action="store_true", help="keep commit, tag and dist/")
    chosen = parser.parse_args(words)
    try:
        names = release(ROOT, chosen.version, stays=chosen.write, day=datetime.date.today().isoformat())
    except NoRelease as reason:
        sys.exit(f"no release: {reason}")
    print(f"built and checked {' and '.join(names)}")
    if chosen.write:
        print(f"tagged v{chosen.version}: git push --follow-tags, then twine upload dist/*{chosen.version}*")
    else:
        print(f"nothing is changed: make release VERSION={chosen.version} WRITE=1 makes the commit and the tag")


if __name__ == "__main__":
    main(sys.argv[1:])
