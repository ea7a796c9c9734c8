"""`rulec new`: the beginning of a rule."""

from __future__ import annotations

import os
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import typer

from rulec.cli.arguments import JsonFlag
from rulec.cli.console import print_json, write_text
from rulec.cli.package import hides, write_package
from rulec.errors import RulecError
from rulec.language.check import title_problem
from rulec.language.expr.names import name_problem

_YAML = """\
name: {title}
summary: One sentence that says what is new about it.
paper:
  title: "Title of the paper"
  authors: "First Author, Second Author"
  year: {year}
  url: "https://arxiv.org/abs/0000.00000"
# Ranges of well-known names are built in; others are given: alpha: {{default: 0.5, min: 0, below: 1}}
hyper: {{lr: 1e-3, beta: 0.9}}
# What is kept of every parameter, and its first value.
state: {{m: 0}}
# g is the gradient, p the parameter, t counts the updates from 1. It ends with p = p - lr*direction.
step: |
  m = beta*m + (1 - beta)*g
  m_hat = m / (1 - beta**t)
  direction = m_hat
# Other libraries' names for the same things; `rulec diff` reads them.
# interop:
#   torch: {{class: {title}, args: {{betas: [beta]}}, state: {{m: exp_avg}}}}
"""

_PYTHON = '''\
"""{title}: one sentence that says what is new about it."""

import rulec


@rulec.rule(
    name="{title}",
    state=dict(m=0),
    paper=dict(title="Title of the paper", authors="First Author, Second Author", year={year}),
)
def {key}(g, t, s, *, lr=1e-3, beta=0.9):
    """One sentence that says what is new about it."""
    s.m = beta*s.m + (1 - beta)*g
    m_hat = s.m / (1 - beta**t)
    return m_hat
'''

_WHY = (
    "what it costs, and how exact it is",
    "its kernel",
    "whether it agrees with an implementation not yours",
)

_WHY_PACKAGE = (
    "what the rule costs, and how exact it is",
    "the rule under its name, in `rulec list` and as a class of rulec.torch",
    "whether it computes the formula of the paper: change that in tests/test_rules.py too",
)


def new(
    name: Annotated[str, typer.Argument(metavar="NAME", help="The rule's name, as in my_rule or MyRule.")],
    python: Annotated[bool, typer.Option("--python", help="Write a Python function instead of YAML.")] = False,
    package: Annotated[
        str | None, typer.Option(metavar="NAME", help="Write a package that adds the rule to rulec, as rulec-mylab.")
    ] = None,
    folder: Annotated[Path, typer.Option(help="Where to write it.")] = Path(),
    json: JsonFlag = False,
) -> None:
    """Write the beginning of a rule, to be changed."""
    key, title = rule_names(name)
    if package is not None:
        if python:
            raise RulecError("a package has its rule in YAML: leave --python or --package out")
        root = write_package(package, key, title, scaffold(key, title, python=False), folder)
        rule = root / package.replace("-", "_") / f"{key}.yaml"
        _say(root, [f"rulec check {rule}", f"pip install -e '{root}[test]'", f"pytest {root}"], _WHY_PACKAGE, json)
        return
    path = folder / f"{key}{'.py' if python else '.yaml'}"
    if os.path.exists(path):
        raise RulecError(f"{path} exists already: choose another name, or remove it")
    if python and hides(key):
        raise RulecError(f"{key}.py would hide the module {key} from every program beside it: choose another name")
    write_text(path, scaffold(key, title, python))
    argument = str(path) if folder.is_absolute() or folder != Path() else path.name
    steps = [
        f"rulec check {argument}",
        f"rulec show {argument}",
        f"rulec diff {argument} --against package.module:Class --theirs lr=0.001",
    ]
    _say(path, steps, _WHY, json)


def _say(path: Path, steps: Sequence[str], reasons: Sequence[str], json: bool) -> None:
    """Prints what is written, and the commands to go on with."""
    if json:
        print_json({"path": str(path), "next": steps})
        return
    print(f"{path} is written. Change it, then:")
    for step, why in zip(steps, reasons, strict=True):
        print(f"  {step}\n      {why}")


def rule_names(name: str) -> tuple[str, str]:
    """The file's name and the rule's: `MyRule` and `my_rule` both give `("my_rule", "MyRule")`.

    RulecError for text that cannot be the name of a rule and of a module.
    """
    if not re.fullmatch(r"[A-Za-z]\w*", name):
        raise RulecError(f"{name!r} is not a name for a rule: use letters, digits and _, as in my_rule")
    key = re.sub(r"(?<=[a-z0-9])(?=[A-Z])", "_", name).lower()
    title = name if name != name.lower() else "".join(part[:1].upper() + part[1:] for part in name.split("_"))
    if problem := name_problem(key) or title_problem(title):
        raise RulecError(problem)
    return key, title


def scaffold(key: str, title: str, python: bool) -> str:
    """The text of a new rule."""
    from datetime import date

    return (_PYTHON if python else _YAML).format(key=key, title=title, year=date.today().year)
