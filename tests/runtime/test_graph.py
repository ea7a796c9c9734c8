"""Steps that are run again without the host, as a CUDA graph runs them, beside the same steps on the host."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

import rulec
from rulec.runtime.buckets.scalar_table_device import Scaling
from rulec.runtime.engine import run
from rulec.testing.cases import loaded
from rulec.testing.whole import tolerance
from tests.runtime.elsewhere import Elsewhere, Here
from tests.runtime.graph import Graph
from tests.runtime.test_device import Run, check_close, runnable, values

EVERY = [*range(8)]


class Static:
    """Steps of one `Run` with gradients and inputs that stay where they are; `seed` is whose numbers are in them."""

    def __init__(self, of: Run) -> None:
        self.of, self.kinds = of, of.rule.standalone().inputs
        self.grads = values(0, of.shapes)
        self.inputs: dict[str, Any] = {
            name: values(0, of.shapes) if kind == "like p" else torch.zeros((), dtype=torch.float64)
            for name, kind in self.kinds.items()
        }
        self.found_inf, self.scale = torch.zeros(1), torch.ones(())

    def give(self, seed: int, scale: float = 1.0, found_inf: float = 0.0) -> None:
        """Other numbers, as `Run.step` has them."""
        for held, new in zip(self.grads, values(100 + seed, self.of.shapes), strict=True):
            held.copy_(new * scale)
        for name, kind in self.kinds.items():
            if kind == "like p":
                for held, new in zip(self.inputs[name], values(200 + seed, self.of.shapes), strict=True):
                    held.copy_(new**2)
            else:
                self.inputs[name].fill_(0.5 + seed)
        self.found_inf.fill_(found_inf)
        self.scale.fill_(scale)

    def step(self, scaled: bool = False) -> None:
        scaling = Scaling(self.found_inf, self.scale) if scaled else None
        engine = self.of.engine
        engine.begin()
        run(engine.ready(tuple(EVERY), self.grads, self.of.table, self.inputs, scaling))
        engine.end()


def recorded(static: Static, scaled: bool = False) -> Graph:
    """The graph of a step, which is taken too, after two others."""
    for seed in range(2):
        static.give(seed)
        static.step(scaled)
    graph = Graph()
    static.give(2)
    with graph.recording():
        static.step(scaled)
    return graph


#: Elementwise rules, scalars of a tensor, reductions of every level, matrices, random numbers and a skip.
EVERYDAY = {
    "adamw", "nadam", "lamb", "adafactor", "prodigy", "muon", "apollo", "schedule_free_adamw", "sm3", "novograd",
    "transforms/noise", "transforms/skip_not_finite", "transforms/clip_by_global_norm",
}  # fmt: skip


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[] if name in EVERYDAY else [pytest.mark.another]) for name in runnable()]
)
def test_every_rule_does_in_a_graph_what_it_does_on_the_host(name: str) -> None:
    rule = loaded(name)
    ours, theirs = Run(rule, Elsewhere(), resident=True), Run(rule, Here())
    names = [*ours.engine.hyper_names]
    place = names.index("lr") if "lr" in names else slice(0)  # a rule without a rate has the same numbers throughout
    first = ours.table[place].copy()
    rates = [torch.tensor(x, dtype=torch.float64) for x in first]
    ours.engine.live = {("lr", group): rate for group, rate in enumerate(rates)}
    static = Static(ours)
    graph = recorded(static)
    for seed in range(3):
        theirs.step(seed, EVERY)
    for seed in range(3, 6):
        theirs.table = theirs.table.copy()
        theirs.table[place] = first / seed
        for rate, value in zip(rates, first / seed, strict=True):
            rate.fill_(value)
        static.give(seed)
        graph.replay()
        theirs.step(seed, EVERY)
    check_close(ours, theirs, tolerance(rule))


def test_indices_in_a_graph_are_those_of_the_step_that_is_run() -> None:
    """An array of indices is made anew in each step where it depends on the number of the step."""
    rule = rulec.parse("""
name: Indices
state: {m: 0}
step: |
  wave = cos(pi*index(per="row")*(index(per="col") + t)/numel)
  m = 0.5*m + where((index() + t) % 3 == 0, g, p)
  direction = m*wave + g*index()/numel
""")
    ours, theirs = Run(rule, Elsewhere(), resident=True), Run(rule, Here())
    static = Static(ours)
    graph = recorded(static)
    for seed in range(3):
        theirs.step(seed, EVERY)
    for seed in range(3, 6):
        static.give(seed)
        graph.replay()
        theirs.step(seed, EVERY)
    check_close(ours, theirs, 1e-12)


@pytest.mark.parametrize("name", ["adamw", "prodigy", "nadam", "lamb", "apollo", "skip_not_finite >> adam"])
def test_a_graph_leaves_everything_where_a_gradient_was_infinite(name: str) -> None:
    rule = rulec.load(name)
    ours, theirs = Run(rule, Elsewhere(), resident=True), Run(rule, Here())
    static = Static(ours)
    graph = recorded(static, scaled=True)
    for seed in range(3):
        theirs.step(seed, EVERY)
    static.give(3, float("inf"), found_inf=1.0)
    before = ours.everything()
    graph.replay()
    for key, value in ours.everything().items():
        np.testing.assert_array_equal(value, before[key], err_msg=key)
    static.give(4, 4.0)
    graph.replay()
    theirs.step(4, EVERY)
    check_close(ours, theirs, tolerance(rule))


def test_a_graph_counts_what_the_rule_skipped() -> None:
    ours = Run(rulec.load("skip_not_finite >> adam"), Elsewhere(), resident=True)
    static = Static(ours)
    graph = recorded(static)
    for seed in range(3, 7):
        static.give(seed, float("nan") if seed % 2 else 1.0)
        graph.replay()
    assert ours.engine.device_skips.steps(ours.engine.host) == 2
    assert float(ours.engine.state(0)["step"]) == 5
