"""The cupy backend under torch's optimizers: kernels on the CPU, in tensors that are said to be on a GPU."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import Any

import pytest
import torch

import rulec.torch
from rulec.backend import registry
from rulec.testing import IEEE, TorchKind
from rulec.testing.cases import loaded
from rulec.testing.trial import Subject
from rulec.testing.whole import check_whole
from rulec_backends.cupy import CupyBackend
from rulec_backends.cupy import memory as cupy_memory
from rulec_backends.cupy.call import CudaCall
from tests.backends import cuda_stand_in
from tests.pairs import paired

pytestmark = pytest.mark.skipif(bool(cuda_stand_in.MISSING), reason=cuda_stand_in.MISSING or "g++ is here")

BACKEND = CupyBackend(threads=64)
STORAGE = [pytest.param({}, id="floats"), pytest.param({"state_dtype": "int8"}, id="codes")]


@pytest.fixture(autouse=True)
def on_a_gpu(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Takes every tensor for one on a GPU; torch's own work is done at once, and so are kernels."""
    memory, get = cupy_memory.TorchMemory, registry.get
    monkeypatch.setattr(registry, "get", lambda name: BACKEND if name == "cupy" else get(name))
    monkeypatch.setattr(cupy_memory, "_where", lambda array, what: ("torch", 0))
    monkeypatch.setattr(memory, "empty", lambda self, count: torch.empty(count, dtype=torch.float64))
    monkeypatch.setattr(memory, "zeros", lambda self, *shape: torch.zeros(shape, dtype=torch.float64))
    monkeypatch.setattr(memory, "stream", lambda self, chosen: cuda_stand_in.Stream(3))
    for name in ("__call__", "scalars"):
        monkeypatch.setattr(CudaCall, name, at_once(getattr(CudaCall, name)))
    with cuda_stand_in.installed():
        yield


def at_once(function: Any) -> Any:
    def call(*given: Any, **named: Any) -> Any:
        found = function(*given, **named)
        cuda_stand_in.flush()
        return found

    return call


@pytest.mark.parametrize("name", ["adamw", "adafactor", "lamb", "muon", "prodigy", "transforms/skip_not_finite"])
def test_whole_steps_are_the_reference_s(name: str) -> None:
    check_whole(Subject(BACKEND, TorchKind("cpu"), IEEE), loaded(name))


def trained(backend: str, make: Any, steps: int = 3, **more: Any) -> list[Any]:
    """Parameters after some steps with gradients of a seed."""
    torch.manual_seed(0)
    params = [torch.nn.Parameter(torch.randn(shape, dtype=torch.float64)) for shape in ((5, 3), (7,), (40, 40))]
    optimizer = make(params, backend=backend, **more)
    for step in range(steps):
        for p in params:
            p.grad = torch.randn_like(p)
        rate = optimizer.param_groups[0]["lr"]
        if isinstance(rate, torch.Tensor):
            rate.fill_(0.01 * (1 + step))
        else:
            optimizer.param_groups[0]["lr"] = 0.01 * (1 + step)
        optimizer.step()
    return [p.detach() for p in params]


@pytest.mark.parametrize("make", [rulec.torch.AdamW, rulec.torch.NAdam, rulec.torch.LAMB], ids=lambda c: c.__name__)
@pytest.mark.parametrize("capturable", [False, True])
def test_optimizers_are_those_of_the_cpu(make: Any, capturable: bool) -> None:
    there: dict[str, Any] = {"capturable": True, "lr": torch.tensor(0.01, dtype=torch.float64)} if capturable else {}
    ours, theirs = trained("cupy", make, **there), trained("cpu", make)
    for a, b in zip(ours, theirs, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-12, atol=1e-14)


def test_scaled_gradients_that_are_not_finite_leave_everything_as_it_was() -> None:
    torch.manual_seed(1)
    param, plain = (torch.nn.Parameter(torch.ones(33, dtype=torch.float64)) for _ in range(2))
    scaled = rulec.torch.AdamW([param], backend="cupy", capturable=True)
    other = rulec.torch.AdamW([plain], backend="cpu")
    grad = torch.randn(33, dtype=torch.float64)
    for factor, infinite in ((1024.0, False), (3.0, True), (8.0, False)):
        scaled.grad_scale = torch.tensor(factor)
        scaled.found_inf = torch.tensor(float(infinite))
        param.grad = grad * factor
        before = param.detach().clone()
        scaled.step()
        if infinite:
            assert torch.equal(param, before)
            continue
        plain.grad = grad.clone()
        other.step()
    torch.testing.assert_close(param, plain, rtol=1e-12, atol=1e-14)
    assert int(scaled.state[param]["step"]) == 2


@pytest.mark.parametrize("make", [rulec.torch.AdamW, rulec.torch.LAMB], ids=lambda c: c.__name__)
def test_tensors_that_stay_keep_their_codes_and_scales(make: Any) -> None:
    torch.manual_seed(1)
    param = torch.nn.Parameter(torch.randn(72, 80))
    optimizer = make([param], backend="cupy", state_dtype="int8", capturable=True)
    optimizer.grad_scale = torch.tensor(4.0)
    before: list[Any] = []
    for infinite in (False, True):
        optimizer.found_inf = torch.tensor(float(infinite))
        param.grad = 4 * torch.randn(72, 80)
        optimizer.step()
        after = [param.detach().clone(), *(x.clone() for x in optimizer.state[param].values())]
        assert not infinite or all(map(torch.equal, before, after))
        before = after
    assert all(bool(x.any()) for x in before)


@pytest.mark.parametrize(
    ("capturable", "more"),
    paired([False, True], STORAGE),
)
def test_stochastic_weights_have_the_bits_of_the_cpu(more: dict[str, Any], capturable: bool) -> None:
    def run(backend: str, **there: Any) -> list[torch.Tensor]:
        torch.manual_seed(0)
        params = [torch.nn.Parameter(torch.randn(shape).bfloat16()) for shape in ((72, 81), (5,), (5,))]
        optimizer = rulec.torch.AdamW(params, 1e-4, backend=backend, weights="stochastic", seed=70000, **more, **there)
        for _ in range(3):
            for p in params:
                p.grad = torch.randn(p.shape).bfloat16()
            optimizer.step()
        return [p.detach() for p in params]

    for ours, theirs in zip(run("cupy", capturable=capturable), run("cpu"), strict=True):
        assert torch.equal(ours, theirs)


@pytest.mark.parametrize("capturable", [False, True])
def test_states_in_codes_are_saved_and_loaded_in_the_middle(capturable: bool) -> None:
    def run(backend: str, **more: Any) -> Any:
        torch.manual_seed(0)
        params = [torch.nn.Parameter(torch.randn(shape)) for shape in ((5,), (72, 80))]
        optimizer = rulec.torch.AdamW(params, backend=backend, state_dtype="int8", **more)
        for step in range(4):
            for p in params:
                p.grad = torch.randn_like(p)
            optimizer.step()
            if step == 1:
                saved = copy.deepcopy(optimizer.state_dict())
                optimizer = rulec.torch.AdamW(params, backend=backend, state_dtype="int8", **more)
                optimizer.load_state_dict(saved)
        assert [*optimizer.storage().values()][1] == {"exp_avg": "int8/32", "exp_avg_sq": "int8/256"}
        assert optimizer.state[params[0]]["exp_avg"].dtype is torch.float32
        return [*params, *optimizer.state[params[1]].values()]

    ours, theirs = run("cupy", capturable=capturable), run("cpu")
    assert all(torch.equal(a.detach().float(), b.detach().float()) for a, b in zip(ours, theirs, strict=True))
