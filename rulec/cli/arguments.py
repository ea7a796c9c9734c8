"""The arguments of commands: rules, hyper-parameters, backends, dtypes, and a shell's completions for them."""

from __future__ import annotations

import os
from collections.abc import Sequence
from glob import escape
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from rulec.errors import RulecError

if TYPE_CHECKING:
    from rulec.language.rule import Rule
    from rulec.language.statistics import Watch


def rule_words(incomplete: str) -> list[str]:
    """Rules of the library and of packages, and rule files and folders, that begin so."""
    from rulec.language.library.load import rules

    names = sorted({*rules(), *(name.rpartition("/")[2] for name in rules())})
    return [name for name in names if name.startswith(incomplete)] + _files(incomplete)


def backend_words(incomplete: str) -> list[str]:
    """Backends that begin so."""
    from rulec.backend import registry

    return [name for name in registry.names() if name.startswith(incomplete)]


def _files(incomplete: str) -> list[str]:
    """Files in YAML or Python, and folders with a slash behind them."""
    folder, _, begin = incomplete.rpartition("/")
    paths = sorted(Path(f"{folder}/" if incomplete.startswith("/") else folder).glob(f"{escape(begin)}*"))
    above = f"{folder}/" if "/" in incomplete else ""
    files = [f"{above}{path.name}" for path in paths if path.suffix in (".yaml", ".yml", ".py")]
    hidden = begin.startswith(".")
    folders = [f"{above}{path.name}/" for path in paths if os.path.isdir(path) and (hidden or path.name[0] != ".")]
    return files + folders


RULE_HELP = (
    "A rule of the library (adamw), a rule file (my.yaml), a rule in a Python file (my.py:adam) or module "
    "(package.module:adam), a pinned address (see --allow-url), or these composed: "
    "'clip_by_value >> lookahead(adamw, k=5)'."
)

RuleArgument = Annotated[str, typer.Argument(metavar="RULE", help=RULE_HELP, autocompletion=rule_words)]
AllowUrlFlag = Annotated[
    bool, typer.Option("--allow-url", help="Fetch a rule at https://host/rule.yaml@sha256:HEX, and keep it.")
]
JsonFlag = Annotated[bool, typer.Option("--json", help="Print JSON, for scripts.")]
BackendOption = Annotated[
    str,
    typer.Option("--backend", "-b", help="The backend: `rulec doctor` lists them.", autocompletion=backend_words),
]
DtypeOption = Annotated[str, typer.Option(help="The dtype of parameters and gradients, and of states.")]
StateDtypeOption = Annotated[
    str, typer.Option(metavar="WORD", help="The dtype or format of states, where it is another, or v=dynamic8,m=int8.")
]
WeightsOption = Annotated[
    str, typer.Option(help="The kind of 16-bit weights: split, split24, master, kahan or stochastic.")
]
WatchOption = Annotated[
    list[str] | None,
    typer.Option(
        "--watch",
        metavar="NAME[=EXPRESSION]",
        help="Statistics to measure: norms, one that the rule declares, or ratio='norm(update)/norm(p)'; "
        "may be repeated.",
    ),
]
HyperOption = Annotated[
    list[str] | None, typer.Option("--hyper", metavar="NAME=NUMBER", help="A hyper-parameter; may be repeated.")
]


def find_rule(text: str, allow_url: bool = False) -> Rule:
    """The rule of an argument; `a >> wrapper(b) + c` is read as Python would. RuleError where there is none.

    A composition keeps the interop section of its parts if only one part has any, so that it can be compared.
    """
    from dataclasses import replace

    from rulec.language.compose.parse import compose_text, is_composition
    from rulec.language.library.load import load

    if not is_composition(text):
        return load(text.strip(), allow_url=allow_url)
    every: list[Rule] = []

    def find(name: str) -> Rule:
        every.append(load(name, allow_url=allow_url))
        return every[-1]

    joined = compose_text(text, find)
    sections = [rule.interop for rule in every if rule.interop]
    joinable = len(every) > 1 and not any(rule.wraps for rule in every)
    return replace(joined, interop=sections[0]) if joinable and len(sections) == 1 else joined


def numbers(texts: Sequence[str] | None, option: str) -> dict[str, float]:
    """`["lr=0.1"]` as `{"lr": 0.1}`; RulecError, naming the option, for anything else."""
    values = {}
    for text in texts or ():
        name, equals, value = text.partition("=")
        try:
            values[name.strip()] = float(value)
        except ValueError:
            equals = ""
        if not equals or not name.strip():
            raise RulecError(f"{option} {text!r} is not NAME=NUMBER, as in {option} lr=0.01")
    return values


def hyper_values(rule: Rule, texts: Sequence[str] | None, dtype: str = "float32") -> dict[str, float]:
    """All hyper-parameters of a rule: those of `--hyper`, and defaults. HyperError for one that it does not have."""
    from rulec.runtime.buckets.hyper import default_hyper

    return default_hyper(rule, numbers(texts, "--hyper"), dtype)


def watch_of(rule: Rule, texts: Sequence[str] | None) -> Watch:
    """The statistics of `--watch`: names, or expressions by name where one is given; RuleError for an unknown name."""
    from rulec.language.expr.text import expression_text
    from rulec.language.statistics import SETS, watched

    expressions: dict[str, str] = {}
    for text in texts or ():
        name, equals, expression = text.partition("=")
        if equals:
            expressions[name.strip()] = expression.strip()
        elif name in SETS:
            expressions |= SETS[name]
        elif any("=" in each for each in texts or ()):
            expressions |= {key: expression_text(statistic.value) for key, statistic in watched(rule, name)}
    return expressions if any("=" in each for each in texts or ()) else [*(texts or ())]


def check_dtype(dtype: str) -> str:
    """The same dtype; RulecError where no kernel stores it."""
    from rulec.compiler.layout import FLOATS
    from rulec.language.source import did_you_mean

    if dtype not in FLOATS:
        raise RulecError(f"there is no dtype {dtype!r}{did_you_mean(dtype, FLOATS)}: use {', '.join(FLOATS)}")
    return dtype


def check_state_dtypes(text: str) -> dict[str, str]:
    """The dtypes and formats of states by name, `""` for all others, of `WORD` or `NAME=WORD,NAME=WORD`."""
    words: dict[str, str] = {}
    for part in text.split(",") if text else ():
        name, equals, word = part.strip().rpartition("=")
        if name in words or (equals and not name):
            raise RulecError(f"--state-dtype {text!r} is no list such as v=dynamic8,m=int8: give each state once")
        words[name.strip()] = check_state_dtype(word.strip())
    return words


def check_state_dtype(word: str) -> str:
    """The same dtype or format of states; RulecError for neither."""
    from rulec.compiler.layout import PLAIN_STORAGE
    from rulec.formats import NAMES, parse
    from rulec.runtime.storage.options import no_state_dtype

    if word.partition("/")[0] in NAMES:
        return parse(word).text if "/" in word else word
    if word not in PLAIN_STORAGE:
        raise RulecError(no_state_dtype(word))
    return word
