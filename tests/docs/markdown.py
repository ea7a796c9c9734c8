"""The manual's pages as their fenced blocks, and the marked parts that are made by functions."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent.parent

_FENCE = re.compile(r"^(?P<indent> *)```(?P<language>\w*)(?P<options>.*)$")
_TITLE = re.compile(r'title="([^"]+)"')
_MARKED = re.compile(r"(<!-- generated: (?P<name>[\w-]+) -->\n).*?(<!-- end of (?P=name) -->)", re.DOTALL)


@dataclass(frozen=True)
class Block:
    """A fenced block: its language, the file it stands for where it has a title, and where it is.

    `first` and `last` are the 0-based numbers of its opening and closing lines; `adjacent` says that nothing but blank
    lines and comments separates it from the block before it; `varies` that `<!-- figures vary -->` stands above it: its
    numbers are those of one machine.
    """

    language: str
    title: str | None
    text: str
    first: int
    last: int
    indent: str
    adjacent: bool
    varies: bool

    @property
    def shortened(self) -> bool:
        """Whether lines were left out of it by hand."""
        return any(line.strip() == "..." for line in self.text.splitlines())


def pages() -> list[Path]:
    """README.md and every page of the manual."""
    return [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]


def blocks(page: str) -> list[Block]:
    """The fenced blocks of a page, in order; a block that is never closed is an AssertionError."""
    lines = page.splitlines()
    found: list[Block] = []
    number = 0
    while number < len(lines):
        opening = _FENCE.match(lines[number])
        if opening is None:
            number += 1
            continue
        indent = opening["indent"]
        last = next((i for i in range(number + 1, len(lines)) if lines[i] == f"{indent}```"), None)
        assert last is not None, f"the block that line {number + 1} opens is never closed"
        title = _TITLE.search(opening["options"])
        text = "".join(f"{line.removeprefix(indent)}\n" for line in lines[number + 1 : last])
        between = lines[found[-1].last + 1 : number] if found else ["start of page"]
        adjacent = all(re.fullmatch(r" *(<!--.*-->)?", line) for line in between)
        varies = any(line.strip() == "<!-- figures vary -->" for line in between)
        found.append(Block(opening["language"], title and title[1], text, number, last, indent, adjacent, varies))
        number = last + 1
    return found


def with_outputs(page: str, outputs: Mapping[Block, str]) -> str:
    """The page with these outputs: in place of a `text` or `console` block's own text, behind a block of any other."""
    lines = page.splitlines()
    for block, output in sorted(outputs.items(), key=lambda item: -item[0].first):
        text = [f"{block.indent}{line}".rstrip() for line in output.splitlines()]
        if block.language in ("text", "console"):
            lines[block.first + 1 : block.last] = text
        else:
            lines[block.last + 1 : block.last + 1] = ["", f"{block.indent}```text", *text, f"{block.indent}```"]
    return "\n".join(lines) + "\n"


def with_generated(page: str, makers: Mapping[str, Callable[[], str]]) -> str:
    """The page with every marked part, `<!-- generated: name -->` to `<!-- end of name -->`, made anew."""
    return _MARKED.sub(lambda m: f"{m[1]}\n{makers[m['name']]().strip()}\n\n{m[3]}", page)
