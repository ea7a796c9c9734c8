"""Faults of one line in the order of transfers: the enumeration of orders finds each of them."""

from __future__ import annotations

import inspect
import sys
import textwrap
from contextlib import nullcontext
from typing import Any, NamedTuple

import pytest

from rulec.torch.offload import link
from rulec.torch.offload.host_step import HostStep
from rulec.torch.offload.link import CudaLink, _CudaEvent
from rulec.torch.offload.pieces import PieceCall
from rulec.torch.offload.ring import Ring, Rings
from tests.torch.offload.scripted import Race
from tests.torch.offload.test_orders import F32, LARGE, SMALL, Case, find_orders


class Fault(NamedTuple):
    """Texts of methods, the texts in their place, and the case in which some order is wrong."""

    edits: tuple[tuple[type, str, str, str], ...]
    case: Case


TWO_STEPS = Case("adamw", F32, (8, 8), (0, 1), steps=2)
FOUR = Case("adamw", F32, (8,) * 4, (0, 1, 2, 3))
MASTERS = SMALL["master copies"]
PIECES = Case("adamw", F32, (256,), (0,), buffer=256, pieces=(4,))

FAULTS = {
    "a claim that does not wait": Fault(((Ring, "claim", "buffer.event.wait()", "pass"),), FOUR),
    "a release before the copy up": Fault(((Ring, "release", "None, event", "None, None"),), MASTERS),
    "weights released twice": Fault(
        ((HostStep, "take_back", "weights.release(load.turn, event)", "weights.release(load.turn)"),),
        FOUR,
    ),
    "gradients in the buffer of another turn": Fault(
        ((HostStep, "_gradients", "gradients.of(group.number)", "gradients.of(0)"),), SMALL["three groups"]
    ),
    "a copy into the buffer in use": Fault(
        ((HostStep, "bring", "_are_apart(load, following)", "following.turn != load.turn"),), SMALL["two of one buffer"]
    ),
    "no wait for the copy down": Fault(((HostStep, "bring", "load.arrived.wait()", "pass"),), SMALL["two groups"]),
    "an eviction of gradients not noticed": Fault(
        ((HostStep, "_start", "ring.is_of(load.turn, load) for ring in rings", "True for ring in rings"),),
        LARGE["evicted"],
    ),
    "an eviction of weights not noticed": Fault(
        ((HostStep, "_start", "for ring in rings):", "for ring in rings[:1]):"),), LARGE["evicted weights"]
    ),
    "the device does not wait for weights": Fault(((Rings, "hold", "self.link.hold(self.last)", "pass"),), TWO_STEPS),
    "weights copied up before they are computed": Fault(
        (
            (HostStep, "take_back", "link.up([(device, mirror) for mirror, device in load.weights])", "last"),
            (
                HostStep, "bring", "load.here = True",
                "load.here, load.rings.last = True, load.rings.link.up([(here, w) for w, here in load.weights])",
            ),
        ),
        SMALL["two groups"],
    ),
    "weights copied up where nothing waits alone": Fault(
        ((HostStep, "take_back", "launch.ran >=", "done and launch.ran >="),), SMALL["a sum after the last stage"]
    ),
    "the first copy up is held": Fault(
        ((HostStep, "take_back", "event = load.rings.last = ", "event = load.rings.last = load.rings.last or "),),
        TWO_STEPS,
    ),
    "pieces that claim no weights": Fault(
        ((PieceCall, "_fetch", "rings.weights.claim(k, self)", "pass"),), PIECES
    ),
    "pieces that do not wait for the copy down": Fault(
        ((PieceCall, "_update", "arrived.wait()", "pass"),), SMALL["two pieces"]
    ),
    "pieces released before the copy up": Fault(
        ((PieceCall, "_send", "rings.weights.release(k, rings.last)", "rings.weights.release(k)"),), PIECES
    ),
    "a piece fetched into the buffer in use": Fault(
        ((PieceCall, "__call__", "arriving = arriving, self._fetch(k + 1)", "arriving = arriving, self._fetch(k)"),),
        SMALL["two pieces"],
    ),
}  # fmt: skip


def plant(monkeypatch: pytest.MonkeyPatch, owner: type, name: str, old: str, new: str) -> None:
    """Puts a text in the place of another in a method, until the test ends."""
    method: Any = owner.__dict__[name]
    text = textwrap.dedent(inspect.getsource(method))
    assert text.count(old) == 1, f"{old!r} is not once in {owner.__name__}.{name}"
    names: dict[str, Any] = {}
    text = "from __future__ import annotations\n" + text.replace(old, new)
    code = compile(text, inspect.getsourcefile(method) or "", "exec")
    exec(code, vars(sys.modules[owner.__module__]), names)  # noqa: S102
    monkeypatch.setattr(owner, name, names[name])


@pytest.mark.parametrize("name", FAULTS)
def test_some_order_finds_a_fault(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    fault = FAULTS[name]
    for edit in fault.edits:
        plant(monkeypatch, *edit)
    with pytest.raises((Race, AssertionError)):
        find_orders(fault.case)


#: The same of the streams and events of CUDA.
CUDA_FAULTS = {
    "a copy down before the device has computed": Fault(
        ((CudaLink, "down", "_CudaEvent(torch.cuda.current_stream(self.device))", "None"),), SMALL["two groups"]
    ),
    "the device does not wait": Fault(
        ((CudaLink, "hold", "event.hold(torch.cuda.current_stream(self.device))", "pass"),), TWO_STEPS
    ),
    "the host does not wait": Fault(((_CudaEvent, "wait", "self._event.synchronize()", "pass"),), SMALL["two groups"]),
    "copies on the stream that computes": Fault(
        ((CudaLink, "_on", "torch.cuda.stream(stream)", "nullcontext()"),), SMALL["two groups"]
    ),
}


@pytest.mark.parametrize("name", CUDA_FAULTS)
def test_some_order_finds_a_fault_of_streams_and_events(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    fault = CUDA_FAULTS[name]
    monkeypatch.setattr(link, "nullcontext", nullcontext, raising=False)
    for edit in fault.edits:
        plant(monkeypatch, *edit)
    with pytest.raises((Race, AssertionError)):
        find_orders(fault.case, cuda=True)


@pytest.mark.slow
def test_the_number_of_orders_finds_an_eviction_that_does_not_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    """Copies of one direction end in their order, so that no number is wrong."""
    count, expected = find_orders(LARGE["evicted"])
    assert count == expected
    condition = "if buffer.event is not None"
    plant(monkeypatch, Ring, "claim", f"{condition}:", f"{condition} and buffer.owner is None:")
    count, expected = find_orders(LARGE["evicted"])
    assert count != expected
