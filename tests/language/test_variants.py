"""Variants of a rule: one file for the values that a study compares."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

import rulec
from rulec.checkpoint.content import meaning

TEXT = """
name: Powered
hyper: {lr: 1e-3, beta: 0.9, power: {default: 0.5, min: 0, static: true}}
state: {v: 0}
step: |
  v = beta*v + (1 - beta)*g*g
  direction = g/(v**power + 1e-8)
"""
VARIANTS = 'variants: {power: [0.5, 1], beta: [0.9, "1 - power/10"]}\n'


@pytest.fixture
def file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.chdir(tmp_path)
    Path("mine.yaml").write_text(TEXT + VARIANTS)
    return "mine.yaml"


def test_every_combination_is_the_rule_with_its_values_bound(file: str) -> None:
    plain, variants = rulec.parse(TEXT), rulec.variants(file)
    assert [*variants] == [
        "mine.yaml(power=0.5, beta=0.9)", "mine.yaml(power=0.5, beta=1 - power/10)", "mine.yaml(power=1, beta=0.9)",
        "mine.yaml(power=1, beta=1 - power/10)",
    ]  # fmt: skip
    values: list[dict[str, Any]] = [
        {"power": power, "beta": beta} for power in (0.5, 1) for beta in (0.9, "1 - power/10")
    ]
    for (name, variant), bound in zip(variants.items(), values, strict=True):
        assert variant == plain.bind(**bound) == rulec.load(name)
        assert variant.variants == {}
    half, whole = (rulec.compile(variants[f"mine.yaml(power={power}, beta=0.9)"]) for power in ("0.5", "1"))
    assert half != whole


def test_a_rule_is_itself_with_its_defaults(file: str) -> None:
    assert rulec.load(file) == rulec.parse(TEXT)
    assert rulec.load(f"{file}(power=1)").variants == {"beta": (0.9, "1 - power/10")}
    assert rulec.variants("adam") == {"adam": rulec.load("adam")}
    text = TEXT.replace("default: 0.5, ", "") + "variants: {power: [0.25, 1]}\n"
    assert rulec.parse(text).hyper["power"].default == 0.25


def test_digests_and_equality_do_not_see_variants_and_texts_keep_them(file: str) -> None:
    with_them, without = rulec.load(file), rulec.parse(TEXT)
    # Equal rules have one entry in the cache of digests.
    assert meaning.__wrapped__(with_them) == meaning.__wrapped__(without)
    again = rulec.parse(with_them.to_yaml())
    assert (again, again.variants) == (with_them, with_them.variants)


def test_a_composed_rule_has_none(file: str) -> None:
    for text in (f"clip_by_value >> {file}", f"lookahead({file})", f"{file} + decay"):
        assert rulec.load(text).variants == {}


def test_lists_and_counts_vary() -> None:
    rule = rulec.parse("""
name: Sums
hyper: {lr: 1e-3, k: [0.9, 0.5], n: {default: 2, static: true, whole: true}}
state: {m: {init: 0, count: n}}
variants: {k: [[0.9], [0.1, 0.2, 0.3]], n: [1, 3]}
step: |
  for i in range(n):
    m[i] = m[i] + g
  direction = m[0]*k[0]
""")
    assert {name: (len(each.hyper), len(each.state)) for name, each in rulec.variants(rule).items()} == {
        "Sums(k=[0.9], n=1)": (3, 1), "Sums(k=[0.9], n=3)": (3, 3),
        "Sums(k=[0.1, 0.2, 0.3], n=1)": (5, 1), "Sums(k=[0.1, 0.2, 0.3], n=3)": (5, 3),
    }  # fmt: skip


def test_a_function_has_them_too(file: str) -> None:
    @rulec.rule(
        name="Powered", state={"v": 0}, hyper={"power": {"min": 0, "static": True}},
        variants={"power": [0.5, 1], "beta": [0.9, "1 - power/10"]},
    )  # fmt: skip
    def powered(g: Any, s: Any, *, lr: Any = 1e-3, beta: Any = 0.9, power: Any = 0.5) -> Any:
        s.v = beta * s.v + (1 - beta) * g * g
        return g / (s.v**power + 1e-8)

    assert [*rulec.variants(powered).values()] == [*rulec.variants(file).values()]
    assert next(iter(rulec.variants(powered))) == "Powered(power=0.5, beta=0.9)"
