"""The claims of docs/watch.md about its trainings, against what `examples.gpt.watch` last wrote."""

from __future__ import annotations

import re

from examples.gpt.watch import RATES, SEEDS
from tests.docs.markdown import ROOT
from tests.docs.watch_table import record

PAGE = (ROOT / "docs" / "watch.md").read_text()


def test_every_training_that_fails_is_seen_50_steps_before_its_loss() -> None:
    high = [run["shown"] for run in record()["runs"] if run["rate"] == RATES[0]]
    assert len(high) == len(SEEDS)
    for shown in high:
        statistics = [step for name, step in shown.items() if name != "loss"]
        assert None not in statistics
        assert shown["loss"] is None or max(statistics) <= shown["loss"] - 50


def test_the_training_at_the_lower_rate_raises_no_alarm() -> None:
    low = [run["shown"] for run in record()["runs"] if run["rate"] == RATES[1]]
    assert [{*shown.values()} for shown in low] == [{None}] * len(SEEDS)


def test_the_text_has_the_steps_of_the_picture() -> None:
    shown = record()["runs"][0]["shown"]
    assert f"rises at step {shown['loss']}." in PAGE
    last = max(step for name, step in shown.items() if name != "loss")
    assert re.search(r"at least (\d+) steps before the loss rises", PAGE)[1] == str(shown["loss"] - last)  # type: ignore[index]
    never = [run["seed"] for run in record()["runs"] if run["rate"] == RATES[0] and run["shown"]["loss"] is None]
    assert never == [int(number) for number in re.findall(r"With seed (\d+) the statistics", PAGE)]
