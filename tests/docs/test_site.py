"""The manual builds, with every link and anchor in it leading somewhere, and nothing fetched from elsewhere."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.docs.markdown import ROOT
from tests.docs.site import RULES, broken, build


@pytest.mark.slow
def test_site_builds_strictly_and_shows_no_markup(tmp_path: Path) -> None:
    """Unbalanced fences and tables show as backticks and bars in the text of a page."""
    pages = build(tmp_path)
    assert tmp_path / "how-it-works.html" in pages
    for page in pages:
        text = page.read_text()
        body = re.sub(r"<[^>]*>", "", re.sub(r"<(pre|code|script)\b.*?</\1>", "", text, flags=re.DOTALL))
        assert "```" not in body, page.name
        assert not re.search(r"^\s*\|", body, re.MULTILINE), page.name
        assert fetched(text) == [], page.name
    assert broken(pages) == []
    cards = (tmp_path / "gallery.html").read_text()
    slugs = [rule.replace("/", "-") for rule in RULES]
    assert re.findall(r'class="rule-card" href="gallery/([^"]*)\.html"', cards) == slugs
    assert sorted(page.stem for page in tmp_path.glob("gallery/*.html")) == sorted(slugs)


def fetched(text: str) -> list[str]:
    """The addresses from elsewhere that a browser asks for when it shows a page."""
    tags = re.findall(r"<(?:link|script|img|iframe|source|image|use)\b[^>]*>", text)
    tags = [tag for tag in tags if 'rel="canonical"' not in tag]
    return [tag for tag in tags if re.search(r'(?:src|href)="(?:https?:)?//', tag)]


def test_fetched_addresses_are_seen() -> None:
    assert fetched('<script src="https://cdn.example/katex.js"></script><a href="https://example.org">x</a>') != []
    assert fetched('<script src="katex/katex.min.js"></script><a href="https://example.org">x</a>') == []


def test_broken_links_are_seen(tmp_path: Path) -> None:
    (tmp_path / "a.html").write_text(
        '<a href="b.html#here">x</a> <a href="b.html#gone">x</a> <a href="#top">x</a> <h1 id="top">x</h1>'
        '<img src="c.png"> <a href="https://example.org/d#e">x</a> <a href="b%2Ehtml">x</a>'
    )
    (tmp_path / "b.html").write_text('<a name="here"></a><a href="a.html#none">x</a>')
    assert broken([tmp_path / "a.html", tmp_path / "b.html"]) == [
        "a.html: b.html#gone",
        "a.html: c.png",
        "b.html: a.html#none",
    ]


def test_readme_links_lead_somewhere() -> None:
    text = (ROOT / "README.md").read_text()
    for target in re.findall(r"\]\((?!https?://)([^)#]+)", text):
        assert (ROOT / target).exists(), target
