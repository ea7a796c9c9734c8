"""A few processes that train one model, over gloo on the CPU."""

from __future__ import annotations

import multiprocessing
import os
import tempfile
import traceback
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

COUNT = 2

#: Processes that wait for one another in different messages would wait for ever; after this time each says where it is.
DEADLOCK = timedelta(minutes=2)


def check_in_processes(work: Callable[[int], None], count: int = COUNT) -> None:
    """Runs `work(rank)` in every one of `count` processes; AssertionError with what went wrong in any."""
    # Forks of a process that has imported everything and started nothing; the first test chooses what.
    multiprocessing.set_forkserver_preload(["tests.torch.eager.preloaded"])
    with tempfile.TemporaryDirectory() as folder:
        mp.start_processes(_process, (folder, work, count), nprocs=count, start_method="forkserver")
        problems = [path.read_text() for path in sorted(Path(folder).glob("problem*"))]
    assert not problems, "\n".join(problems)


def _process(rank: int, folder: str, work: Callable[[int], None], count: int) -> None:
    torch.set_num_threads(1)
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    meeting = f"file://{folder}/meeting"
    dist.init_process_group("gloo", init_method=meeting, rank=rank, world_size=count, timeout=DEADLOCK)
    try:
        work(rank)
    except BaseException:  # noqa: BLE001 - whatever it is, the other process waits for this one
        Path(folder, f"problem{rank}").write_text(traceback.format_exc())
        os._exit(0)
    dist.destroy_process_group()
