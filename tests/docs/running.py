"""Runs the blocks of a page as its reader would, in an empty folder.

A block's language says what is done with it:

- `python` runs, every block of a page in one module, one after the other;
- `yaml` is read as a rule, and written to the file its title names, where it has one;
- `console` holds commands after `$ `, which run, each followed by what it prints, where that is shown;
- `sh` holds commands that take long or change the machine: they are looked at, not run;
- `toml` and `json` are read;
- `c`, `fortran`, `julia` and `rust` are written to the file their title names: a later command or another test
  compiles it;
- `text` right behind a `python` or `yaml` block is what that prints, or the error it ends in.

In what is shown, a line `...` stands for any number of lines and `...` within a line for any text. Below a comment
`<!-- figures vary -->` a number stands for any number.
"""

from __future__ import annotations

import contextlib
import importlib
import importlib.util
import io
import json
import linecache
import os
import re
import shlex
import shutil
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from dataclasses import dataclass, field
from importlib.machinery import SourceFileLoader
from pathlib import Path
from types import ModuleType
from typing import Any

import yaml

import rulec
from tests.docs.markdown import ROOT, Block
from tests.docs.stand_ins import stand_ins

_BIN = Path(sys.executable).parent

#: Files that the manual links to: a page's reader has them at hand.
EXAMPLES = ROOT / "docs" / "examples"

#: What `sh` blocks may hold: set-up, and commands whose existence is checked.
_SET_UP = re.compile(
    r"pip install (-e )?'?\.(\[[\w,]+\])?'?|make \w+( \w+=.*)?|rulec \w+.*|\.ci/run|gfortran -o .*|gcc -c .*|rustc .*"
    r"|python -m pip (wheel|download|install) .*|python -m rulec \w+.*|export PYTHONPATH=\w+"
    r"|python -m examples\..*|python3 -m venv \.venv|source \.venv/bin/activate"
)


class _Loader(SourceFileLoader):
    """Keeps no bytecode: Python would take that of another block of the same length from the same second."""

    def set_data(self, path: str, data: Any, *, _mode: int = 0) -> None:
        pass


def example(name: str) -> ModuleType:
    """A file of the manual as a module; its folder joins sys.path, so that child processes find it."""
    if str(EXAMPLES) not in sys.path:
        sys.path.append(str(EXAMPLES))
    return importlib.import_module(name)


@dataclass(frozen=True)
class Outcome:
    """What a block did: `shown` is the block with its output, None where the page shows none."""

    block: Block
    shown: Block | None
    printed: str

    @property
    def agrees(self) -> bool:
        """Whether the page shows what happened."""
        if self.shown is None:
            return agrees("", self.printed)
        return agrees(self.shown.text, self.printed, self.shown.varies)


def agrees(shown: str, printed: str, varies: bool = False) -> bool:
    """Whether `printed` is what `shown` says, with `...` standing for anything, and numbers where they vary."""
    if varies:
        shown, printed = _without_figures(shown), _without_figures(printed)
    pattern = ""
    for line in shown.splitlines():
        if line.strip() == "...":
            pattern += r"(?:.*\n)*?"
        else:
            pattern += ".*".join(map(re.escape, line.rstrip().split("..."))) + r"\n"
    return re.fullmatch(pattern, tidy(printed)) is not None


def _without_figures(text: str) -> str:
    return re.sub(" +", " ", re.sub(r"-?\b\d+(\.\d+)?(e[+-]?\d+)?\b", "#", text))


def tidy(text: str) -> str:
    """Lines without spaces at their ends, nor empty lines around them."""
    lines = "\n".join(line.rstrip() for line in text.splitlines()).strip("\n")
    return f"{lines}\n" if lines else ""


@dataclass
class PageRun:
    """One page's blocks run in `folder`, which is the working folder meanwhile."""

    name: str
    folder: Path
    module: ModuleType = field(init=False)

    def __post_init__(self) -> None:
        self.module = ModuleType(f"page_{re.sub(r'[^a-z]', '_', self.name.lower())}")

    def run(self, page: list[Block]) -> Iterator[Outcome]:
        """The outcome of every block but those that show the output of another."""
        before, modules = Path.cwd(), set(sys.modules)
        for file in EXAMPLES.glob("*.py"):
            shutil.copy(file, self.folder)
        os.chdir(self.folder)
        sys.path.insert(0, str(self.folder))
        sys.modules[self.module.__name__] = self.module
        try:
            with stand_ins():
                yield from self._outcomes(page)
        finally:
            os.chdir(before)
            sys.path.remove(str(self.folder))
            # Other pages may have files of the same names.
            for name in set(sys.modules) - modules:
                if name == self.module.__name__ or self._is_of_page(sys.modules[name]):
                    del sys.modules[name]

    def _is_of_page(self, module: ModuleType) -> bool:
        file = getattr(module, "__file__", None)
        return file is not None and Path(file).is_relative_to(self.folder)

    def _outcomes(self, page: list[Block]) -> Iterator[Outcome]:
        for position, block in enumerate(page):
            following = page[position + 1] if position + 1 < len(page) else None
            shows = following is not None and following.language == "text" and following.adjacent
            if block.language == "text":
                continue
            if block.title is not None:
                Path(block.title).write_text(block.text)
            if block.language == "console":
                yield Outcome(block, block, self._console(block))
            else:
                shown = following if shows else None
                yield Outcome(block, shown, self._printed(block, may_fail=shown is not None and _may_show_error(shown)))

    def _printed(self, block: Block, may_fail: bool) -> str:
        output = io.StringIO()
        try:
            with contextlib.redirect_stdout(output):
                self._do(block)
        except Exception as error:
            if not may_fail:
                raise AssertionError(f"the block of line {block.first + 1} fails: {error}") from error
            place = type(error).__module__
            kind = type(error).__name__ if place == "builtins" else f"{place}.{type(error).__name__}"
            # A mistake in a rule file is shown as it reads; one in Python as the last line of its traceback.
            print(error if block.language == "yaml" else f"{kind}: {error}", file=output)
        return tidy(output.getvalue())

    def _do(self, block: Block) -> None:
        if block.language == "python":
            self._python(block)
        elif block.language == "yaml":
            rulec.parse(block.text, block.title or "rule.yaml", self.folder)
        elif block.language == "toml":
            tomllib.loads(block.text)
        elif block.language == "json":
            json.loads(block.text)
        elif block.language == "sh":
            for line in block.text.splitlines():
                _check_command(line)
        elif block.language == "yml":
            yaml.safe_load(block.text)  # a rule of a design, which the language does not have yet
        elif block.language not in ("c", "fortran", "julia", "lua", "rust"):
            raise AssertionError(f"blocks of the language {block.language!r} are not part of the manual")

    def _python(self, block: Block) -> None:
        file = Path(block.title or "example.py")
        file.write_text(block.text)
        linecache.clearcache()  # every untitled block is a new example.py
        _Loader(self.module.__name__, str(file)).exec_module(self.module)

    def _console(self, block: Block) -> str:
        """The block with what each command prints now, where the page shows it."""
        parts = []
        for part in re.split(r"^(?=\$ )", block.text, flags=re.MULTILINE)[1:]:
            command, _, shown = part.partition("\n")
            done = _command(command[2:])
            if not shown:
                assert done.returncode == 0, f"{command} fails:\n{done.stdout}"
            # What agrees stays as it is shown, so that elisions survive a refresh.
            kept = not shown or agrees(shown, done.stdout, block.varies)
            parts.append(part if kept else f"{command}\n{tidy(done.stdout)}")
        return "".join(parts)


def _may_show_error(shown: Block) -> bool:
    """Whether an output ends in an error, or is still to be filled: elsewhere an error is no output."""
    return (
        not shown.text.strip()
        or re.search(r"^(\w+Error|rulec\.errors\.\w+|\S+:\d+:\d+): ", shown.text, re.M) is not None
    )


def _command(line: str) -> subprocess.CompletedProcess[str]:
    words = shlex.split(line)
    settings = {}
    while "=" in words[0]:
        key, _, settings[key] = words.pop(0).partition("=")
    place = {"PATH": f"{_BIN}{os.pathsep}{os.environ['PATH']}", "COLUMNS": "100", "NO_COLOR": "1", "RULEC_QUIET": "1"}
    program = _BIN / words[0]
    return subprocess.run(
        [program if program.exists() else words[0], *words[1:]], env={**os.environ, **place, **settings},
        stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False,
    )  # fmt: skip


def _check_command(line: str) -> None:
    """AssertionError for a set-up command that cannot work: no such target, extra or subcommand."""
    line = line.partition("#")[0].strip()
    assert _SET_UP.fullmatch(line), f"{line!r} is not a set-up command"
    words = shlex.split(line)
    if words[0] == "make":
        assert f"\n{words[1]}:" in (ROOT / "Makefile").read_text(), f"there is no target {words[1]}"
    if words[0] == "pip" and "[" in line:
        extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
        named = line[line.index("[") + 1 : line.index("]")].split(",")
        assert set(named) <= set(extras), f"pyproject.toml has no extra {set(named) - set(extras)}"
    if words[0] == ".ci/run":
        assert (ROOT / words[0]).is_file()
    if words[:3] == ["python", "-m", "pip"]:  # a search for pip takes the distutils of setuptools from this process
        return
    if words[0] == "python":
        assert importlib.util.find_spec(words[2]) is not None, f"there is no program {words[2]}"
    if words[0] == "rulec":
        assert _command(f"rulec {words[1]} --help").returncode == 0, f"there is no command {line!r}"
