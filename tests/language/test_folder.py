"""Where the rules that ship with rulec are, and what is said where rulec is imported from an archive."""

from __future__ import annotations

import os
import subprocess
import sys
import zipfile
from importlib.machinery import ModuleSpec
from pathlib import Path

import pytest

from rulec.errors import RuleError
from rulec.language.library import folder
from tests.test_packaging import FOLDERS, ROOT

#: What a user may begin with.
BEGINNINGS = [
    "rulec.load('adamw')", "rulec.rules()", "import rulec.torch", "import rulec.jax; rulec.jax.transform('adamw')",
    "import rulec.mlx; rulec.mlx.optimizer('adamw')", "rulec.array.Optimizer('sgd', [])",
    "from rulec.cli.app import app; app(['list'], standalone_mode=False)",
]  # fmt: skip


def test_a_library_in_an_archive_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    spec = ModuleSpec("rulec_rules", None, origin="/somewhere/rulec.whl/rulec_rules/__init__.py")
    monkeypatch.setattr(folder, "find_spec", lambda name: spec)
    message = "cannot be imported from an archive, as /somewhere/rulec.whl/rulec_rules is: install it by pip"
    with pytest.raises(RuleError, match=message):
        folder.library_folder.__wrapped__()


@pytest.mark.slow
def test_a_wheel_that_is_imported_says_so(tmp_path: Path) -> None:
    wheel = tmp_path / "rulec.whl"
    with zipfile.ZipFile(wheel, "w") as archive:
        for name, place in FOLDERS.items():
            for file in (ROOT / place).rglob("*.*"):
                archive.write(file, Path(name, file.relative_to(ROOT / place)))
    texts = [
        f"try:\n    {text}\nexcept rulec.RulecError as error:\n    print({text!r}, error)\n" for text in BEGINNINGS
    ]
    program = "import rulec\nassert '.whl' in rulec.__file__\n" + "".join(texts)
    environment = {**os.environ, "PYTHONPATH": str(wheel)}
    command = [sys.executable, "-c", program]
    done = subprocess.run(command, env=environment, cwd=tmp_path, capture_output=True, text=True, check=True)
    said = done.stdout + done.stderr
    assert said.count(f"cannot be imported from an archive, as {wheel}") == len(BEGINNINGS), said
