"""Whatever is fed to the parsers, they answer with a rule or a RuleError, and soon."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

import rulec
from rulec import Rule, RuleError
from rulec.errors import HyperError
from rulec.language.compose.bind import bind
from rulec.language.expr.functions import FUNCTIONS
from rulec.language.hyper import resolve_hyper
from rulec.language.library.folder import library_folder
from rulec.language.parse.expression import parse_expression
from rulec.language.parse.located import Text
from rulec.language.source import Source
from tests.language.expressions import NAMES
from tests.language.test_mistakes import TABLE
from tests.language.work import counted

EXAMPLES = Path(__file__).parents[1] / "compiler" / "examples"
VALID = [path.read_text("utf-8") for path in [*library_folder().rglob("*.yaml"), *EXAMPLES.glob("*.yaml")]]
SEEDS = [*VALID, *(row["text"] for row in TABLE)]

#: What a rule file is made of, so that nonsense is not all of one kind.
TOKENS = [
    "name:", "hyper:", "state:", "step: |", "wraps:", "inner", "inner(g)",
    "plus:", "chain:", "uses:", "paper:", "interop:", "evaluate:", "skip:",
    "view:", "if:", "init:", "per:", "shape:", "default:", "min:", "static:", "R", "adam", "decay", "lr", "m", "g", "p",
    "t", "direction", "= ", "+", "-", "*", "/", "**", "%", "//", "@", "(", ")", "[", "]", "{", "}", ",", ":", "<", "<=",
    "==", "!=", ">", "and", "or", "not", "if ", "else:", "elif ", "where(", "sqrt(", "norm(", 'per="row"', "normal(",
    "tagged(", "1e-3", "0", "1e400", ".inf", ".nan", "~", "null", "true", "no", "'", '"', "|", ">", "-", "#", "&a",
    "*a", "!!str", "\t", "\n", "\n  ", "\n    ", " ", "\\", "\r\n", "é", "β", "²", "\u2028", "\ufeff", "lambda", "for",
    "in", "import", "__", ".", "..", "0x", "1_0", "?", "%YAML 1.2", "---", "...",
]  # fmt: skip


def check_taken(make: Any) -> Any:
    """What is made, or None for a RuleError in one sentence; anything else is a failure, and so is too much work."""
    found, error = None, None
    with counted():
        try:
            found = make()
        except RuleError as refused:
            error = refused
    if error is not None:
        assert error.message
        assert "\n" not in error.message
        assert not error.place or error.place.count(":") >= 2
        assert len(str(error)) < 3000
    return found


def use(rule: Rule | None) -> None:
    """All that a rule can be asked for, once it was taken."""
    if rule is None:
        return
    assert rulec.parse(rule.to_yaml()) == rule
    if not rule.wraps:
        check_taken(lambda: rulec.compile(rule))
    wrapped = check_taken(lambda: rule(*[rulec.load("adam")] * len(rule.wraps))) if rule.wraps else None
    assert wrapped is None or rulec.parse(wrapped.to_yaml()) == wrapped
    rule.latex()
    repr(rule)


QUICK = settings(max_examples=40, deadline=None, suppress_health_check=list(HealthCheck))


@given(st.text(max_size=300))
@QUICK
@example("\x00")
@example("\ud800")
@example("a: \ud800")
@example("? ")
@example("- - - -")
@example("%TAG ! x\n---\na: !<!> b")
@example("name: R\nstep: |\n  x = \ud800\n")
def test_any_text(text: str) -> None:
    use(check_taken(lambda: rulec.parse(text)))


@given(st.binary(max_size=300))
@QUICK
def test_any_file(tmp_path_factory: Any, data: bytes) -> None:
    path = tmp_path_factory.mktemp("fuzz") / "rule.yaml"
    path.write_bytes(data)
    use(check_taken(lambda: rulec.load(path)))


@given(
    st.lists(st.sampled_from(TOKENS), max_size=60).map(" ".join)
    | st.lists(st.sampled_from(TOKENS), max_size=60).map("".join)
)
@QUICK
def test_the_words_of_a_rule_in_any_order(text: str) -> None:
    use(check_taken(lambda: rulec.parse(text)))


@given(st.lists(st.sampled_from(TOKENS), max_size=40).map("".join))
@QUICK
def test_a_step_of_any_words(text: str) -> None:
    body = "\n".join(f"  {line}" for line in text.split("\n"))
    use(
        check_taken(
            lambda: rulec.parse(f"name: R\nhyper: {{lr: 1, a: 2}}\nstate: {{m: 0}}\nuses: [adam]\nstep: |\n{body}\n")
        )
    )


@st.composite
def mutated(draw: Any) -> str:
    """A rule file with some pieces cut out, doubled, moved or replaced."""
    text = draw(st.sampled_from(SEEDS))
    for _ in range(draw(st.integers(1, 4))):
        i, j = sorted(draw(st.tuples(st.integers(0, len(text)), st.integers(0, len(text)))))
        piece = text[i:j]
        what = draw(st.integers(0, 5))
        if what == 0:
            text = text[:i] + text[j:]
        elif what == 1:
            text = text[:j] + piece + text[j:]
        elif what == 2:
            text = text[:i] + draw(st.sampled_from(TOKENS)) + text[i:]
        elif what == 3:
            other = draw(st.sampled_from(VALID))
            k = draw(st.integers(0, len(other)))
            text = text[:i] + other[k : k + 40] + text[i:]
        elif what == 4:
            text = text.replace(draw(st.sampled_from(TOKENS)), draw(st.sampled_from(TOKENS)), 1)
        else:
            text = text[:i] + draw(st.characters()) + text[i + 1 :]
    return str(text)


#: Words of one kind, any of which may stand where another stands.
KINDS = [
    ["g", "p", "t", "m", "v", "grad", "lr", "beta1", "beta2", "eps", "rows", "ndim", "direction", "m_hat", "inf"],
    ["+", "-", "*", "/", "**", "%", "//", "<", ">=", "==", "and", "or", "@"],
    ["0", "1", "2", "0.5", "1e-3", "-1", "1e300", "5", ".5", "0x10"],
    ["sqrt", "abs", "exp", "norm", "mean", "where", "clip", "maximum", "transpose", "isfinite", "max"],
    ["row", "col", "tensor", "model", "group", "matrix", "element"],
    ["plus", "chain", "uses", "state", "hyper", "skip", "evaluate", "summary"],
]


@st.composite
def nearly(draw: Any) -> str:
    """A rule file with some words replaced by others of their kind: often still a rule."""
    text = draw(st.sampled_from(VALID))
    for _ in range(draw(st.integers(1, 4))):
        kind = draw(st.sampled_from(KINDS))
        found = [m for m in re.finditer(r"[A-Za-z_]\w*|[-+]?[\d.]+(?:e-?\d+)?|[-+*/%<>=@]+", text) if m[0] in kind]
        if found:
            where = draw(st.sampled_from(found))
            text = text[: where.start()] + draw(st.sampled_from(kind)) + text[where.end() :]
    return str(text)


@pytest.mark.slow
@given(nearly() | mutated())
@settings(QUICK, max_examples=600)
def test_many_valid_rules_with_changes(text: str) -> None:
    use(check_taken(lambda: rulec.parse(text)))


@pytest.mark.slow
@given(nearly())
@settings(QUICK, max_examples=50)
def test_valid_rules_with_a_word_changed(text: str) -> None:
    use(check_taken(lambda: rulec.parse(text)))


@given(mutated())
@settings(QUICK, max_examples=50)
def test_valid_rules_with_something_changed(text: str) -> None:
    use(check_taken(lambda: rulec.parse(text)))


PIECES = [
    "adam", "decay", "l2", "lookahead", "ema", "accumulate", "low_rank", "schedule_free", "(", ")", "(", ")", " + ",
    " >> ", ",", "lr=", "k=", "0.1", "2*lr", "rank", "'", "**", "-", "x.yaml", "transforms/l2", "=", "[", "\n", "é",
]  # fmt: skip


@given(st.lists(st.sampled_from(PIECES), max_size=12).map("".join))
@QUICK
def test_any_composition(text: str) -> None:
    use(check_taken(lambda: rulec.load(text)))


@pytest.mark.slow
@given(st.recursive(
    st.sampled_from(["adam", "sgd", "decay", "l2", "sign", "rprop", "adamw"]),
    lambda inner: st.tuples(inner, inner).map(" + ".join)
    | st.tuples(inner, inner).map(lambda x: f"({x[0]}) >> ({x[1]})")
    | st.tuples(st.sampled_from(["lookahead", "ema", "accumulate", "low_rank", "schedule_free"]), inner).map(
        lambda x: f"{x[0]}({x[1]})"
    ),
    max_leaves=4,
))  # fmt: skip
@QUICK
def test_any_composition_that_reads_well(text: str) -> None:
    use(check_taken(lambda: rulec.load(text)))


words = st.sampled_from(
    [
        *NAMES,
        *FUNCTIONS,
        *"()[]{},.:+-*/%<>=!@~^|&'\"\\#; ",
        "**",
        "//",
        "<=",
        " and ",
        " not ",
        "1",
        "1e9",
        "per=",
        "\n",
    ]
)


@given(st.lists(words, max_size=30).map("".join))
@settings(QUICK, max_examples=150)
def test_any_expression(text: str) -> None:
    source = Source("<fuzz>", text)
    value = check_taken(lambda: parse_expression(Text(text, source), NAMES))
    assert value is None or value.size >= 1


@given(
    st.dictionaries(
        st.sampled_from(["lr", "beta1", "eps", "m", "q"]),
        st.text(max_size=12) | st.floats() | st.none() | st.integers(),
    )
)
@QUICK
def test_any_binding(bindings: dict[str, Any]) -> None:
    use(check_taken(lambda: bind(rulec.load("adam"), bindings)))


@given(
    st.sampled_from("([{-+~*a.,:\n#'\" 1=<>|&!?%@\\"),
    st.sampled_from(["{}", "name: R\nstep: |\n  x = {}\n", "name: {}\n"]),
    st.integers(1, 40_000),
)
@settings(QUICK, max_examples=30)
def test_one_character_over_and_over(character: str, frame: str, count: int) -> None:
    check_taken(lambda: rulec.parse(frame.replace("{}", character * count)))


@given(st.recursive(
    st.none() | st.booleans() | st.integers(-5, 5) | st.floats() | st.sampled_from(TOKENS) | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from(
        ["name", "hyper", "state", "step", "plus", "chain", "uses", "default", "init", "per", "lr", "m", "view"]
    ), inner, max_size=4),
    max_leaves=12,
))  # fmt: skip
@QUICK
def test_any_data(data: Any) -> None:
    text = yaml.safe_dump({"name": "R", "step": "direction = g\n", **(data if isinstance(data, dict) else {"x": data})})
    use(check_taken(lambda: rulec.parse(text)))


@given(
    st.dictionaries(
        st.sampled_from(["lr", "beta1", "eps", "q"]),
        st.none() | st.floats() | st.text() | st.integers() | st.booleans(),
    )
)
@QUICK
def test_any_value_of_a_hyper_parameter(values: dict[str, Any]) -> None:
    adam = rulec.load("adam")
    try:
        found = resolve_hyper(adam.hyper, values, 2.0**-52, "Adam")
    except HyperError:
        return
    assert all(isinstance(v, float) for v in found.values())
