"""Triton's kernels where there is a GPU: the contract, graphs, streams, and a tensor beyond 32 bits."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest

import rulec
from rulec.backend.protocol import Rows
from rulec.compiler.layout import layout_for
from rulec.testing import TorchKind, check_backend
from rulec_backends.triton import TritonBackend

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("dtype", ["float32", "float64", "bfloat16", "float16"])
def test_it_is_a_backend(dtype: str) -> None:
    report = check_backend("triton", dtypes=[dtype], arrays=TorchKind("cuda"))
    assert (report.rules, report.refused, report.unmet, report.stages) == (rulec.rules(), [], [], True)


class Bound:
    """SGD, p - lr*g, bound to tensors of ones on the GPU."""

    def __init__(self, *sizes: int, dtype: str = "float32") -> None:
        import torch

        self.program = rulec.compile(rulec.parse("name: Plain\nhyper: {lr: 0.5}\nstep: |\n  p = p - lr*g\n"))
        layout = layout_for(self.program, dtype)
        self.kernel = TritonBackend().build(self.program, layout, TritonBackend().emit(self.program, layout))
        self.params = [torch.ones(n, device="cuda", dtype=getattr(torch, dtype)) for n in sizes]
        self.call = self.kernel.bind(self.params, [{} for _ in sizes])
        self.index = np.zeros(len(sizes), np.int64)

    def step(self, grads: Any, rate: float | Any, **options: Any) -> None:
        table = np.array([[rate]]) if isinstance(rate, float) else rate
        self.call(0, grads, Rows(table, self.index, options.pop("stays", None), options.pop("scale", None)), **options)


@contextmanager
def nothing_waits() -> Iterator[None]:
    """Within, whatever waits for the device is an error."""
    import torch

    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


def test_steps_do_not_wait_for_the_device_and_compile_once() -> None:
    import torch

    bound = Bound(5, 1000, 1 << 20)
    grads = [torch.ones_like(p) for p in bound.params]
    bound.step(grads, 0.5)
    kernel = bound.kernel.kernels["stage_0"]
    before = len(kernel.device_caches[torch.cuda.current_device()][0])
    with nothing_waits():
        for step in range(20):
            moved = [torch.full_like(g, 1.0) for g in grads]
            bound.step(moved, 0.25 + step)
            some = [torch.empty(g.numel() + 1, device="cuda").fill_(1.0)[1:] for g in moved[:2]]
            bound.step(some, 1.0, tensors=[0, 1])
    assert len(kernel.device_caches[torch.cuda.current_device()][0]) == before
    total = 0.5 + sum(0.25 + step for step in range(20))
    assert all((p == 1 - total - 20).all() for p in bound.params[:2])
    assert (bound.params[2] == 1 - total).all()


def test_a_graph_replays_while_other_steps_run_between() -> None:
    import torch

    bound = Bound(1000, 77)
    grads = [torch.ones_like(p) for p in bound.params]
    rate = torch.full((1, 1), 0.5, dtype=torch.float64, device="cuda")
    stays = torch.zeros(1, dtype=torch.bool, device="cuda")
    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        for _ in range(3):
            bound.step(grads, rate, stays=stays)
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        bound.step(grads, rate, stays=stays)
    graph.replay()
    rate.fill_(2.0)
    bound.step([torch.full_like(g, 10.0) for g in grads], 0.5)
    graph.replay()
    stays.fill_(True)
    graph.replay()
    assert all((p == 1 - 3 * 0.5 - 0.5 - 5.0 - 2.0).all() for p in bound.params)


def test_the_stream_that_is_given_is_used() -> None:
    import torch

    bound = Bound(1 << 20)
    grads = [torch.ones_like(bound.params[0])]
    bound.step(grads, 0.5)
    torch.cuda.synchronize()
    stream, gate = torch.cuda.Stream(), torch.cuda.Event()
    with torch.cuda.stream(stream):
        torch.cuda._sleep(100_000_000)
    bound.step(grads, 0.5, stream=stream)
    gate.record(stream)
    assert not gate.query()  # it waits behind the sleep
    stream.synchronize()
    assert (bound.params[0] == 0.0).all()


def test_a_scale_divides_gradients() -> None:
    import torch

    bound = Bound(1000)
    bound.step([torch.full_like(bound.params[0], 65536.0)], 0.5, scale=torch.tensor([65536.0], device="cuda"))
    assert (bound.params[0] == 0.5).all()


def test_a_tensor_of_more_elements_than_32_bits_count() -> None:
    import torch

    size = 2**31 + 17
    if torch.cuda.mem_get_info()[0] < 5 * size:
        pytest.skip("needs 11 GB of the GPU's memory")
    bound = Bound(size, dtype="bfloat16")
    gradient = torch.ones_like(bound.params[0])
    bound.step([gradient], 0.5)
    for at in (0, 2**31 - 1, 2**31, size - 1):
        assert float(bound.params[0][at]) == 0.5
    total = sum(float(part.sum(dtype=torch.float64)) for part in bound.params[0].split(1 << 28))
    assert total == size * 0.5
