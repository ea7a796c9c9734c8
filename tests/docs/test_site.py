"""The manual builds, with every link and anchor in it leading somewhere, and nothing fetched from elsewhere."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path
from urllib.parse import unquote, urlsplit

import pytest

from tests.docs.markdown import ROOT

#: Rules whose pages the test builds: elementwise, of matrices, a wrapper, and a transform.
RULES = ("adamw", "muon", "transforms/lookahead", "transforms/clip_by_value")


@pytest.mark.slow
def test_site_builds_strictly_and_shows_no_markup(tmp_path: Path) -> None:
    """Unbalanced fences and tables show as backticks and bars in the text of a page."""
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--quiet", "--site-dir", str(tmp_path)]
    done = subprocess.run(
        command, cwd=ROOT, stdin=subprocess.DEVNULL, capture_output=True, text=True, check=False,
        env={**os.environ, "RULEC_GALLERY": " ".join(RULES)},
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    assert (tmp_path / "how-it-works.html").is_file()
    pages = [*tmp_path.glob("*.html"), *tmp_path.glob("gallery/*.html")]
    for page in pages:
        text = page.read_text()
        body = re.sub(r"<[^>]*>", "", re.sub(r"<(pre|code|script)\b.*?</\1>", "", text, flags=re.DOTALL))
        assert "```" not in body, page.name
        assert not re.search(r"^\s*\|", body, re.MULTILINE), page.name
        assert fetched(text) == [], page.name
    for page in [tmp_path / "gallery.html", *tmp_path.glob("gallery/*.html")]:
        assert [link for link in links(page.read_text()) if not (page.parent / link).is_file()] == [], page.name
    cards = (tmp_path / "gallery.html").read_text()
    slugs = [rule.replace("/", "-") for rule in RULES]
    assert re.findall(r'class="rule-card" href="gallery/([^"]*)\.html"', cards) == slugs
    assert sorted(page.stem for page in tmp_path.glob("gallery/*.html")) == sorted(slugs)


def fetched(text: str) -> list[str]:
    """The addresses from elsewhere that a browser asks for when it shows a page."""
    tags = re.findall(r"<(?:link|script|img|iframe|source|image|use)\b[^>]*>", text)
    tags = [tag for tag in tags if 'rel="canonical"' not in tag]
    return [tag for tag in tags if re.search(r'(?:src|href)="(?:https?:)?//', tag)]


def links(text: str) -> set[str]:
    """The files beside a page that it leads to, without anchors."""
    targets = (urlsplit(target) for target in re.findall(r'\b(?:src|href)="([^"]*)"', text))
    return {unquote(t.path) for t in targets if t.path and not t.scheme and not t.netloc}


def test_fetched_addresses_are_seen() -> None:
    assert fetched('<script src="https://cdn.example/katex.js"></script><a href="https://example.org">x</a>') != []
    assert fetched('<script src="katex/katex.min.js"></script><a href="https://example.org">x</a>') == []


def test_readme_links_lead_somewhere() -> None:
    text = (ROOT / "README.md").read_text()
    for target in re.findall(r"\]\((?!https?://)([^)#]+)", text):
        assert (ROOT / target).exists(), target
