"""What nothing reads: states that are only written are kept; hyper-parameters, inputs and values are warned of."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import rulec
import rulec.array
import rulec.torch
from rulec.errors import RuleError
from rulec.language.check import unread
from rulec.tools.language_server.answers import mistakes
from tests.cli.running import error, invoke, run_json

#: A kind of state -> its declaration, and the lines that write it.
WRITTEN = {
    "tensor": ("{init: 0, per: tensor}", "size = norm(m)"),
    "row": ("{init: 0, per: row}", 'size = norm(g, per="row")'),
    "matrix": ("{init: 0, per: matrix}", 'size = norm(g, per="matrix")'),
    "element": ("0", "size = m*m"),
    "a number": ("0", "size = 3"),
    "shape": ("{init: 0, shape: [rows, rows]}", "size = g @ transpose(g)"),
    "branch": ("{init: 0, per: tensor}", "if t > 1:\n    size = norm(m)"),
    "some steps": ("{init: 0, per: tensor}", "size = where(t % 2 == 0, norm(m), size)"),
    "of p": ("0", "size = p"),
    "model": ("{init: 0, per: model}", 'size = norm(g, per="model")'),
    "history": ("{history: 3}", "size = m"),
}


def _logged(kind: str, reads: bool = False) -> rulec.Rule:
    state, lines = WRITTEN[kind]
    read = "size[2]" if kind == "history" else "size"
    step = f"  m = 0.9*m + g\n  {lines}\n  direction = m{f' + 0*sum({read})' if reads else ''}\n"
    return rulec.parse(f"name: Logged\nhyper: {{lr: 0.1}}\nstate: {{m: 0, size: {state}}}\nstep: |\n{step}")


def _states(saved: dict[str, Any], key: str = "") -> dict[str, np.ndarray]:
    """The arrays of a saved state by their places."""
    arrays = {}
    for name, value in saved.items():
        arrays |= _states(value, f"{key}{name}.") if isinstance(value, dict) else {f"{key}{name}": np.asarray(value)}
    return {name: array for name, array in arrays.items() if "size" in name}


def _ended(rule: rulec.Rule, backend: str) -> dict[str, np.ndarray]:
    numbers = np.random.default_rng(0)
    params = [numbers.standard_normal((3, 4)), numbers.standard_normal((2, 4))]
    optimizer = rulec.array.Optimizer(rule, params, backend=backend)
    for _ in range(4):
        optimizer.step([numbers.standard_normal(p.shape) for p in params])
    return _states(optimizer.state_dict())


@pytest.mark.parametrize("backend", ["numpy", "cpu"])
@pytest.mark.parametrize("kind", WRITTEN)
def test_a_state_that_nothing_reads_is_kept(kind: str, backend: str) -> None:
    kept, wanted = _ended(_logged(kind), backend), _ended(_logged(kind, reads=True), backend)
    assert kept.keys() == wanted.keys() != set()
    for name, value in kept.items():
        np.testing.assert_array_equal(value, wanted[name])


def test_a_user_of_torch_sees_such_a_state() -> None:
    param = torch.nn.Parameter(torch.ones(3, 4, dtype=torch.float64))
    optimizer = rulec.torch.optimizer(rulec.load("lookahead")(_logged("tensor")))([param])
    momentum = torch.zeros(3, 4, dtype=torch.float64)
    for number in range(1, 4):
        param.grad = torch.full_like(param, number)
        momentum = 0.9 * momentum + number
        optimizer.step()
        torch.testing.assert_close(optimizer.state[param]["size"], torch.linalg.norm(momentum))


def test_a_state_that_a_step_does_not_name_is_a_mistake() -> None:
    with pytest.raises(RuleError, match="state m is never used: assign it in the step or remove it"):
        rulec.parse("name: R\nstate: {m: 0}\nstep: direction = g\n")


WARNED = """\
name: Warned
hyper: {lr: 0.1, beta: 0.9, late: 3}
state: {m: 0}
inputs: {loss: scalar}
step: |
  mean_of_g = g
  x = m
  x = 2*g
  if t > late:
    y = 3
    z = 2
  else:
    z = 4
  m = x + z
  m = x - z
  direction = m
"""

#: The line and the sentence of each warning of the rule above.
SAID = [
    (None, "nothing reads the input loss: read it or remove it"),
    (2, "nothing reads the hyper-parameter beta: read it or remove it"),
    (6, "nothing reads mean_of_g: read it or remove it"),
    (7, "x is assigned again before anything reads it: read it or remove it"),
    (10, "nothing reads y: read it or remove it"),
    (14, "m is assigned again before anything reads it: read it or remove it"),
]


def test_every_name_that_nothing_reads_is_warned_of_at_its_place() -> None:
    warnings = unread(rulec.parse(WARNED, "warned"))
    assert {warning.code for warning in warnings} == {"unread"}
    assert [(int(w.place.split(":")[1]) if w.place else None, w.message) for w in warnings] == SAID


@pytest.mark.parametrize(
    "text",
    [
        "hyper: {n: {default: 3, static: true}}\nstate: {m: {history: n}}\nstep: |\n  m = g\n  direction = m[1]",
        "hyper: {a: 0.1}\napplies_to: ndim == 2\notherwise: {adamw: {lr: a}}\nstep: direction = g",
        "hyper: {a: 0.1, b: 10*a}\nstep: direction = b*g",
        "hyper: {a: 0.1}\nevaluate: p - a\nstep: direction = g",
        "hyper: {a: 0.1}\nskip: t > a\nstep: direction = g",
        "hyper: {a: 0.1}\nrate: a\nstep: direction = g",
        "hyper: {a: 0.1}\nstate: {m: a}\nstep: |\n  m = m + g\n  direction = m",
        "hyper: {a: 0.1}\npasses: {climb: p + a*g}\nstep: direction = climb.g",
        "wraps: inner\nhyper: {k: 5}\nstep: |\n  d = k*inner(g)\n  direction = d",
        "hyper: {betas: [0.9, 0.99]}\nstate: {m: {count: 2}}\nstep: |\n  for i in range(2):\n"
        "    m[i] = betas[i]*m[i] + g\n  direction = m[0] + m[1]",
        "uses: [adam]\nhyper: {beta1: 0.9}\nstep: direction = adam(g)",
        "hyper: {beta1: 0.9}\nplus: [adam, decay]",
        "step: |\n  if t > 2:\n    x = g\n  else:\n    x = 2*g\n  direction = x",
        "hyper: {a: 0.1}\nstep: |\n  x = g\n  b = a\n  for i in range(3):\n    x = x*b\n    b = b*a\n  direction = x",
        "step: |\n  x = g\n  for i in range(3):\n    b = i*g\n    if i > 0:\n      x = x + b\n  direction = x",
        "step: |\n  for i in range(3):\n    x[i] = i*g\n  direction = x[2]",
        "hyper: {a: [1, 2, 3]}\nstep: |\n  x = g\n  for i in range(1, len(a)):\n    x = x*a[i]\n  direction = x",
        "hyper: {a: [1, 2, 3]}\nstep: direction = len( a )*g",
        "step: |\n  q, r = qr(g)\n  direction = q",
        "step: |\n  q, r = qr(g)\n  direction = g @ r",
        "step: |\n  values, vectors = eigh(g @ transpose(g))\n  direction = g*values",
        "applies_to: ndim > 1\nhyper: {a: 1}\notherwise:\n  name: Rest\n  hyper: {a: 1}\n  step: direction = a*g\n"
        "step: direction = g",
    ],
)
def test_what_is_read_in_any_place_is_not_warned_of(text: str) -> None:
    assert unread(rulec.parse(f"name: Read\n{text}\n")) == []


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("step: |\n  for i in range(3):\n    b = i*g\n  direction = g", ["4:5: nothing reads b"]),
        ("step: |\n  values, vectors = eigh(g @ transpose(g))\n  direction = g", ["3:3: nothing reads values"]),
        ("hyper: {a: [1, 2]}\nstep: direction = g", ["2:9: nothing reads the hyper-parameter a"]),
        (
            "applies_to: ndim > 1\nhyper: {a: 1}\notherwise:\n  name: Rest\n  hyper: {a: 1, z: 1}\n  step: |\n"
            "    u = g\n    direction = g\nstep: direction = a*g",
            ["6:17: nothing reads the hyper-parameter z", "8:5: nothing reads u"],
        ),
    ],
)
def test_each_line_and_list_is_warned_of_once_and_the_rule_for_the_rest_in_the_same_text(
    text: str, said: list[str]
) -> None:
    warnings = unread(rulec.parse(f"name: Warned\n{text}\n", "warned"))
    assert [f"{w.place.removeprefix('warned:')}: {w.message.partition(':')[0]}" for w in warnings] == said


@pytest.mark.parametrize("name", rulec.rules())
def test_no_rule_of_the_library_is_warned_of(name: str) -> None:
    assert unread(rulec.load(name)) == []


def test_a_rule_in_python_is_warned_of() -> None:
    @rulec.rule(state={"m": 0})
    def mine(g: Any, s: Any, *, lr: float = 0.1, beta: float = 0.9) -> Any:
        s.m = s.m + g
        return s.m

    (warning,) = unread(mine)
    assert warning.message == "nothing reads the hyper-parameter beta: read it or remove it"


def test_check_warns_and_a_strict_check_fails(tmp_path: Path) -> None:
    file = tmp_path / "warned.yaml"
    file.write_text(WARNED)
    result = invoke("check", str(file), "--steps", "1")
    assert result.exit_code == 0
    assert result.stderr.count("warning: ") == len(SAID)
    assert f"warning: {file}:6:3: nothing reads mean_of_g" in result.stderr
    warnings = run_json("check", str(file), "--steps", "1")["warnings"]
    assert [(each.get("line"), each["message"]) for each in warnings] == SAID
    assert error("check", str(file), "--strict").count("error: ") == len(SAID)
    mistakes = run_json("check", str(file), "--strict", code=2)["mistakes"]
    assert {each["code"] for each in mistakes} == {"unread"}
    assert run_json("check", "adamw", "--strict", "--steps", "1")["warnings"] == []


def test_an_editor_shows_warnings_of_a_rule_and_not_beside_mistakes() -> None:
    shown = mistakes(WARNED)
    assert [each.message for each in shown] == [message for _, message in SAID]
    assert all(each.warning for each in shown)
    assert [each.warning for each in mistakes(WARNED.replace("x = m\n", "x = q\n"))] == [False]
