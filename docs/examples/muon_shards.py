"""Two processes train the shards of a small model with Muon, and the first prints what a step sends."""

import os
import tempfile

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import rulec.torch


def work(rank: int, folder: str) -> None:
    """Trains in one of two processes."""
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    dist.init_process_group("gloo", init_method=f"file://{folder}/meeting", rank=rank, world_size=2)
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("dp",))
    model = nn.Sequential(*(nn.Linear(64, 64, bias=False) for _ in range(4)))
    optimizer = rulec.torch.Muon(fully_shard(model, mesh=mesh).parameters(), lr=0.02)
    for _ in range(2):
        model(torch.ones(8, 64)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    if rank == 0:
        print(optimizer.communication())
    dist.destroy_process_group()


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:
        torch.multiprocessing.spawn(work, (folder,), nprocs=2)
