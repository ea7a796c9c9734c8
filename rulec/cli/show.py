"""`rulec show`: the kernel of a rule for any backend, and its other forms, on any machine."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, cast, get_args

import typer

from rulec.cli.arguments import (
    AllowUrlFlag,
    BackendOption,
    DtypeOption,
    JsonFlag,
    RuleArgument,
    StateDtypeOption,
    WatchOption,
    WeightsOption,
    check_dtype,
    check_state_dtypes,
    find_rule,
    watch_of,
)
from rulec.cli.console import print_json, print_source
from rulec.errors import RulecError

if TYPE_CHECKING:
    from rulec.backend.capabilities import Values
    from rulec.compiler.ir import Program
    from rulec.compiler.layout import Layout
    from rulec.language.rule import Rule
    from rulec.language.statistics import Watch
    from rulec.runtime.storage.options import Storage


def show(
    rule: RuleArgument,
    backend: BackendOption = "cpu",
    dtype: DtypeOption = "float32",
    state_dtype: StateDtypeOption = "",
    weights: WeightsOption = "",
    watch: WatchOption = None,
    epilogue: Annotated[
        bool, typer.Option("--epilogue", help="Show the kernel that makes a gradient, a product, and updates with it.")
    ] = False,
    estimate: Annotated[
        str, typer.Option(help="Show the kernel whose gradient is noise: normal, popcount or rademacher.")
    ] = "",
    passes: Annotated[bool, typer.Option("--passes", help="Show the program after each pass instead.")] = False,
    latex: Annotated[bool, typer.Option("--latex", help="Show the mathematics as LaTeX instead.")] = False,
    yaml: Annotated[bool, typer.Option("--yaml", help="Show the rule as one rule file instead.")] = False,
    assembly: Annotated[
        bool, typer.Option("--assembly", help="Show the machine code of the kernel instead, of cpu or c.")
    ] = False,
    analysis: Annotated[bool, typer.Option("--analysis", help="Show what is proved about the rule instead.")] = False,
    allow_url: AllowUrlFlag = False,
    json: JsonFlag = False,
) -> None:
    """Show the kernel that a rule becomes, for any backend.

    With --watch it shows the kernel that measures statistics, and their costs beside the step without them. Other
    options show the kernel with the rule as the epilogue of a product, the kernel with noise as its gradient, or the
    machine code for this processor. They also show the program after each pass, the mathematics as LaTeX, the rule
    as a rule file, or what is proved about it.
    """
    from rulec.tools.display.assembly import kernel_assembly
    from rulec.tools.display.kernels import COMMENTS, LANGUAGES, kernel_source

    loaded, language = find_rule(rule, allow_url), LANGUAGES.get(backend, "python")
    if passes:
        asked = watch_of(loaded, watch)
        kind, text, language = "passes", _passes(loaded, check_dtype(dtype), state_dtype, asked), "python"
    elif latex:
        kind, text, language = "latex", loaded.latex(), "latex"
    elif yaml:
        kind, text, language = "yaml", loaded.to_yaml(), "yaml"
    elif analysis:
        kind, text, language = "analysis", str(loaded.analysis), "text"
    elif assembly:
        kind, language = "assembly", "nasm"
        text = kernel_assembly(
            loaded, backend, check_dtype(dtype), _storage(state_dtype, weights), watch_of(loaded, watch)
        )
    elif epilogue:
        kind, text, language = "epilogue", _epilogue(loaded, backend, check_dtype(dtype), state_dtype), "python"
    elif estimate:
        kind, text = "estimate", _estimate(loaded, backend, estimate, check_dtype(dtype), state_dtype)
    else:
        kind, asked = "source", watch_of(loaded, watch)
        text = kernel_source(loaded, backend, check_dtype(dtype), _storage(state_dtype, weights), asked)
        text = "".join(f"{COMMENTS[language]} {line}\n" for line in _costs(loaded, dtype, asked)) + text
    if json:
        printed = backend if kind in ("source", "assembly", "epilogue", "estimate") else None
        print_json({"rule": loaded.name, "kind": kind, "backend": printed, "text": text})
    else:
        print_source(text, language)


def _costs(rule: Rule, dtype: str, watch: Watch) -> list[str]:
    """A line of the costs of the statistics for each program of the rule; none without statistics."""
    from rulec.tools.display.kernels import costs_of, statistics_line

    programs = costs_of(rule, dtype, watch) if watch else []
    return [
        f"{', '.join(facts['names'])} of {' and '.join(each['shapes'])}: {statistics_line(facts)}"
        for each in programs
        if (facts := each["statistics"])["names"]
    ]


def _epilogue(rule: Rule, backend: str, dtype: str, state_dtype: str) -> str:
    from rulec.backend import registry
    from rulec.backend.capabilities import capabilities_of
    from rulec.tools.display.kernels import program_of

    kernels = capabilities_of(registry.get(backend)).epilogue
    if kernels is None:
        raise RulecError(f"--epilogue shows a kernel that triton has and {backend} has not: give --backend triton")
    program = program_of(rule, dtype, _storage(state_dtype))
    return kernels.emit_epilogue(program, _floats(program, dtype, state_dtype), dtype)


def _estimate(rule: Rule, backend: str, values: str, dtype: str, state_dtype: str) -> str:
    from rulec.backend import registry
    from rulec.backend.capabilities import Values, capabilities_of
    from rulec.language.source import did_you_mean
    from rulec.tools.display.kernels import program_of

    kinds = get_args(Values)
    if values not in kinds:
        raise RulecError(f"there is no noise {values!r}{did_you_mean(values, kinds)}: give {', '.join(kinds)}")
    kernels = capabilities_of(registry.get(backend)).estimate
    if kernels is None:
        raise RulecError(f"--estimate shows a kernel that cpu, c, cupy and triton have and {backend} has not")
    program = program_of(rule, dtype, _storage(state_dtype))
    return kernels.emit_estimate(program, _floats(program, dtype, state_dtype), cast("Values", values))


def _storage(state_dtype: str, weights: str = "") -> Storage:
    from rulec.runtime.storage.options import Storage

    return Storage(check_state_dtypes(state_dtype), weights)


def _floats(program: Program, dtype: str, state_dtype: str) -> Layout:
    """A layout without codes; RulecError for a format."""
    from rulec.tools.display.kernels import layout_of

    layout = layout_of(program, dtype, _storage(state_dtype))
    if layout.formats:
        raise RulecError(f"no such kernel takes states in codes, as {state_dtype} is: leave out --state-dtype")
    return layout


def _passes(rule: Rule, dtype: str, state_dtype: str, watch: Watch = ()) -> str:
    from rulec.compiler.pipeline import DEFAULT_FACTS, passes
    from rulec.compiler.text import program_text
    from rulec.compiler.view import static_defaults
    from rulec.language.statistics import watched
    from rulec.tools.display.kernels import layout_of

    rule, storage = rule.standalone() if watch else rule, _storage(state_dtype)
    memory = storage.memory_of(rule, dtype)
    programs = passes(
        rule,
        DEFAULT_FACTS,
        static_defaults(rule),
        layout=lambda p: layout_of(p, dtype, storage),
        memory=memory,
        watch=watched(rule, watch),
    )
    return "\n\n".join(f"# after {name}\n{program_text(program)}" for name, program in programs)
