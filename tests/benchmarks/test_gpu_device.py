"""The device as torch drives it, with torch's own functions replaced: units, and what older or other platforms lack."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from benchmarks.gpu import device as gpu_device
from benchmarks.gpu.device import Bench, TorchDevice, gpu_facts


class Event:
    """Ten milliseconds after the one before."""

    count = 0

    def __init__(self, enable_timing: bool = False) -> None:
        assert enable_timing

    def record(self) -> None:
        Event.count += 1
        self.at = 10.0 * Event.count

    def elapsed_time(self, later: Event) -> float:
        return later.at - self.at


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """A GPU that does nothing but say what it was asked."""
    said: list[Any] = []
    properties = SimpleNamespace(
        name="Some GPU", total_memory=80 * 2**30, L2_cache_size=50 * 2**20, multi_processor_count=132, major=9, minor=0
    )
    stubs = {
        "init": lambda: None, "current_device": lambda: 0, "get_device_properties": lambda index: properties,
        "Event": Event, "_sleep": lambda cycles: said.append(("sleep", cycles)),
        "synchronize": lambda: said.append("synchronize"), "empty_cache": lambda: said.append("empty"),
        "mem_get_info": lambda: (7 * 2**30, 80 * 2**30),
    }  # fmt: skip
    for name, stub in stubs.items():
        monkeypatch.setattr(torch.cuda, name, stub)
    return said


def test_events_are_in_seconds(calls: list[Any]) -> None:
    device = TorchDevice()
    first, last = device.mark(), device.mark()
    assert device.seconds(first, last) == pytest.approx(0.01)


def test_the_device_is_held_by_counting_cycles(calls: list[Any], monkeypatch: pytest.MonkeyPatch) -> None:
    TorchDevice().hold(0.001)
    assert calls == [("sleep", 2_000_000)]
    monkeypatch.delattr(torch.cuda, "_sleep")
    TorchDevice().hold(0.001)
    assert len(calls) == 1


@pytest.mark.slow
def test_memory_is_counted_after_what_torch_keeps_is_given_back(calls: list[Any]) -> None:
    device = TorchDevice()
    assert device.free_bytes() == 7 * 2**30
    assert calls == ["empty"]
    assert device.cache_bytes() == 50 * 2**20


def test_a_device_that_does_not_tell_its_cache(calls: list[Any]) -> None:
    device = TorchDevice()
    del device.facts.L2_cache_size
    assert device.cache_bytes() == 64 * 2**20
    assert gpu_facts()["last_level_cache_bytes"] is None


def test_facts_name_the_architecture_and_the_platform(calls: list[Any], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    facts = gpu_facts()
    assert (facts["name"], facts["architecture"], facts["platform"]) == ("Some GPU", "sm_90", "CUDA 13.0")
    monkeypatch.setattr(torch.version, "cuda", None)
    monkeypatch.setattr(torch.version, "hip", "7.0")
    torch.cuda.get_device_properties(0).gcnArchName = "gfx942"
    facts = gpu_facts()
    assert (facts["architecture"], facts["platform"]) == ("gfx942", "ROCm 7.0")


@pytest.mark.slow
def test_a_device_is_asked_whether_it_still_works(calls: list[Any], monkeypatch: pytest.MonkeyPatch) -> None:
    bench = Bench()
    assert bench.recover()  # nothing was done yet
    assert calls == []
    bench.prepare()
    assert bench.recover()
    assert calls == ["empty", "synchronize"]

    def broken() -> None:
        raise RuntimeError("CUDA error: an illegal memory access was encountered")

    monkeypatch.setattr(torch.cuda, "synchronize", broken)
    assert not bench.recover()


def test_what_is_missing_is_one_sentence(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    assert gpu_device.missing() is None
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert gpu_device.missing() == (
        "rulec bench gpu needs a GPU of NVIDIA or AMD, and torch finds none: run it on a machine that has one"
    )
