"""Links that hold a rule: what one opens, and what is none."""

from __future__ import annotations

import pytest

from rulec.cli.play import opening_of
from rulec.errors import RulecError
from rulec.language.source import MAX_DOCUMENT
from rulec.tools.playground.link import is_link, link_text, linked_text
from tests.cli.running import error

TEXT = "name: Löwe\nhyper: {lr: 1e-3}\nstep: direction = sign(g)\n"


def test_a_link_opens_its_rule() -> None:
    for address in ("", "http://127.0.0.1:8710/", "http://[::1]:1/"):
        opening = opening_of(address + link_text(TEXT))
        assert (opening.text, opening.file) == (TEXT, "linked.yaml")
    assert linked_text(link_text(TEXT).replace("#", "#key_-9&")) == TEXT
    assert [*map(is_link, ("adamw", "my.yaml", "#rule", "http://a/#b"))] == [False] * 4


@pytest.mark.parametrize(
    "link", ["#rule=", "#rule=abc", "#rule=%20", link_text(TEXT)[:-3], link_text("#" * (4 * MAX_DOCUMENT + 1))]
)
def test_a_link_without_a_whole_rule_is_a_sentence(link: str) -> None:
    with pytest.raises(RulecError, match=r"^the link holds no whole rule: copy it again"):
        linked_text(link)
    assert error("play", "--no-browser", link) == (
        "error: the link holds no whole rule: copy it again, all of it behind #rule=, and set it in quotes\n"
    )
