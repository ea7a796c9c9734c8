"""How plainly the project speaks: few sentences that must be guessed, and no participles as names."""

from __future__ import annotations

from pathlib import Path

from tests.words import obscure, sentences, total, vague

#: One sentence in two hundred may point at two things that it does not name.
OBSCURE = 1 / 200

#: Names in modules whose code the ledger of proved kernels holds fixed.
VAGUE = 13


def test_sentences_name_what_they_speak_of() -> None:
    assert total(obscure) <= OBSCURE * total(sentences)


def test_names_are_nouns() -> None:
    assert total(vague) <= VAGUE


def test_the_counts_see_what_they_are_for(tmp_path: Path) -> None:
    module = tmp_path / "module.py"
    module.write_text('"""What has that which these are. A kernel."""\nown = 1\nkernel = own\n')
    assert [*sentences(module)] == ["What has that which these are.", "A kernel."]
    assert [*obscure(module)] == ["What has that which these are."]
    assert len([*vague(module)]) == 2
