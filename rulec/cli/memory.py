"""`rulec memory`: the memory of training a model, on a machine that need not have it."""

from __future__ import annotations

import os
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from rulec.cli.arguments import (
    RULE_HELP,
    AllowUrlFlag,
    DtypeOption,
    HyperOption,
    JsonFlag,
    check_dtype,
    check_state_dtype,
    find_rule,
    numbers,
)
from rulec.cli.console import print_json, print_table, progress
from rulec.errors import RulecError
from rulec.extras import needing

if TYPE_CHECKING:
    from rulec.memory.live import Account
    from rulec.torch.memory_profile.mesh import MeshAccount
    from rulec.torch.memory_profile.meter import Training, Way

#: The most tokens of a sequence where nothing is said of them.
_LENGTH = 2048

#: Two fifths of the peak of an H100, in TFLOP/s.
_RATE = 400.0


#: The options of the command that no other command has.
ModelOption = Annotated[
    Path,
    typer.Option(
        help="A config.json of Llama's or GPT-2's kind, a .safetensors file (its first bytes are enough, and "
        "nothing is known of activations), or a folder with either."
    ),
]
EagerFlag = Annotated[bool, typer.Option("--eager", help="Update inside the backward pass, and free gradients.")]
EpilogueFlag = Annotated[
    bool, typer.Option("--epilogue", help="Eager, and in the products that gradients of linear layers are.")
]
StateDtypeOption = Annotated[str | None, typer.Option(help="The dtype or format of states, where it is another.")]
WeightsOption = Annotated[
    str | None, typer.Option(help="The kind of bfloat16 weights: split, split24, master, kahan or stochastic.")
]
OffloadOption = Annotated[
    str | None, typer.Option(help="What lies on the host: `step` (states, master weights and the step) or `states`.")
]
OffloadBufferOption = Annotated[
    int | None, typer.Option(min=1, metavar="BYTES", help="The size of a transfer buffer; by default 64 MiB.")
]
BatchOption = Annotated[int, typer.Option(min=1, help="Sequences in a batch.")]
LengthOption = Annotated[
    int | None, typer.Option(min=2, help=f"Tokens in a sequence; by default what the model has, {_LENGTH} at most.")
]
RecomputeFlag = Annotated[
    bool, typer.Option("--recompute", help="Gradient checkpointing: layers keep their inputs alone.")
]
MeshOption = Annotated[str | None, typer.Option(help="Devices: a number of shards (64), or replicas x shards (8x64).")]
RateOption = Annotated[
    float, typer.Option(min=0.001, help="The speed of a device with matrices of bfloat16, in TFLOP/s.")
]


def memory(
    model: ModelOption,
    rule: Annotated[str, typer.Option(metavar="RULE", help=RULE_HELP)] = "adamw",
    eager: EagerFlag = False,
    epilogue: EpilogueFlag = False,
    dtype: DtypeOption = "float32",
    state_dtype: StateDtypeOption = None,
    weights: WeightsOption = None,
    offload: OffloadOption = None,
    offload_buffer: OffloadBufferOption = None,
    batch: BatchOption = 1,
    length: LengthOption = None,
    recompute: RecomputeFlag = False,
    mesh: MeshOption = None,
    rate: RateOption = _RATE,
    hyper: HyperOption = None,
    allow_url: AllowUrlFlag = False,
    json: JsonFlag = False,
) -> None:
    """Tell what a training step keeps in memory, by kind.

    With an offload, it tells this of the device and of the host, and what a step moves between the two. On a mesh of
    devices, it also tells what the device with most keeps and sends.

    Takes the step on fake tensors, with PyTorch: nothing is computed, and no memory is needed. Nothing is known of what
    a device's own library keeps beside tensors.
    """
    with needing("rulec memory", "torch"):
        import torch  # noqa: F401
    from rulec.compiler.weights import DTYPES
    from rulec.torch.memory_profile.meter import Training

    make, inputs = _model(model, batch, length, recompute)
    known = make.func.__name__ != "Weights"
    if epilogue and not known:
        raise RulecError(f"which weights of {model} are of linear layers is not known: --epilogue needs a config.json")
    if offload_buffer is not None and offload is None:
        raise RulecError("--offload-buffer is for an offload: give --offload step, or leave it out")
    if offload is not None and epilogue:
        raise RulecError("--epilogue updates on the device, and --offload on the host: leave one out")
    if offload == "step" and weights is None and dtype in DTYPES["master"]:
        weights = "master"
    states = None if state_dtype is None else check_state_dtype(state_dtype)
    training = Training(
        make, inputs, find_rule(rule, allow_url), numbers(hyper, "--hyper"), check_dtype(dtype), states, weights,
        offload, offload_buffer,
    )  # fmt: skip
    _told(training, "epilogue" if epilogue else "eager" if eager else "deferred", known, mesh, rate, json)


def _told(training: Training, way: Way, known: bool, mesh: str | None, rate: float, json: bool) -> None:
    """Takes a training step and prints the bytes it keeps. `known` is true where activations are counted."""
    from rulec.torch.memory_profile.mesh import mesh_of, on_mesh
    from rulec.torch.memory_profile.meter import account

    with progress() as shown:
        shown.add_task(f"a step of {training.rule.name}", total=None)
        measured = account(training, way, before=1)
    spread = None if mesh is None else on_mesh(training, measured, mesh_of(mesh))
    if json:
        print_json({**_data(measured, training, way), **({} if spread is None else {"mesh": spread.data()})})
        return
    _print(measured, training, way, known)
    if spread is not None:
        _print_mesh(spread, rate)


def _model(path: Path, batch: int, length: int | None, recompute: bool) -> tuple[partial[Any], Any]:
    """The model's maker, and its inputs."""
    from rulec.memory.shape import read_shape, read_shapes
    from rulec.torch.memory_profile.meter import tokens
    from rulec.torch.memory_profile.models import Transformer, Weights

    files = _files(path)
    if files[0].suffix == ".safetensors":
        return partial(Weights, read_shapes(files)), lambda dtype: ()
    shape = read_shape(files[0])
    chosen = min(_LENGTH, shape.positions) if length is None else length
    if shape.family == "gpt2" and chosen > shape.positions:
        raise RulecError(f"{files[0]} has {shape.positions} positions: give a --length of at most that, not {chosen}")
    return partial(Transformer, shape, recompute), tokens(batch, chosen)


def _files(path: Path) -> list[Path]:
    """The file with the model's shape, or the files of its weights."""
    if not os.path.exists(path):
        raise RulecError(f"there is no file or folder {path}: give a config.json or a .safetensors file")
    if not os.path.isdir(path):
        return [path]
    config, weights = path / "config.json", sorted(path.glob("*.safetensors"))
    if os.path.isfile(config):
        return [config]
    if not weights:
        raise RulecError(f"the folder {path} has neither a config.json nor .safetensors files")
    return weights


def _data(measured: Account, training: Training, way: Way) -> dict[str, Any]:
    return {
        "rule": training.rule.name, "way": way, "offload": training.offload,
        "parameters": _parameters(measured, training), **measured.data(),
    }  # fmt: skip


def _parameters(measured: Account, training: Training) -> int:
    from rulec.compiler.layout import ITEM_SIZE

    return measured.peak["weights"] // ITEM_SIZE[training.dtype]


def _print(measured: Account, training: Training, way: Way, known: bool) -> None:
    usual = "float32" if training.weights else training.dtype
    state = usual if training.state_dtype is None else training.state_dtype
    kept = f"{training.dtype} ({training.weights})" if training.weights else training.dtype
    moved = "" if training.offload is None else f", offload={training.offload}"
    unit, (columns, *table) = measured.table(known)
    print(
        f"{_parameters(measured, training):,} parameters in {kept}, {training.rule.name} with states in "
        f"{state}, {way}{moved}; {unit}"
    )
    print_table(columns, table, right=columns[1:])
    if training.offload is not None:
        print(measured.moved)
    if not known:
        print("activations are not known from weights alone: give a config.json for those")


def _print_mesh(spread: MeshAccount, rate: float) -> None:
    from rulec.memory.live import amount

    mesh, size = spread.mesh, 2**30
    devices = f"{mesh.devices} devices" + (f", {mesh.replicas} replicas of {mesh.shards}" if mesh.replicas > 1 else "")
    print(f"\n{devices}; GiB of the one with most")
    table = [
        ["kept", *(amount(spread.kept[kind], size) for kind in ("weights", "gradients", "state")), ""],
        ["sent in a step", "", amount(spread.model, size), "", amount(spread.exchanged, size)],
    ]
    columns = ("weights", "gradients", "state", "matrices")
    print_table(("", *columns), table, right=columns)
    if spread.matrices:
        seconds = spread.work / rate / 1e12
        print(
            f"{spread.matrices} matrices are worked on for {seconds * 1000:,.0f} ms at {rate:g} TFLOP/s, "
            f"{spread.work / spread.mean_work:.2f} of the mean"
        )
    if spread.shared:
        print(
            f"{spread.shared} of them have several owners, who send {amount(spread.between, size)} GiB to one another "
            f"for their products"
        )
