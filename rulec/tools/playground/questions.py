"""The requests of the playground's page about the text of a rule, answered from the text as data.

Nothing of the text is run but the rule that it says. A wrapper is shown and run around rules of the library. The slider
of a hyper-parameter has fixed values.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np

from rulec.errors import RulecError
from rulec.language.hyper import Hyper
from rulec.language.library.load import load, parse, rules
from rulec.language.rule import Rule
from rulec.tools.display.assembly import MACHINES, kernel_assembly
from rulec.tools.display.drawing import picture
from rulec.tools.display.kernels import LANGUAGES, TABS, cost_lines, costs_of, kernel_source
from rulec.tools.display.path import FUNCTIONS, RATES, STEPS, paths, paths_with, refusal, statistics_with
from rulec.tools.language_server.answers import meaning_at, mistakes, names_of, words_at
from rulec.tools.race import Result, race
from rulec.tools.race.outcome import Outcome
from rulec.tools.race.page import cells, columns, notes, title
from rulec.tools.race.tasks import TASKS

#: Tells how much of the work is done, from 0 to 1.
Tell = Callable[[float], None]

#: A race of the page: learning rates, how many of them, seeds, seconds, and rules beside the page's own.
SPAN, GRID, SEEDS, BUDGET, RIVALS = (1e-4, 1.0), 9, 2, 5.0, 4


def ask_mistakes(folder: Path, tell: Tell, text: str) -> list[dict[str, Any]]:
    """All mistakes of the text."""
    return [asdict(each) for each in mistakes(text, folder)]


def ask_words(folder: Path, tell: Tell, text: str, line: int, column: int) -> list[dict[str, Any]]:
    """The words that may stand at a place."""
    return [asdict(word) for word in words_at(text, line, column, names_of(text))]


def ask_meaning(folder: Path, tell: Tell, text: str, line: int, column: int) -> dict[str, Any] | None:
    """The word at a place."""
    word = meaning_at(text, line, column, names_of(text))
    return None if word is None else asdict(word)


def ask_look(folder: Path, tell: Tell, text: str) -> dict[str, Any]:
    """The rule's formula, costs, analysis and hyper-parameters."""
    rule = _rule(text, folder)
    shown = whole(rule)
    around = ", ".join(partners(rule))
    costs = [
        {"rule": facts["rule"], "shapes": facts["shapes"], "lines": cost_lines(facts)} for facts in costs_of(shown)
    ]
    return {
        "name": rule.name, "summary": rule.summary, "paper": dict(rule.paper), "around": around,
        "formula": rule.latex(), "costs": costs, "analysis": shown.analysis.lines, "sliders": sliders(shown),
    }  # fmt: skip


def ask_kernel(folder: Path, tell: Tell, text: str, backend: str) -> dict[str, str]:
    """The source of the rule's kernel."""
    if backend not in TABS:
        raise RulecError(f"the page shows kernels of {', '.join(TABS)}, not of {backend!r}")
    source = kernel_source(whole(_rule(text, folder)), backend)
    return {"source": source.strip(), "language": LANGUAGES.get(backend, "python")}


def ask_assembly(folder: Path, tell: Tell, text: str, backend: str) -> dict[str, str]:
    """The machine code of the rule's kernel for this processor."""
    if backend not in MACHINES:
        raise RulecError(f"the page shows machine code of {' and '.join(MACHINES)}, not of {backend!r}")
    return {"source": kernel_assembly(whole(_rule(text, folder)), backend).strip(), "language": "assembly"}


def ask_path(folder: Path, tell: Tell, text: str, function: str, hyper: Mapping[str, float]) -> dict[str, Any]:
    """The path on a function, and the rule's statistics along it; by default at the best of some learning rates."""
    drawn = next((each for each in FUNCTIONS if each.name == function), None)
    if drawn is None:
        raise RulecError(f"the page has the functions {', '.join(each.name for each in FUNCTIONS)}, not {function!r}")
    rule = whole(_rule(text, folder))
    if sentence := refusal(rule):
        raise RulecError(f"No path is drawn. {sentence}")
    path = paths_with(rule, hyper, (drawn,))[0] if hyper else paths(rule)[FUNCTIONS.index(drawn)]
    last = f"the last value is {path.value:.2g}" if math.isfinite(path.value) else "the path goes beyond all numbers"
    first = f"{drawn.value(np.array(drawn.start)):.2g}"
    caption = f"{STEPS} steps from a value of {first}: {last}."
    measured = statistics_with(rule, hyper or ({} if path.rate is None else {"lr": path.rate}), drawn)
    lines = [_band(name, np.arange(1, STEPS + 1), values[:, None]) for name, values in measured.items()]
    return {"picture": picture(drawn, path), "caption": caption, "rate": path.rate, "statistics": lines}


def ask_race(folder: Path, tell: Tell, text: str, task: str, rivals: list[str]) -> dict[str, Any]:
    """A race of the rule and some of the library."""
    if task not in TASKS:
        raise RulecError(f"the page has the tasks {', '.join(TASKS)}, not {task!r}")
    named = {"your rule": whole(_rule(text, folder))}
    for name in dict.fromkeys(rivals):
        if name not in rules():
            raise RulecError(f"{name!r} is no rule of the library: choose one of the list")
        named[name] = whole(load(name))
    if len(named) > RIVALS + 1:
        raise RulecError(f"a race of the page has at most {RIVALS} rules beside yours, not {len(named) - 1}")
    parts = iter(range(1, 10**9))
    result = race(
        named, task, lr=SPAN, rates=GRID, seeds=SEEDS, budget=BUDGET,
        advance=lambda label: tell(next(parts) / (50 * len(named))),
    )  # fmt: skip
    return _race(result)


QUESTIONS: dict[str, Callable[..., Any]] = {
    "mistakes": ask_mistakes, "words": ask_words, "meaning": ask_meaning, "look": ask_look, "kernel": ask_kernel,
    "assembly": ask_assembly, "path": ask_path, "race": ask_race,
}  # fmt: skip


@functools.lru_cache(maxsize=8)
def _rule(text: str, folder: Path) -> Rule:
    return parse(text, "rule", folder)


def _race(result: Result) -> dict[str, Any]:
    """The table and the lines of both plots; numbers that are not finite are null."""
    outcomes = result.outcomes
    return {
        "title": title(result.task, outcomes), "columns": columns(outcomes), "rows": [cells(o) for o in outcomes],
        "notes": [note.partition(":")[0] for note in notes(outcomes)],
        "curves": [_curve(outcome) for outcome in outcomes], "rates": [_rates(outcome) for outcome in outcomes],
    }  # fmt: skip


def _curve(outcome: Outcome) -> dict[str, Any]:
    """The losses over the steps at the best learning rate."""
    if outcome.best is None:
        return _band(outcome.label, np.array([]), np.empty((0, SEEDS)))
    return _band(outcome.label, *outcome.curve(outcome.best))


def _rates(outcome: Outcome) -> dict[str, Any]:
    """The final losses over the learning rates."""
    return _band(outcome.label, np.array(outcome.grid.rates), outcome.final)


def _band(label: str, at: Any, values: Any) -> dict[str, Any]:
    """A line of means over seeds, and the lowest and the highest."""
    lines = {"mean": values.mean(axis=-1), "low": values.min(axis=-1), "high": values.max(axis=-1)}
    finite = {key: [float(v) if math.isfinite(v) else None for v in line] for key, line in lines.items()}
    return {"label": label, "x": at.tolist(), **finite}


def partners(rule: Rule) -> list[str]:
    """The names of the rules that a wrapper goes around; empty for other rules."""
    return ["adam", "sgd", *rule.wraps][: len(rule.wraps)]


def whole(rule: Rule) -> Rule:
    """The rule itself, or the wrapper around its partners."""
    return rule(*map(load, partners(rule))) if rule.wraps else rule


#: Whole numbers of a slider, at most.
WHOLE = 20


def sliders(rule: Rule) -> list[dict[str, Any]]:
    """A slider for each hyper-parameter with a number as its default: name, values, and the default's place."""
    rows = []
    for name, hyper in rule.settings.items():
        if isinstance(hyper.default, int | float) and math.isfinite(hyper.default) and not hyper.decides:
            values = stops(name, hyper, float(hyper.default))
            rows.append({"name": name, "values": values, "at": values.index(float(hyper.default))})
    return rows


def stops(name: str, hyper: Hyper, default: float) -> list[float]:
    """Ascending values in the range of a hyper-parameter, its default among them."""
    if hyper.whole:
        first = math.ceil(hyper.min) if math.isfinite(hyper.min) else min(0, int(default))
        values = [float(first + i) for i in range(WHOLE)]
    elif name == "lr" or name.endswith("_lr"):
        values = [*_decades(-5, 1), *RATES]
    elif _is_part(hyper) and default >= 0.5:
        values = [0.0, *(1 - value for value in _decades(-4, -1)), 0.8, 0.7, 0.6, 0.5, 0.25]
    elif math.isfinite(_low(hyper)) and math.isfinite(_high(hyper)):
        values = [_low(hyper) + (_high(hyper) - _low(hyper)) * i / 40 for i in range(41)]
    elif default:
        power = math.log10(abs(default))
        values = [math.copysign(value, default) for value in _decades(round(power) - 3, round(power) + 3)]
        values += [0.0]
    else:
        values = [0.0, *_decades(-5, 0)]
    rounded = {float(f"{value:.12g}") for value in values}
    return sorted({value for value in rounded if _fits(hyper, value)} | {default})


def _decades(first: int, last: int) -> list[float]:
    """Numbers from one power of ten to another, nine in each."""
    return [float(f"{digit}e{power}") for power in range(first, last) for digit in range(1, 10)] + [10.0**last]


def _is_part(hyper: Hyper) -> bool:
    """Whether the range is that of an average's coefficient: at least 0 and below 1."""
    return hyper.min == 0 and hyper.below == 1


def _low(hyper: Hyper) -> float:
    return max(hyper.min, hyper.above)


def _high(hyper: Hyper) -> float:
    return min(hyper.max, hyper.below)


def _fits(hyper: Hyper, value: float) -> bool:
    return hyper.min <= value <= hyper.max and hyper.above < value < hyper.below
