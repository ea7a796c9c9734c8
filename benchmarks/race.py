"""`rulec bench race`: a grid of learning rates and seeds as one batch of runs, against the same runs one by one."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from benchmarks.kernels import threads
from benchmarks.result import Result, Row
from rulec.language.library.load import load
from rulec.tools.compare.measure import interleaved
from rulec.tools.race.outcome import Grid, grid
from rulec.tools.race.race import Contender
from rulec.tools.race.tasks import TASKS

RULES = ("adamw", "muon")
RATES, SEEDS = 8, 3
#: Steps of a sample, and samples.
STEPS, ROUNDS = 10, 5
QUICK_STEPS, QUICK_ROUNDS = 1, 1

MEASURE = "24 runs one by one, times as long as one batch"


def tasks() -> list[str]:
    """The measured tasks: all that come with rulec."""
    return [*TASKS]


def rules(only: Sequence[str] = ()) -> list[str]:
    """The rules that are measured."""
    return [name for name in RULES if not only or name in only]


def parts(only: Sequence[str] = ()) -> int:
    """The number of figures."""
    return len(tasks()) * len(rules(only))


def measure(quick: bool, only: Sequence[str] = (), advance: Callable[[], object] = lambda: None) -> Result:
    """The measurement; `advance` is called after each of its `parts`."""
    steps, rounds = (QUICK_STEPS, QUICK_ROUNDS) if quick else (STEPS, ROUNDS)
    rows = []
    for task in tasks():
        for rule in rules(only):
            rows.append(_row(task, rule, steps, rounds))
            advance()
    notes = [f"{RATES} learning rates x {SEEDS} seeds, {steps} steps of all runs by turns, model and optimizer"]
    return Result("race", rows, quick, threads(), notes)


def _row(task_name: str, rule_name: str, steps: int, rounds: int) -> Row:
    """The time of separate runs over that of a batch; every sample takes further steps of the same training."""
    task, rule, whole = TASKS[task_name](), load(rule_name), grid((1e-4, 1e-2), RATES, SEEDS)
    batch = Contender(rule_name, rule, whole, task)
    runs = [Grid((rate,), (seed,)) for rate in whole.rates for seed in whole.seeds]
    alone = [Contender(rule_name, rule, run, task) for run in runs]

    def one_by_one() -> None:
        for contender in alone:
            contender.advance(steps)

    times = interleaved({"batch": lambda: batch.advance(steps), "alone": one_by_one}, rounds)
    detail = {**times.medians(), "scatter": times.quartiles("alone", "batch")}
    return Row(f"{rule_name} on {task_name}", MEASURE, times.ratio("alone", "batch"), detail=detail)
