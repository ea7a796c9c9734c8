"""Defaults outside the range of a hyper-parameter's name: the advice in the error makes a rule that takes them."""

from __future__ import annotations

import re
from typing import Any

import pytest
import sympy

import rulec
from rulec.errors import RuleError


@pytest.mark.parametrize(
    ("key", "default"), [("beta2", 1.0), ("beta2", -0.5), ("beta1", 7.25), ("lr", -2.0), ("eps", -1e-8)]
)
@pytest.mark.parametrize("body", ["step: |\n  p = p - KEY*g", "chain: [l2, adam]"])
def test_the_advice_of_a_file_is_followed(body: str, key: str, default: float) -> None:
    text = f"hyper: {{KEY: DEFAULT}}\n{body}".replace("KEY", key)
    with pytest.raises(RuleError, match=f"{key}={default!r} of R must be at least 0.*, the range of this name") as said:
        rulec.parse(f"name: R\n{text.replace('DEFAULT', repr(default))}\n")
    advice = re.search(r"write \w+: (\{[^}]*\}) for another", str(said.value))
    assert advice is not None
    rule = rulec.parse(f"name: R\n{text.replace('DEFAULT', advice[1])}\n")
    assert rule.hyper[key].default == default
    rulec.compile(rule)


def test_the_advice_to_python_is_followed() -> None:
    def wide(g: Any, *, beta2: float = 1.0) -> Any:
        return beta2 * g

    with pytest.raises(RuleError, match=r"write hyper=dict\(beta2=dict\(min=0, max=1\)\) for another"):
        rulec.rule(wide)
    assert rulec.rule(hyper={"beta2": {"min": 0, "max": 1}})(wide).hyper["beta2"].default == 1.0
    g, beta2 = sympy.symbols("g beta2")
    with pytest.raises(RuleError, match=r"write beta2: dict\(default=1, min=0, max=1\) for another"):
        rulec.from_sympy(name="Wide", direction=beta2 * g, hyper={beta2: 1.0})
    rule = rulec.from_sympy(name="Wide", direction=beta2 * g, hyper={beta2: {"default": 1, "min": 0, "max": 1}})
    assert rule.hyper["beta2"].default == 1.0
