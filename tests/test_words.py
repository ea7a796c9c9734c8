"""How plainly the project speaks: few sentences that must be guessed, and no participles as names."""

from __future__ import annotations

from pathlib import Path

from tests.words import bare, left_behind, obscure, sentences, total, unchecked, vague

TESTS = Path(__file__).parent

#: One sentence in two hundred may point at two things that it does not name.
OBSCURE = 1 / 200

#: Names in modules whose code the ledger of proved kernels holds fixed.
VAGUE = 13


def test_sentences_name_what_they_speak_of() -> None:
    assert total(obscure) <= OBSCURE * total(sentences)


def test_names_are_nouns() -> None:
    assert total(vague) <= VAGUE


def test_every_sentence_has_a_subject_and_a_verb() -> None:
    assert total(bare) == 0, "list them: python -m tests.words"


def test_names_that_were_left_behind_stay_away() -> None:
    assert total(left_behind) == 0


def test_every_test_asserts_by_itself_or_by_a_helper_whose_name_says_so() -> None:
    assert [name for file in sorted(TESTS.rglob("test_*.py")) for name in unchecked(file)] == []


def test_a_test_without_an_assertion_is_seen(tmp_path: Path) -> None:
    module = tmp_path / "test_module.py"
    bodies = {
        "assert f()": False, "check_f()": False, "np.testing.assert_array_equal(f(), g())": False, "f.check()": False,
        "with pytest.raises(ValueError):\n        f()": False, "f()": True, "f(check_f)": False, "recheck(f)": True,
    }  # fmt: skip
    module.write_text("".join(f"def test_{i}():\n    {body}\n" for i, body in enumerate(bodies)))
    assert [*unchecked(module)] == [f"test_{i}" for i, expected in enumerate(bodies.values()) if expected]


def test_the_counts_see_what_they_are_for(tmp_path: Path) -> None:
    module = tmp_path / "module.py"
    text = '"""What has that which these are. A kernel."""\nown = 1\nkernel = own\n'
    module.write_text(f'{text}class Halves:\n    """For all sizes."""\n')
    assert [*sentences(module)] == ["What has that which these are.", "A kernel.", "For all sizes."]
    assert [*bare(module)] == ["For all sizes."]
    assert [*left_behind(module)] == ["line 4: Halves"]
    assert [*obscure(module)] == ["What has that which these are."]
    assert len([*vague(module)]) == 2
