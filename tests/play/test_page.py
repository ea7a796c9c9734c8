"""The page in a headless Chromium, with real clicks and keys.

Skipped where no Chromium is installed: continuous integration installs nothing by hand. The tests beside this one hold
the server and its answers without a browser.
"""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator

import pytest

from rulec.tools.playground.link import link_text, linked_text
from tests.play.chromium import Tab, chromium, command

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(command() is None, reason="no Chromium is installed: the page is clicked where one is"),
]


@pytest.fixture(scope="module")
def address() -> Iterator[str]:
    arguments = [sys.executable, "-m", "rulec", "play", "--no-browser", "--port", "0"]
    with subprocess.Popen(arguments, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        said = process.stdout.readline()
        assert said.startswith("wary_adam.yaml is open at http://127.0.0.1:")
        yield said.split()[4]
        process.terminate()


@pytest.fixture(scope="module")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Tab]:
    with chromium(tmp_path_factory.mktemp("profile")) as tab:
        yield tab


@pytest.fixture(params=[(1400, 900, False), (390, 844, True)], ids=["wide", "phone"])
def tab(browser: Tab, address: str, request: pytest.FixtureRequest) -> Iterator[Tab]:
    """The page with its first rule; in the end nothing has failed, and nothing is wider than the page."""
    width, height, dark = request.param
    browser.size(width, height, dark=dark)
    browser.open(address)
    browser.value("sessionStorage.clear()")
    browser.open(address)
    browser.wait("document.querySelector('#formula .katex')")
    yield browser
    assert browser.errors == []
    assert browser.value("document.documentElement.scrollWidth") <= width


def test_mistakes_are_shown_as_one_types(tab: Tab) -> None:
    assert tab.text("#mistakes") == "No mistakes."
    tab.click(".cm-content")
    tab.press("End", control=True)
    tab.type("  x = momentun*g")
    tab.wait("document.querySelector('#mistakes li')")
    assert "unknown name 'momentun'" in tab.text("#mistakes")
    tab.wait("document.querySelector('.cm-lintRange-error')")
    assert tab.text(".cm-lintRange-error") == "momentun"
    assert tab.text("#stale") == "This is the last text without mistakes."
    tab.press("a", control=True)
    tab.type("name: Mine\nhyper: {lr: 0.1}\nstep: direction = sign(g)")
    tab.wait("document.querySelector('#name').innerText === 'Mine'")
    assert tab.text("#mistakes") == "No mistakes."


def test_a_warning_is_shown_beside_the_rule(tab: Tab) -> None:
    tab.click(".cm-content")
    tab.press("a", control=True)
    tab.type("name: Warned\nhyper: {lr: 0.1, beta: 0.9}\nstep: direction = sign(g)")
    tab.wait("document.querySelector('#name').innerText === 'Warned'")
    tab.wait("document.querySelector('.cm-lintRange-warning')")
    assert "nothing reads the hyper-parameter beta" in tab.text("#mistakes .warning")
    assert tab.value("document.querySelector('#stale').hidden")


def test_completion_offers_names(tab: Tab) -> None:
    tab.click(".cm-content")
    tab.press("End", control=True)
    tab.type("  y = bet")
    tab.wait("document.querySelector('.cm-tooltip-autocomplete li')")
    assert tab.text(".cm-tooltip-autocomplete li").startswith("beta1")


def test_kernels_paths_and_tabs_by_keys(tab: Tab) -> None:
    assert "16 bytes (p, g, m, v) for each float32 parameter" in tab.text("#cost-tables")
    tab.click("#tab-kernel")
    tab.click("#backends input[value=triton]")
    tab.wait("document.querySelector('#source').innerText.includes('triton')")
    tab.click("#tab-assembly")
    tab.press("ArrowRight")
    tab.wait("document.querySelector('#picture polyline')")
    assert tab.value("document.activeElement.id") == "tab-path"
    first = tab.value("document.querySelector('#picture polyline').getAttribute('points')")
    tab.value("document.getElementById('slider-lr').focus()")
    for _ in range(4):
        tab.press("ArrowLeft")
    tab.wait(f"document.querySelector('#picture polyline').getAttribute('points') !== {first!r}")
    tab.click("#reset")
    tab.wait(f"document.querySelector('#picture polyline').getAttribute('points') === {first!r}")


def test_the_kernel_in_c_comes_first_and_its_machine_code_beside_it(tab: Tab) -> None:
    tab.click("#tab-kernel")
    tab.wait("document.querySelector('#source').innerText.includes('int64_t')")
    tab.click("#tab-assembly")
    tab.wait("document.querySelector('#machine-code .tok-typeName')")
    tab.click("#machines input[value=cpu]")
    tab.wait("document.querySelector('#machine-code').innerText.includes('kernel:')")
    assert tab.value("document.querySelector('#assembly-problem').hidden")


def test_a_link_holds_the_rule(tab: Tab, address: str) -> None:
    """The link that the page copies opens this text; a part of it is a sentence, beside the rule of the server."""
    page = address.partition("#")[0]
    tab.call("Browser.grantPermissions", permissions=["clipboardReadWrite", "clipboardSanitizedWrite"])
    tab.click(".cm-content")
    tab.press("a", control=True)
    tab.type("name: Löwe\nhyper: {lr: 0.1}\nstep: direction = sign(g)")
    tab.click("#copy-link")
    tab.wait("document.querySelector('#copy-link').innerText === 'Copied'")
    link = tab.value("await navigator.clipboard.readText()")
    text = "name: Löwe\nhyper: {lr: 0.1}\nstep: direction = sign(g)"
    assert (link.startswith(f"{page}#rule="), linked_text(link)) == (True, text)
    for written in (link, page + link_text(text), f"{address}&{link.partition('#')[2]}"):
        tab.open(written)
        tab.wait("document.querySelector('.cm-content')?.innerText.includes('Löwe')")
        assert tab.text("#file") == "linked.yaml"
        assert tab.value("location.hash") == f"#{address.partition('#')[2]}"
    tab.open(link[:-9])
    tab.wait("document.querySelector('#name')?.innerText === 'WaryAdam'")
    assert tab.text("#link-problem").startswith("The link holds no whole rule")


def test_statistics_are_drawn_below_the_path(tab: Tab) -> None:
    tab.click(".cm-content")
    tab.press("a", control=True)
    tab.type("name: Moved\nhyper: {lr: 0.1}\nstatistics: {moved: norm(update)}\nstep: direction = sign(g)")
    tab.wait("document.querySelector('#name').innerText === 'Moved'")
    tab.click("#tab-path")
    tab.wait("document.querySelector('#path-statistics polyline')")
    assert tab.text("#path-statistics figcaption") == "moved"


def test_a_race(tab: Tab) -> None:
    tab.click("#tab-race")
    tab.value("document.getElementById('task').value = 'valley'")
    tab.click("#go")
    tab.wait("document.querySelectorAll('#race-result tbody tr').length === 3")
    tab.wait("document.querySelectorAll('#race-result .chart polyline').length >= 6")
    assert "your rule" in tab.text("#race-result")
    tab.value("document.getElementById('task').value = 'char'")
    tab.click("#go")
    tab.wait("document.querySelector('#go').innerText === 'Stop'")
    tab.click("#go")
    tab.wait("document.querySelector('#go').innerText === 'Race'")
    assert tab.text("#race-problem") == "Stopped."


def test_a_rule_of_the_library_opens(tab: Tab) -> None:
    tab.click("#open-name")
    tab.type("lion")
    tab.wait("document.querySelector('#name').innerText === 'Lion'")
    assert tab.text("#file") == "lion.yaml"
    tab.call("Page.reload")
    tab.wait("document.querySelector('#name')?.innerText === 'Lion'")
    assert tab.text("#file") == "lion.yaml"


def test_the_word_under_the_pointer_is_explained(tab: Tab) -> None:
    tab.point(".cm-content .tok-typeName")
    tab.wait("document.querySelector('.cm-tooltip-hover .meaning')")
    assert "sqrt(x)" in tab.text(".cm-tooltip-hover .meaning")
