"""The parser is fed noise, and rules with pieces cut, moved and swapped: RuleError is the only way out, and soon."""

from __future__ import annotations

import random
import time

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import rulec
from rulec.errors import RuleError
from rulec.language.library import library_folder

LIBRARY = [(library_folder() / f"{name}.yaml").read_text() for name in rulec.rules()]
WORDS = [
    "name: X\n",
    "step: |\n",
    "  direction = g\n",
    "hyper: {lr: 1}\n",
    "state: {m: 0}\n",
    "plus: [adam, decay]\n",
    "chain: [",
    "uses: ",
    "  m = ",
    "((((",
    "))",
    "**",
    "-",
    "not ",
    "\t",
    "\0",
    "\ufeff",
    "&a ",
    "*a",
    "!!python/object:os",
    "1e999",
    "0x",
    "{",
    "}",
    "[",
    "]",
    ":",
    ",",
    "'",
    '"',
    "|",
    ">",
    "%",
    "@",
    "`",
    "#",
    "\r\n",
    "é",
    "\U0001f600",
    "if g:\n",
    "lambda: 0",
    "__import__('os')",
    "where(",
    "sum(g, per=",
    "normal([",
    ", ",
    "tagged(",
    "t",
    "lr",
    "direction",
]


def _outcome(text: str) -> None:
    begin = time.perf_counter()
    message = "none: it is a rule"
    try:
        rulec.compile(rulec.parse(text))
    except RuleError as error:
        message = error.message
    assert message
    assert "\x00" not in message
    assert time.perf_counter() - begin < 5


@settings(max_examples=150, deadline=None, suppress_health_check=list(HealthCheck))
@given(st.text(max_size=400))
def test_any_text(text: str) -> None:
    _outcome(text)


@settings(max_examples=300, deadline=None, suppress_health_check=list(HealthCheck))
@given(st.lists(st.sampled_from(WORDS), max_size=25))
def test_any_words_of_the_language(words: list[str]) -> None:
    _outcome("".join(words))


@settings(max_examples=150, deadline=None, suppress_health_check=list(HealthCheck))
@given(st.lists(st.sampled_from(WORDS), max_size=12))
def test_any_words_as_a_step(words: list[str]) -> None:
    body = "".join(words).replace("\n", "\n  ")
    _outcome(f"name: X\nhyper: {{lr: 0.1}}\nstate: {{m: 0}}\nstep: |\n  m = m + g\n  x = {body}\n  direction = m\n")


@pytest.mark.parametrize("seed", range(300))
def test_a_rule_of_the_library_with_pieces_changed(seed: int) -> None:
    chance = random.Random(seed)
    text = chance.choice(LIBRARY)
    for _ in range(chance.randint(1, 4)):
        a, b = sorted(chance.randrange(len(text) + 1) for _ in range(2))
        b = min(b, a + 12)
        text = text[:a] + chance.choice([chance.choice(WORDS), text[b : b + 9], ""]) + text[chance.choice([a, b]) :]
    _outcome(text)
