"""Places of mistakes in every style YAML has for a scalar: line and column are those of the file."""

from __future__ import annotations

import pytest

import rulec
from rulec import RuleError

#: A file in which `oops` stands exactly once, in a scalar of some style.
FILES = {
    "literal": "name: R\nstep: |\n  m = g\n  direction = m*oops\n",
    "literal, deep": "name: R\nstep: |\n        m = g\n        direction = m*oops\n",
    "literal, indented in": "name: R\nstep: |\n  if ndim > 1:\n    direction = g*oops\n  else:\n    direction = g\n",
    "literal, blank lines first": "name: R\nstep: |\n\n\n   m = g\n\n   direction = m*oops\n",
    "literal, blank lines longer": "name: R\nstep: |\n  m = g\n      \n  direction = m*oops\n",
    "literal, comment at the header": "name: R\nstep: |  # the step\n  direction = oops\n",
    "literal, comments within": "name: R\nstep: |\n  # first\n  m = g  # second: m\n  direction = m + oops\n",
    "literal, explicit indent": "name: R\nstep: |2\n  direction = oops\n",
    "literal, stripped": "name: R\nstep: |-\n  direction = oops",
    "literal, kept": "name: R\nstep: |+\n  direction = oops\n\n\nsummary: x\n",
    "literal, header on its own line": "name: R\nstep:\n  |\n  direction = oops\n",
    "literal, after others": "hyper: {lr: 1e-3}\n\n# why\nname: R\n\nstep: |\n  direction = g + oops\nsummary: late\n",
    "literal, semicolon": "name: R\nstep: |\n  m = g; direction = m + oops\n",
    "literal, continued in brackets": "name: R\nstep: |\n  direction = (g +\n               oops)\n",
    "literal, continued by backslash": "name: R\nstep: |\n  direction = g + \\\n    oops\n",
    "literal, beyond ASCII": "name: R\nsummary: ∇ö\nstep: |\n  m = g  # ∇ö\n  direction = m + norm(m*oops)  # ö\n",
    "literal, windows": "name: R\r\nstep: |\r\n  m = g\r\n  direction = m*oops\r\n",
    "literal, old macintosh": "name: R\rstep: |\r  m = g\r  direction = m*oops\r",
    "byte order mark": "\ufeffname: R\nstep: |\n  direction = m*oops\n".replace("m*", "g*"),
    "byte order mark, first line": "\ufeffoops: R\n",
    "plain": "name: R\nstep: direction = g*oops\n",
    "plain, on the next line": "name: R\nstep:\n  direction = g*oops\n",
    "plain, spaced": "name:    R\nstep:      direction = g*oops   # comment\n",
    "single quotes": "name: R\nstep: 'direction = g*oops'\n",
    "single quotes, doubled": "name: R\nstep: 'direction = norm(g, per=''row'')*oops'\n",
    "double quotes": 'name: R\nstep: "direction = g*oops"\n',
    "double quotes, escapes": 'name: R\nstep: "direction = norm(g, per=\\"row\\")*oops"\n',
    "double quotes, unicode escapes": 'name: R\nstep: "m = \\x67 + \\u0067 \\n\\U00000064irection = m*oops"\n',
    "double quotes, joined": 'name: R\nevaluate: "p +\n  2*p +   \\\n    oops"\nstep: |\n  direction = g\n',
    "single quotes, folded": "name: R\nevaluate: 'p +\n\n   2*p\n  + oops'\nstep: |\n  direction = g\n",
    "plain, folded": "name: R\nevaluate: p +\n   2*p\n     + oops\nstep: |\n  direction = g\n",
    "folded": "name: R\nevaluate: >\n  p +\n  2*p +\n\n  oops\nstep: |\n  direction = g\n",
    "folded, stripped": "name: R\nevaluate: >-\n   (p\n   +  2*p + oops)\nstep: |\n  direction = g\n",
    "folded, more indented": "name: R\nevaluate: >\n  (p\n     + 2*p\n   + oops)\nstep: |\n  direction = g\n",
    "literal expression": "name: R\nevaluate: |\n  (p\n     + oops)\nstep: |\n  direction = g\n",
    "hyper in a flow mapping": "name: R\nhyper: {a: 1, b: 2*a + oops}\nstep: |\n  direction = g\n",
    "hyper, quoted comma": 'name: R\nhyper: {a: 1, b: "minimum(a, oops)", c: 3}\nstep: |\n  direction = g\n',
    "hyper, quoted key": "name: R\nhyper: {'a': 1, \"b\": 'oops'}\nstep: |\n  direction = g\n",
    "hyper over lines": "name: R\nhyper: {\n  a: 1,\n    b: maximum(a\n      + oops)}\nstep: |\n  direction = g\n",
    "hyper in a block": "name: R\nhyper:\n  a: 1\n  b:   oops*a\nstep: |\n  direction = g\n",
    "default": "name: R\nhyper:\n  a: 1\n  b: {default: 2*oops, min: 0}\nstep: |\n  direction = g\n",
    "default, quoted": "name: R\nhyper:\n  a: 1\n  b: {default: 'maximum(a, oops)'}\nstep: |\n  direction = g\n",
    "state": "name: R\nstate: {m: 0, n: 2*oops}\nstep: |\n  direction = g\n",
    "initial value": "name: R\nstate:\n  m: {per: row, init: oops}\nstep: |\n  direction = g\n",
    "extent": "name: R\nstate:\n  m:\n    shape:\n    - rows\n    - 2*oops\nstep: |\n  direction = g\n",
    "condition": "name: R\nstate: {m: {init: 0, if: ndim > oops}}\nstep: |\n  direction = g\n",
    "skip": "name: R\nskip: g > oops\nstep: |\n  direction = g\n",
    "applies to": "name: R\napplies_to: ndim == 2 and not oops\nstep: |\n  direction = g\n",
    "condition of a branch": "name: R\nstep: |\n  if ndim > oops:\n    direction = g\n",
    "call of a rule": "name: R\nuses: [adam]\nstep: |\n  direction = adam(g*oops)\n",
    "key": "name: R\noops: 1\nstep: |\n  direction = g\n",
    "key in a flow mapping": "name: R\npaper: {title: a, oops: 1}\nstep: |\n  direction = g\n",
    "component": "name: R\nplus: [adam, oops]\n",
    "component in a block": "name: R\nchain:\n- adam\n-   oops\n",
    "component with bindings": "name: R\nplus: [adam, oops: {a: 1}]\n",
    "bound name": "name: R\nplus: [adam: {oops: 1}, decay]\n",
}


def place_of(text: str, word: str) -> str:
    """The line and column of the word in a text, counted by hand."""
    before, found, after = text.removeprefix("\ufeff").replace("\r\n", "\n").replace("\r", "\n").partition(word)
    assert found
    assert word not in after
    return f"{before.count(chr(10)) + 1}:{len(before.rpartition(chr(10))[2]) + 1}"


@pytest.mark.parametrize("text", FILES.values(), ids=FILES.keys())
def test_place(text: str) -> None:
    with pytest.raises(RuleError) as caught:
        rulec.parse(text, "r.yaml")
    error = caught.value
    assert "oops" in error.message
    assert error.place == f"r.yaml:{place_of(text, 'oops')}"
    line, carets = str(error).split("\n")[1:]
    assert line[carets.index("^") :].startswith("oops")
    assert carets.count("^") in (4, len("oops: {a: 1}"))


def test_place_of_a_binding() -> None:
    text = "name: R\nplus:\n- adam: {beta1: 1 - 2*+ , eps: 'eps'}\n- decay\n"
    with pytest.raises(RuleError) as caught:
        rulec.parse(text, "r.yaml")
    assert str(caught.value) == (
        "r.yaml:3:24: something is missing at the end of this line\n"
        "    - adam: {beta1: 1 - 2*+ , eps: 'eps'}\n"
        "                           ^"
    )


@pytest.mark.parametrize("end", ["\n", "\r\n", "\r"])
@pytest.mark.parametrize("mark", ["", "\ufeff"])
def test_ends_of_lines_do_not_matter(end: str, mark: str) -> None:
    text = rulec.load("adam").to_yaml()
    assert rulec.parse(mark + text.replace("\n", end)) == rulec.load("adam")
