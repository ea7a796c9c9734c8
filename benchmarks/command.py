"""The command line of the measurements, `rulec bench`."""

from __future__ import annotations

import os
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from benchmarks.gpu.asked import FIRST, Asked
from benchmarks.gpu.names import PARTS
from rulec.cli.console import console, fail, json_text, print_json, print_table, progress, write_text
from rulec.cli.examples import epilog
from rulec.errors import RulecError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from benchmarks.result import Result, Row

app = typer.Typer(name="bench", pretty_exceptions_enable=False, rich_markup_mode=None, add_completion=False)


@app.command(epilog=epilog("bench"))
def bench(
    what: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="[WHAT]",
            help="rules, reductions, matrices, orthogonal, many, watch, offload, start, memory, mesh, states, es, "
            "race, jax, gpu, all.",
        ),
    ] = None,
    quick: Annotated[bool, typer.Option("--quick", help="Sizes too small to count: does it run?")] = False,
    rule: Annotated[list[str] | None, typer.Option(help="Restrict those of rules to this one; repeatable.")] = None,
    json: Annotated[
        Path | None,
        typer.Option(metavar="PATH", help="Write results to a .json file, or into a folder; - prints them."),
    ] = None,
    page: Annotated[
        Path | None, typer.Option(help="Write the manual's page of the results in the --json folder here.")
    ] = None,
    tune: Annotated[
        bool, typer.Option("--tune", help="With gpu: find block sizes and write the triton backend's table of them.")
    ] = False,
    part: Annotated[
        list[str] | None,
        typer.Option(help=f"With gpu: measure this part alone; repeatable. There are {', '.join(PARTS)}."),
    ] = None,
    first: Annotated[
        str,
        typer.Option(metavar="LOOK", help=f"With gpu: a first look of five minutes, {' or '.join(FIRST)}."),
    ] = "",
    seconds: Annotated[
        float | None, typer.Option(min=1, help="With gpu: end within so many seconds; 500 where nothing is said.")
    ] = None,
    chart: Annotated[Path | None, typer.Option(help="With memory or states: draw the results, as a PNG, here.")] = None,
) -> None:
    """Measure speed and memory: ratios within this run.

    Of kernels, steps, start and memory, against the targets that the project set itself. Exit code 1 where a GPU or
    JAX is asked for and there is none.
    """
    asked = Asked(part or (), first, tune, seconds)
    from benchmarks.suite import measurement, usual

    # torch's profiler, which counts allocations, tells stderr when it starts; it reads this when torch is imported.
    os.environ.setdefault("KINETO_LOG_LEVEL", "99")
    _check_paths(json, page)
    _check_rules(rule)
    _check_gpu(what, asked, rule or ())
    if chart is not None and what not in (["memory"], ["states"]):
        raise RulecError("--chart is of one measurement, memory or states: rulec bench memory --chart PATH")
    names = what or usual()
    _check_there(names)
    results: list[Result] = []
    keep = partial(_keep, results, json, _recorded(names, json, quick, rule or [], asked))
    chosen = [measurement(name, quick, rule or (), keep, asked) for name in names]
    for one in chosen:
        with progress() as shown:
            task = shown.add_task(one.name, total=one.parts)
            done = one.run(partial(shown.advance, task))
        keep(done)
        results.append(done)
        if json != Path("-"):
            _print(results[-1])
    if json == Path("-"):
        print_json([result.data() for result in results])
    if chart is not None:
        _draw(results[0], chart)
    if page is not None and json is not None:
        from benchmarks.page import write

        write(page, json)


def _draw(result: Result, path: Path) -> None:
    """Writes the picture of a result of memory or states."""
    if result.name == "memory":
        from benchmarks.memory.chart import draw
    else:
        from benchmarks.states_chart import draw
    draw(result, path)


def _check_paths(json: Path | None, page: Path | None) -> None:
    """RulecError, before an hour is spent, where the results could not be written."""
    if page is not None and (json is None or json == Path("-") or json.suffix == ".json"):
        raise RulecError("--page needs the folder of the results: give --json FOLDER too")


def _check_gpu(what: list[str] | None, asked: Asked, rules: Sequence[str]) -> None:
    """RulecError for an option of the measurement on a GPU without it, or with two of them."""
    options = {
        "--tune": asked.tune, "--part NAME": asked.parts, "--first LOOK": asked.first, "--seconds N": asked.seconds,
    }  # fmt: skip
    for option, value in options.items():
        if value and what != ["gpu"]:
            alone = "is of the measurement on a GPU alone"
            raise RulecError(f"{option.partition(' ')[0]} {alone}: rulec bench gpu {option}")
    asked.check(rules)


def _recorded(names: list[str], path: Path | None, quick: bool, rules: list[str], asked: Asked) -> Result | None:
    """The results on a GPU that the file has already, and keeps beside new ones; None where it has none."""
    alone = names == ["gpu"] or (path is not None and path.suffix != ".json")
    if path is None or path == Path("-") or "gpu" not in names or asked.tune or not alone:
        return None
    from benchmarks.gpu import merge
    from benchmarks.result import read_result

    file = path if path.suffix == ".json" else path / f"{asked.result}.json"
    if not file.is_file():
        return None
    before = read_result(file)
    merge.check(before, str(file), quick, rules, asked.result)
    return before


def _check_there(names: list[str]) -> None:
    """A sentence and exit code 1 where a measurement needs a GPU or JAX and there is none."""
    from benchmarks.gpu import device as gpu_device
    from benchmarks.jax import measure as jax

    for name, missing in (("gpu", gpu_device.missing), ("jax", jax.missing)):
        reason = missing() if name in names else None
        if reason is not None:
            fail(reason)
            raise typer.Exit(1)


def _check_rules(names: list[str] | None) -> None:
    from rulec.language.library.load import rules
    from rulec.language.source import did_you_mean

    for name in names or ():
        if name not in rules():
            raise RulecError(f"there is no library rule {name!r}{did_you_mean(name, rules())} (`rulec list`)")


def _keep(done: list[Result], path: Path | None, before: Result | None, so_far: Result) -> None:
    """Writes the results of a measurement, finished or under way, beside those before it; no failure loses them.

    Results on a GPU are written with the results `before`, of other runs.
    """
    if path is None or path == Path("-"):
        return
    if before is not None and so_far.name == before.name:
        from benchmarks.gpu.merge import merged

        so_far = merged(before, so_far)
    results = [*done, so_far]
    data = [result.data() for result in results]
    if path.suffix == ".json":
        write_text(path, json_text(data[0] if len(data) == 1 else data) + "\n")
        return
    for result in results:
        write_text(path / f"{result.name}.json", json_text(result.data()) + "\n")


def _print(result: Result) -> None:
    from benchmarks.page import figure, target

    quick = " (quick: these figures do not count)" if result.quick else ""
    out = console()
    out.print(f"{result.name}, {result.threads} threads{quick}", style="bold")
    for note in result.remarks:
        out.print(f"  {note}", markup=False)
    rows = [[row.subject, row.measure, figure(row), target(row), _mark(row)] for row in result.rows]
    print_table(("", "figure", "measured", "target", " "), rows, right=("measured", "target"))
    out.print()


def _mark(row: Row) -> str:
    if row.met is None:
        return ""
    return "[green]met[/]" if row.met else "[red]missed[/]"
