"""The device as measurements see it: events, memory, and whether it still works; through torch, on NVIDIA and AMD."""

from __future__ import annotations

import gc
import importlib.util
from dataclasses import dataclass, field
from typing import Any, Protocol

from rulec.extras import sentence

#: Cycles of the device's clock in a second, for waits whose length matters little.
_CYCLES = 2.0e9


class Device(Protocol):
    """A device with a clock for its work; `name` is torch's name of it."""

    name: str

    def mark(self) -> Any:
        """A mark behind the work that was handed over so far."""
        ...

    def seconds(self, first: Any, last: Any) -> float:
        """The device's time between two marks, once it has passed both."""
        ...

    def passed(self, mark: Any) -> bool:
        """Whether the device is past a mark by now."""
        ...

    def hold(self, seconds: float) -> None:
        """Keeps the device busy for about so long: work handed over meanwhile then runs without a gap."""
        ...

    def synchronize(self) -> None:
        """Waits until all work is done; raises the device's errors."""
        ...

    def free_bytes(self) -> int:
        """Bytes of free memory."""
        ...

    def cache_bytes(self) -> int:
        """The size of the last cache before memory."""
        ...

    def release(self) -> None:
        """Gives memory back that nobody uses."""
        ...


class TorchDevice:
    """The device that torch has chosen, with work on its current stream."""

    name = "cuda"

    def __init__(self) -> None:
        import torch

        self._torch = torch
        torch.cuda.init()  # type: ignore[no-untyped-call]
        self.facts = torch.cuda.get_device_properties(torch.cuda.current_device())

    def mark(self) -> Any:
        """An event."""
        event = self._torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        event.record()
        return event

    def seconds(self, first: Any, last: Any) -> float:
        """By events, which count in milliseconds."""
        return float(first.elapsed_time(last)) / 1e3

    def passed(self, mark: Any) -> bool:
        """Asks the event, and does not wait for it."""
        return bool(mark.query())

    def hold(self, seconds: float) -> None:
        """By a kernel that counts cycles; not at all where torch no longer has it."""
        sleep = getattr(self._torch.cuda, "_sleep", None)
        if sleep is not None:
            sleep(int(seconds * _CYCLES))

    def synchronize(self) -> None:
        """Waits for all streams."""
        self._torch.cuda.synchronize()

    def free_bytes(self) -> int:
        """The driver's free memory, after torch has given back its cached blocks."""
        self.release()
        return int(self._torch.cuda.mem_get_info()[0])

    def cache_bytes(self) -> int:
        """The L2; 64 MiB where torch does not say."""
        return int(getattr(self.facts, "L2_cache_size", 0) or 64 * 2**20)

    def release(self) -> None:
        """Of torch's cache, after a collection of cycles of references."""
        gc.collect()
        self._torch.cuda.empty_cache()


@dataclass
class Bench:
    """The tools of a part: the device, made when it is first needed, and whether sizes are to be tiny."""

    quick: bool = False
    _device: Device | None = field(default=None, repr=False)

    def prepare(self) -> None:
        """Makes the device ready, where it is not."""
        if self._device is None:
            self._device = TorchDevice()

    @property
    def device(self) -> Device:
        """The device."""
        self.prepare()
        assert self._device is not None
        return self._device

    def recover(self) -> bool:
        """Gives memory back after a part; False where the device takes no more work from this process."""
        if self._device is None:
            return True
        try:
            self._device.release()
            self._device.synchronize()
        except Exception:  # noqa: BLE001 - a context that an illegal access has spoilt raises all kinds of things
            return False
        return True


def missing() -> str | None:
    """A sentence about a missing package or GPU; None where a measurement can run."""
    for package in ("torch", "triton"):
        if importlib.util.find_spec(package) is None:
            return sentence("rulec bench gpu", "torch", "triton", package=package)
    import torch

    if torch.cuda.is_available():
        return None
    return "rulec bench gpu needs a GPU of NVIDIA or AMD, and torch finds none: run it on a machine that has one"


def gpu_facts() -> dict[str, Any]:
    """The device that torch has chosen: its name, memory, last cache, architecture, and the platform's version."""
    import torch

    properties = torch.cuda.get_device_properties(torch.cuda.current_device())
    platform = f"CUDA {torch.version.cuda}" if torch.version.cuda else f"ROCm {torch.version.hip}"
    return {
        "name": properties.name,
        "memory_bytes": properties.total_memory,
        "last_level_cache_bytes": getattr(properties, "L2_cache_size", None),
        "processors": properties.multi_processor_count,
        "architecture": getattr(properties, "gcnArchName", None) or f"sm_{properties.major}{properties.minor}",
        "platform": platform,
    }
