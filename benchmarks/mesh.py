"""`rulec bench mesh`: what a step of Muon costs on meshes of 8 to 10,240 GPUs. Counted on paper: no GPU takes part."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from benchmarks.kernels import threads
from benchmarks.result import Result, Row
from rulec.language.library.load import load
from rulec.memory.shape import Shape
from rulec.torch.memory_profile.mesh import MeshAccount, mesh_of, on_mesh
from rulec.torch.memory_profile.meter import Training, account, tokens
from rulec.torch.memory_profile.models import Transformer

#: Shards of `fully_shard`, or replicas of so many shards.
MESHES = ("1", "8", "64", "300", "8x64", "1024", "20x512")
QUICK_MESHES = ("1", "2x4")

#: Floating-point operations in a second: two fifths of the peak of an H100 in bfloat16.
RATE = 4e14

TIME, WORK = "time of the busiest GPU for Muon's products", "its work, of the mean over all GPUs"
MATRICES, MODEL = "matrices and results that the busiest GPU sends", "weights and gradients that a GPU sends"
BETWEEN = "parts of products that the busiest GPU sends to other owners of its matrices"
KEPT = "weights, gradients and momentum that a GPU keeps"

#: Llama 3 of 70 billion weights.
LLAMA = Shape("llama", 128256, 8192, 28672, 80, 64, 8, 128, 8192, tied=False)
QUICK_LLAMA = Shape("llama", 512, 64, 160, 2, 4, 2, 16, 256, tied=False)


def meshes(quick: bool) -> tuple[str, ...]:
    """The meshes, as `rulec memory --mesh` takes them."""
    return QUICK_MESHES if quick else MESHES


def measure(quick: bool, advance: Callable[[], object]) -> Result:
    """Counts for each mesh; calls `advance` after each."""
    shape = QUICK_LLAMA if quick else LLAMA
    training = Training(partial(Transformer, shape, True), tokens(1, 128), load("muon"), {}, "bfloat16", None, None)
    measured = account(training, "deferred", before=1)
    rows = []
    for text in meshes(quick):
        rows += _rows(text, on_mesh(training, measured, mesh_of(text)))
        advance()
    note = f"weights, gradients and momentum in bfloat16; GPUs of {RATE / 1e12:g} TFLOP/s with matrices of bfloat16"
    return Result("mesh", rows, quick, threads(), [note])


def _rows(text: str, counted: MeshAccount) -> list[Row]:
    devices = counted.mesh.devices
    subject = f"{devices:,} GPU{'s' * (devices > 1)}" + (f", {text.replace('x', ' x ')}" if "x" in text else "")
    gib = [sum(counted.kept.values()), counted.model, counted.exchanged, counted.between]
    kept, model, matrices, between = (size / 2**30 for size in gib)
    return [
        Row(subject, TIME, counted.work / RATE * 1000, unit="ms", detail=counted.data()),
        Row(subject, WORK, counted.work / counted.mean_work),
        Row(subject, MATRICES, matrices, unit="GiB"),
        Row(subject, BETWEEN, between, unit="GiB"),
        Row(subject, MODEL, model, unit="GiB"),
        Row(subject, KEPT, kept, unit="GiB"),
    ]
