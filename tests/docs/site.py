"""The built manual: how tests build it, and what its pages lead to."""

from __future__ import annotations

import os
import subprocess
import sys
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote, urlsplit

from tests.docs.markdown import ROOT

#: Rules whose pages tests build: elementwise, of matrices, a wrapper, and a transform.
RULES = ("adamw", "muon", "transforms/lookahead", "transforms/clip_by_value")


def build(folder: Path) -> list[Path]:
    """Builds the manual into a folder, strictly; its pages, without that of the error 404."""
    done = subprocess.run(
        [sys.executable, "-m", "mkdocs", "build", "--strict", "--quiet", "--site-dir", str(folder)],
        cwd=ROOT, stdin=subprocess.DEVNULL, capture_output=True, text=True, check=False,
        env={**os.environ, "RULEC_GALLERY": " ".join(RULES), "NO_MKDOCS_2_WARNING": "1"},
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    return sorted({*folder.rglob("*.html")} - {folder / "404.html"})


class Page(HTMLParser):
    """The anchors of a page, and the addresses that it leads to or shows."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.anchors: set[str] = set()
        self.targets: set[str] = set()
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        named = dict(attrs)
        self.anchors |= {str(named[key]) for key in ("id", "name") if named.get(key)}
        self.targets |= {str(named[key]) for key in ("href", "src") if named.get(key)}


def broken(pages: list[Path]) -> list[str]:
    """The links of pages to files and anchors that do not exist, as `page: target`."""
    read = {page.resolve(): Page(page.read_text(encoding="utf-8")) for page in pages}
    return sorted(
        f"{page.name}: {target}"
        for page, content in read.items() for target in content.targets
        if not _exists(page, target, read)
    )  # fmt: skip


def _exists(page: Path, target: str, read: dict[Path, Page]) -> bool:
    parts = urlsplit(target)
    if parts.scheme or parts.netloc:
        return True
    file = (page.parent / unquote(parts.path)).resolve() if parts.path else page
    if not file.is_file():
        return False
    return not parts.fragment or file not in read or unquote(parts.fragment) in read[file].anchors
