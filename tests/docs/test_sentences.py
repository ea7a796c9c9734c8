"""The English of README.md and the manual: a subject that is named comes first."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.docs.markdown import pages

#: `What cannot be right is an error` has to be read twice; a question does not.
_UNNAMED = re.compile(r"(?:^|[.:] )((?:What|Who) [a-z][^.?:]*[.:])", re.MULTILINE)


@pytest.mark.parametrize("path", pages(), ids=lambda path: path.name)
def test_no_sentence_begins_with_a_thing_that_has_no_name(path: Path) -> None:
    text = re.sub(r"^```.*?^```$", "", path.read_text(), flags=re.DOTALL | re.MULTILINE)
    assert _UNNAMED.findall(text) == []
