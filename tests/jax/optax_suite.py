"""optax's own tests with our functions under optax's names: `python -m tests.jax.optax_suite`.

Runs those tests of optax's wheel that are about some functions that we have, of each kind of state one, and prints as
JSON how many of each method were run, what optax's tests skipped themselves, what failed, and what was left out and
why. It patches optax, so it is a program of its own.
"""

from __future__ import annotations

import importlib
import json
import os
import re
import sys
import unittest
from collections import Counter
from collections.abc import Iterable, Iterator
from typing import Any

os.environ.setdefault("XLA_FLAGS", "--xla_force_host_platform_device_count=8")

import jax
import optax
from optax import contrib
from optax._src import alias, transform
from optax.contrib import _schedule_free
from optax.transforms import _accumulation

import rulec.jax
from rulec.jax.drop_ins import names

#: Where optax's modules and tests look for its functions.
PLACES: dict[str, list[Any]] = {"": [optax, alias, transform, _accumulation], "contrib.": [contrib, _schedule_free]}

#: The modules whose tests are run.
MODULES = (
    "optax._src.alias_test", "optax.contrib._common_test", "optax._src.sharding_test", "optax._src.transform_test",
    "optax.contrib._schedule_free_test",
)  # fmt: skip

#: The functions that are taken.
FEW = ("adamw", "lion", "sgd", "novograd", "prodigy", "schedule_free_sgd", "scale_by_adam")

#: Tests that cannot be ours, by what is in their name or their parameters, and the reason.
NOT_OURS = {
    "state_dtype='complex64'": "a state is complex where its parameter is",
    "params_dtype='complex64', state_dtype='float32'": "a state is complex where its parameter is",
    "microbatch": "is about no rule",
}


def patch() -> None:
    """Puts our functions where optax's are."""
    for prefix, modules in PLACES.items():
        for name in names(prefix):
            function = getattr(rulec.jax.contrib if prefix else rulec.jax, name)
            for module in modules:
                if hasattr(module, name):
                    setattr(module, name, function)
    contrib.schedule_free_eval_params = _eval_params
    # Its tests of sharding compare this as a text with 0.7.2, and skip themselves where it is 0.10.
    jax.__version__ = "1.0"


def _eval_params(state: Any, params: Any) -> Any:
    """What optax has for a schedule-free state: with ours, which does not repeat the value of b1, its default."""
    return jax.tree.map(lambda y, z: (y - (1 - 0.9) * z) / 0.9, params, state.z)


def cases(module: Any) -> Iterator[tuple[unittest.TestCase, str]]:
    """Every test of a module, and the text of its parameters."""
    for suite in unittest.defaultTestLoader.loadTestsFromModule(module):
        for case in suite:  # type: ignore[union-attr]
            method = case._testMethodName  # type: ignore[union-attr]
            known = getattr(type(case), "_test_params_reprs", {})
            yield case, known.get(method, "") or method  # type: ignore[misc]


OWN = {*names(), *names("contrib.")}

#: What tests are about that say it neither by parameters nor by their name.
ABOUT = {"test_buffer_donation": "schedule_free_sgd"}


def subject(text: str, method: str, known: Iterable[str]) -> str:
    """The function that a test is about: by its parameters, or by the end of its name; empty where there is none."""
    named = re.search(r"opt_name='(\w+)'", text)
    if named:
        return named[1].removesuffix("_mom")
    found = [name for name in known if method.endswith(f"_{name}")]
    return ABOUT.get(method, max(found, key=len, default=""))


def left_out(text: str, method: str, known: Iterable[str]) -> str:
    """Why a test is not run; empty where it is."""
    reasons = [reason for word, reason in NOT_OURS.items() if word in text or word in method]
    name = subject(text, method, known)
    if re.fullmatch(r"test_optimiz(ation|ers)\d*", method):
        return "trains to the end, by steps that are compared one by one"
    if reasons:
        return reasons[0]
    if name not in OWN:
        return f"rulec has no {name}" if name else "is about no function that rulec has"
    return "" if name in FEW else "not among the few"


def main() -> None:
    """Runs the tests and prints the report."""
    patch()
    suite = unittest.TestSuite()
    report: dict[str, Any] = {"run": Counter(), "left_out": {}}
    for name in MODULES:
        module = importlib.import_module(name)
        known = {*OWN, *getattr(module, "OPTIMIZERS", ())}
        ending = re.compile(rf"(\d+|_({'|'.join(known)}))$")
        for case, text in cases(module):
            why = left_out(text, case._testMethodName, known)
            if why:
                report["left_out"][case.id()] = why
            else:
                suite.addTest(case)
                report["run"][f"{name}.{ending.sub('', case._testMethodName)}"] += 1
    with open(os.devnull, "w", encoding="utf-8") as nowhere:
        result = unittest.TextTestRunner(stream=nowhere, verbosity=0).run(suite)
    report["skipped"] = {case.id(): why for case, why in result.skipped}
    report["failed"] = {case.id(): trace for case, trace in [*result.failures, *result.errors]}
    json.dump(report, sys.stdout)


if __name__ == "__main__":
    main()
