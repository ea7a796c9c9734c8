"""How plainly the project speaks: few sentences that must be guessed, and no participles as names."""

from __future__ import annotations

from pathlib import Path

from tests.sentences import KINDS, LONG, faults, listed, sentences_of
from tests.test_layering import ROOT
from tests.words import bare, left_behind, obscure, read_twice, sentences, total, unchecked, vague

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


#: Sentences of pages that quote a remark kept with a measurement, or list its figures.
RECORDED = 4

#: Sentences of docstrings that a reader must read twice: no new ones.
READ_TWICE = 421

#: A sentence of each kind, and one near to it that is none of them.
PLANTED = {
    "ends on a negation": ("Copies of a parameter have not.", "Copies of a parameter have no codes."),
    "none as a noun": ("`**` is any number of parts, none too.", "None of the parts matches."),
    "one as a noun": ("An error in one process is one in all processes.", "There is one error in all processes."),
    "possessive without noun": ("The search of ours ends, and torch's goes to NaN.", "It's torch's search that ends."),
    "nothing as a subject": ("An error comes first; then nothing was written.", "Nothing is downloaded."),
    "where as a condition": ("Where a process fails as all write, others wait.", "Where to go on: the language."),
    "for as because": (
        "The device holds all, for it reads none of them.",
        "The table is for torch, for JAX and for MLX.",
    ),
    "but for": ("All figures but for the last are times.", "The last figure is no time but a rate."),
    "that upon that": ("A reduction is of the words that all agree by.", "It computes that sum by the first word."),
    "long": (f"A step has {'one word more and ' * 10}ends.", f"The figures are {'1.25, ' * 60}and 2."),
}


def test_each_kind_of_sentence_to_read_twice_is_seen() -> None:
    assert [*PLANTED] == [kind.name for kind in (*KINDS, LONG)]
    for kind, (bad, good) in PLANTED.items():
        assert [found.name for found in faults(bad)] == [kind]
        assert [*faults(good)] == []


def test_a_page_is_divided_into_sentences(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text(
        "# Where\n\nOne `a. b`\nline. Two.\n\n- An [item. Or](x.md) two\n  lines\n\n```\nno. Code.\n```\n\n| a. |\n"
    )
    assert [*sentences_of(page.read_text())] == ["One `a. b` line.", "Two.", "An [item. Or](x.md) two lines"]
    assert [*listed(page)] == []
    page.write_text("Where it rains, we wait.")
    assert [*listed(page)] == ["where as a condition (begin with if, or with when): Where it rains, we wait."]


def test_no_sentence_of_a_page_must_be_read_twice() -> None:
    pages = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").rglob("*.md"))]
    assert len(pages) > 40
    told = {page.name: [*listed(page)] for page in pages}
    recorded = {"gpu.md", "memory.md", "missed.md"}
    assert {name: lines for name, lines in told.items() if lines and name not in recorded} == {}
    assert sum(map(len, told.values())) <= RECORDED


def test_no_more_docstrings_must_be_read_twice() -> None:
    assert total(read_twice) <= READ_TWICE, "list them: python -m tests.words rulec"
