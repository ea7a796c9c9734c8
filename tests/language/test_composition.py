"""Rules composed in text: what Python would make of the same, and what is no composition."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

import rulec
from rulec import Rule, RuleError
from rulec.compiler.reference import ReferenceOptimizer
from rulec.language.compose.parse import MAX_PARTS, is_composition

ADAM, ADAMW, SGD, L2, DECAY, CLIP = map(rulec.load, ("adam", "adamw", "sgd", "l2", "decay", "clip_by_value"))
LOOKAHEAD, EMA, ACCUMULATE = map(rulec.load, ("lookahead", "ema", "accumulate"))

COMPOSITIONS: list[tuple[str, Rule]] = [
    ("adam + decay", ADAM + DECAY),
    ("l2 >> adam", L2 >> ADAM),
    ("clip_by_value >> adam + decay", CLIP >> (ADAM + DECAY)),
    ("(clip_by_value >> adam) + decay", (CLIP >> ADAM) + DECAY),
    ("adam + decay + sgd(lr=1e-3)", ADAM + DECAY + SGD.bind(lr=1e-3)),
    ("l2>>adam", L2 >> ADAM),
    ("lookahead(adamw)", LOOKAHEAD(ADAMW)),
    ("lookahead(adamw, k=7)", LOOKAHEAD(ADAMW, k=7)),
    ("lookahead(k=7)(adamw)", LOOKAHEAD(ADAMW, k=7)),
    ("clip_by_value >> ema(lookahead(accumulate(adam, every=2)))", CLIP >> EMA(LOOKAHEAD(ACCUMULATE(ADAM, every=2)))),
    ("ema(l2 >> adam)", EMA(L2 >> ADAM)),
    ("adam(beta1=0.5, beta2=1 - (1 - beta1)**2)", ADAM.bind(beta1=0.5, beta2="1 - (1 - beta1)**2")),
    ("clip_by_value(bound=2*lr) >> adam(lr=1e-2)", CLIP.bind(bound="2*lr") >> ADAM.bind(lr=1e-2)),
    ("clip_by_value(bound=lr/2) >> sgd", CLIP.bind(bound="lr/2") >> SGD),
    ("(adam + decay)(weight_decay=0.5)", (ADAM + DECAY).bind(weight_decay=0.5)),
    ("transforms/nesterov >> sgd", rulec.load("transforms/nesterov") >> SGD),
    ("  adam\n  + decay ", ADAM + DECAY),
    ('"adam" + decay', ADAM + DECAY),
]


@pytest.mark.parametrize(("text", "rule"), COMPOSITIONS, ids=[text for text, _ in COMPOSITIONS])
def test_text_means_what_python_would_make_of_it(text: str, rule: Rule) -> None:
    assert rulec.load(text) == rule


@pytest.mark.parametrize(("text", "rule"), COMPOSITIONS, ids=[text for text, _ in COMPOSITIONS])
def test_text_means_the_same_in_a_file(text: str, rule: Rule) -> None:
    quoted = "'" + text.strip().replace("\n", " ") + "'"
    parsed = (
        rulec.parse(f"name: R\nuses: {{used: {quoted}}}\nstep: |\n  direction = used(g)\n") if _callable(rule) else None
    )
    chained = rulec.parse(f"name: R\nchain: [{quoted}]\n")
    assert chained.hyper == rule.hyper
    assert len(chained.state) == len(rule.state)
    assert parsed is None or parsed.hyper == rule.hyper


def _callable(rule: Rule) -> bool:
    return not rule.assigns_parameter


def test_every_place_of_a_file_takes_a_composition() -> None:
    chain = rulec.parse("name: R\nchain:\n  - clip_by_value(bound=2)\n  - ema(adam + decay)\n")
    assert chain.step == (CLIP.bind(bound=2) >> EMA(ADAM + DECAY)).step
    plus = rulec.parse("name: R\nplus: [l2 >> adam, decay]\n")
    assert plus.step == ((L2 >> ADAM) + DECAY).step
    bound = rulec.parse("name: R\nchain: [{lookahead(adam): {k: 3, lr: 0.1}}]\n")
    assert bound.hyper == (LOOKAHEAD(ADAM).bind(k=3, lr=0.1)).hyper
    routed = rulec.parse("name: R\napplies_to: ndim == 2\notherwise: l2 >> adam(lr=other)\nstep: |\n  direction = g\n")
    assert routed.rest is not None
    assert routed.rest.step == (L2 >> ADAM.bind(lr="other")).step
    assert rulec.parse(routed.to_yaml()) == routed


def test_files_can_be_composed(tmp_path: Path) -> None:
    folder = tmp_path / "a-b.c"
    folder.mkdir()
    (folder / "my_signum.yaml").write_text(rulec.load("signum").to_yaml())
    (folder / "two words.yaml").write_text(rulec.load("sign").to_yaml())
    signum = rulec.load("signum")
    assert rulec.load(f"l2 >> {folder}/my_signum.yaml").step == (L2 >> signum).step
    assert rulec.load(f"lookahead({folder}/my_signum.yaml, k=3)").step == LOOKAHEAD(signum, k=3).step
    assert rulec.load(f"l2 >> '{folder}/two words.yaml'").step == (L2 >> rulec.load("transforms/sign")).step
    odd = folder / "l2 >> (1).yaml"
    odd.write_text(rulec.load("lion").to_yaml())
    assert rulec.load(odd) == rulec.load(str(odd)) == rulec.load("lion")
    (folder / "all.yaml").write_text("name: R\nchain: [l2, 'lookahead(my_signum.yaml)']\n")
    assert rulec.load(folder / "all.yaml").step == (L2 >> LOOKAHEAD(signum)).step


@pytest.mark.parametrize("text", ["madgrad + decay", "decay + madgrad"])
def test_what_is_added_to_a_rule_that_assigns_p_moves_it_from_there(text: str) -> None:
    added, alone = rulec.load(text), rulec.load("madgrad")
    assert set(added.state) == set(alone.state)
    rng = np.random.default_rng(1)
    start, hyper = rng.standard_normal(50), {"weight_decay": 0.3}
    # The library's MADGRADW has the decay in its own last line.
    sides = [ReferenceOptimizer(rule, [start.copy()], hyper) for rule in (added, rulec.load("madgradw"))]
    for _ in range(5):
        g = rng.standard_normal(50)
        for side in sides:
            side.step([g.copy()], hyper)
    ours, theirs = (np.asarray(side.params[0], np.float64) for side in sides)
    assert not np.array_equal(theirs, start)
    np.testing.assert_allclose(ours, theirs, rtol=1e-14)


@pytest.mark.parametrize("text", ["adam", "my.yaml", "a+b.yaml", "folder (1)/my(2).yaml"[9:], "transforms/l2"])
def test_a_name_is_no_composition(text: str) -> None:
    assert not is_composition(text)


MISTAKES: list[tuple[str, str, str]] = [
    ("adam + dekay", "dekay", "there is no rule 'dekay'; did you mean 'decay'?"),
    ("lookahead(adm)", "adm", "there is no rule 'adm'; did you mean 'adam'?"),
    ("adam >> decay", "adam >> decay", "Decay never reads its input g, so Adam before it would have no effect"),
    ("lookahead + adam", "lookahead + adam", "Lookahead wraps another rule and has none here: write lookahead(adam)"),
    ("lookahead(adam, sgd)", "sgd", "Lookahead wraps one rule, not 2: join rules with + and >>, and write"),
    ("lookahead(adam, j=3)", "lookahead(adam, j=3)", "Lookahead has no hyper-parameter 'j'"),
    ("lookahead(adam, k=3, k=4)", "k=4", "k is bound twice"),
    ("lookahead(adam, **k)", "**k", "** has no place here"),
    ("adam(lr=-1)", "adam(lr=-1)", "lr=-1.0 of Adam must be at least 0"),
    ("adam(lr=m)", "m", "'m' is a state of Adam: bind to numbers and hyper-parameters only"),
    ("adam(beta1=sqrt(2, 3))", "sqrt(2, 3)", "sqrt takes 1 argument, not 2: write sqrt(x)"),
    ("adam()", "adam()", "there is nothing between these brackets"),
    ("decay(adam)", "decay(adam)", "Decay wraps no rule: did you mean decay >> adam?"),
    ("adam >> (2*decay)", "2*decay", "'2*decay' is no rule: join rules with + and >>, and write wrapper(rule) or"),
    ("adam + [decay]", "[decay]", "'[decay]' is no rule: join rules with + and >>"),
    ("(adam if decay else l2) + sgd", "adam if decay else l2", "'adam if decay else l2' is no rule"),
    ("adam + __import__('os')", "__import__", "there is no rule '__import__'"),
    ("adam + 3", "3", "'3' is no rule"),
    ("(adam + decay", "(", "this bracket is never closed"),
    ("x = adam + decay", "x = adam + decay", "this is no rule: join rules with + and >>"),
    ("adam + decay; sgd", "adam + decay; sgd", "this is no rule: join"),
    ("schedule_free(adam) + decay", "schedule_free(adam) + decay", "nothing can be added to the p of"),
    ("adam + missing.yaml", "missing.yaml", "there is no rule file 'missing.yaml'"),
    (
        "lookahead(adamw) >> sgd",
        "lookahead(adamw) >> sgd",
        "LookaheadAdamW assigns p itself, so it cannot be followed by",
    ),
]


@pytest.mark.parametrize(("text", "marked", "says"), MISTAKES, ids=[text for text, _, _ in MISTAKES])
def test_mistakes_are_shown_where_they_stand(text: str, marked: str, says: str) -> None:
    with pytest.raises(RuleError) as caught:
        rulec.load(text)
    column = text.rindex(marked) + 1
    assert caught.value.message.startswith(says)
    assert caught.value.place == f"<rule>:1:{column}"
    assert str(caught.value).endswith(f"    {text}\n    {' ' * (column - 1)}{'^' * len(marked)}")


def test_a_mistake_in_a_file_is_at_its_place() -> None:
    text = "name: R\nchain:\n  - l2\n  - lookahead(adem, k=3)\n"
    with pytest.raises(RuleError, match=r"^r\.yaml:4:15: there is no rule 'adem'; did you mean 'adam'\?"):
        rulec.parse(text, "r.yaml")


def test_what_is_composed_without_end_is_refused() -> None:
    with pytest.raises(RuleError, match="this composes too many rules: name parts of it in rule files"):
        rulec.load(" + ".join(["sign"] * MAX_PARTS))
    with pytest.raises(RuleError, match=r"nested too deeply|too many rules"):
        rulec.load("(" * 5000 + "adam" + ")" * 5000)


@pytest.mark.parametrize("text", [1, None, 2.5])
def test_a_name_is_a_text(text: Any) -> None:
    with pytest.raises(RuleError, match="a rule is loaded by its name or its path, and this is of type"):
        rulec.load(text)
