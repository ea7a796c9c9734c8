"""`rulec check`: the validity, costs and exactness of a rule."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Annotated, Any

import typer

from rulec.cli.arguments import DtypeOption, HyperOption, JsonFlag, RuleArgument, check_dtype, find_rule, numbers
from rulec.cli.console import MISTAKE, print_json, progress
from rulec.errors import BackendUnavailable, BackendUnsupported, RuleError

if TYPE_CHECKING:
    from rulec.compiler.ir import Program
    from rulec.language.rule import Rule, State


def check(
    rule: RuleArgument,
    dtype: DtypeOption = "float32",
    backend: Annotated[str, typer.Option("--backend", "-b", help="The backend to hold against the oracle.")] = "cpu",
    hyper: HyperOption = None,
    steps: Annotated[int, typer.Option(min=1, help="Steps to hold against the oracle.")] = 8,
    json: JsonFlag = False,
) -> None:
    """Check a rule: what it costs, and how exact it is.

    Validates the rule, lists a step's reads, writes, states, and hoisted and fused operations, and compares with 50
    digits. All mistakes of a rule file are reported.
    """
    from rulec.compare.trial import shapes_for
    from rulec.language.passes import parts_of
    from rulec.runtime.engine import default_hyper

    try:
        loaded = find_rule(rule)
    except RuleError as error:
        if json:
            print_json({"rule": rule, "mistakes": [_mistake(each) for each in (error, *error.others)]})
            raise typer.Exit(MISTAKE) from None
        raise
    if loaded.wraps:
        _report_wrapper(loaded, json)
        return
    values = default_hyper(loaded, numbers(hyper, "--hyper"))
    programs = {str(shape): _program_facts(loaded, shape, check_dtype(dtype)) for shape in shapes_for(loaded)}
    sides: list[dict[str, Any]] = []
    for part in parts_of(loaded):
        sides += _oracle(part, {key: values[key] for key in default_hyper(part, {})}, dtype, backend, steps)
    exact = {"steps": steps, "sides": sides}
    report = {"rule": loaded.name, "dtype": dtype, "programs": _distinct(programs), "oracle": exact}
    if json:
        print_json(report)
    else:
        _print(report)


def _mistake(error: RuleError) -> dict[str, Any]:
    """A mistake for scripts, with its place where that is known."""
    where = re.fullmatch(r"(.*):(\d+):(\d+)", error.place)
    at = {"file": where[1], "line": int(where[2]), "column": int(where[3])} if where else {}
    return {"message": error.message, **at}


def _report_wrapper(wrapper: Rule, json: bool) -> None:
    """Reports a wrapper, which has no program of its own: its costs depend on the rule inside."""
    if json:
        print_json({"rule": wrapper.name, "wraps": wrapper.wraps[0] if len(wrapper.wraps) == 1 else wrapper.wraps})
    else:
        typer.echo(f'{wrapper.name} is a valid wrapper: check "{wrapper.called}(adam)", or around another rule')


def _distinct(programs: Mapping[str, dict[str, Any]]) -> list[dict[str, Any]]:
    """The facts of the different programs, each with its shapes."""
    distinct: list[dict[str, Any]] = []
    for shape, facts in programs.items():
        same = next((f for f in distinct if {**f, "shapes": 0} == {**facts, "shapes": 0}), None)
        if same is None:
            distinct.append({**facts, "shapes": [shape]})
        else:
            same["shapes"].append(shape)
    return distinct


def _program_facts(rule: Rule, shape: Sequence[int], dtype: str) -> dict[str, Any]:
    from rulec.compare.traffic import traffic
    from rulec.compiler.grouping import view_of
    from rulec.compiler.layout import kernel_for
    from rulec.compiler.pipeline import compile
    from rulec.compiler.rings import ringed
    from rulec.compiler.routing import route
    from rulec.language.text import expression_text

    routed = route(rule, shape, set())
    program = compile(routed, view_of(routed, shape).facts)
    program, layout = kernel_for(ringed(program)[0] if program.skip is None else program, dtype)
    moved = traffic(program, layout)
    narrow = {b.name: _kept(routed.state[b.name]) for b in program.states if b.name not in moved.state}
    return {
        "rule": routed.name,
        "scope": scope(program),
        "stages": len(program.stages),
        "bytes_read": moved.read,
        "bytes_written": moved.written,
        "state_bytes": moved.state,
        "narrow_states": narrow,
        "hoisted": {c.name: expression_text(c.value) for c in program.scalars.columns},
        "scalar_states": {s.buffer: expression_text(s.value) for s in program.scalars.stores},
        "operations": moved.values,
        "stores": moved.stores,
        "bytes_moved": moved.total,
        "bytes_unfused": moved.unfused,
    }


def _kept(state: State) -> str:
    """The level of a state in words, or its own shape."""
    from rulec.language.text import expression_text

    if state.shape is None:
        return f"per {state.per}"
    return f"a matrix of {' by '.join(map(expression_text, state.shape))}"


def scope(program: Program) -> str:
    """The extent of one element's update: `elementwise`, or over its `tensor`, its `group`, the whole `model`."""
    levels = {str(join.arg) for join in program.joins}
    if levels:
        return "model" if "model" in levels else "group"
    return "elementwise" if program.elementwise else "tensor"


def _oracle(rule: Rule, hyper: Mapping[str, float], dtype: str, backend: str, steps: int) -> list[dict[str, Any]]:
    """The exactness of the reference and of the backend, in ulps, or the reason where it was not measured."""
    from rulec.compare.oracle import exactness
    from rulec.compare.trial import Trial, shapes_for

    shapes = shapes_for(rule)
    sides: list[dict[str, Any]] = []
    with progress() as shown:
        for name, trial in ((None, Trial("float64", steps, shapes)), (backend, Trial(dtype, steps, shapes))):
            task = shown.add_task(f"{name or 'reference'} against 50 digits", total=steps)
            try:
                measured = exactness(rule, hyper, trial, name, partial(shown.advance, task))
            except (RuleError, BackendUnsupported, BackendUnavailable) as error:
                result: dict[str, Any] = {"reason": str(error)}
            else:
                result = {"ulps": measured.ulps}
            sides.append(
                {"rule": rule.name, "side": name or "reference", "dtype": dtype if name else "float64", **result}
            )
    return sides


def _print(report: Mapping[str, Any]) -> None:
    print(f"{report['rule']} is a valid rule")
    for facts in report["programs"]:
        if len(report["programs"]) > 1 or facts["rule"] != report["rule"]:
            print(f"for tensors of shape {' and '.join(facts['shapes'])}, by {facts['rule']}:")
        _print_program(facts, report["dtype"])
    oracle = report["oracle"]
    print(f"  {'exactness':<11}{oracle['steps']} steps against 50 digits, largest distance in ulps")
    for side in oracle["sides"]:
        ulps = ", ".join(f"{name} {value:.1f}" for name, value in side.get("ulps", {}).items())
        of = "" if side["rule"] == report["rule"] else f"{side['rule']} by "
        print(f"{'':13}{of}{side['side']} in {side['dtype']}: {ulps or 'not run, ' + side['reason']}")


def _print_program(facts: Mapping[str, Any], dtype: str) -> None:
    stages = f"{facts['stages']} stage{'s' if facts['stages'] > 1 else ''}"
    _line("scope", f"{facts['scope']}, {stages}")
    _line("reads", f"{_bytes(facts['bytes_read'])} for each {dtype} parameter")
    _line("writes", _bytes(facts["bytes_written"]))
    narrow = "".join(f", {name} {kept}" for name, kept in facts["narrow_states"].items())
    _line("state", _bytes(facts["state_bytes"]) + narrow)
    scalars = {**facts["hoisted"], **{f"store {k}": v for k, v in facts["scalar_states"].items()}}
    _line("hoisted", f"{len(scalars)} scalars, in float64 once for each group and t" if scalars else "nothing")
    for name, text in scalars.items():
        print(f"{'':13}{name}" + (f" = {text}" if name != text else ""))
    saved = f"{facts['bytes_moved']} bytes moved; one at a time they would move {facts['bytes_unfused']}"
    _line("fused", f"{facts['operations']} operations and {facts['stores']} stores, {saved}")


def _line(title: str, text: str) -> None:
    print(f"  {title:<11}{text}")


def _bytes(buffers: Mapping[str, int]) -> str:
    return f"{sum(buffers.values())} bytes" + (f" ({', '.join(buffers)})" if buffers else "")
