"""What an installed rulec does with only the dependencies it declares: run by an interpreter outside the checkout.

Used by .ci/run and tests/versions. Fails with an AssertionError or ImportError where the wheel is incomplete.
"""

from __future__ import annotations

import subprocess
import sys
from importlib.metadata import entry_points
from importlib.resources import files
from importlib.util import find_spec
from pathlib import Path

import numpy as np

import rulec
import rulec.array
import rulec_backends
import rulec_rules


def installed_here() -> None:
    for package in (rulec, rulec_backends, rulec_rules):
        where = Path(next(iter(package.__path__))).resolve()
        assert where.is_relative_to(Path(sys.prefix).resolve()), f"{package.__name__} comes from {where}, not the wheel"


def files_are_packed() -> None:
    names = {file.name for file in files("rulec_rules").iterdir()}
    transforms = {file.name for file in files("rulec_rules.transforms").iterdir()}
    assert {"adam.yaml", "sgd.yaml"} <= names, sorted(names)
    assert {"decay.yaml", "l2.yaml"} <= transforms, sorted(transforms)
    assert files("rulec").joinpath("py.typed").is_file()
    page = {file.name for file in files("rulec.tools.playground").joinpath("page").iterdir()}
    assert {"index.html", "play.css", "play.js", "codemirror.js", "codemirror.LICENSE"} <= page, sorted(page)
    katex = files("rulec.tools.display").joinpath("katex")
    assert all(katex.joinpath(name).is_file() for name in ("katex.min.js", "LICENSE", "fonts/KaTeX_Main-Regular.woff2"))
    for name in rulec.rules():
        rulec.load(name)
    assert {"numpy", "cpu", "triton", "jax"} <= {entry.name for entry in entry_points(group="rulec.backends")}


def adam_steps(backend: str) -> None:
    """One Adam step from zero moments is lr*g/(|g| + eps): the corrections cancel the averages."""
    parameter, gradient = np.linspace(-1.0, 1.0, 7), np.array([3.0, -2.0, 1.0, 0.5, -0.25, 4.0, -1.0])
    expected = parameter - 0.1 * gradient / (np.abs(gradient) + 1e-8)
    rulec.array.Optimizer("adam", [parameter], backend=backend, lr=0.1).step([gradient])
    np.testing.assert_allclose(parameter, expected, rtol=1e-14, atol=1e-15)


def sympy_is_an_extra() -> None:
    rule = rulec.load("adam")
    assert r"\beta_{1}" in rule.latex()
    if find_spec("sympy"):  # by another package, such as torch
        return
    message = ""
    try:
        rule.sympy()
    except rulec.RulecError as error:
        message = str(error)
    assert "needs sympy, which is not installed: pip install " in message, message
    assert "[sympy]" in message, message


def command_lists_rules() -> None:
    command = Path(sys.executable).parent / "rulec"
    listed = subprocess.run([command, "list"], stdin=subprocess.DEVNULL, capture_output=True, text=True, check=True)
    assert "adamw" in listed.stdout, listed.stdout


def measurements_stay_in_the_checkout() -> None:
    command = Path(sys.executable).parent / "rulec"
    asked = subprocess.run([command, "bench"], stdin=subprocess.DEVNULL, capture_output=True, text=True, check=False)
    assert asked.returncode == 2, asked
    assert "clone rulec's repository" in asked.stderr, asked.stderr


if __name__ == "__main__":
    installed_here()
    files_are_packed()
    adam_steps("numpy")
    adam_steps("cpu")
    sympy_is_an_extra()
    command_lists_rules()
    measurements_stay_in_the_checkout()
    print(f"rulec {rulec.__version__} installed with {len(rulec.rules())} rules; numpy and cpu backends step")
