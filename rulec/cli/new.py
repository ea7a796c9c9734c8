"""`rulec new`: writes a new rule as a first draft.

`rulec new --package` writes a package with a rule, its test, and a workflow to run the test.
"""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Sequence
from importlib.util import find_spec
from keyword import iskeyword
from pathlib import Path
from typing import Annotated

import typer

from rulec.cli.arguments import JsonFlag
from rulec.cli.console import print_json, write_text
from rulec.errors import RulecError
from rulec.language.check import title_problem
from rulec.language.expr.names import MAX_NAME, name_problem, short
from rulec.language.library.modules import GROUP

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


_PROJECT = """\
[build-system]
requires = ["setuptools>=77"]
build-backend = "setuptools.build_meta"

[project]
name = "{package}"
version = "0.1.0"
description = "The optimizer rule {title}, for rulec."
readme = "README.md"
requires-python = ">=3.11"
dependencies = ["rulec"]

[project.optional-dependencies]
test = ["pytest"]

# A line for each rule: its name, and where it is. rulec finds them by this group.
[project.entry-points."{group}"]
{key} = "{module}:{key}"

[tool.setuptools]
packages = ["{module}"]
package-data = {{ {module} = ["*.yaml"] }}
"""

_INIT = '''\
"""The optimizer rule {title}, for rulec."""

from pathlib import Path

import rulec

{key} = rulec.load(Path(__file__).with_name("{key}.yaml"))
'''

_TEST = '''\
"""The rule {title}, against the formula of its paper in NumPy."""

import numpy as np
import pytest
import rulec

RATE, BETA = 0.1, 0.9


@pytest.mark.parametrize("backend", ["numpy", "cpu"])
def test_steps_are_those_of_the_paper(backend: str) -> None:
    weights = np.linspace(-1.0, 1.0, 64)
    wanted, mean = weights.copy(), np.zeros(64)
    optimizer = rulec.array.Optimizer("{key}", [weights], lr=RATE, beta=BETA, backend=backend)
    draws = np.random.default_rng(0)
    for t in range(1, 6):
        gradient = draws.normal(size=64)
        mean = BETA * mean + (1 - BETA) * gradient
        wanted -= RATE * mean / (1 - BETA**t)
        optimizer.step([gradient])
    np.testing.assert_allclose(weights, wanted, rtol=1e-12)


def test_it_is_a_rule_of_the_installed_rulec() -> None:
    assert "{key}" in rulec.rules()
'''

_README = """\
# {package}

The optimizer rule {title}, for rulec.

From a checkout, in an environment that has rulec:

```sh
pip install .
rulec check {key}
```

```python
import rulec.torch

optimizer = rulec.torch.{title}(model.parameters(), lr=1e-3)
```

The rule is in [{module}/{key}.yaml]({module}/{key}.yaml). To test it: `pip install -e '.[test]'`, then `pytest`.
"""

_WORKFLOW = """\
name: tests
on: [push, pull_request]
env:
  RULEC: rulec  # or its address, such as a git+https://... or a wheel's, where no index has it
jobs:
  tests:
    runs-on: ubuntu-latest
    steps:
      - uses: actions/checkout@v4
      - uses: actions/setup-python@v5
        with: {{python-version: "3.12"}}
      - run: pip install "$RULEC" '.[test]'
      - run: pytest
      - run: rulec check {key}
"""


def hides(module: str) -> bool:
    """Whether a new module of this name would hide one that Python imports here, or be hidden by it.

    A module in the working folder is none: that is where new ones are written.
    """
    if module in (*sys.stdlib_module_names, "rulec", "test"):
        return True
    try:
        spec = find_spec(module)
    except (ImportError, ValueError):  # a module without a specification
        return True
    if spec is None or spec.origin is None:  # a folder alone is none either
        return False
    here = Path.cwd()
    return Path(spec.origin) not in (here / f"{module}.py", here / module / "__init__.py")


def _check_names(package: str, module: str, key: str, title: str) -> None:
    """RulecError where a package, its module or its rule cannot have its name."""
    from rulec.language.library.load import library_names, titles

    if len(package) > MAX_NAME:
        raise RulecError(f"the name {short(package)} has {len(package)} characters: use at most {MAX_NAME}")
    if iskeyword(module):
        raise RulecError(f"{module!r} is a word of Python, and no module can be imported by it: choose another name")
    if module == "tests":
        raise RulecError("a package tests would lie where its own tests do: choose another name, as rulec-mylab")
    if hides(module):
        raise RulecError(f"a package {package} would hide the module {module}: choose another name")
    taken = key if key in {name.rpartition("/")[2] for name in library_names()} else titles().get(title)
    if taken is not None:
        raise RulecError(f"{taken!r} is a rule of the library, which comes before packages: choose another name")


def write_package(package: str, key: str, title: str, rule: str, folder: Path) -> Path:
    """Writes a package that adds a rule, of this YAML text, under the name `key`; its folder.

    RulecError where `package` is no name of a package or the folder exists.
    """
    if not re.fullmatch(r"[a-z][a-z0-9]*([-_][a-z0-9]+)*", package):
        raise RulecError(f"{package!r} is no name for a package: use small letters, digits and -, as in rulec-mylab")
    module, root = package.replace("-", "_"), folder / package
    _check_names(package, module, key, title)
    if os.path.exists(root):
        raise RulecError(f"{root} exists already: choose another name, or remove it")
    files = {
        "pyproject.toml": _PROJECT, "README.md": _README, f"{module}/__init__.py": _INIT,
        "tests/test_rules.py": _TEST, ".github/workflows/tests.yml": _WORKFLOW,
    }  # fmt: skip
    names = {"package": package, "module": module, "key": key, "title": title, "group": GROUP}
    for path, text in files.items():
        write_text(root / path, text.format(**names))
    write_text(root / module / f"{key}.yaml", rule)
    return root
