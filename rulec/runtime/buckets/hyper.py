"""Hyper-parameters of an engine: by name and group, checked, and on devices."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from rulec.array_api.library import Library
from rulec.compiler.ir import Program
from rulec.compiler.scalars import resolve_hyper
from rulec.errors import HyperError
from rulec.language.expr.node import Op, walk
from rulec.language.hyper import followed, followers
from rulec.language.rule import Rule
from rulec.language.source import did_you_mean
from rulec.runtime.buckets.bucket import Bucket
from rulec.runtime.buckets.scalar_table import Numbers
from rulec.runtime.buckets.scalar_table_device import DeviceHyper

EPS = {"float64": 2.0**-52, "float32": 2.0**-23, "float16": 2.0**-10, "bfloat16": 2.0**-7}


class HyperValues:
    """The hyper-parameters of a rule, `known`, and their values in the current step.

    `table` has shape (names, groups); `named` has a row of it by name. `live` has arrays on the device by (name,
    group), read at every step.
    """

    def __init__(self, rule: Rule) -> None:
        self.rule_name, self.known = rule.name, rule.all_hyper
        self.names = list(self.known)
        self._follows = bool(followers(self.known))
        self.table: Numbers = np.zeros(0)
        self.named: dict[str, Numbers] = {}
        self.live: dict[tuple[str, int], Any] = {}
        self._of_model: set[str] = set()
        self._on_device: dict[Any, DeviceHyper] = {}

    def table_of(self, groups: Sequence[Mapping[str, float]]) -> Numbers:
        """Hyper-parameters by name and group, in float64; second learning rates have followed `lr`."""
        groups = [followed(self.known, group) for group in groups] if self._follows else groups
        return np.array([[g[k] for g in groups] for k in self.names], np.float64).reshape(-1, len(groups))

    def of_group(self, table: Numbers, group: int) -> dict[str, float]:
        """A group's hyper-parameters by name."""
        return dict(zip(self.names, table[:, group].tolist(), strict=True))

    def take(self, table: Numbers, buckets: Iterable[Bucket]) -> None:
        """Checks and keeps a table of hyper-parameters."""
        if table.shape != self.table.shape or table.tobytes() != self.table.tobytes():
            self.check(table, buckets)
        self.table = table
        self.named = dict(zip(self.names, table, strict=True))

    def check(self, table: Numbers, buckets: Iterable[Bucket]) -> None:
        """HyperError where a value lies outside its range, or differs between groups where it must not.

        HyperError too where a static one, compiled into kernels and states of `buckets`, changes.
        """
        if table.shape[1] == 0:
            return
        # A number that did not change is in its range.
        alike = table == self.table if table.shape == self.table.shape else np.zeros(table.shape, bool)
        for i in np.flatnonzero(~alike.all(axis=1)):
            # The extremes are in range where all are; a NaN is both.
            for value in {float(table[i].min()), float(table[i].max())}:
                self.known[self.names[i]].check(self.names[i], value, self.rule_name)
        self._check_model(table)
        self._check_static(table, buckets)

    def add_programs(self, programs: Iterable[Program], table: Numbers) -> None:
        """Adds programs that will run. HyperError where groups differ in a value of the whole model."""
        for program in programs:
            self._of_model |= _of_model(program)
        self._check_model(table)

    def on_device(self, program: Program, device: str, library: Library) -> DeviceHyper:
        """The hyper-parameters of a program as a table on a device."""
        names = [*program.hyper]
        key = device, tuple(names)
        if key not in self._on_device:
            self._on_device[key] = DeviceHyper(names, library)
        device_hyper = self._on_device[key]
        device_hyper.take(self.named, self.table, self.live)
        return device_hyper

    def _check_static(self, table: Numbers, buckets: Iterable[Bucket]) -> None:
        for bucket in buckets:
            for name, made_for in bucket.static.items():
                values = table[self.names.index(name)][bucket.groups]
                if (others := values[values != made_for]).size:
                    raise HyperError(
                        f"{name} of {self.rule_name} cannot change from {made_for:g} to {others[0]:g} after the first "
                        f"step: kernels and states were made for it; make a new optimizer"
                    )

    def _check_model(self, table: Numbers) -> None:
        for name in sorted(self._of_model):
            values = table[self.names.index(name)]
            if not (values == values[0]).all():
                raise HyperError(
                    f"{name} of {self.rule_name} is part of a state of the whole model, so every group needs the same "
                    f"value, not {', '.join(f'{v:g}' for v in np.unique(values))}"
                )


def default_hyper(rule: Rule, chosen: Mapping[str, float], dtype: str = "float32") -> dict[str, float]:
    """Every hyper-parameter of a rule and its routed rules, by name: the chosen value, else the default.

    HyperError for a name that the rule does not have.
    """
    hyper = rule.settings
    for key in chosen:
        if key not in hyper:
            raise HyperError(f"{rule.name} has no hyper-parameter {key!r}{did_you_mean(key, hyper)}")
    return resolve_hyper(hyper, chosen, EPS[dtype], rule.name)


def _of_model(program: Program) -> set[str]:
    """The hyper-parameters in the states of the whole model and in their first values."""
    roots = [c.value for c in program.scalars.columns] + [s.value for s in program.scalars.stores]
    first = [b.init for b in program.states if b.init is not None and not b.axes.letters]
    return {str(n.arg) for n in walk(roots) if n.op is Op.MODEL_HYPER} | {
        str(n.arg) for n in walk(first) if n.op is Op.HYPER
    }
