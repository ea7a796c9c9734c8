"""Missing packages: every one that a command needs is named at once, with a command that fits the installation."""

from __future__ import annotations

import json
import re
import sys
import tomllib
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from rulec import extras
from rulec.errors import MissingExtra

ROOT = Path(__file__).resolve().parent.parent


@dataclass
class Installed:
    """As much of a distribution as the module reads."""

    source: dict[str, object] = field(default_factory=dict)
    requires: tuple[str, ...] = (
        "numpy>=2.0", 'plotly>=6; extra == "race"', 'scikit-learn>=1.4; extra == "race"', 'sympy>=1; extra == "sympy"',
        f'here>=1; sys_platform == "{sys.platform}" and extra == "race"',
        'there>=1; sys_platform == "vms" and extra == "race"',
    )  # fmt: skip

    def read_text(self, name: str) -> str | None:
        assert name == "direct_url.json"
        return json.dumps(self.source) if self.source else None


def installed(monkeypatch: pytest.MonkeyPatch, **source: object) -> None:
    """Makes the module see rulec installed from this source, and no package of its extras."""
    monkeypatch.setattr(extras, "_rulec", lambda: Installed(source))
    monkeypatch.setattr(extras, "_installed", lambda name: name == "numpy")


@pytest.mark.parametrize(
    ("source", "words"),
    [
        ({}, "'rulec[race]'"),
        ({"url": "https://example.org/rulec.git", "vcs_info": {"vcs": "git", "commit_id": "abc"}},
         "'rulec[race] @ git+https://example.org/rulec.git@abc'"),
        ({"url": "https://example.org/rulec.whl", "archive_info": {}}, "'rulec[race] @ https://example.org/rulec.whl'"),
        ({"url": "file:///no/such/rulec.whl", "archive_info": {}}, "'plotly>=6' 'scikit-learn>=1.4' 'here>=1'"),
    ],
)  # fmt: skip
def test_the_command_names_the_source(monkeypatch: pytest.MonkeyPatch, source: dict[str, object], words: str) -> None:
    installed(monkeypatch, **source)
    assert extras.command("race") == f"pip install {words}"


def test_the_command_names_a_folder_or_a_wheel(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    folder, wheel = tmp_path / "a checkout", tmp_path / "rulec-1-py3-none-any.whl"
    folder.mkdir()
    wheel.touch()
    installed(monkeypatch, url=folder.as_uri(), dir_info={})
    assert extras.command("race", "torch") == f"pip install '{folder}[race,torch]'"
    monkeypatch.chdir(folder)
    assert extras.command("race") == "pip install '.[race]'"
    installed(monkeypatch, url=folder.as_uri(), dir_info={"editable": True})
    assert extras.command("race") == "pip install -e '.[race]'"
    installed(monkeypatch, url=wheel.as_uri(), archive_info={})
    assert extras.command("race") == f"pip install '{wheel}[race]'"


def test_a_checkout_that_is_not_installed_is_a_folder(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(extras, "_rulec", lambda: None)
    monkeypatch.chdir("/")
    assert extras.command("race") == f"pip install '{ROOT}[race]'"


def test_all_missing_packages_are_named_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    installed(monkeypatch)
    monkeypatch.setitem(sys.modules, "plotly", None)
    with (
        pytest.raises(MissingExtra, match=r"^a race needs plotly, scikit-learn and here, which are not installed: "),
        extras.needing("a race", "race"),
    ):
        import plotly  # noqa: F401


def test_a_missing_module_of_rulec_is_a_defect() -> None:
    with pytest.raises(ModuleNotFoundError, match=r"No module named 'rulec\.nothing'"), extras.needing("it", "race"):
        import rulec.nothing  # type: ignore[import-not-found]  # noqa: F401


def test_every_extra_is_named_by_this_module_alone() -> None:
    known = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    texts = {p: p.read_text() for top in ("rulec", "backends", "benchmarks") for p in (ROOT / top).rglob("*.py")}
    calls = re.findall(r"""(?:needing|sentence)\("[^"]+", ((?:"\w+"(?:, )?)+)""", "\n".join(texts.values()))
    named = {name for call in calls for name in re.findall(r"\w+", call)}
    assert named >= {"play", "race", "torch", "jax", "mlx", "keras", "sympy", "lsp", "demo"}
    assert sorted(named - set(known)) == []
    literal = re.compile(r"pip install ('?rulec\[|torch|jax|mlx|triton|keras|plotly|scikit-learn|matplotlib)")
    assert [str(path) for path, text in texts.items() if literal.search(text)] == []
