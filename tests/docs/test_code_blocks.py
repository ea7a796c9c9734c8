"""Every code block of README.md and the manual runs, and prints what the page shows."""

from __future__ import annotations

import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

from tests.docs.markdown import ROOT, blocks, pages, with_outputs
from tests.docs.running import PageRun, agrees

#: The pages whose blocks run every day; the others take seconds each.
DAILY = ("README.md", "partition.md", "index.md")
PAGES = [pytest.param(p, marks=() if p.name in DAILY else pytest.mark.slow, id=p.name) for p in pages()]


@pytest.mark.parametrize("path", PAGES)
def test_page(path: Path, tmp_path: Path) -> None:
    if path.name == "keras.md" and find_spec("keras") is None:
        pytest.skip("keras is not installed")
    for outcome in PageRun(path.stem, tmp_path).run(blocks(path.read_text())):
        assert outcome.agrees, (
            f"{path.relative_to(ROOT)}:{outcome.block.first + 1} now prints\n{outcome.printed}\n"
            f"if that is right: python -m tests.docs.refresh {path.name}"
        )


@pytest.mark.parametrize("path", pages(), ids=lambda path: path.name)
def test_every_output_belongs_to_a_block(path: Path) -> None:
    found = blocks(path.read_text())
    for before, block in zip([None, *found], found, strict=False):
        if block.language == "text":
            shown_by = before.language if before is not None and block.adjacent else None
            assert shown_by in ("python", "yaml"), f"{path.name}:{block.first + 1} is the output of nothing"


@pytest.mark.parametrize(
    ("shown", "printed", "agree"),
    [
        ("a\nb\n", "a\nb\n", True),
        ("a\nb\n", "a \nb\n\n", True),
        ("a\nb\n", "a\nc\n", False),
        ("a\nb\n", "a\n", False),
        ("", "a\n", False),
        ("a\n", "", False),
        ("a\n...\nd\n", "a\nb\nc\nd\n", True),
        ("a\n...\nd\n", "a\nd\n", True),
        ("a\n...\nd\n", "a\nb\nc\n", False),
        ("took ... s\n", "took 1.5 s\n", True),
        ("took ... s\n", "took 1.5 ms\n", False),
        ("a.b\n", "axb\n", False),
    ],
)
def test_agreement(shown: str, printed: str, agree: bool) -> None:
    assert agrees(shown, printed) is agree


def test_figures_that_vary() -> None:
    assert agrees("m 1.5, v 12\n", "m 0.25,  v 3e-8\n", varies=True)
    assert not agrees("m 1.5, v 12\n", "m 1.5, u 12\n", varies=True)
    assert not agrees("m 1.5, v 12\n", "m 1.5, v\n", varies=True)
    (first, second) = blocks("```python\n1\n```\n\n<!-- figures vary -->\n```text\n2\n```\n")
    assert (first.varies, second.varies, second.adjacent) == (False, True, True)


def outcomes(page: str, folder: Path) -> list[bool]:
    return [outcome.agrees for outcome in PageRun("trial", folder).run(blocks(page))]


def test_blocks_share_one_module(tmp_path: Path) -> None:
    page = "```python\na = 1\ndef f(): return a\n```\n\n```python\na = 2\nprint(f())\n```\n\n```text\n2\n```\n"
    assert outcomes(page, tmp_path) == [True, True]


def test_blocks_of_one_length_are_run_each(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "dont_write_bytecode", False)
    page = "".join(f"```python\nprint({i})\n```\n\n```text\n{i}\n```\n\n" for i in range(4))
    assert all(outcome.agrees for outcome in PageRun("page", tmp_path).run(blocks(page)))


def test_wrong_output_is_noticed(tmp_path: Path) -> None:
    assert outcomes("```python\nprint(1)\n```\n\n```text\n2\n```\n", tmp_path) == [False]
    assert outcomes("```python\nprint(1)\n```\n", tmp_path) == [False]


def test_shown_error(tmp_path: Path) -> None:
    page = "```python\nimport rulec\nrulec.load('adan').bind(x=1)\n```\n\n```text\nrulec.errors.RuleError: ...\n```\n"
    assert outcomes(page, tmp_path) == [True]


def test_error_that_is_not_shown_fails(tmp_path: Path) -> None:
    with pytest.raises(AssertionError, match="line 3 fails: division by zero"):
        outcomes("\n\n```python\n1/0\n```\n", tmp_path)


def test_error_in_place_of_an_output_fails(tmp_path: Path) -> None:
    with pytest.raises(AssertionError, match="line 1 fails: name 'a' is not defined"):
        outcomes("```python\nprint(a)\n```\n\n```text\n1\n```\n", tmp_path)


def test_yaml_is_a_rule(tmp_path: Path) -> None:
    with pytest.raises(AssertionError, match="unknown name 'x'"):
        outcomes("```yaml\nname: A\nstep: |\n  direction = x\n```\n", tmp_path)


def test_console(tmp_path: Path) -> None:
    page = '```console\n$ python -c "print(3)"\n3\n$ A=b python -c "import os; print(os.environ[\'A\'])"\nc\n```\n'
    (outcome,) = PageRun("trial", tmp_path).run(blocks(page))
    assert not outcome.agrees
    assert outcome.printed == outcome.block.text.replace("\nc\n", "\nb\n")


@pytest.mark.parametrize(
    "line", ["make nothing", "pip install '.[nothing]'", "rm -r docs", "rulec nothing", "make demo && rm -r docs"]
)
def test_set_up_commands_are_checked(line: str, tmp_path: Path) -> None:
    with pytest.raises(AssertionError):
        outcomes(f"```sh\n{line}\n```\n", tmp_path)


def test_unknown_languages_and_open_blocks_fail(tmp_path: Path) -> None:
    with pytest.raises(AssertionError, match="'ini'"):
        outcomes("```ini\na = 1\n```\n", tmp_path)
    with pytest.raises(AssertionError, match="never closed"):
        blocks("a\n```python\n")


def test_outputs_are_put_where_they_belong() -> None:
    page = "  ```python\n  print(1)\n  ```\n\n  ```text\n  2\n  ```\n```python\nprint(3)\n```\n"
    first, shown, second = blocks(page)
    assert first.text == "print(1)\n"
    expected = "  ```python\n  print(1)\n  ```\n\n  ```text\n  1\n  ```\n```python\nprint(3)\n```\n\n```text\n3\n```\n"
    assert with_outputs(page, {shown: "1\n", second: "3\n"}) == expected
