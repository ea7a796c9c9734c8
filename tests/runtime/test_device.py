"""Steps whose values between the stages stay on a device, beside the same steps on the host."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

import rulec
from rulec import Rule
from rulec.errors import TensorError
from rulec.language.expr.node import Op, walk
from rulec.runtime.buckets.scalar_table_device import Scaling
from rulec.runtime.engine import Engine, default_hyper
from rulec.testing.cases import loaded
from rulec.testing.whole import tolerance
from rulec.torch.tensors.tensors import TorchArrays
from tests.library import by_kind, single
from tests.runtime.elsewhere import Elsewhere, Here
from tests.runtime.nowhere import DEVICE, Nowhere, copies

SHAPES = [(), (7,), (6, 5), (0,), (6, 5), (3, 4, 5), (2, 3, 4, 2), (5, 6)]
SQUARE_SHAPES = [(), (7,), (5, 5), (0,), (5, 5), (6, 2, 3), (4, 2, 2), (6, 6)]

#: All, some, and all again.
FIRED = [[*range(8)], [0, 2, 5, 6], [1, 2, 3, 4], [*range(8)]]


def shapes_of(rule: Rule) -> list[tuple[int, ...]]:
    return SQUARE_SHAPES if any(n.op is Op.EIGH for n in walk(rule.expressions)) else SHAPES


def values(seed: int, shapes: Sequence[tuple[int, ...]]) -> list[Tensor]:
    rng = np.random.default_rng(seed)
    return [torch.from_numpy(np.array(rng.normal(size=s))) for s in shapes]


class Run:
    """A rule on tensors in two groups."""

    def __init__(self, rule: Rule, backend: Any, resident: bool = False, **hyper: float) -> None:
        self.rule, self.shapes = rule, shapes_of(rule)
        self.params = values(1, self.shapes)
        self.engine = Engine(rule, TorchArrays(), backend, resident=resident)
        for i, p in enumerate(self.params):
            self.engine.add(p, i % 2, f"tensor {i}")
        first = default_hyper(self.engine.rule, hyper, "float64")
        second = first if not self.engine.rule.hyper.get("lr") or rule.inputs else {**first, "lr": 0.5 * first["lr"]}
        self.table = self.engine.hyper_table([first, self._fitting(first, second)])

    def _fitting(self, first: Mapping[str, float], second: Mapping[str, float]) -> Mapping[str, float]:
        """The second group's numbers, those of the first where a state of the model is made of them."""
        try:
            self.engine.prepare([*range(len(self.params))], None, self.engine.hyper_table([first, second]))
        except rulec.errors.HyperError:
            return first
        return second

    def step(self, seed: int, fired: Sequence[int], scaling: Scaling | None = None, factor: float = 1.0) -> None:
        grads = [factor * g for g in values(100 + seed, self.shapes)]
        inputs: dict[str, Any] = {}
        for name, kind in self.rule.standalone().inputs.items():
            given = values(200 + seed, self.shapes)
            inputs[name] = [given[i] ** 2 for i in fired] if kind == "like p" else 0.5 + seed
        self.engine.begin()
        launches = self.engine.ready(tuple(fired), [grads[i] for i in fired], self.table, inputs, scaling)
        rulec.runtime.engine.run(launches)
        self.engine.end()

    def everything(self) -> dict[str, np.ndarray[Any, Any]]:
        found = {f"{i} p": p.numpy().copy() for i, p in enumerate(self.params)}
        for i in range(len(self.params)):
            found |= {f"{i} {k}": v.double().numpy().copy() for k, v in self.engine.state(i).items()}
        return found | {k: np.asarray(self.engine.host.numbers(v)).copy() for k, v in self.engine.shared.values.items()}


def check_close(ours: Run, theirs: Run, rtol: float) -> None:
    found, wanted = ours.everything(), theirs.everything()
    assert found.keys() == wanted.keys()
    for key, value in wanted.items():
        scale = np.abs(value[np.isfinite(value)]).max(initial=1e-30)
        np.testing.assert_allclose(found[key], value, rtol=rtol, atol=rtol * scale, err_msg=key)


def runnable() -> list[str]:
    return [name for name in single() if not loaded(name).wraps]


def both_ways(names: Sequence[str]) -> list[Any]:
    """Each rule with its scalars on the device and on the host."""
    return by_kind((name, resident) for name in names for resident in (False, True))


@pytest.mark.filterwarnings("ignore:.*skipped the step")
@pytest.mark.parametrize(("name", "resident"), both_ways(runnable()))
def test_every_rule_does_on_a_device_what_it_does_on_the_host(name: str, resident: bool) -> None:
    rule = loaded(name)
    ours, theirs = Run(rule, Elsewhere(), resident), Run(rule, Here())
    for seed, fired in enumerate(FIRED):
        ours.step(seed, fired)
        theirs.step(seed, fired)
    check_close(ours, theirs, tolerance(rule))


@pytest.mark.parametrize("resident", [False, True])
def test_quantiles_of_stacked_tensors_are_those_of_each(resident: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each tensor of several matrices has its own share, a number that the host does not know."""
    monkeypatch.setattr(
        "tests.runtime.test_device.SHAPES", [(2, 3, 4), (2, 3, 4), (5,), (2, 3, 4), (5,), (3, 4), (3, 4), ()]
    )
    rule = rulec.parse("""
name: Quantiles
state: {m: 0, limit: {init: 0, per: tensor}, r: {init: 0, per: row}}
step: |
  m = 0.5*m + g
  share = 1/(1 + norm(g))
  limit = quantile(abs(m), 1 - share)
  r = r + median(m, per="row") + quantile(m, share, per="matrix")
  direction = clip(m, -limit, limit) + r*quantile(p, 0.3, per="col", interpolation="higher")
""")
    ours, theirs = Run(rule, Elsewhere(), resident), Run(rule, Here())
    for seed, fired in enumerate(FIRED):
        ours.step(seed, fired)
        theirs.step(seed, fired)
    check_close(ours, theirs, 1e-12)


@pytest.mark.parametrize("resident", [False, True])
def test_orders_of_stacked_tensors_are_those_of_each(resident: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each tensor of several matrices has its own place, a number that the host does not know."""
    monkeypatch.setattr(
        "tests.runtime.test_device.SHAPES", [(2, 3, 4), (2, 3, 4), (5,), (2, 3, 4), (5,), (3, 4), (3, 4), ()]
    )
    rule = rulec.parse("""
name: Orders
state: {m: 0, c: {init: 0, per: tensor}, r: {init: 0, per: row}}
step: |
  m = 0.5*m + g
  place = round(numel/(1 + norm(g)))
  c = c + where(numel > 1, take(m, place), 1)
  r = r + sort(max(p, per="row"), per="matrix") + take(eye(rows), 0)
  order = argsort(norm(g, per="row"), per="matrix")
  direction = take(sort(m), argsort(g)) + c*take(m, order, axis=0) + r*take(m, 0, axis=0) + sort(p, per="row")
""")
    ours, theirs = Run(rule, Elsewhere(), resident), Run(rule, Here())
    for seed, fired in enumerate(FIRED):
        ours.step(seed, fired)
        theirs.step(seed, fired)
    check_close(ours, theirs, 1e-12)


@pytest.mark.parametrize(
    "name", ["adamw", "lamb", "adafactor", "prodigy", "muon", "nadam", "clip_by_global_norm >> adam", "shampoo"]
)
def test_scaled_gradients_are_unscaled_and_an_infinity_leaves_everything(name: str) -> None:
    rule = rulec.load(name)
    ours, theirs = Run(rule, Elsewhere(), resident=True), Run(rule, Here())
    every, scale = [*range(8)], torch.tensor(1024.0)
    fine, bad = (Scaling(torch.tensor(x), scale) for x in (0.0, 1.0))
    ours.step(0, every, fine, 1024.0)
    theirs.step(0, every)
    before = ours.everything()
    ours.step(1, every, bad, float("inf"))
    after = ours.everything()
    assert before.keys() == after.keys()
    for key, value in before.items():
        np.testing.assert_array_equal(after[key], value, err_msg=key)
    for seed, fired in ((2, [0, 2, 5, 6]), (3, every)):
        ours.step(seed, fired, fine, 1024.0)
        theirs.step(seed, fired)
    check_close(ours, theirs, tolerance(rule))


def test_a_learning_rate_on_the_device_is_read_at_every_step() -> None:
    rule = rulec.load("adamw")
    ours, theirs = Run(rule, Elsewhere(), resident=True), Run(rule, Here())
    rate = torch.tensor(0.25, dtype=torch.float64)
    ours.engine.live = {("lr", 0): rate, ("lr", 1): rate}
    for seed in range(3):
        rate.fill_(0.25 / (1 + seed))
        theirs.table = theirs.engine.hyper_table([default_hyper(rule, {"lr": float(rate)}, "float64")] * 2)
        ours.step(seed, FIRED[seed])
        theirs.step(seed, FIRED[seed])
    check_close(ours, theirs, 1e-12)


def test_gradients_that_are_scaled_are_refused_where_tensors_are_on_the_host() -> None:
    ours = Run(rulec.load("adamw"), "cpu")
    before = ours.everything()
    with pytest.raises(TensorError, match="AdamW cannot take scaled gradients on cpu: unscale them before the step"):
        ours.step(0, [*range(8)], Scaling(torch.tensor(0.0)))
    after = ours.everything()
    for key, value in before.items():
        np.testing.assert_array_equal(after[key], value, err_msg=key)


SKIPPING = rulec.parse("name: S\nskip: not isfinite(sum(g))\nstate: {m: 0}\nstep: |\n  m = m + g\n  direction = m\n")


def test_updates_that_were_skipped_are_counted_on_the_device() -> None:
    ours = Run(SKIPPING, Elsewhere())
    ours.step(0, [0, 1, 2])
    before = ours.everything()
    ours.step(1, [0, 1, 2], factor=float("nan"))
    after = ours.everything()
    for key, value in before.items():
        np.testing.assert_array_equal(after[key], value, err_msg=key)
    assert ours.engine.device_skips.steps(ours.engine.host) == 1
    ours.step(2, [0, 1, 2])
    assert [float(ours.engine.state(i)["step"]) for i in range(3)] == [2, 2, 2]


def test_skipped_updates_are_counted_where_a_graph_goes_on_counting() -> None:
    ours = Run(SKIPPING, Elsewhere())
    ours.step(0, [0, 1, 2], factor=float("nan"))
    assert ours.engine.device_skips._count is not None
    counted, _ = ours.engine.device_skips._count
    ours.step(1, [0, 1, 2], factor=float("nan"))
    assert float(counted) == ours.engine.device_skips.steps(ours.engine.host) == 2


def test_what_a_scale_was_too_large_for_was_not_skipped_by_the_rule() -> None:
    ours = Run(SKIPPING, Elsewhere(), resident=True)
    scale = torch.tensor(2.0)
    for seed, broken in enumerate((False, True)):
        scaling = Scaling(torch.tensor(float(broken)), scale)
        ours.step(seed, [0, 1, 2], scaling, factor=float("inf") if broken else 2.0)
    assert ours.engine.device_skips.steps(ours.engine.host) == 0
    assert [float(ours.engine.state(i)["step"]) for i in range(3)] == [1, 1, 1]


POLYAK = 'name: P\ninputs: {loss: scalar, w: like p}\nstep: |\n  p = p - loss*g*w/(sum(g**2, per="model") + 1e-8)\n'


def test_inputs_are_read_where_they_are() -> None:
    rule = rulec.parse(POLYAK)
    with copies() as copied:
        params, grads = ([torch.empty(s, device=DEVICE) for s in SHAPES] for _ in range(2))
        engine = Engine(rule, TorchArrays(), Nowhere(), resident=True)
        ids = tuple(engine.add(p, 0, f"tensor {i}") for i, p in enumerate(params))
        table = engine.hyper_table([default_hyper(engine.rule, {}, "float32")])
        for loss in (torch.empty((), device=DEVICE), 0.5, torch.empty((), device=DEVICE)):
            before = len(copied)
            engine.step(ids, grads, table, {"loss": loss, "w": grads})
    assert copied[before:] == []


#: What leaves nothing to the tensors' framework that it waits in.
WAITING = {Op.EIGH, Op.SINGULAR_VECTORS, Op.INVERSE_ROOT}


def without_waiting() -> list[str]:
    """Not SaRA: its state begins with the values of the parameters, and tensors of this device have none."""
    names = [name for name in runnable() if name != "sara"]
    return [name for name in names if not WAITING & {n.op for n in walk(loaded(name).expressions)}]


@pytest.mark.parametrize(("name", "resident"), both_ways(without_waiting()))
def test_nothing_between_the_stages_waits_for_the_device(name: str, resident: bool) -> None:
    rule = loaded(name)
    shapes = shapes_of(rule)
    with copies() as copied:
        params, grads = ([torch.empty(s, device=DEVICE) for s in shapes] for _ in range(2))
        engine = Engine(rule, TorchArrays(), Nowhere(), resident=resident)
        for i, p in enumerate(params):
            engine.add(p, i % 2, f"tensor {i}")
        table = engine.hyper_table([default_hyper(engine.rule, {}, "float32")] * 2)
        inputs = {k: grads if kind == "like p" else 1.0 for k, kind in rule.standalone().inputs.items()}
        for _ in range(2):
            engine.step(tuple(range(len(params))), grads, table, inputs)
        before = len(copied)
        engine.step(tuple(range(len(params))), grads, table, inputs)
    if resident:
        assert copied[before:] == []
