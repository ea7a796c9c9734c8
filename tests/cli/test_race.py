"""`rulec race`: the table, the files, and one sentence for each mistake."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.cli.running import error, run

SMALL = ("--task", "rosenbrock", "--rates", "2", "--seeds", "1", "--steps", "5")

TASK = """
import numpy as np

def bowl():
    def loss_and_grad(params, step, seed):
        return float(params["x"] @ params["x"]), {"x": 2*params["x"]}
    return {"x": np.ones(3)}, loss_and_grad

def broken():
    return 1
"""


def test_the_table_and_the_files(tmp_path: Path) -> None:
    file = tmp_path / "race.json"
    shown = run("race", "sgd", "lion", *SMALL, "--lr", "1e-4:1e-3", "--lr", "lion=1e-3:1e-2", "--json", str(file))
    assert shown.startswith("rosenbrock: 2 learning rates x 1 seed for each rule, 5 steps\n")
    assert {line.split()[0] for line in shown.splitlines()[2:4]} == {"sgd", "lion"}
    rates = {(each["rule"], each["lr"]) for each in json.loads(file.read_text())["runs"]}
    assert rates == {("sgd", 1e-4), ("sgd", 1e-3), ("lion", 1e-3), ("lion", 1e-2)}


def test_one_rate_is_a_rate(tmp_path: Path) -> None:
    """Of the usual eight rates there is one, for all rules or for one of them."""
    file, few = tmp_path / "race.json", ("--task", "rosenbrock", "--seeds", "1", "--steps", "1")
    shown = run("race", "sgd", "lion", *few, "--lr", "1e-3", "--json", str(file))
    assert shown.startswith("rosenbrock: 1 learning rate x 1 seed for each rule, 1 step\n")
    assert [each["lr"] for each in json.loads(file.read_text())["runs"]] == [1e-3, 1e-3]
    mixed = run("race", "sgd", "lion", *few, "--lr", "lion=1e-3", "--rates", "2")
    assert mixed.startswith("rosenbrock: 1 to 2 learning rates x 1 seed")


def test_a_file_that_cannot_be_written_is_said_before_the_race(tmp_path: Path) -> None:
    assert f"{tmp_path} is a folder: name a file" in error("race", "sgd", *SMALL, "--csv", str(tmp_path))
    (tmp_path / "file").write_text("")
    assert "cannot be written" in error("race", "sgd", *SMALL, "--json", str(tmp_path / "file" / "race.json"))


def test_a_task_of_a_file(tmp_path: Path) -> None:
    file = tmp_path / "my.py"
    file.write_text(TASK)
    shown = run("race", "sgd", "--task", f"{file}:bowl", "--rates", "2", "--seeds", "1", "--steps", "4")
    assert shown.startswith("bowl: ")
    assert "the task broken must return" in error("race", "sgd", "--task", f"{file}:broken")
    assert f"{file} has no function 'bowls'; did you mean 'bowl'?" in error("race", "sgd", "--task", f"{file}:bowls")


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (("adamm",), "there is no rule 'adamm'; did you mean 'adam'?"),
        (("sgd", "sgd"), "sgd is in the race twice"),
        (("sgd", "--task", "digit"), "there is no task 'digit'; did you mean 'digits'?"),
        (("sgd", "--lr", "1e-1:1e-4"), "must go from a smaller to a larger one"),
        (("sgd", "--lr", "0:1"), "the learning rates 0:1 must be positive numbers"),
        (("sgd", "--lr", "low:1"), "the learning rates 'low:1' are neither LOW:HIGH"),
        (("sgd", "--lr", "0"), "the learning rates 0:0 must be positive numbers"),
        (("sgd", "--lr", "1:2", "--lr", "2:3"), "are named twice"),
        (("sgd", "--lr", "lion=1:2"), "learning rates are named for 'lion', and the race has sgd alone"),
        (("sgd", "--seeds", "0"), "a race needs at least one seed, not 0"),
        (("sgd", "--rates", "0"), "a race needs at least one learning rate, not 0"),
        (("sgd", "--steps", "0"), "a race needs at least one step, not 0"),
        (("sgd", "--budget", "5x"), "the budget '5x' is no time"),
        (("sophia",), "Sophia reads the input 'hessian' at every step"),
        (("adgd",), "AdGD has no hyper-parameter lr"),
        (("lookahead",), "Lookahead"),
    ],
)
def test_a_mistake_is_one_sentence(arguments: tuple[str, ...], sentence: str) -> None:
    task = () if "--task" in arguments else ("--task", "rosenbrock")
    message = error("race", *arguments, *task)
    assert sentence in message
    assert len(message.splitlines()) == 1


def test_statistics_have_curves_in_the_files(tmp_path: Path) -> None:
    file, page = tmp_path / "race.json", tmp_path / "race.html"
    run("race", "sgd", "lion", *SMALL, "--watch", "update_norm", "--json", str(file), "--html", str(page))
    curves = json.loads(file.read_text())["curves"]
    assert all([*each["statistics"]] == ["update_norm"] for each in curves.values())
    assert all(len(values) == 5 for each in curves.values() for values in each["statistics"]["update_norm"])
    assert "update_norm at the best learning rate" in page.read_text()
    assert '<div id="plot2"' in page.read_text()
    run("race", "sgd", *SMALL, "--html", str(page))
    assert '<div id="plot2"' not in page.read_text()


def test_statistics_without_a_file_for_their_curves_are_refused(tmp_path: Path) -> None:
    assert "--watch draws curves on a page: give --html FILE" in error("race", "sgd", *SMALL, "--watch", "norms")
    mixed = ("--watch", "trust", "--watch", "norms", "--json", str(tmp_path / "race.json"))
    assert "--watch trust is a name that rules declare" in error("race", "lamb", *SMALL, *mixed)


def test_variants_race_side_by_side_with_the_bits_of_their_names(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    text = "name: Scaled\nhyper: {lr: 1e-3, k: 1}\nstep: |\n  direction = k*g\n"
    Path("plain.yaml").write_text(text)
    Path("scaled.yaml").write_text(f"{text}variants: {{k: [1, 2]}}\n")
    spans = ("--lr", "scaled.yaml=1e-4:1e-3", "--lr", "scaled.yaml(k=2)=1e-3:1e-2")
    run("race", "scaled.yaml", *SMALL, *spans, "--json", "all.json")
    run("race", "plain.yaml(k=2)", *SMALL, "--lr", "1e-3:1e-2", "--json", "one.json")
    runs = json.loads(Path("all.json").read_text())["runs"]
    assert {(each["rule"], each["lr"]) for each in runs} == {
        ("scaled.yaml(k=1)", 1e-4), ("scaled.yaml(k=1)", 1e-3), ("scaled.yaml(k=2)", 1e-3), ("scaled.yaml(k=2)", 1e-2),
    }  # fmt: skip
    alone = [each["loss"] for each in json.loads(Path("one.json").read_text())["runs"]]
    assert [each["loss"] for each in runs if each["rule"] == "scaled.yaml(k=2)"] == alone
