"""Runs tests of another project with rulec's classes in the place of theirs: a script, started by `tests.suites`.

`inside.py SUITE REPORT [PYTEST ARGUMENTS]` writes the outcome of every test to the file REPORT. Their tests are
collected with their own classes, so that the same tests run; then the classes change places. No keyword is renamed on
the way. The script imports nothing of this package: a suite may be a package `tests` itself.
"""

from __future__ import annotations

import json
import sys
import types
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import pytest

#: Classes of theirs whose name is not that of the rule, by suite.
NAMES = {
    "pytorch_optimizer": {"SignSGD": "Signum", "SophiaH": "Sophia"},
    "timm": {"AdamWLegacy": "AdamW", "NAdamLegacy": "NAdam", "RAdamLegacy": "RAdam", "NvNovoGrad": "NovoGrad"},
}

#: Functions of optax that change places.
FUNCTIONS = ("adam", "adamw")

#: Beginnings of error messages, and the reason that they are counted under.
REASONS = (
    ("Loss did not decrease", "loss"),
    ("has no keyword", "keyword"),
    ("does not support", "value of a keyword"),
    ("has no attribute", "method"),
    ("DID NOT RAISE", "error expected"),
    ("unexpected keyword", "keyword"),
)


class StandIn:
    """The plugin: it puts classes in place once the tests are collected, and keeps outcomes."""

    def __init__(self, suite: str) -> None:
        self.suite, self.outcomes, self.met = suite, {}, False

    def pytest_collection_modifyitems(self, config: pytest.Config, items: list[pytest.Item]) -> None:
        """Leaves out tests of optax that name another function."""
        if self.suite == "optax":
            others = [item for item in items if not any(f"'{name}'" in parameters(item) for name in FUNCTIONS)]
            config.hook.pytest_deselected(items=others)
            items[:] = [item for item in items if item not in others]

    def pytest_collection_finish(self, session: pytest.Session) -> None:
        """Puts the classes in place."""
        PLACES[self.suite]({item.module for item in session.items if isinstance(item, pytest.Function)})
        if self.suite in ("pytorch_optimizer", "timm"):
            self._watch()

    def _watch(self) -> None:
        """Notes when a test makes an optimizer of rulec, or tries to."""
        from rulec.torch.optimizer import RuleOptimizer

        begin = RuleOptimizer.__init__

        def noted(optimizer: Any, *args: Any, **keywords: Any) -> None:
            self.met = True
            begin(optimizer, *args, **keywords)

        RuleOptimizer.__init__ = noted  # type: ignore[method-assign]

    @pytest.hookimpl(hookwrapper=True)
    def pytest_runtest_makereport(self, item: pytest.Item, call: pytest.CallInfo[None]) -> Any:
        """Keeps the outcome of a test: passed, skipped, or the reason of its failure."""
        report = (yield).get_result()
        if report.when == "setup":
            self.met = False
        name = item.nodeid.partition("::")[2]
        if report.failed or (report.when == "call" and name not in self.outcomes) or report.skipped:
            fault = call.excinfo.value if report.failed and call.excinfo else None
            self.outcomes[name] = {
                "outcome": report.outcome, "met": self.met or self.suite in ("optax", "torch"),
                "reason": "" if fault is None else reason(fault), "message": "" if fault is None else str(fault)[:300],
            }  # fmt: skip


def reason(fault: BaseException) -> str:
    """The reason that a failure is counted under: one of `REASONS`, or the name of the exception."""
    text = str(fault)
    return next((word for start, word in REASONS if start in text), type(fault).__name__)


def parameters(item: pytest.Item) -> str:
    """The parameters of one of absl's tests, as text; empty where it has none."""
    return str(getattr(getattr(item, "cls", None), "_test_params_reprs", {}).get(item.name, ""))


def torch_classes() -> dict[str, Any]:
    """Our classes by their names in lower case."""
    import rulec.torch
    from rulec.torch.classes import class_names

    return {name.lower(): getattr(rulec.torch, name) for name in class_names()}


def ours(theirs: Any, suite: str) -> Any:
    """Our class of the name of theirs, or theirs where there is none."""
    name = getattr(theirs, "__name__", "")
    return torch_classes().get(NAMES.get(suite, {}).get(name, name).lower(), theirs)


def place_pytorch_optimizer(modules: Iterable[Any]) -> None:
    """Puts our classes into the register that `load_optimizer` reads."""
    from pytorch_optimizer.optimizer import OPTIMIZERS

    for name, theirs in [*OPTIMIZERS.items()]:
        OPTIMIZERS[name] = ours(theirs, "pytorch_optimizer")


def place_timm(modules: Iterable[Any]) -> None:
    """Puts our classes into the records that `create_optimizer_v2` reads; the defaults of each record stay."""
    from dataclasses import replace

    from timm.optim._optim_factory import default_registry

    for name, info in [*default_registry._optimizers.items()]:
        if not isinstance(info.opt_class, str):
            default_registry._optimizers[name] = replace(info, opt_class=ours(info.opt_class, "timm"))


def place_torch(modules: Iterable[Any]) -> None:
    """Puts our classes into torch.optim, and into the tests that imported them."""
    import torch.optim
    from torch.optim import Optimizer

    for module in [torch.optim, *modules]:
        for name, value in [*vars(module).items()]:
            if isinstance(value, type) and issubclass(value, Optimizer) and value is not Optimizer:
                setattr(module, name, ours(value, "torch"))


def place_optax(modules: Iterable[Any]) -> None:
    """Puts our adam and adamw into optax's module of aliases."""
    from optax._src import alias

    import rulec.jax

    for name in FUNCTIONS:
        setattr(alias, name, getattr(rulec.jax, name))


def without_vision_kernels() -> None:
    """Lets torchvision be imported where its build has no kernels for this torch; no test of optimizers calls one."""
    name = "torchvision._meta_registrations"
    sys.modules[name] = types.ModuleType(name)


PLACES: dict[str, Callable[[Iterable[Any]], None]] = {
    "pytorch_optimizer": place_pytorch_optimizer, "timm": place_timm, "torch": place_torch, "optax": place_optax,
}  # fmt: skip


def main(suite: str, report: str, *arguments: str) -> int:
    """Runs the tests and writes the report."""
    plugin = StandIn(suite)
    if suite == "timm":
        without_vision_kernels()
    code = pytest.main([*arguments, "-q", "-p", "no:cacheprovider", "-o", "addopts="], plugins=[plugin])
    Path(report).write_text(json.dumps(plugin.outcomes))
    return int(code)


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
