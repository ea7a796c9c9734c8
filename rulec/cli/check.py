"""`rulec check`: the validity, costs and exactness of a rule."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import TYPE_CHECKING, Annotated, Any

import typer

from rulec.cli import arguments
from rulec.cli.console import MISTAKE, fail, print_json, warn
from rulec.cli.working import Working, shapes_text, working
from rulec.errors import BackendUnavailable, BackendUnsupported, RuleError

if TYPE_CHECKING:
    from rulec.language.rule import Rule
    from rulec.language.statistics import Watch
    from rulec.tools.compare.oracle import Exactness


def check(
    rule: arguments.RuleArgument,
    dtype: arguments.DtypeOption = "float32",
    backend: Annotated[str, typer.Option("--backend", "-b", help="The backend to hold against the oracle.")] = "cpu",
    hyper: arguments.HyperOption = None,
    steps: Annotated[int, typer.Option(min=1, help="Steps to hold against the oracle.")] = 8,
    watch: arguments.WatchOption = None,
    strict: Annotated[bool, typer.Option("--strict", help="A warning is an error.")] = False,
    allow_url: arguments.AllowUrlFlag = False,
    json: arguments.JsonFlag = False,
) -> None:
    """Check a rule: what it costs, and how exact it is.

    Validates the rule, lists a step's reads, writes, states, and hoisted and fused operations, and compares with 50
    digits. All mistakes of a rule file are reported, and warnings of what nothing reads. With --watch it says what the
    statistics cost, beside the step without them, and how exact they are. Each variant of a rule is checked.
    """
    from rulec.language.check import unread
    from rulec.language.variants import variants_of

    try:
        loaded = arguments.find_rule(rule, allow_url)
    except RuleError as error:
        if json:
            print_json({"rule": rule, "mistakes": [_mistake(each) for each in (error, *error.others)]})
            raise typer.Exit(MISTAKE) from None
        raise
    warnings = unread(loaded)
    if strict and warnings and json:
        print_json({"rule": loaded.name, "mistakes": [*map(_mistake, warnings)]})
    for each in [] if json else warnings:
        (fail if strict else warn)(str(each))
    if strict and warnings:
        raise typer.Exit(MISTAKE)
    if loaded.wraps:
        _report_wrapper(loaded, warnings, json)
        return
    with working() as shown:
        reports = {
            name: _measured(name, each, hyper, dtype, backend, steps, watch, shown)
            for name, each in variants_of(loaded, loaded.name).items()
        }
    if json:
        whole = reports.get(loaded.name) or {"rule": loaded.name, "dtype": dtype, "variants": reports}
        print_json({**whole, "warnings": [*map(_mistake, warnings)]})
    else:
        for name, report in reports.items():
            _print(name, report)
    beyond = [far for report in reports.values() for far in report["oracle"]["beyond"]]
    for far in beyond:
        fail(
            f"{far['side']} is wrong: {far['name']} of {far['rule']} in float64 is {far['ulps']:.6g} ulps from 50 "
            f"digits, and the bound is {far['bound']:.6g}: choose another backend by --backend, and report this one"
        )
    if beyond:
        raise typer.Exit(1)


def _measured(
    name: str, rule: Rule, hyper: list[str] | None, dtype: str, backend: str, steps: int, watch: list[str] | None,
    shown: Working,
) -> dict[str, Any]:  # fmt: skip
    """The costs and the exactness of a rule, or of one of its variants, known by a name."""
    from rulec.language.evaluations import parts_of
    from rulec.runtime.engine import default_hyper
    from rulec.tools.display.kernels import costs_of

    values = arguments.hyper_values(rule, hyper)
    programs = costs_of(rule, arguments.check_dtype(dtype), arguments.watch_of(rule, watch))
    sides: list[dict[str, Any]] = []
    beyond: list[dict[str, Any]] = []
    parts = parts_of(rule)
    for place, part in enumerate(parts, 1):
        # The statistics of a rule with passes are of its last point.
        asked = arguments.watch_of(rule, watch) if place == len(parts) else []
        mine = {key: values[key] for key in default_hyper(part, {})}
        label = name if len(parts) == 1 else part.name
        measured = _oracle(label, part, mine, dtype, backend, steps, asked, shown)
        sides, beyond = sides + measured[0], beyond + measured[1]
    exact = {"steps": steps, "sides": sides, "beyond": beyond}
    return {"rule": rule.name, "dtype": dtype, "programs": programs, "oracle": exact}


def _mistake(error: RuleError) -> dict[str, Any]:
    """A mistake for scripts, with its place where that is known."""
    where = re.fullmatch(r"(.*):(\d+):(\d+)", error.place)
    at = {"file": where[1], "line": int(where[2]), "column": int(where[3])} if where else {}
    return {"code": error.code, "message": error.message, **at}


def _report_wrapper(wrapper: Rule, warnings: list[RuleError], json: bool) -> None:
    """Reports a wrapper, which has no program of its own: its costs depend on the rule inside."""
    if json:
        wraps = wrapper.wraps[0] if len(wrapper.wraps) == 1 else wrapper.wraps
        print_json({"rule": wrapper.name, "wraps": wraps, "warnings": [*map(_mistake, warnings)]})
    else:
        typer.echo(f'{wrapper.name} is a valid wrapper: check "{wrapper.called}(adam)", or around another rule')


def _oracle(
    label: str, rule: Rule, hyper: Mapping[str, float], dtype: str, backend: str, steps: int, watch: Watch,
    shown: Working,
) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:  # fmt: skip
    """The exactness of the reference and of the backend, in ulps, or the reason where it was not measured.

    Second are the backend's values beyond the bounds, in float64.
    """
    from rulec.tools.compare.difference import Trial, shapes_for
    from rulec.tools.compare.oracle import beyond_bounds, exactness_of_all

    shapes = shapes_for(rule)
    measured: dict[tuple[str | None, str], Exactness] = {}
    reasons: dict[str | None, str] = {}
    tries: list[tuple[str, list[str | None]]] = [("float64", [None, backend])]
    tries += [(dtype, [backend])] if dtype != "float64" else []
    for place, (kind, names) in enumerate(tries, 1):
        what = ", ".join((" and ".join(n or "reference" for n in names), kind, shapes_text(shapes)))
        for group in (names, names[:1]) if len(names) > 1 else (names,):
            shown.begin(f"{label} beside 50 digits, {what}", steps, place, len(tries))
            try:
                results = exactness_of_all(rule, hyper, Trial(kind, steps, shapes), group, shown.advance, watch)
            except (RuleError, BackendUnsupported, BackendUnavailable) as error:
                reasons[group[-1]] = str(error)
            else:
                measured |= {(name, kind): each for name, each in zip(group, results, strict=True)}
                break
    sides: list[dict[str, Any]] = []
    for name, kind in ((None, "float64"), (backend, dtype)):
        side = measured.get((name, kind))
        result: dict[str, Any] = {"reason": reasons.get(name, "")} if side is None else {"ulps": side.ulps}
        if side is not None and watch:
            result["statistics"] = side.statistics
        sides.append({"rule": rule.name, "side": name or "reference", "dtype": kind, **result})
    ours, reference = measured.get((backend, "float64")), measured.get((None, "float64"))
    far = [] if ours is None or reference is None else beyond_bounds(ours, reference)
    return sides, [
        {"rule": rule.name, "side": backend, "name": x.name, "ulps": x.distance, "bound": x.bound} for x in far
    ]


def _print(name: str, report: Mapping[str, Any]) -> None:
    from rulec.tools.display.kernels import cost_lines

    print(f"{name} is a valid rule")
    for facts in report["programs"]:
        if len(report["programs"]) > 1 or facts["rule"] != report["rule"]:
            print(f"for tensors of shape {' and '.join(facts['shapes'])}, by {facts['rule']}:")
        for title, line in cost_lines(facts, report["dtype"]):
            _line(title, line)
    oracle = report["oracle"]
    print(f"  {'exactness':<11}{oracle['steps']} steps against 50 digits, largest distance in ulps")
    for side in oracle["sides"]:
        ulps = ", ".join(f"{name} {value:.1f}" for name, value in side.get("ulps", {}).items())
        measured = ", ".join(f"{name} {value:.1f}" for name, value in side.get("statistics", {}).items())
        of = "" if side["rule"] == report["rule"] else f"{side['rule']} by "
        print(f"{'':13}{of}{side['side']} in {side['dtype']}: {ulps or 'not run, ' + side['reason']}")
        if measured:
            print(f"{'':15}statistics: {measured}")


def _line(title: str, text: str) -> None:
    print(f"  {title:<11}{text}")
