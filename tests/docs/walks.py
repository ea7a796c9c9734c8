"""The way of a steady step through the modules, seen in real calls: `python -m tests.docs.walks` writes it anew.

A walk has the modules in the order of their first call, each with its number of Python calls, and the number of
classes whose methods were called. The step is the sixth: nothing is compiled or planned in it.
"""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from collections.abc import Callable, Mapping
from typing import Any

from tests.calls import profiled
from tests.test_layering import ROOT

DATA = ROOT / "docs" / "data" / "walks.json"

#: The title of each walk -> the arguments of its program: kind, and number of processes.
WALKS: Mapping[str, tuple[str, int]] = {
    "AdamW on the CPU": ("cpu", 1),
    "AdamW by Triton's kernels": ("triton", 1),
    "Muon under FSDP2, 2 ranks, 2 matrices": ("fsdp", 2),
}


def walked(step: Callable[[], object]) -> dict[str, Any]:
    """The modules of rulec that a call goes through, and how many classes."""
    calls: dict[str, int] = {}
    classes: set[tuple[str, str]] = set()

    def note(frame: Any, event: str, _: object) -> None:
        file, name = frame.f_code.co_filename, frame.f_code.co_qualname
        if event == "call" and file.startswith((f"{ROOT}/rulec/", f"{ROOT}/backends/")):
            module = file[len(str(ROOT)) + 1 :]
            calls[module] = calls.get(module, 0) + 1
            if "." in name and "<" not in name:
                classes.add((module, name.partition(".")[0]))

    profiled(step, note)
    return {"modules": calls, "classes": len(classes)}


def steady_step(kind: str) -> dict[str, Any]:
    """The sixth step of an optimizer of two matrices."""
    import torch

    import rulec.torch

    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(16, 32, bias=False), torch.nn.Linear(32, 16, bias=False))
    if kind == "fsdp":
        from torch.distributed.fsdp import fully_shard

        for layer in model:
            fully_shard(layer)
        fully_shard(model)
    name, options = ("muon", {}) if kind == "fsdp" else ("adamw", {"backend": "triton"} if kind == "triton" else {})
    optimizer = rulec.torch.optimizer(name)(model.parameters(), **options)
    for _ in range(5):
        _backward(model)
        optimizer.step()
    _backward(model)
    return walked(optimizer.step)


def _backward(model: Any) -> None:
    import torch

    model.zero_grad()
    model(torch.ones(4, 16)).square().sum().backward()


def run(kind: str, processes: int) -> dict[str, Any]:
    """The walk of the first of some processes."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    common = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1"}
    if kind == "triton":
        common["TRITON_INTERPRET"] = "1"
    started = [
        subprocess.Popen(
            [sys.executable, "-m", "tests.docs.walks", kind], cwd=ROOT, stdout=subprocess.PIPE, text=True,
            env={**os.environ, **common, "RANK": str(rank), "WORLD_SIZE": str(processes)},
        )
        for rank in range(processes)
    ]  # fmt: skip
    printed = [process.communicate(timeout=300)[0] for process in started]
    assert [process.returncode for process in started] == [0] * processes, printed
    walk: dict[str, Any] = json.loads(printed[0].splitlines()[-1])
    return walk


def main(arguments: list[str]) -> None:
    """Writes all walks, or prints one of this process."""
    if not arguments:
        walks = {title: run(*parameters) for title, parameters in WALKS.items()}
        DATA.write_text(json.dumps(walks, indent=1) + "\n")
        return
    if arguments[0] == "fsdp":
        import torch.distributed as dist

        dist.init_process_group("gloo")
    print(json.dumps(steady_step(arguments[0])), flush=True)
    if arguments[0] == "fsdp":
        dist.destroy_process_group()


if __name__ == "__main__":
    main(sys.argv[1:])
