"""`rulec trace`: the value of every line of a step, in the reference and beside it in a backend."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any

import typer

from rulec.cli import arguments
from rulec.cli.console import console, print_json
from rulec.errors import BackendUnsupported, RulecError

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from rulec.language.rule import Rule
    from rulec.language.statistics import Watch
    from rulec.tools.compare.difference import Trial
    from rulec.tools.compare.lines import TracedStep
    from rulec.tools.compare.sides import Array


def trace(
    rule: arguments.RuleArgument,
    steps: Annotated[int, typer.Option(min=1, help="How many steps.")] = 3,
    backend: Annotated[
        str, typer.Option("--backend", "-b", help="The backend beside the reference; `none` for the reference alone.")
    ] = "cpu",
    dtype: arguments.DtypeOption = "float32",
    shape: Annotated[str, typer.Option(help="The tensor's shape, as in 3 or 2x4.")] = "3",
    hyper: arguments.HyperOption = None,
    seed: Annotated[int, typer.Option(help="Chooses the numbers.")] = 0,
    watch: arguments.WatchOption = None,
    allow_url: arguments.AllowUrlFlag = False,
    json: arguments.JsonFlag = False,
) -> None:
    """Show the value of every line of a step.

    For a small tensor: by the float64 reference, by a backend beside it, and their distance in ulps. Gradients and
    inputs are random numbers, also those at the passes of a rule. With --watch each step shows its statistics too, in
    float64 and by the backend.
    """
    from rulec.backend import registry
    from rulec.compiler.routing import written_for
    from rulec.tools.compare.difference import Trial

    whole, extent = arguments.find_rule(rule, allow_url), read_shape(shape)
    values = arguments.hyper_values(whole, hyper)
    trial = Trial(arguments.check_dtype(dtype), steps, (extent,), seed)
    routed = written_for(whole, extent).in_one()
    beside = None if backend == "none" else registry.usable(backend).name
    traced, reason = _traced(routed, values, trial, beside, arguments.watch_of(routed, watch))
    beside = None if reason else beside
    if json:
        print_json(_data(routed, trial.params[0], traced, beside, dtype))
        return
    if routed.name != whole.name:
        print(f"a tensor of shape {extent} goes to {routed.name}")
    if reason:
        print(f"the reference alone: {reason}")
    _print(trial.params[0], traced, beside, dtype)


def _traced(
    rule: Rule, values: Mapping[str, float], trial: Trial, backend: str | None, watch: Watch
) -> tuple[Sequence[TracedStep], str]:
    """The steps over a trial's only tensor, and why they are of the reference alone where the backend refuses them."""
    from rulec.tools.compare import lines

    kept = lines.keep_lines(rule, trial.shapes[0])
    hyper = {name: value for name, value in values.items() if name in rule.hyper}
    gradients = [gradient for (gradient,) in trial.gradients()]
    inputs = [*trial.inputs(kept.rule)] if kept.rule.inputs else []
    try:
        return lines.trace(kept, hyper, trial.params[0], gradients, backend, inputs, watch), ""
    except BackendUnsupported as error:
        return lines.trace(kept, hyper, trial.params[0], gradients, None, inputs, watch), str(error)


def read_shape(text: str) -> tuple[int, ...]:
    """`2x4` as `(2, 4)`; RulecError for anything else, and for more numbers than anyone reads."""
    parts = text.lower().split("x")
    if not all(part.isdecimal() and int(part) for part in parts):
        raise RulecError(f"--shape {text!r} is no shape: write 3 or 2x4")
    shape = tuple(int(part) for part in parts)
    count = 1
    for extent in shape:
        count *= extent
    if count > 64:
        raise RulecError(f"--shape {text} has {count} elements, more than the 64 that a trace shows")
    return shape


def _data(rule: Rule, start: Array, traced: Sequence[TracedStep], backend: str | None, dtype: str) -> dict[str, Any]:
    return {
        "rule": rule.name, "backend": backend, "dtype": dtype, "p": start.astype(float).tolist(),
        "steps": [
            {
                "g": step.gradient.astype(float).tolist(),
                "inputs": {name: value.astype(float).tolist() for name, value in step.inputs.items()},
                "lines": [
                    {
                        "line": v.line.text, "target": v.line.target, "reference": v.reference.tolist(),
                        "backend": None if v.backend is None else v.backend.astype(float).tolist(),
                        "ulps": None if v.ulps(dtype) is None else v.ulps(dtype),
                    }
                    for v in step.values
                ],
                "statistics": {
                    s.name: {
                        "reference": s.reference.tolist(), "backend": None if s.backend is None else s.backend.tolist(),
                    }
                    for s in step.statistics
                },
            }
            for step in traced
        ],
    }  # fmt: skip


def _print(start: Array, traced: Sequence[TracedStep], backend: str | None, dtype: str) -> None:
    out = console()
    out.print(f"p = {_numbers(start)}", markup=False)
    seen = False
    for number, step in enumerate(traced, 1):
        out.print(f"\nstep {number}", style="bold")
        for name, read in {"g": step.gradient, **step.inputs}.items():
            out.print(f"  {name} = {_numbers(read)}", markup=False)
        for value in step.values:
            ulps = value.ulps(dtype)
            first = bool(ulps) and not seen
            seen = seen or first
            style = "yellow" if first else None
            out.print(f"  {value.line.text}", style=style, markup=False)
            out.print(f"      reference  {_numbers(value.reference, value.line.narrow)}", style="dim", markup=False)
            if value.backend is not None and ulps is not None:
                mark = "  <- the first difference" if first else ""
                shown = _numbers(value.backend, value.line.narrow)
                out.print(f"      {backend:<9}  {shown}  {ulps:.1f} ulp{mark}", style=style, markup=False)
        for each in step.statistics:
            out.print(f"  statistic {each.name}", markup=False)
            out.print(f"      reference  {_numbers(each.reference)}", style="dim", markup=False)
            if each.backend is not None:
                out.print(f"      {backend:<9}  {_numbers(each.backend)}", markup=False)


def _numbers(values: Array, narrow: bool = False) -> str:
    flat = values.astype(float).reshape(-1)
    return " ".join(f"{x:>15.9g}" for x in (flat[:1] if narrow else flat))
