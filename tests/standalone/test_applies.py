"""Rules that are for some tensors alone: a file of its own is told of no tags, and says so where nothing is left."""

from __future__ import annotations

import pytest

import rulec
from rulec.standalone.cases import CannotBuild
from rulec.standalone.prose import WRITTEN, written

TEXT = """
name: Some
applies_to: {applies}
hyper: {{lr: 0.1}}
state: {{m: 0}}
step: |
  m = 0.9*m + g
  direction = m
"""


@pytest.mark.parametrize("backend", WRITTEN)
@pytest.mark.parametrize(
    ("applies", "why"),
    [
        ('tagged("embedding")', "what is written is told of no tags"),
        ('ndim == 2 and tagged("embedding")', "what is written is told of no tags"),
        ("ndim == 7", "no shape was found for which that is true"),
    ],
)
def test_what_applies_to_nothing_is_refused(backend: str, applies: str, why: str) -> None:
    rule = rulec.parse(TEXT.format(applies=applies))
    with pytest.raises(CannotBuild, match=r"rulec build cannot write Some as .*: it applies to") as caught:
        written(rule, backend)
    assert str(caught.value).endswith(f"it applies to {applies} alone, and {why}")


@pytest.mark.parametrize("applies", ['not tagged("embedding")', 'ndim == 2 or tagged("embedding")'])
def test_conditions_that_hold_without_tags_are_written(applies: str) -> None:
    assert "some_step" in written(rulec.parse(TEXT.format(applies=applies)), "c")["some.c"]
