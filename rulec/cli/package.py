"""`rulec new --package`: a package with a rule, its test, and a workflow to run the test."""

from __future__ import annotations

import os
import re
import sys
from importlib.util import find_spec
from keyword import iskeyword
from pathlib import Path

from rulec.cli.console import write_text
from rulec.errors import RulecError
from rulec.language.expr.names import MAX_NAME, short
from rulec.language.library.modules import GROUP

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

```sh
pip install {package}
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
jobs:
  tests:
    runs-on: ubuntu-latest
    steps:
      - uses: actions/checkout@v4
      - uses: actions/setup-python@v5
        with: {{python-version: "3.12"}}
      - run: pip install '.[test]'
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
