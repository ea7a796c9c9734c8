"""`rulec new --package`: a package with a rule, its test, and a workflow to run the test."""

from __future__ import annotations

import os
import re
import sys
from pathlib import Path

from rulec.cli.console import write_text
from rulec.errors import RulecError
from rulec.language.modules import GROUP

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


def write_package(package: str, key: str, title: str, rule: str, folder: Path) -> Path:
    """Writes a package that adds a rule, of this YAML text, under the name `key`; its folder.

    RulecError where `package` is no name of a package or the folder exists.
    """
    if not re.fullmatch(r"[a-z][a-z0-9]*([-_][a-z0-9]+)*", package):
        raise RulecError(f"{package!r} is no name for a package: use small letters, digits and -, as in rulec-mylab")
    module, root = package.replace("-", "_"), folder / package
    if module == "rulec" or module in sys.stdlib_module_names:
        raise RulecError(f"a package {package} would hide the module {module}: choose another name")
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
