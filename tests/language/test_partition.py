"""Which pattern takes which path, and what is said of patterns, paths and entries that make no sense."""

from __future__ import annotations

import pickle
import re
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import rulec
from rulec.errors import HyperError, RuleError, TensorError
from rulec.language.partition import matches, places_of

PARTS = st.text("abA.[", min_size=1, max_size=3)
PATTERN_PARTS = st.one_of(st.just("**"), st.just("*"), st.text("abA.*?[]!-", min_size=1, max_size=4))


def plain_match(wanted: list[str], parts: list[str]) -> bool:
    """The meaning of a pattern in its plainest words: part by part by the standard library, `**` for none or more."""
    if not wanted:
        return not parts
    if wanted[0] == "**":
        return plain_match(wanted[1:], parts) or (bool(parts) and plain_match(wanted, parts[1:]))
    return bool(parts) and fnmatchcase(parts[0], wanted[0]) and plain_match(wanted[1:], parts[1:])


@given(st.lists(PATTERN_PARTS, min_size=1, max_size=5), st.lists(PARTS, min_size=1, max_size=5))
@settings(max_examples=50)
def test_patterns_match_part_by_part(wanted: list[str], parts: list[str]) -> None:
    assert matches("/".join(wanted), "/".join(parts)) is plain_match(wanted, parts)


@given(
    # The pattern `...` alone is all that is left.
    st.lists(
        st.lists(PATTERN_PARTS, min_size=1, max_size=3).filter(lambda parts: parts != ["..."]), min_size=1, max_size=4
    ),
    st.lists(st.lists(PARTS, min_size=1, max_size=3), max_size=4),
)
def test_the_first_pattern_holds(wanted: list[list[str]], paths: list[list[str]]) -> None:
    patterns = ["/".join(parts) for parts in wanted] + ["..."]
    found = places_of(patterns, ["/".join(path) for path in paths], allow_unused=True)
    for place, path in zip(found, paths, strict=True):
        holding = [i for i, parts in enumerate(wanted) if plain_match(parts, path)]
        assert place == min(holding, default=len(wanted))


@pytest.mark.parametrize(
    ("pattern", "taken", "left"),
    [
        ("bias", ["bias"], ["a/bias", "bias2", "Bias"]),
        ("*/bias", ["a/bias", "0/bias"], ["bias", "a/b/bias"]),
        ("**/bias", ["bias", "a/bias", "a/b/bias"], ["a/bias/b", "abias"]),
        ("layer/**", ["layer", "layer/0", "layer/0/w"], ["layers/0"]),
        ("**/norm*/*", ["norm1/scale", "a/b/norm/bias"], ["norm", "a/norm/b/c"]),
        ("h?/[qk]", ["h1/q", "h2/k"], ["h12/q", "h1/v"]),
        ("h/[!v]", ["h/q"], ["h/v"]),
        ("**", ["a", "a/b/c"], []),
        ("...", ["a", "a/b/c"], []),
        ("a/**/b/**/c", ["a/b/c", "a/x/b/y/z/c", "a/b/b/c/c"], ["a/c", "a/b/d"]),
    ],
)
def test_examples(pattern: str, taken: list[str], left: list[str]) -> None:
    assert [path for path in [*taken, *left] if matches(pattern, path)] == taken


def test_long_patterns_end_soon() -> None:
    assert not matches("/".join(["**", "a*a*a"] * 40), "/".join(["aaaa"] * 300) + "/b")


def test_entries_in_every_form(tmp_path: Path) -> None:
    file = tmp_path / "mine.yaml"
    file.write_text("name: Mine\nstep: direction = g\n")
    made = rulec.partition(
        {
            "a": "sgd", "b": rulec.load("adam"), "c": file, "d": ("sgd", {"lr": 0.5}), "f": None,
            "e": rulec.part("adamw", lr=0.1, tags=["embedding", "embedding"]), ...: "clip_by_value >> sgd",
        }
    )  # fmt: skip
    assert made.patterns == ("a", "b", "c", "d", "f", "e", "...")
    assert [own.rule.name for own in made.parts] == ["SGD", "Adam", "Mine", "SGD", "AdamW", "ClipByValueThenSGD"]
    assert [dict(own.hyper) for own in made.parts] == [{}, {}, {}, {"lr": 0.5}, {"lr": 0.1}, {}]
    assert made.parts[4].tags == ("embedding",)
    assert made.split(["f", "a", "b", "c", "d", "e", "x", "y"])["..."] == ["x", "y"]
    again = pickle.loads(pickle.dumps(made))  # noqa: S301
    assert again.patterns == made.patterns
    assert [own.rule for own in again.parts] == [own.rule for own in made.parts]


def test_a_partition_says_what_it_is() -> None:
    made = rulec.partition({"**/bias": "sgd", "emb/*": None, "...": "adamw"})
    assert repr(made) == "<Partition '**/bias': SGD, 'emb/*': None, '...': AdamW>"


@pytest.mark.parametrize(
    ("entries", "sentence"),
    [
        ({}, "a partition is a dict of patterns and rules"),
        ("adamw", "a partition is a dict of patterns and rules"),
        ({"": "sgd"}, "the pattern '' must be a path with none of its parts empty"),
        ({"a//b": "sgd"}, "the pattern 'a//b' must be a path with none of its parts empty"),
        ({"/a": "sgd"}, "the pattern '/a' must be a path"),
        ({3: "sgd"}, "the pattern 3 must be a path"),
        ({"...": "sgd", "a": "adam"}, 'the pattern "..." stands for everything else: give it last'),
        ({"a": 3}, "the entry of 'a' is of type int: give a rule"),
        ({"a": ("sgd", 3)}, "the entry of 'a' is of type tuple: give a rule"),
        ({"a": "adamww"}, "there is no rule 'adamww'; did you mean 'adamw'?"),
    ],
)
def test_entries_that_make_no_sense(entries: Any, sentence: str) -> None:
    with pytest.raises(RuleError, match=re.escape(sentence)):
        rulec.partition(entries)


def test_parts_that_make_no_sense() -> None:
    with pytest.raises(HyperError, match=r"tags='embedding' of a part must be words, such as \['embedding'\]"):
        rulec.part("sgd", tags="embedding")
    with pytest.raises(RuleError, match="a part is of a rule, the name of one or a path, not of dict"):
        rulec.part({})  # type: ignore[arg-type]


def test_a_partition_is_no_rule() -> None:
    sentence = "a partition is of several rules, not one: give it to rulec.jax or rulec.torch.Partitioned"
    with pytest.raises(RuleError, match=re.escape(sentence)):
        rulec.load(rulec.partition({"...": "sgd"}))  # type: ignore[arg-type]
    with pytest.raises(RuleError, match="a rule is loaded by its name or its path, and this is of type int"):
        rulec.load(3)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("patterns", "paths", "sentence"),
    [
        (["layers/*/bias", "..."], ["layer/0/bias"], r"'layers/\*/bias' matches no .*did you mean 'layer/0/bias'\?"),
        (["*/bias", "..."], ["a/b/bias"], r"'\*/bias' matches no parameter: .*did you mean '\*\*/bias'\?"),
        (["bias", "..."], ["a/b/bias"], r"'bias' matches no parameter: .*did you mean '\*\*/bias'\?"),
        (["layer", "..."], ["layer/0/w"], r"'layer' matches no parameter: .*did you mean 'layer/\*\*'\?"),
        (["layer.*.bias", "..."], ["layer/0/bias"], r"'layer\.\*\.bias' matches no .*did you mean 'layer/\*/bias'\?"),
        (["zzz", "..."], ["a"], "'zzz' matches no parameter: correct it, or allow it with allow_unused=True$"),
        (["**/w", "a/w", "..."], ["a/w", "b/w"], r"'a/w' takes no parameter, .* as '\*\*/w' takes a/w: put it before"),
        (["a"], [], "'a' matches no parameter"),
    ],
)  # fmt: skip
def test_patterns_that_take_nothing(patterns: list[str], paths: list[str], sentence: str) -> None:
    with pytest.raises(RuleError, match=sentence):
        places_of(patterns, paths)
    places_of(patterns, paths, allow_unused=True)


def test_what_is_left_over_need_not_be() -> None:
    assert rulec.partition({"a": "sgd", "...": "adamw"}).places(["a"]) == [0]
    assert rulec.partition({"a": "sgd", "b": "adamw"}, allow_unused=True).places(["b"]) == [1]


def test_a_path_that_nothing_matches() -> None:
    sentence = 'no pattern of the partition matches the parameter b/c: add "...": a rule for everything else, or None'
    with pytest.raises(TensorError, match=re.escape(sentence)):
        rulec.partition({"a": "sgd"}).places(["a", "b/c"])
