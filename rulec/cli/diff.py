"""`rulec diff`: the differences between a rule and another implementation."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any

import typer

from rulec.cli.arguments import AllowUrlFlag, DtypeOption, HyperOption, JsonFlag, RuleArgument, find_rule, hyper_values
from rulec.cli.console import print_json
from rulec.cli.working import Working, shapes_text, working
from rulec.errors import RulecError, RuleError

if TYPE_CHECKING:
    from rulec.language.rule import Rule
    from rulec.tools.compare.difference import Differences, Trial
    from rulec.tools.compare.sides import Array, Side


def diff(
    rule: RuleArgument,
    against: Annotated[
        str,
        typer.Option(metavar="THEIRS", help="torch.optim.NAdam, optax.nadam, package.module:Class, or another rule."),
    ],
    steps: Annotated[int, typer.Option(min=1, help="How many steps.")] = 25,
    hyper: HyperOption = None,
    theirs: Annotated[
        list[str] | None, typer.Option("--theirs", metavar="KEYWORD=VALUE", help="A keyword of theirs; repeatable.")
    ] = None,
    backend: Annotated[
        str,
        typer.Option("--backend", "-b", help="How ours runs: a backend or `reference`."),
    ] = "cpu",
    dtype: DtypeOption = "float64",
    tolerance: Annotated[
        float | None, typer.Option(help="Differences up to this are rounding, in parts of a tensor's largest value.")
    ] = None,
    seed: Annotated[int, typer.Option(help="Chooses the numbers.")] = 0,
    allow_url: AllowUrlFlag = False,
    json: JsonFlag = False,
) -> None:
    """Find where a rule and another implementation differ.

    Says the largest difference, and the first step and value that differ. Then it says how far each side is
    from the rule's formulas in 50 digits. Exit code 0 where they agree, 1 where not.
    """
    from rulec.tools.compare.difference import TOLERANCE, Trial, compare, order_of_values, shapes_for
    from rulec.tools.compare.sides import check_inputs

    if dtype not in TOLERANCE:
        raise RulecError(f"a comparison runs in {' or '.join(TOLERANCE)}, not in {dtype!r}")
    ours = find_rule(rule, allow_url)
    check_inputs(ours)
    # Another library's class has one rule for all tensors: ours is held against it on those it is for.
    trial = Trial(dtype, steps, shapes_for(ours, itself=not _is_rule(against)), seed)
    values = hyper_values(ours, hyper, dtype)
    allowed = TOLERANCE[dtype] if tolerance is None else tolerance
    other = _theirs(against, ours, values, keywords(theirs), allow_url)
    mine = _ours(ours, values, backend)
    with working() as shown:
        shown.begin(f"{ours.name} beside {against}, {backend}, {dtype}, {shapes_text(trial.shapes)}", steps)
        sides = mine(trial.params), other.start(trial.params)
        order = order_of_values(ours.standalone())
        differences = compare(*sides, trial, order, allowed, other.states, shown.advance)
        parted = {n: differences.names[n] for n, largest in differences.largest.items() if largest > allowed}
        near, told = _nearness(ours, (mine, other.start), values, trial, parted, shown) if parted else ({}, None)
    report = _report(ours, other, differences, allowed, trial) | {"exact": near, "verdict": told}
    if json:
        print_json(report)
    else:
        _print(report)
    if differences.first is not None:
        raise typer.Exit(1)


def _nearness(
    rule: Rule, starts: Sequence[Callable[[list[Array]], Side]], hyper: Mapping[str, float], trial: Trial,
    names: Mapping[str, str], shown: Working,
) -> tuple[dict[str, Any], str]:  # fmt: skip
    """How far both sides are from 50 digits in the values that differ, and the verdict on it.

    The verdict has the reason where there are no 50 digits.
    """
    from rulec.tools.compare.nearer import nearness, verdict
    from rulec.tools.compare.sides import ReferenceSide

    shown.begin(f"{rule.name} and theirs beside 50 digits", trial.steps)
    try:
        exact = ReferenceSide(rule, trial.params, hyper, "mpmath")
        ours, theirs = (start(trial.params) for start in starts)
        near = nearness(ours, theirs, exact, trial, names, shown.advance)
    except RuleError as error:
        return {}, f"which is nearer to the exact values is not known: {error.message}"
    return {name: vars(each) | {"nearer": each.nearer} for name, each in near.items()}, verdict(rule.name, near)


def keywords(texts: Sequence[str] | None) -> dict[str, Any]:
    """`["betas=0.9,0.99", "amsgrad=true"]` as `{"betas": (0.9, 0.99), "amsgrad": True}`; RulecError otherwise."""
    values = {}
    for text in texts or ():
        name, equals, value = text.partition("=")
        if not equals or not name.isidentifier() or not value:
            raise RulecError(f"--theirs {text!r} is not KEYWORD=VALUE, as in --theirs weight_decay=0.1")
        values[name] = tuple(map(_value, value.split(","))) if "," in value else _value(value)
    return values


def _value(text: str) -> Any:
    """A number, true, false, none, or else the text itself."""
    words = {"true": True, "false": False, "none": None, "null": None}
    if text.lower() in words:
        return words[text.lower()]
    for kind in (int, float):
        try:
            return kind(text)
        except ValueError:
            continue
    return text


@dataclass(frozen=True)
class _Theirs:
    """The other side: a function that starts it, its construction as text, its names for our states, and our
    hyper-parameters without a keyword there."""

    start: Callable[[list[Array]], Side]
    call: str
    states: Mapping[str, str]
    left_out: Sequence[str]


def _theirs(
    against: str, rule: Rule, hyper: Mapping[str, float], overrides: Mapping[str, Any], allow_url: bool
) -> _Theirs:
    if _is_rule(against):
        return _other_rule(find_rule(against, allow_url).standalone(), rule, hyper, overrides)
    from rulec.tools.compare.target import find_target

    target = find_target(against, rule, hyper, overrides)
    return _Theirs(target.start, target.call, target.states, target.left_out)


def _is_rule(text: str) -> bool:
    from rulec.language.library.load import rules
    from rulec.language.library.remote import is_address

    names = {*rules(), *(name.rpartition("/")[2] for name in rules())}
    joined = " + " in text or " >> " in text
    return joined or is_address(text) or text in names or text.endswith((".yaml", ".yml", ".py")) or ".py:" in text


def _other_rule(rule: Rule, ours: Rule, hyper: Mapping[str, float], overrides: Mapping[str, Any]) -> _Theirs:
    from rulec.runtime.engine import default_hyper
    from rulec.tools.compare.sides import ReferenceSide, check_inputs

    check_inputs(rule)
    known = rule.all_hyper
    values = default_hyper(rule, {**{k: v for k, v in hyper.items() if k in known}, **overrides})
    call = f"{rule.name}({', '.join(f'{k}={v!r}' for k, v in values.items())})"
    states = {name: name for name in ours.state if name in rule.state}
    left_out = [name for name in hyper if name not in known]
    return _Theirs(lambda params: ReferenceSide(rule, params, values), call, states, left_out)


def _ours(rule: Rule, hyper: Mapping[str, float], backend: str) -> Callable[[list[Array]], Side]:
    from rulec.tools.compare.sides import ReferenceSide, backend_side

    if backend == "reference":
        return lambda params: ReferenceSide(rule, params, hyper)
    return lambda params: backend_side(rule, params, hyper, backend)


def _report(rule: Rule, theirs: _Theirs, differences: Differences, tolerance: float, trial: Trial) -> dict[str, Any]:
    from rulec.tools.compare.difference import line_of

    first = differences.first
    line = "" if first is None else line_of(rule.standalone(), first.value)
    missing = [name for name in rule.state if name not in differences.largest]
    return {
        "rule": rule.name, "theirs": theirs.call, "dtype": trial.dtype, "steps": trial.steps, "tolerance": tolerance,
        "shapes": [list(shape) for shape in trial.shapes],
        "equal": first is None, "largest": differences.largest,
        "first": None if first is None else {**vars(first), "line": line},
        "not_compared": missing, "not_given": list(theirs.left_out),
    }  # fmt: skip


def _print(report: Mapping[str, Any]) -> None:
    print(f"{report['rule']} beside {report['theirs']}: {report['steps']} steps in {report['dtype']}")
    if len(report["shapes"]) == 1:
        print(f"  on a tensor of shape {tuple(report['shapes'][0])}, which {report['rule']} applies to")
    for name, value in report["largest"].items():
        print(f"  {name:<12} largest difference {value:.1e}")
    if report["not_compared"]:
        print(f"  not compared, because no state of theirs matches: {', '.join(report['not_compared'])}")
    if report["not_given"]:
        print(f"  not given to theirs, which has no such keyword: {', '.join(report['not_given'])}")
    first = report["first"]
    if first is None:
        print(f"they agree within {report['tolerance']:.1e} of each tensor's largest value")
        return
    where = f"{first['value']} of tensor {first['tensor']}, element {list(first['element'])}"
    print(f"they part at step {first['step']}, first in {where}: {first['ours']!r} here, {first['theirs']!r} there")
    if first["line"]:
        print(f"  {first['line']}")
    for name, near in report["exact"].items():
        print(f"  {name:<12} from 50 digits: ours {near['ours']:.1e}, theirs {near['theirs']:.1e}")
    print(report["verdict"])
