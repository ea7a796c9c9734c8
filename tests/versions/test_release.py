"""A release is refused for every reason that the module names, and changes version, citation and changelog alone."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest
import yaml

import rulec
from tests.versions import release
from tests.versions.release import NoRelease, cut
from tests.versions.requirements import ROOT

LOG = "# Changes\n\n## Unreleased\n\n### Added\n\n- A rule.\n\n## 0.1.0, 2026-01-01\n\n- All.\n"


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    """A repository at version 0.1.0, which was released."""
    (tmp_path / "rulec").mkdir()
    (tmp_path / "rulec" / "__init__.py").write_text('"""Rules."""\n\n__version__ = "0.1.0"\n')
    (tmp_path / "CITATION.cff").write_text('title: a\nversion: 0.1.0\ndate-released: "2026-01-01"\nlicense: MIT\n')
    (tmp_path / "CHANGELOG.md").write_text(LOG)
    names = {"user.name": "a", "user.email": "a@b"}
    for words in (["init", "-q"], *(["config", *pair] for pair in names.items()), ["add", "."], ["commit", "-qm", "A"]):
        subprocess.run(["git", "-C", tmp_path, *words], check=True)
    release.git(tmp_path, "tag", "v0.1.0")
    return tmp_path


def test_a_wrong_version_is_refused(tree: Path) -> None:
    reasons = {
        "": "give three numbers", "0.2": "give three numbers", "v0.2.0": "give three numbers",
        "0.1.0": r"the tag v0\.1\.0 is there", "0.0.9": r"the version 0\.0\.9 is below 0\.1\.0",
    }  # fmt: skip
    for version, reason in reasons.items():
        with pytest.raises(NoRelease, match=reason):
            release.check(tree, version)


def test_a_tree_with_changes_is_refused(tree: Path) -> None:
    release.check(tree, "0.2.0")
    (tree / "new.txt").write_text("a")
    with pytest.raises(NoRelease, match=r"has 1 changes, the first of new\.txt: commit them first"):
        release.check(tree, "0.2.0")


def test_the_version_is_written_everywhere(tree: Path) -> None:
    release.write(tree, "0.2.0", "2026-02-02")
    release.commit(tree, "0.2.0")
    assert release.git(tree, "status", "--porcelain") == ""
    assert release.git(tree, "log", "-1", "--format=%s") == "Release 0.2.0\n"
    assert '__version__ = "0.2.0"\n' in (tree / "rulec" / "__init__.py").read_text()
    assert 'version: 0.2.0\ndate-released: "2026-02-02"\nlicense' in (tree / "CITATION.cff").read_text()
    log = (tree / "CHANGELOG.md").read_text()
    assert log.startswith("# Changes\n\n## Unreleased\n\n## 0.2.0, 2026-02-02\n\n### Added\n\n- A rule.\n\n## 0.1.0, ")


def test_a_changelog_without_lines_is_refused() -> None:
    empty = LOG.replace("### Added\n\n- A rule.\n\n", "")
    with pytest.raises(NoRelease, match="no line in Unreleased"):
        cut(empty, "0.2.0", "2026-02-02")
    assert cut(empty, "0.1.0", "2026-02-02") == empty.replace("2026-01-01", "2026-02-02")
    with pytest.raises(NoRelease, match=r"lines in Unreleased, and a section 0\.1\.0"):
        cut(LOG, "0.1.0", "2026-02-02")
    with pytest.raises(NoRelease, match="no section Unreleased"):
        cut("# Changes\n", "0.1.0", "2026-02-02")


def test_the_citation_is_of_this_version() -> None:
    text = (ROOT / "CITATION.cff").read_text()
    assert f"\nversion: {rulec.__version__}\n" in text
    assert release._CITED.search(text)


def test_github_runs_what_the_checkout_runs() -> None:
    workflow = yaml.safe_load((ROOT / ".github" / "workflows" / "ci.yml").read_text())
    assert [step["run"] for step in workflow["jobs"]["run"]["steps"] if "run" in step][-1] == ".ci/run"
    forms = [yaml.safe_load(file.read_text()) for file in (ROOT / ".github" / "ISSUE_TEMPLATE").glob("*.yml")]
    asked = [[part["attributes"]["label"] for part in form["body"]] for form in forms if "body" in form]
    assert len(asked) == 3
    assert all(len(labels) == len({*labels}) for labels in asked)
