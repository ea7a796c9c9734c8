"""What the page is told of a rule, and of a text that is none."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import rulec
from rulec.tools.display.path import ROSENBROCK, paths_with
from rulec.tools.playground import questions
from rulec.tools.playground.questions import QUESTIONS, sliders
from rulec.tools.playground.worker import reply

TEXT = (
    "name: Mine\nhyper: {lr: 1e-3, beta: 0.9}\nstate: {m: 0}\nstep: |\n  m = beta*m + (1 - beta)*g\n  direction = m\n"
)


def ask(question: str, folder: Path = Path(), told: list[float] | None = None, **arguments: Any) -> Any:
    """The answer, as it comes through JSON, or the sentence of an error."""
    told = [] if told is None else told
    message = json.loads(json.dumps(reply(json.dumps([question, arguments]), folder, told.append), allow_nan=False))
    return message.get("answer", message.get("error"))


def test_a_look_at_a_rule() -> None:
    look = ask("look", text=TEXT)
    assert look["name"] == "Mine"
    assert look["formula"] == rulec.parse(TEXT).latex()
    (costs,) = look["costs"]
    assert ["reads", "12 bytes (p, g, m) for each float32 parameter"] in costs["lines"]
    assert ["scope", "elementwise"] in look["analysis"]
    assert [slider["name"] for slider in look["sliders"]] == ["lr", "beta"]


def test_a_wrapper_is_shown_around_rules() -> None:
    text = (Path(rulec.load("lookahead").path or "")).read_text()
    assert ask("look", text=text)["around"] == "adam"
    assert "slow" in ask("kernel", text=text, backend="c")["source"]


def test_machine_code_of_backends() -> None:
    shown = ask("assembly", text=TEXT, backend="c")
    assert shown["language"] == "assembly"
    assert "step" in shown["source"]
    assert ask("assembly", text=TEXT, backend="jax") == "the page shows machine code of c and cpu, not of 'jax'"


def test_kernels_of_backends() -> None:
    assert "@triton.jit" in ask("kernel", text=TEXT, backend="triton")["source"]
    assert ask("kernel", text=TEXT, backend="cupy")["language"] == "cuda"
    assert (
        ask("kernel", text=TEXT, backend="numpy")
        == "the page shows kernels of c, triton, cupy, cpu, jax, not of 'numpy'"
    )


def test_paths_with_the_hyper_parameters_of_sliders() -> None:
    function = "Rosenbrock's function"
    best = ask("path", text=TEXT, function=function, hyper={})
    same = ask("path", text=TEXT, function=function, hyper={"lr": best["rate"], "beta": 0.9})
    other = ask("path", text=TEXT, function=function, hyper={"lr": best["rate"], "beta": 0.5})
    assert best == same
    assert other["picture"] != best["picture"]
    assert ask("path", text=TEXT, function=function, hyper={"lr": 1e9})["caption"].endswith("goes beyond all numbers.")
    assert "beta" in ask("path", text=TEXT, function=function, hyper={"beta": 2.0})
    assert ask("path", text=TEXT, function="x", hyper={}).startswith(
        "the page has the functions Rosenbrock's function,"
    )


def test_the_statistics_of_a_rule_are_those_of_the_path_that_is_drawn() -> None:
    text = TEXT + "statistics: {moved: norm(update), agree: mean(m*g > 0)}\n"
    function = "Rosenbrock's function"
    path = ask("path", text=text, function=function, hyper={"lr": 1e-3})
    moved, agree = path["statistics"]
    assert (moved["label"], agree["label"]) == ("moved", "agree")
    assert moved["x"] == [*range(1, 101)]
    points = paths_with(rulec.parse(TEXT), {"lr": 1e-3}, (ROSENBROCK,))[0].points
    np.testing.assert_allclose(moved["mean"], np.linalg.norm(np.diff(points, axis=0), axis=1), rtol=1e-6)
    assert {*agree["mean"]} <= {0, 0.5, 1}
    best = ask("path", text=text, function=function, hyper={})
    assert best == ask("path", text=text, function=function, hyper={"lr": best["rate"], "beta": 0.9})
    assert ask("path", text=TEXT, function=function, hyper={})["statistics"] == []
    assert None in ask("path", text=text, function=function, hyper={"lr": 1e9})["statistics"][0]["mean"]


@pytest.mark.slow
def test_a_race_with_rules_of_the_library(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(questions, "GRID", 3)
    told: list[float] = []
    race = ask("race", told=told, text=TEXT, task="valley", rivals=["sgd"])
    assert {row[0] for row in race["rows"]} == {"your rule", "sgd"}
    assert told == sorted(told)
    assert told[-1] == 1
    assert len(race["rates"][0]["x"]) == len(race["rates"][0]["mean"]) == 3


@pytest.mark.parametrize(
    ("task", "rivals", "sentence"),
    [
        ("my.py:task", [], "rosenbrock, rastrigin, valley, not 'my.py:task'"),
        ("valley", ["my.py:rule"], "'my.py:rule' is no rule of the library"),
        ("valley", ["sgd", "adam", "lion", "adamw", "nadam"], "at most 4 rules beside yours, not 5"),
        ("valley", ["sophia"], "Sophia reads the input 'hessian' at every step"),
    ],
)  # fmt: skip
def test_a_race_that_cannot_be(task: str, rivals: list[str], sentence: str) -> None:
    assert sentence in ask("race", text=TEXT, task=task, rivals=rivals)


def test_python_is_not_run(tmp_path: Path) -> None:
    """A text that names Python files and modules."""
    mark = tmp_path / "mark"
    (tmp_path / "my.py").write_text(f"open({str(mark)!r}, 'w')")
    for name in ("my.py", "my.py:rule", "my:rule", str(tmp_path / "my.py")):
        for text in (f"name: A\nplus: [adam, '{name}']\n", f"name: A\nuses: ['{name}']\nstep: direction = g\n"):
            assert len(ask("mistakes", tmp_path, text=text)) == 1, text
    assert not mark.exists()


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("name: A\n" + "#" * 1_000_000, "rule has 1000008 characters, over the limit of 100000: it is no rule file"),
        ("name: " + "[" * 5000, "nested deeper than 20 levels"),
        ("name: A\nstep: direction = " + "(" * 5000 + "g" + ")" * 5000, "nested"),
        ("name: A\nstep: direction = " + "-" * 5000 + "g", "nested"),
    ],
)  # fmt: skip
def test_a_text_that_is_too_large_is_one_sentence(text: str, sentence: str) -> None:
    (mistake,) = ask("mistakes", text=text)
    assert sentence in mistake["message"]


def test_a_defect_is_said_and_ends_nothing(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    def fails(error: type[Exception]) -> Any:
        def question(*arguments: Any, **named: Any) -> None:
            raise error("broken")

        return question

    monkeypatch.setitem(QUESTIONS, "look", fails(KeyError))
    assert ask("look", text=TEXT) == "This is a defect of rulec, please report it: KeyError: 'broken'"
    assert "Traceback" in capsys.readouterr().err
    monkeypatch.setitem(QUESTIONS, "look", fails(MemoryError))
    assert ask("look", text=TEXT) == "The rule needs more than 6 GiB of memory here, and was stopped."


@pytest.mark.parametrize("name", ["adamw", "sgd", "muon", "ademamix", "lion"])
def test_sliders_have_the_default_and_stay_in_range(name: str) -> None:
    rule = rulec.load(name)
    for slider in sliders(rule):
        hyper = rule.settings[slider["name"]]
        assert slider["values"][slider["at"]] == hyper.default
        assert slider["values"] == sorted(set(slider["values"]))
        assert len(slider["values"]) > 1
        assert all(hyper.min <= value <= hyper.max and hyper.above < value < hyper.below for value in slider["values"])
