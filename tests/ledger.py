"""What was proved of a text before, by the digest of all that the proof depends on: unchanged, it is not proved again.

Machine code depends on the text that is compiled, the compiler, and what reads its assembly; looking at all of it takes
half an hour. `proved.txt` holds the digests that passed. `make prove` proves all anew and writes that file; a text
that is not in it is proved where it is met, and kept for this checkout.
"""

from __future__ import annotations

import ast
import functools
import hashlib
import importlib.metadata
import os
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path

LEDGER = Path(__file__).parent / "golden" / "proved.txt"

#: Where values lie in memory, by which all machine code is judged.
KERNEL = ("rulec/kernel/place.py", "rulec/kernel/nest.py")

#: Claims that are proved, and then recorded, together: a stop loses no more.
PORTION = 24

#: Whether the test that runs is marked `proof`, as conftest.py notes.
marked = False

#: The environment's names of the folder of this checkout's own digests, of whether everything is proved anew, and of
#: whether every rule is proved for every target.
FOLDER, ANEW, WHOLE = "RULEC_PROVED_DIR", "RULEC_PROVE_ANEW", "RULEC_PROVE_WHOLE"


def digest(*parts: str) -> str:
    """The name of a proof."""
    return hashlib.sha256("\0".join(parts).encode()).hexdigest()[:24]


@functools.cache
def checker(*files: Path) -> str:
    """The tools that compile and take apart, by their versions, and the files that judge, by what they do."""
    packages = ("triton", "nvidia-cuda-nvrtc")
    versions = [f"{name} {importlib.metadata.version(name)}" for name in packages if _is_installed(name)]
    return digest(*versions, *map(_code, files))


def _code(file: Path) -> str:
    """A file without comments, docstrings and imports: they decide nothing."""
    tree = ast.parse(file.read_text())
    for parent in ast.walk(tree):
        body = getattr(parent, "body", None)
        if isinstance(body, list):
            parent.body = [s for s in body if not _is_aside(s)] or [ast.Pass()]  # type: ignore[attr-defined]
    return ast.unparse(tree)


def _is_aside(statement: ast.stmt) -> bool:
    """Whether a statement is an import, or a text that stands by itself."""
    text = isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Constant)
    return text or isinstance(statement, ast.Import | ast.ImportFrom)


def _is_installed(package: str) -> bool:
    try:
        importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return False
    return True


def prove(claims: Mapping[str, str], check: Callable[[list[str]], None]) -> None:
    """Has `check` prove the claims that are not proved yet, by name, in portions; `claims` has the digest of each.

    Portions that `check` did not raise for are recorded.
    """
    assert marked, "mark this test `proof`: it is by that mark that `make prove` finds it"
    open_claims = [name for name, claim in claims.items() if not is_proved(claim)]
    for first in range(0, len(open_claims), PORTION):
        portion = open_claims[first : first + PORTION]
        check(portion)
        record(claims[name] for name in portion)


def selected(rules: Iterable[str], kinds: Iterable[str]) -> list[str]:
    """The rules to prove for a target beside the first: `make prove` takes all, other runs take one of each kind."""
    return [*(rules if os.environ.get(WHOLE) else kinds)]


def is_proved(claim: str) -> bool:
    """Whether the digest is in the ledger, or was recorded here."""
    if os.environ.get(ANEW):
        return False
    return claim in _committed() or (_folder() / claim).exists()


def record(claims: Iterable[str]) -> None:
    """Keeps digests for this checkout."""
    for claim in claims:
        (_folder() / claim).touch()


def write() -> None:
    """Writes the ledger: what it held, and what was recorded here."""
    recorded = {file.name for file in _folder().iterdir()}
    LEDGER.write_text("".join(f"{claim}\n" for claim in sorted(recorded | _committed())))


@functools.cache
def _committed() -> frozenset[str]:
    return frozenset(LEDGER.read_text().split() if LEDGER.exists() else ())


def _folder() -> Path:
    return Path(os.environ[FOLDER])
