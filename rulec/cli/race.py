"""`rulec race`: rules side by side on one task, over learning rates and seeds."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from rulec.cli.arguments import RULE_HELP, AllowUrlFlag, find_rule, rule_words
from rulec.cli.console import console, print_table
from rulec.cli.working import working
from rulec.errors import RulecError

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from rulec.language.rule import Rule
    from rulec.language.statistics import Watch
    from rulec.tools.race import Result


def race(
    rules: Annotated[list[str], typer.Argument(metavar="RULE...", help=RULE_HELP, autocompletion=rule_words)],
    task: Annotated[
        str,
        typer.Option(
            help="digits, char, cifar-like, rosenbrock, rastrigin or valley; or my.py:function, your own task in "
            "NumPy, torch or JAX. The file my.py is run, as any program of yours."
        ),
    ] = "digits",
    lr: Annotated[
        list[str] | None,
        typer.Option(
            metavar="LOW:HIGH",
            help="The lowest and the highest learning rate, 1e-4:1e-1 by default, or one rate; RULE=LOW:HIGH for one "
            "rule alone.",
        ),
    ] = None,
    rates: Annotated[int, typer.Option(help="Learning rates for each rule, spaced by equal ratios.")] = 8,
    seeds: Annotated[int, typer.Option(help="Seeds of first weights and data, for each learning rate.")] = 3,
    steps: Annotated[int | None, typer.Option(help="Steps of each run; the task has a number of its own.")] = None,
    budget: Annotated[
        str | None, typer.Option(metavar="TIME", help="A limit such as 30s or 5m: then all rules stop at one step.")
    ] = None,
    json: Annotated[Path | None, typer.Option(metavar="FILE", help="Write rows, runs and curves as JSON.")] = None,
    csv: Annotated[Path | None, typer.Option(metavar="FILE", help="Write a line for each run as CSV.")] = None,
    html: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Write a page with interactive plots, in one file; with plotly.")
    ] = None,
    watch: Annotated[
        list[str] | None,
        typer.Option(
            metavar="NAME",
            help="A statistic to draw a curve of for each rule that has it, such as update_norm of the set norms; "
            "or norms, or ratio='norm(update)/norm(p)'. May be repeated.",
        ),
    ] = None,
    allow_url: AllowUrlFlag = False,
) -> None:
    """Race rules: train each at many learning rates, and compare.

    Every rule has the same first weights, data, steps and number of runs. The table has the best learning rate of each,
    its final loss and the spread over seeds, and how wide the range of good rates is.
    """
    from rulec.tools.race.outcome import seconds_of, spans_of

    if watch and not (json or html):
        raise RulecError("--watch draws curves on a page: give --html FILE, or --json FILE for their numbers")
    _check_files(json, csv, html)
    named = _contenders(rules, allow_url)
    limit = None if budget is None else seconds_of(budget)
    spans, watched = spans_of(lr or []), _watch(watch or [])
    result = _run(named, steps, task=task, lr=spans, rates=rates, seeds=seeds, budget=limit, watch=watched)
    _print(result)
    for path, write in ((json, result.json), (csv, result.csv), (html, result.html)):
        if path is not None:
            write(path)
            print(f"wrote {path}")


def _watch(texts: Sequence[str]) -> Watch:
    """The statistics of `--watch`: names that rules declare, or else expressions by name.

    RulecError for both, which no single rule decides.
    """
    from rulec.language.statistics import NORMS, SETS

    expressions: dict[str, str] = {}
    for text in texts:
        name, equals, expression = text.partition("=")
        expressions |= {name.strip(): expression.strip()} if equals else SETS.get(name, {})
        expressions |= {name: NORMS[name]} if name in NORMS else {}
    declared = [text for text in texts if "=" not in text and text not in SETS and text not in NORMS]
    if declared and expressions:
        raise RulecError(f"--watch {declared[0]} is a name that rules declare: leave the expressions out")
    return declared or expressions


def _contenders(texts: Sequence[str], allow_url: bool) -> dict[str, Rule]:
    """The rules of the race by the names that its table shows; RulecError where one comes twice."""
    from rulec.language.library.remote import shown

    labels = [shown(text) for text in texts]
    repeated = {label for label in labels if labels.count(label) > 1}
    if repeated:
        raise RulecError(f"{min(repeated)} is in the race twice: give each rule once")
    return {label: find_rule(text, allow_url) for label, text in zip(labels, texts, strict=True)}


def _run(named: Mapping[str, Rule], steps: int | None, **options: Any) -> Result:
    """The race; `options` are further arguments of `rulec.tools.race.race`."""
    from rulec.tools.race import race as run
    from rulec.tools.race.race import PARTS

    with working() as shown:
        shown.begin(f"racing {', '.join(named)}", min(PARTS, steps or PARTS) * len(named))
        return run(named, steps=steps, advance=lambda label: shown.advance(), **options)


def _check_files(json: Path | None, csv: Path | None, html: Path | None) -> None:
    """RulecError, before minutes are spent, where a file could not be written, or plotly is missing."""
    from rulec.tools.race import page

    if html is not None:
        page.check()
    for path in (json, csv, html):
        _check_file(path)


def _check_file(path: Path | None) -> None:
    """RulecError where the file could not be written."""
    if path is None:
        return
    if os.path.isdir(path):
        raise RulecError(f"{path} is a folder: name a file")
    try:
        os.stat(path)
    except FileNotFoundError:
        pass
    except OSError as error:
        raise RulecError(f"{path} cannot be written: {error.strerror}") from None
    above = next(folder for folder in path.absolute().parents if os.path.exists(folder))
    if not os.path.isdir(above) or not os.access(above, os.W_OK):
        raise RulecError(f"{path} cannot be written: {above} is no folder that can be written to")


def _print(result: Result) -> None:
    from rich.markup import escape

    from rulec.tools.race import page as report

    out = console()
    out.print(report.title(result.task, result.outcomes), style="bold")
    headings = report.columns(result.outcomes)
    rows = [[escape(cell) for cell in report.cells(outcome)] for outcome in result.outcomes]
    print_table(headings, rows, right=("diverged", "seconds"))
    for note in report.notes(result.outcomes):
        out.print(note)
