"""The manual builds, with every link and anchor in it leading somewhere."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.docs.markdown import ROOT


@pytest.mark.slow
def test_site_builds_strictly_and_shows_no_markup(tmp_path: Path) -> None:
    """Unbalanced fences and tables show as backticks and bars in the text of a page."""
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--quiet", "--site-dir", str(tmp_path)]
    done = subprocess.run(command, cwd=ROOT, stdin=subprocess.DEVNULL, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert (tmp_path / "how-it-works.html").is_file()
    for page in tmp_path.glob("*.html"):
        body = re.sub(r"<(pre|code|script)\b.*?</\1>", "", page.read_text(), flags=re.DOTALL)
        text = re.sub(r"<[^>]*>", "", body)
        assert "```" not in text, page.name
        assert not re.search(r"^\s*\|", text, re.MULTILINE), page.name


def test_readme_links_lead_somewhere() -> None:
    text = (ROOT / "README.md").read_text()
    for target in re.findall(r"\]\((?!https?://)([^)#]+)", text):
        assert (ROOT / target).exists(), target
