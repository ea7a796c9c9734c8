"""By what the ledger of proofs knows a proof: the text, the tools, and what the files that judge do."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests import ledger

JUDGE = '''"""Looks at machine code."""
from somewhere import LIMIT


def check(text):
    # Nothing is spilled.
    import re

    assert len(re.findall("st.local", text)) <= 0
'''


@pytest.mark.parametrize(
    ("change", "same"),
    [
        (("somewhere", "elsewhere"), True), (("# Nothing is spilled.", "# Registers are enough."), True),
        (("Looks at machine code.", "Reads assembly."), True),
        (("<= 0", "<= 1"), False), (("st.local", "ld.local"), False),
    ],
)  # fmt: skip
def test_a_judge_is_another_where_it_judges_otherwise(change: tuple[str, str], same: bool, tmp_path: Path) -> None:
    one, other = tmp_path / "one.py", tmp_path / "other.py"
    one.write_text(JUDGE)
    other.write_text(JUDGE.replace(*change))
    assert other.read_text() != JUDGE
    assert (ledger.checker(one) == ledger.checker(other)) is same


def test_what_was_proved_before_a_failure_is_kept(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv(ledger.FOLDER, str(tmp_path))
    monkeypatch.delenv(ledger.ANEW, raising=False)
    monkeypatch.setattr(ledger, "marked", True)
    claims = {str(i): ledger.digest("a kernel", str(i)) for i in range(2 * ledger.PORTION + 1)}
    last, asked = str(2 * ledger.PORTION), list[str]()

    def check(names: list[str]) -> None:
        asked.extend(names)
        assert last not in names

    with pytest.raises(AssertionError):
        ledger.prove(claims, check)
    assert asked == [*claims]
    assert {name for name, claim in claims.items() if ledger.is_proved(claim)} == {*claims} - {last}
    asked.clear()
    ledger.prove(claims, asked.extend)
    assert asked == [last]
    assert ledger.is_proved(claims[last])
