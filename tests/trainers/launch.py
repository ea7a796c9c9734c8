"""Runs an example as its user does: `python -m tests.trainers.launch SCRIPT`; two processes of FSDP2 are looked at.

What differs from a user's machine is the hardware: accelerate takes FSDP2 for GPUs alone, and torchvision's wheels are
for CUDA, so that timm is given the names of two operators which it never calls.
"""

from __future__ import annotations

import runpy
import sys
from pathlib import Path

import torch

#: Operators of torchvision that its Python code expects of its compiled library.
_OPERATORS = (
    "nms(Tensor dets, Tensor scores, float threshold) -> Tensor",
    "qnms(Tensor a, Tensor b, float c) -> Tensor",
)


def with_vision() -> torch.library.Library:
    """torchvision without its compiled library, from a folder of its own; good as long as the result is alive."""
    sys.path.insert(0, str(Path(sys.prefix, "vision")))
    library = torch.library.Library("torchvision", "DEF")
    for operator in _OPERATORS:
        library.define(operator)
    return library


def main(script: str) -> None:
    """Runs the script."""
    library = with_vision() if "timm" in script else None
    if "fsdp2" in script:
        from tests.torch.test_trainers import with_processors_for_gpus

        torch.distributed.init_process_group("gloo")
        with_processors_for_gpus()
    names = runpy.run_path(script, run_name="__main__")
    if "fsdp2" in script:
        parts = [*names["model"].parameters()]
        assert all(type(part).__name__ == "DTensor" for part in parts)
        assert {route.rule.name for route in names["optimizer"].optimizer.routing()} == {"Muon", "AdamW"}
    del library


if __name__ == "__main__":
    main(sys.argv[1])
