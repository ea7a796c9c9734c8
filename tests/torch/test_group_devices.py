"""The devices that messages travel by, for process groups of every form."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

import rulec.torch
from rulec.errors import HyperError
from rulec.language.expr.node import Op
from rulec.torch.distributed import devices
from rulec.torch.distributed.consensus import Consensus
from rulec.torch.distributed.cross_process import Across
from rulec.torch.distributed.devices import backends_of, device_of
from rulec.torch.distributed.mesh import MeshGroup
from rulec.torch.distributed.traffic import Communication, Exchange, Reductions
from rulec.torch.states.saved import _anywhere
from tests.torch.eager.processes import check_in_processes
from tests.torch.test_meshes import Twins, kind_of

#: A backend of a vendor: torch's gloo under another name, registered for other devices.
VENDOR = "vendor_ccl"


@pytest.fixture(autouse=True)
def loopback(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo")


@contextmanager
def group_of(backend: str | None) -> Iterator[Any]:
    """The group of this process alone with a backend."""
    if backend is not None and VENDOR in backend and not hasattr(dist.Backend, VENDOR.upper()):
        gloo = lambda store, rank, size, timeout: dist.ProcessGroupGloo(store, rank, size, timeout)  # noqa: E731
        dist.Backend.register_backend(VENDOR, gloo, devices=["cpu", "xpu"])
    from torch.testing._internal.distributed.fake_pg import FakeStore

    store = FakeStore() if backend == "fake" else dist.HashStore()
    dist.init_process_group(backend, store=store, rank=0, world_size=1)
    try:
        yield dist.group.WORLD
    finally:
        dist.destroy_process_group()


def with_devices(patch: pytest.MonkeyPatch, *kinds: str) -> None:
    """Has this process have a device of each of these types, too."""
    patch.setattr(devices, "_is_here", lambda kind: kind in ("cpu", *kinds))
    patch.setattr(devices, "_current", lambda group, kind: torch.device(kind))


#: Backends as `get_backend_config` tells them, and the devices of values on a GPU, values on the CPU, and words.
FORMS = {
    "cpu:gloo,cuda:gloo": ("cpu", "cpu", "cpu"),  # gloo alone: it takes not every collective from a GPU
    "cuda:nccl": ("cuda", "cuda", "cuda"),  # also of init_process_group() where there is a GPU
    "cpu:gloo,cuda:nccl": ("cuda", "cpu", "cpu"),
    "cuda:nccl,cpu:gloo": ("cuda", "cpu", "cpu"),
    "cpu:gloo": ("cpu", "cpu", "cpu"),
    "cuda:gloo": ("cuda", "cuda", "cuda"),
    "cpu:mpi,cuda:mpi": ("cpu", "cpu", "cpu"),
    "cpu:ucc,cuda:ucc": ("cuda", "cpu", "cpu"),
    "cpu:gloo,cuda:vendor": ("cuda", "cpu", "cpu"),
}


@pytest.mark.parametrize("form", FORMS)
def test_values_travel_by_their_device_and_words_by_the_host(form: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dist, "get_backend_config", lambda group: form)
    with_devices(monkeypatch, "cuda")
    of_gpu, of_cpu = MeshGroup("group", "dp", "cuda"), MeshGroup("group", "dp", "cpu")
    monkeypatch.setattr(MeshGroup, "label", "dp (2)")
    chosen = [of_gpu.device(), of_cpu.device(), of_gpu.device(of_host=True)]
    assert [device.type for device in chosen] == [*FORMS[form]]


@pytest.mark.parametrize("kind", ["xpu", "hpu", "npu"])
def test_devices_of_all_vendors_are_served(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(devices, "_is_here", lambda each: each in ("cpu", kind))
    monkeypatch.setattr(devices, "_current", lambda group, each: each)
    for form in (f"cpu:gloo,{kind}:ccl", f"{kind}:ccl"):
        monkeypatch.setattr(dist, "get_backend_config", lambda group, form=form: form)
        assert device_of("group", "dp", kind) == kind  # type: ignore[comparison-overlap]


REAL = {
    "gloo": {"cpu": "gloo", "cuda": "gloo"},
    "cpu:gloo,cuda:fake": {"cpu": "gloo", "cuda": "fake"},
    "cuda:fake": {"cuda": "fake"},
    VENDOR: {"cpu": VENDOR, "xpu": VENDOR},
    f"cpu:gloo,xpu:{VENDOR}": {"cpu": "gloo", "xpu": VENDOR},
}


@pytest.mark.parametrize("backend", REAL)
def test_a_group_tells_its_backends(backend: str) -> None:
    with group_of(backend) as group:
        assert backends_of(group) == REAL[backend]
        assert backends_of(dist.new_group([0])) == REAL[backend]


def test_a_group_without_a_named_backend_serves_the_devices_of_this_process() -> None:
    with group_of(None) as group:
        assert dist.get_backend(group) == "undefined"
        assert device_of(group, "dp").type == ("cpu" if "cpu" in backends_of(group) else "cuda")


def test_a_fake_group_serves_the_cpu() -> None:
    with group_of("fake") as group:
        assert device_of(group, "dp").type == "cpu"


def test_the_device_that_a_group_is_bound_to_is_its_device(monkeypatch: pytest.MonkeyPatch) -> None:
    class Group:
        bound_device_id = torch.device("cuda", 3)

    monkeypatch.setattr(dist, "get_backend_config", lambda group: "cuda:nccl")
    monkeypatch.setattr(devices, "_is_here", lambda kind: kind == "cuda")
    assert device_of(Group(), "dp") == torch.device("cuda", 3)
    Group.bound_device_id = None  # type: ignore[assignment]
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 1)
    assert device_of(Group(), "dp", "cuda") == torch.device("cuda", 1)


@pytest.mark.parametrize("backend", ["cuda:fake", f"xpu:{VENDOR}"])
@pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has the devices")
def test_a_group_that_serves_no_device_of_this_process_is_refused_before_anything_changes(backend: str) -> None:
    kind = backend.partition(":")[0]
    with group_of(backend) as group:
        param = nn.Parameter(torch.ones(3))
        words = f"the process group of reduce_over .1. serves {kind}, and this process has tensors on cpu and no such"
        with pytest.raises(HyperError, match=words):
            kind_of("clip >> lamb")([param], lr=0.1, reduce_over=group)
        with pytest.raises(HyperError, match=f"serves {kind}, and this process has"):
            _anywhere(True, [], Standing(group))  # type: ignore[arg-type]
        assert torch.equal(param, torch.ones(3))


class Standing:
    """In the place of `Across`."""

    def __init__(self, group: Any) -> None:
        self.group = group


class Sent(Exception):
    """A message was sent by this device."""


@pytest.mark.parametrize(("form", "device"), [("cpu:gloo,cuda:nccl", "meta"), ("cpu:gloo,cuda:gloo", "cpu")])
def test_messages_are_sent_by_that_device(form: str, device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """`meta` is a device without a device, in the place of a GPU."""
    monkeypatch.setattr(dist, "get_backend_config", lambda group: form.replace("cuda", "meta"))
    with_devices(monkeypatch, "meta")

    def send(tensor: torch.Tensor, *_: Any, **__: Any) -> None:
        raise Sent(tensor.device.type)

    with group_of("gloo") as group:
        monkeypatch.setattr(dist, "all_reduce", send)
        monkeypatch.setattr(dist, "all_to_all_single", send)
        rank_group = MeshGroup(group, "dp", "meta")
        for numbers in (np.ones(2), torch.ones(2)):
            with pytest.raises(Sent, match=device):
                rank_group.reduce(Op.SUM, numbers)
            with pytest.raises(Sent, match=device):
                rank_group.exchange(numbers, [2], [2], "bfloat16")
        with pytest.raises(Sent, match=device):
            rank_group.start_reduce(Op.SUM, np.ones(2))
        with pytest.raises(Sent, match="cpu"):
            rank_group.reduce(Op.SUM, np.ones(2), of_host=True)
        coordinator = Consensus([rank_group])
        coordinator.open()
        with pytest.raises(Sent, match="cpu"):  # words alone, of the host in all ranks
            coordinator.reduce(Op.SUM, rank_group, np.zeros(0))
        with pytest.raises(Sent, match=device):  # placeholder data of a rank that fails, where others send values
            coordinator.reduce(Op.SUM, rank_group, np.zeros(3))


def test_values_of_a_step_go_by_the_device_that_any_process_has_them_on(monkeypatch: pytest.MonkeyPatch) -> None:
    """A rank with values on the CPU alone meets the others where they are."""
    with group_of("gloo") as group:
        across = Across(group)
        monkeypatch.setattr(dist, "get_backend_config", lambda group: "cpu:gloo,cuda:nccl")
        with_devices(monkeypatch, "cuda")
        assert across._device_of([False, False], "cpu").type == "cpu"
        assert across._device_of([True, False], "cuda").type == "cuda"
        assert across._device_of([True, False], "cpu").type == "cuda"
        monkeypatch.setattr(dist, "get_backend_config", lambda group: "cpu:gloo,cuda:gloo")
        assert across._device_of([True, False], "cpu").type == "cpu"


def of_two(rank: int) -> None:
    """Steps over groups of several forms have the numbers of one process, and say by which device they sent."""
    for backend in (None, "gloo", "cpu:gloo", "cpu:gloo,cuda:fake"):
        group = dist.new_group([0, 1], backend=backend)
        mesh = DeviceMesh.from_group(group, "cpu", mesh_dim_names=("dp",))
        for name in ("clip >> lamb", "muon"):
            twins = Twins(name, mesh, [Shard(0)])
            for seed in (1, 2, 3):
                twins.step(seed)
            twins.check()
            record = twins.optimizer.communication()
            assert {r.device for r in (*record.reductions, *record.exchanges)} == {"cpu"}
            assert "by" in str(record).split()
        param = nn.Parameter(torch.ones(3))
        optimizer = kind_of("clip >> lamb")([param], lr=0.1, max_norm=1.0, reduce_over=group)
        param.grad = torch.ones(3)
        optimizer.step()
        assert optimizer.communication().reductions[0].device == "cpu"


@pytest.mark.slow
def test_two_processes_step_over_groups_of_every_form() -> None:
    check_in_processes(of_two)


def test_the_record_names_the_devices() -> None:
    with group_of("gloo"):
        mesh = init_device_mesh("cpu", (1,))
        param = nn.Parameter(distribute_tensor(torch.ones(4), mesh, [Shard(0)]))
        optimizer = rulec.torch.AdamW([param])
        param.grad = param.detach().clone()
        optimizer.step()
        assert str(optimizer.communication()) == "a step sends nothing"
    reductions = Reductions("dp (2)", 1, 12, 96, "cuda and cpu")
    exchange = Exchange("dp (2)", "bfloat16", 0, 1, (1, 0), (1.0, 0.0), (8, 8), 16, 1, device="cuda")
    first, second, *_ = str(Communication((reductions,), (exchange,))).split("\n\n")
    assert first.splitlines()[1].split() == ["dp", "(2)", "cuda", "and", "cpu", "1", "12", "96"]
    assert second.splitlines()[1].split()[:4] == ["dp", "(2)", "cuda", "bfloat16"]
