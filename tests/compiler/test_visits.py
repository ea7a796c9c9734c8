"""Every walk over nodes remembers the nodes it has seen: its visits grow as a power of a rule's length, not twofold
with every line."""

from __future__ import annotations

from collections.abc import Mapping

import pytest

import rulec
from rulec.analysis.flow import flow_of
from rulec.analysis.scale import constant_scale
from rulec.compiler.pipeline import _compile
from rulec.errors import RulecError
from rulec.functional.plan import as_update
from rulec.language.expr.counts import simplified
from rulec.language.expr.functions import FUNCTIONS
from rulec.language.expr.node import Node, Op, const, node
from rulec.tools.display.kernels import costs_of
from rulec_backends.common import text as comment
from tests.compiler.visits import OPERATORS, PATHS, USES, check_visits, shared_rule

#: Lines of a short and of a long rule, and the growth of visits with the cube of the length.
_SHORT, _LONG, _GROWTH = 8, 20, 16

#: Paths that take long: their parts are in others.
_SLOW = (
    "jax", "notebook", "analysis", "codes", "source of cupy", "source of c", "source of triton", "files of c",
    "files of cupy",
)  # fmt: skip

_ALL = {**USES, **OPERATORS, "if": "if"}


def visits_of(path: str, use: str, lines: int, most: int = 10**7) -> int:
    """The visits of one way of a rule through the project; 0 where the way refuses it."""
    with check_visits(most) as visits:
        rule = shared_rule(use, lines)
        _compile.cache_clear()
        try:
            PATHS[path](rule)
        except RulecError:
            return 0
        return visits.count


def check(path: str, use: str) -> None:
    few = visits_of(path, use, _SHORT)
    if not few:
        assert not visits_of(path, use, _LONG)
        return
    assert visits_of(path, use, _LONG, most=_GROWTH * few) <= _GROWTH * few


def test_every_function_has_a_use() -> None:
    assert {*USES} == {*FUNCTIONS}


@pytest.mark.parametrize("path", [pytest.param(p, marks=[pytest.mark.slow] * (p in _SLOW)) for p in PATHS])
def test_visits_of_each_path(path: str) -> None:
    if path == "jax":
        pytest.importorskip("jax")
    check(path, "where({x} > 0, {x}*{x}, abs({x}))")


@pytest.mark.slow
@pytest.mark.parametrize("path", [*PATHS])
@pytest.mark.parametrize("use", [*_ALL])
def test_visits_of_each_function(use: str, path: str) -> None:
    if path == "jax":
        pytest.importorskip("jax")
    check(path, _ALL[use])


#: Lines of one kind, which one walk alone follows, from the value `x` of the line before -> the path with the walk.
_KINDS = {
    "x*x": "proofs", "x**2*x": "proofs", "where(g > {k}, x, where(p > {k}, x, g))": "proofs",
    "where(norm(x) > 0, x/norm(x), x)*x": "proofs", "x + x": "update", "x - g + x": "update",
}  # fmt: skip


@pytest.mark.parametrize("use", [*_KINDS])
def test_visits_of_lines_of_one_kind(use: str) -> None:
    lines = "".join(f"  x = {use.format(k=k)}\n" for k in range(24))
    rule = rulec.parse(
        f"name: F\nstate: {{m: 0}}\nhyper: {{a: 1}}\nstep: |\n  x = a*g + m\n{lines}  m = x\n  p = x + p\n"
    )
    with check_visits(300_000):
        if _KINDS[use] == "proofs":
            PATHS["proofs"](rule)
        else:
            as_update(rulec.compile(rule))


def test_visits_of_a_term_that_may_vanish() -> None:
    lines = "".join("  x = x*x\n" for _ in range(24))
    rule = rulec.parse(f"name: F\nhyper: {{a: 1}}\nstep: |\n  x = a + 1\n{lines}  direction = g/(g*g + x)\n")
    with check_visits(100_000):
        assert constant_scale(flow_of(rule)).answer == "unknown"


@pytest.mark.parametrize("wrap", ["transpose({})", "({})**3", "(1 - {})", "g//({})", "where(g > 0, {}, {})"])
def test_visits_of_nested_latex(wrap: str) -> None:
    nested = "g"
    for _ in range(40 if wrap.count("{}") == 1 else 8):
        nested = wrap.format(*[nested] * wrap.count("{}"))
    rule = rulec.parse(f"name: F\nstep: |\n  direction = {nested}\n")
    with check_visits(5_000):
        assert "g_{t}" in rule.latex()


def test_visits_of_extents() -> None:
    rows = extent = node(Op.FACT, "rows")
    for _ in range(30):
        extent = node(Op.SUB, node(Op.ADD, extent, extent), const(1))
    with check_visits(5_000):
        assert simplified(extent) is node(Op.SUB, node(Op.MUL, const(2.0**30), rows), const(2.0**30 - 1))


@pytest.mark.parametrize("inner", ["atan", "sin", "softplus", "erf", "tanh", "round"])
def test_names_of_nested_functions(inner: str) -> None:
    nested = "g"
    for _ in range(4 if inner != "softplus" else 3):
        nested = f"{inner}({nested})"
    with check_visits(60_000):
        program = rulec.compile(rulec.parse(f"name: F\nstep: |\n  direction = norm({nested})*g\n"))
    assert len(program.stages) == 2


def _known(lines: int) -> rulec.Rule:
    """A rule of a value that is known before a step, and whose text written out doubles with every line."""
    body = "".join("  x = x*x + x/2\n" for _ in range(lines))
    return rulec.parse(
        f"name: F\nhyper: {{h: 0.5}}\nstate: {{k: {{init: 0, per: model}}}}\nstep: |\n  x = h\n{body}  k = x\n"
        f"  direction = x*g\n"
    )


@pytest.mark.parametrize("backend", ["c", "cupy"])
def test_a_comment_of_a_long_value_is_not_written_out(backend: str, monkeypatch: pytest.MonkeyPatch) -> None:
    lengths: list[int] = []
    text_of = comment.expression_text

    def text(value: Node, *named: Mapping[Node, str]) -> str:
        said: str = text_of(value, *named)
        lengths.append(len(said))
        return said

    monkeypatch.setattr(comment, "expression_text", text)
    PATHS[f"source of {backend}"](_known(10))
    assert max(lengths) < 1000


def test_costs_show_the_beginning_of_a_long_value() -> None:
    (costs,) = costs_of(_known(10))
    shown = [*costs["hoisted"].values(), *costs["scalar_states"].values()]
    assert max(map(len, shown)) < 1000
    assert "..." in costs["scalar_states"]["k"]
    (costs,) = costs_of(_known(2))
    assert costs["scalar_states"]["k"] == "(h*h + h/2)*(h*h + h/2) + (h*h + h/2)/2"
