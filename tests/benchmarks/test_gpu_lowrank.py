"""The measurement of low-rank members, on the processor: its timed steps, its targets, and EGGROLL's own code."""

from __future__ import annotations

import importlib.util
import sys
from types import ModuleType
from typing import Any

import pytest

from benchmarks.gpu import lowrank as gpu_lowrank
from benchmarks.gpu.device import Bench
from benchmarks.gpu.time import Prepared, timed
from benchmarks.result import Row
from rulec.tools.compare.measure import Times
from tests.benchmarks.gpu_fakes import HostDevice


@pytest.fixture
def bench() -> Bench:
    return Bench(True, HostDevice())


def rows(found: Any) -> dict[str, Row]:
    return {row.measure: row for row in found}


@pytest.mark.parametrize("dtype", gpu_lowrank.DTYPES)
def test_forward_and_update_are_judged(dtype: str, bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    seconds = {"base": 1.0, "forward": 1.05, "drawn": 1.4, "update": 1.2}
    monkeypatch.setattr(
        gpu_lowrank, "timed", lambda device, contenders, *_: Times({n: [seconds[n]] for n in contenders})
    )
    found = rows(gpu_lowrank.members(bench, dtype))
    assert {measure: (row.value, row.target, row.met) for measure, row in found.items()} == {
        gpu_lowrank.BASE: (1.05, 1.1, True), gpu_lowrank.DRAWN: (1.4, None, None),
        gpu_lowrank.UPDATE: (1.2, 1.1, False),
    }  # fmt: skip
    assert found[gpu_lowrank.BASE].subject == f"lowrank, rank 1, linear 64 x 64, 32 members, {dtype}"
    assert (gpu_lowrank.WIDE, gpu_lowrank.MEMBERS) == (4096, 4096)


def test_contenders_can_be_called_again_and_again(bench: Bench) -> None:
    """A forward that draws noise draws it each time; one with noise that is there, and an update, are prepared."""
    contenders = gpu_lowrank._ours(bench, "float32")
    times = timed(bench.device, {name: [step] for name, step in contenders.items()}, 3)
    assert all(len(of_one) == 3 for of_one in times.seconds.values())


def test_what_is_prepared_is_called_before_each_call_and_not_timed(bench: Bench) -> None:
    calls: list[str] = []
    step = Prepared(lambda: calls.append("step"), lambda: calls.append("before"))
    timed(bench.device, {"a": [step]}, 2)
    assert calls[::2] == ["before"] * (len(calls) // 2)
    assert calls[1::2] == ["step"] * (len(calls) // 2)


def test_a_rule_alone_has_no_part(monkeypatch: pytest.MonkeyPatch) -> None:
    assert gpu_lowrank.parts(("adamw",)) == []
    assert gpu_lowrank.missing(("adamw",)) == []
    find = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "hyperscalees" else find(name))
    assert [part.arguments for part in gpu_lowrank.parts(())] == [("bfloat16",), ("float32",)]
    assert gpu_lowrank.missing(()) == ["hyperscalees, EGGROLL's own code in JAX, to compare with, is not installed"]


class Strategy:
    """As EGGROLL's, of noise that is nothing."""

    @staticmethod
    def init_noiser(params: Any, sigma: float, lr: float, rank: int) -> tuple[dict[str, Any], dict[str, Any]]:
        return {"rank": rank}, {"sigma": sigma}

    @staticmethod
    def do_mm(frozen: Any, noiser: Any, param: Any, key: Any, info: Any, x: Any) -> Any:
        assert x.shape == (64,)
        return x @ param.T + noiser["sigma"] * info[1]

    @staticmethod
    def do_updates(
        frozen: Any, noiser: Any, params: Any, keys: Any, fitnesses: Any, infos: Any, kinds: int
    ) -> tuple[Any, Any]:  # fmt: skip
        assert fitnesses.shape == infos[0].shape == infos[1].shape == (32,)
        assert kinds == 1  # of a matrix
        return noiser, params + fitnesses.sum()


def test_eggrolls_own_code_is_held_against_its_own_plain_layer(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    module = ModuleType("hyperscalees.noiser.eggroll")
    module.EggRoll = Strategy  # type: ignore[attr-defined]
    for name in ("hyperscalees", "hyperscalees.noiser"):
        monkeypatch.setitem(sys.modules, name, ModuleType(name))
    monkeypatch.setitem(sys.modules, "hyperscalees.noiser.eggroll", module)
    contenders = gpu_lowrank._theirs(bench, "float32")
    base, drawn = contenders["base"](), contenders["drawn"]()
    assert base.shape == drawn.shape == (32, 64)  # type: ignore[attr-defined]
    assert contenders["update"]().shape == (64, 64)  # type: ignore[attr-defined]
    monkeypatch.setattr(gpu_lowrank, "interleaved", lambda contenders, _: Times({n: [2.0] for n in contenders}))
    found = list(gpu_lowrank.eggroll(bench, "float32"))
    assert [(row.value, row.target) for row in found if isinstance(row, Row)] == [(1.0, None)] * 2
    assert all(row.subject.startswith("EGGROLL's own code in JAX: ") for row in found if isinstance(row, Row))
