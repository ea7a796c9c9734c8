"""The pages of the manual in a headless Chromium: nothing is wider than the window, and axe finds no violation.

Skipped where no Chromium is installed. axe-core is an npm package, installed into pytest's cache at the version of
tests/docs/axe/package-lock.json; its part is skipped where npm cannot install it.
"""

from __future__ import annotations

import json
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.docs.site import build
from tests.play.chromium import Tab, chromium, command

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(command() is None, reason="no Chromium is installed: pages are looked at where one is"),
]

HERE = Path(__file__).parent / "axe"

#: Violations on a page: rule, and the first elements that break it.
VIOLATIONS = """
(await axe.run(document, {resultTypes: ["violations"]})).violations.map(
  (each) => `${each.id}: ${each.nodes.slice(0, 3).map((node) => node.target.join(" ")).join(", ")}`)
"""

#: The elements wider than the window, but for those inside an element that scrolls or hides its content.
WIDE = """
[...document.body.querySelectorAll("*")].filter((element) => {
  if (element.getBoundingClientRect().right <= innerWidth + 1) return false;
  for (let above = element.parentElement; above; above = above.parentElement)
    if (getComputedStyle(above).overflowX !== "visible") return false;
  return true;
}).slice(0, 3).map((element) => `${element.tagName} ${element.className}`)
"""


@pytest.fixture(scope="module")
def pages(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    return build(tmp_path_factory.mktemp("site"))


@pytest.fixture(scope="module")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Tab]:
    with chromium(tmp_path_factory.mktemp("profile")) as tab:
        yield tab


@pytest.fixture(scope="module")
def axe(pytestconfig: pytest.Config) -> str:
    """The script of axe-core."""
    if shutil.which("npm") is None:
        pytest.skip("npm, which installs axe-core, is not installed")
    folder = pytestconfig.cache.mkdir("axe")
    for name in ("package.json", "package-lock.json"):
        shutil.copy(HERE / name, folder / name)
    script = folder / "node_modules" / "axe-core" / "axe.min.js"
    version = json.loads((HERE / "package.json").read_text())["devDependencies"]["axe-core"]
    if not script.is_file() or f"axe v{version}" not in script.read_text()[:200]:
        done = subprocess.run(
            ["npm", "ci", "--ignore-scripts", "--no-audit", "--no-fund"],
            cwd=folder, stdin=subprocess.DEVNULL, capture_output=True, text=True, check=False,
        )  # fmt: skip
        if done.returncode:
            pytest.skip(f"npm cannot install axe-core: {done.stderr.strip()[-200:]}")
    return script.read_text()


def shown(tab: Tab, page: Path) -> None:
    """Opens a page, and waits until it is loaded and its formula is set."""
    tab.open(page.as_uri())
    tab.wait("document.readyState === 'complete' && document.title")
    tab.wait("[...document.querySelectorAll('.rule-formula')].every((each) => each.querySelector('.katex'))")


def sized(tab: Tab, page: Path, width: int) -> None:
    """A wide window with light colours, or a phone with dark ones. The browser would keep the colours of before."""
    tab.size(width, 900, dark=width < 600)
    shown(tab, page)
    tab.value("localStorage.clear()")


@pytest.mark.parametrize("width", [1400, 390])
def test_nothing_is_wider_than_the_window(browser: Tab, pages: list[Path], width: int) -> None:
    sized(browser, pages[0], width)
    faults = {}
    for page in pages:
        shown(browser, page)
        if browser.value("document.documentElement.scrollWidth") > width:
            faults[page.name] = browser.value(WIDE)
    assert faults == {}
    assert browser.errors == []


#: The tables of which a part lies outside of their column, and the words of tables that are broken inside.
BROKEN = """
[...document.querySelectorAll(".md-typeset table")].flatMap((table) => {
  const box = table.closest(".md-typeset__scrollwrap");
  if (!table.getClientRects().length) return [];
  if (box && box.scrollWidth > box.clientWidth + 1) return [`clipped: ${table.textContent.trim().slice(0, 40)}`];
  const texts = document.createTreeWalker(table, NodeFilter.SHOW_TEXT), broken = [];
  for (let text = texts.nextNode(); text; text = texts.nextNode())
    for (const word of text.data.matchAll(/(?<![\\w./-])[A-Za-z]{4,}(?![\\w./(-])/g)) {
      const range = document.createRange();
      range.setStart(text, word.index);
      range.setEnd(text, word.index + word[0].length);
      const rows = [...range.getClientRects()].filter((each) => each.width > 1).map((each) => Math.round(each.top));
      if (new Set(rows).size > 1) broken.push(text.data.slice(word.index - 9, word.index + 29));
    }
  return broken.slice(0, 3);
}).slice(0, 5)
"""

#: The most pixels of a chapter of benchmarks.
TALL = 6000


@pytest.mark.parametrize("width", [1400, 390])
def test_tables_are_whole_and_their_words_too(browser: Tab, pages: list[Path], width: int) -> None:
    """On every page of the manual; a page for one rule stands for those of all."""
    sized(browser, pages[0], width)
    faults = {}
    for page in pages:
        shown(browser, page)
        browser.wait("document.querySelectorAll('.md-typeset table:not([class])').length == 0 || window.manual_is_set")
        if broken := browser.value(BROKEN):
            faults[page.name] = broken
        if "benchmarks" in page.parts[-2:] or page.name == "benchmarks.html":
            tall = browser.value("document.querySelector('article').scrollHeight")
            assert tall <= TALL, (page.name, tall)
    assert faults == {}


@pytest.mark.parametrize("width", [1400, 390])
def test_axe_finds_no_violation(browser: Tab, pages: list[Path], axe: str, width: int) -> None:
    sized(browser, pages[0], width)
    faults = {}
    for page in pages:
        shown(browser, page)
        browser.value(axe)
        if violations := browser.value(VIOLATIONS):
            faults[page.name] = violations
    assert faults == {}, json.dumps(faults, indent=1)


def test_the_search_works_from_disk(browser: Tab, pages: list[Path]) -> None:
    """With the site's own script in place of one that the theme would fetch."""
    page = next(page for page in pages if page.name == "adamw.html")
    sized(browser, page, 1400)
    shown(browser, page)
    browser.errors.clear()  # axe asks for style sheets, which a page on disk may not read
    browser.click(".md-search__input")
    browser.type("lookahead")
    browser.wait("document.querySelector('.md-search-result__link[href*=\"gallery/transforms-lookahead.html\"]')")
    assert browser.errors == []
