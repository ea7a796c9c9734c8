"""Parts in Triton's interpreter, which must be chosen before Triton is imported: in processes of their own."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from benchmarks.gpu import check as gpu_check
from benchmarks.gpu import tune as gpu_tune
from benchmarks.gpu.device import Bench
from rulec.testing import NumpyKind
from rulec.testing.kinds import IEEE
from rulec.testing.trial import Subject
from rulec_backends.numpy import NumpyBackend
from tests.backends.triton_process import require_interpreter
from tests.benchmarks.gpu_fakes import HostDevice
from tests.testing.broken import WrongSign

#: Numba, which a machine with a GPU need not have, cannot be imported.
CHECK = """
import json, sys
sys.modules["numba"] = None
from benchmarks.gpu import check as gpu_check
from benchmarks.gpu.device import Bench
from tests.benchmarks.gpu_fakes import HostDevice
found = list({call})
print(json.dumps([[c.backend, c.rule, c.dtype, c.difference, c.fault, c.refused, c.kind] for c in found]))
"""


def in_the_interpreter(call: str) -> Any:
    return in_a_process(CHECK.format(call=call))


def in_a_process(program: str) -> Any:
    require_interpreter()
    done = subprocess.run(
        [sys.executable, "-c", program], env={**os.environ, "TRITON_INTERPRET": "1"},
        cwd=Path(__file__).parents[2], stdin=subprocess.DEVNULL, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout.splitlines()[-1])


@pytest.mark.slow
def test_a_rule_is_checked_in_every_dtype_with_its_largest_difference() -> None:
    found = in_the_interpreter("gpu_check.rule(Bench(False, HostDevice()), 'triton', 'adamw')")
    assert [one[:3] for one in found] == [
        ["triton", "adamw", dtype] for dtype in ("float32", "float64", "bfloat16", "float16")
    ]
    bounds = {"float32": 2.0**-22, "float64": 2.0**-50, "bfloat16": 2.0**-7, "float16": 2.0**-9}
    for _, _, dtype, difference, fault, refused, kind in found:
        assert (fault, refused, kind) == (None, None, "rules")
        assert difference <= bounds[dtype]
    assert sum(one[3] > 0 for one in found) >= 3  # it does measure


STEPS = """
import json, sys
sys.modules["numba"] = None
import torch, rulec.torch
from benchmarks.gpu import measure as gpu
params = [torch.ones(5, requires_grad=True)]
params[0].grad = torch.ones(5)
rulec.torch.AdamW(params, backend="triton", lr=0.5, weight_decay=0).step()
parts = sum(len(section.parts) for section in gpu.sections((), ("triton",)))
print(json.dumps([float(params[0].sum()), parts > 150]))
"""


@pytest.mark.slow
def test_steps_and_plans_need_no_numba() -> None:
    assert in_a_process(STEPS) == [pytest.approx(2.5), True]


BLOCKS = """
import json
from unittest import mock
from benchmarks.gpu import tune as gpu_tune
from benchmarks.gpu.device import Bench
from rulec.torch.tensors import tensors
from tests.benchmarks.gpu_fakes import HostDevice
with mock.patch.dict(tensors._BACKENDS, cpu="triton"), mock.patch.object(gpu_tune, "QUICK", 3000):
    (row,) = gpu_tune.blocks(Bench(True, HostDevice()), "lion", "bfloat16")
print(json.dumps([row.value, row.detail]))
"""


@pytest.mark.slow
def test_every_block_is_tried_beside_the_default() -> None:
    gain, detail = in_a_process(BLOCKS)
    assert detail["bytes"] == 5 * 2
    seconds = detail["seconds"]
    default = tuple(detail["default"])
    assert set(seconds) == {"default", *(gpu_tune._name(b) for b in gpu_tune.BLOCKS if b != default)}
    assert tuple(detail["block"]) in {default, *gpu_tune.BLOCKS}
    assert gain >= 1
    assert tuple(detail["block"]) == default or gain >= gpu_tune.GAIN


@pytest.mark.slow
def test_rules_made_to_be_hard() -> None:
    (found,) = in_the_interpreter("gpu_check.stages(Bench(True, HostDevice()), 'triton', 'Exchange')")
    assert found == ["triton", "Exchange", "every dtype", 0.0, None, None, "test rules"]


def on_numpy(monkeypatch: pytest.MonkeyPatch, backend: NumpyBackend) -> None:
    """Has the part check a backend of NumPy's arrays instead."""
    subject = Subject(backend, NumpyKind(), IEEE)
    monkeypatch.setattr(gpu_check, "subject_of", lambda bench, name: subject)


def test_a_rule_that_is_wrong_is_a_fault_in_a_sentence(monkeypatch: pytest.MonkeyPatch) -> None:
    on_numpy(monkeypatch, WrongSign())
    found = list(gpu_check.rule(Bench(False, HostDevice()), "numpy", "sgd"))
    assert [one.dtype for one in found] == ["float32", "float64", "bfloat16", "float16"]
    for one in found:
        assert one.fault is not None
        assert one.fault.startswith("backend 'wrong-sign', SGD in ")


def test_what_an_operation_raises_is_its_fault_and_the_next_goes_on(monkeypatch: pytest.MonkeyPatch) -> None:
    class Fails(NumpyBackend):
        def build(self, program: Any, layout: Any, source: str) -> Any:
            if program.name == "exp(g)":
                raise RuntimeError("no exponential here")
            return super().build(program, layout, source)

    on_numpy(monkeypatch, Fails())
    found = {one.rule: one for one in gpu_check.operations(Bench(True, HostDevice()), "numpy", "float64")}
    assert found["exp(g)"].fault == "RuntimeError: no exponential here"
    assert [name for name, one in found.items() if one.fault] == ["exp(g)"]
    assert len(found) > 30


def test_a_slow_rule_is_checked_in_a_dtype_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    on_numpy(monkeypatch, NumpyBackend())
    found = list(gpu_check.rule(Bench(False, HostDevice()), "numpy", "sgd", ("bfloat16",)))
    assert [(one.dtype, one.fault) for one in found] == [("bfloat16", None)]


def test_statistics_are_compared(monkeypatch: pytest.MonkeyPatch) -> None:
    on_numpy(monkeypatch, NumpyBackend())
    found = list(gpu_check.statistics(Bench(True, HostDevice()), "numpy", "adamw"))
    assert [(one.dtype, one.fault, one.kind) for one in found] == [
        (dtype, None, "steps with statistics") for dtype in ("float32", "float64")
    ]
    on_numpy(monkeypatch, WrongSign())
    (one, _) = gpu_check.statistics(Bench(True, HostDevice()), "numpy", "lamb")
    assert one.fault is not None


def test_where_it_is_to_be_quick_there_are_two_dtypes(monkeypatch: pytest.MonkeyPatch) -> None:
    on_numpy(monkeypatch, NumpyBackend())
    found = list(gpu_check.rule(Bench(True, HostDevice()), "numpy", "lamb"))
    assert [(one.dtype, one.fault) for one in found] == [("float32", None), ("float64", None)]


def test_a_device_that_is_spoilt_ends_the_part(monkeypatch: pytest.MonkeyPatch) -> None:
    device = HostDevice()

    class Spoils(NumpyBackend):
        def build(self, program: Any, layout: Any, source: str) -> Any:
            device.broken = True
            raise RuntimeError("CUDA error: an illegal memory access was encountered")

    on_numpy(monkeypatch, Spoils())
    with pytest.raises(RuntimeError, match="illegal memory access"):
        list(gpu_check.rule(Bench(True, device), "numpy", "sgd"))


def test_backends_that_cannot_run_here_are_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpu_check, "BACKENDS", ("numpy", "nowhere"))
    found, reasons = gpu_check.usable_backends()
    assert found == ["numpy"]
    (reason,) = reasons
    assert reason.startswith("correctness, nowhere: not run: there is no backend 'nowhere'")
