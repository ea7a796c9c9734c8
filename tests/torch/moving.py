"""Runs whose states are moved in memory after some steps, and the same runs where nobody moves them."""

from __future__ import annotations

import io
import json
import sys
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from multiprocessing.reduction import ForkingPickler
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

import rulec.torch
from rulec.errors import RulecError
from tests.torch.shrinking import shrink

#: States of fewer elements than 4,096 are not kept in codes.
SHAPES = ((64, 80), (7,), (6, 8))


def _assign_data(tensor: Tensor) -> None:
    tensor.data = tensor.data.clone()


def _assign_part(tensor: Tensor) -> None:
    """Memory in the middle of other memory."""
    whole = torch.zeros(tensor.numel() + 24, dtype=tensor.dtype)
    part = whole[16 : 16 + tensor.numel()].view(tensor.shape)
    tensor.data = part.copy_(tensor)


def _turn_data(tensor: Tensor) -> None:
    """The same values in another memory order, where there is another."""
    tensor.data = tensor.data.t().contiguous().t() if tensor.dim() == 2 else tensor.data.clone()


def _set(tensor: Tensor) -> None:
    with torch.no_grad():
        tensor.set_(tensor.detach().clone())  # type: ignore[call-overload]


def _resize(tensor: Tensor) -> None:
    values, shape = tensor.detach().clone(), tensor.shape
    if not tensor.untyped_storage().resizable():  # NumPy sees it
        return
    tensor.resize_(0)
    tensor.resize_(tensor.numel() + 300_000)
    tensor.resize_(shape).copy_(values)


def _resize_storage(tensor: Tensor) -> None:
    values, storage = tensor.detach().clone(), tensor.untyped_storage()
    size = storage.nbytes()
    if not storage.resizable():
        return
    others = torch.empty(0, dtype=torch.uint8).set_(storage).clone()  # type: ignore[call-overload]
    storage.resize_(0)
    _fill_freed_memory(size)
    storage.resize_(size)
    torch.empty(0, dtype=torch.uint8).set_(storage).copy_(others)  # type: ignore[call-overload]
    tensor.copy_(values)


def _swap(tensor: Tensor) -> None:
    torch.utils.swap_tensors(tensor, tensor.detach().clone())


def _pickle(tensor: Tensor) -> None:
    ForkingPickler(io.BytesIO()).dump(tensor)


#: What moves the memory of a tensor, and leaves its values: torch goes on as if nothing had happened.
MOVES: Mapping[str, Callable[[Tensor], Any]] = {
    "share_memory_": Tensor.share_memory_, "a queue of processes": _pickle, "data": _assign_data,
    "data in larger memory": _assign_part, "data in another order": _turn_data, "set_": _set, "resize_": _resize,
    "resize_ of the storage": _resize_storage, "swap_tensors": _swap,
}  # fmt: skip

#: What leaves a state with which no step can be taken.
BREAKS: Mapping[str, Callable[[Tensor], Any]] = {
    "another shape": lambda tensor: tensor.resize_(3, 5),
    "an emptied storage": lambda tensor: tensor.untyped_storage().resize_(0),
    "a storage that shrank at its address": shrink,
    "a sparse tensor": lambda tensor: torch.utils.swap_tensors(tensor, tensor.detach().clone().to_sparse()),
}

Make = Callable[[Sequence[Tensor]], Any]


def _of(name: str, dtype: torch.dtype = torch.float32, **keywords: Any) -> tuple[torch.dtype, Make]:
    kind = getattr(rulec.torch, name) if name.isidentifier() and name[0].isupper() else rulec.torch.optimizer(name)
    return dtype, lambda params: kind(params, lr=0.01, **keywords)


def _matrices(name: str, **keywords: Any) -> tuple[torch.dtype, Make]:
    kind = getattr(rulec.torch, name)

    def make(params: Sequence[Tensor]) -> Any:
        matrices, vectors = [p for p in params if p.dim() == 2], [p for p in params if p.dim() != 2]
        groups = [{"params": matrices}, {"params": vectors, "tags": {"embedding"}}]
        return kind(groups, lr=0.01, **keywords)

    return torch.float32, make


def _fused() -> tuple[torch.dtype, Make]:
    """Two sections in a parameter, each with a norm of its own."""

    def make(params: Sequence[Tensor]) -> Any:
        fused = [p for p in params if p.dim() == 2]
        return rulec.torch.LAMB(
            [{"params": fused, "split": 2}, {"params": [p for p in params if p.dim() != 2]}], lr=0.01
        )

    return torch.float32, make


_BFLOAT16 = torch.bfloat16

#: The kinds of states: elements, rows and columns, numbers, codes, parts of weights, histories, complex numbers.
CLASSES: Mapping[str, tuple[torch.dtype, Make]] = {
    "AdamW": _of("AdamW"), "AdamW, amsgrad": _of("AdamW", amsgrad=True),
    "AdamW, complex": _of("AdamW", torch.complex64),
    "AdamW, int8": _of("AdamW", state_dtype="int8"), "AdamW, dynamic4": _of("AdamW", state_dtype="dynamic4"),
    "AdamW, bfloat16_sr": _of("AdamW", _BFLOAT16, state_dtype="bfloat16_sr"),
    **{f"AdamW, {kind}": _of("AdamW", _BFLOAT16, weights=kind) for kind in ("split", "split24", "master", "kahan")},
    "SGD": _of("SGD", momentum=0.9), "LAMB": _of("LAMB"), "LAMB, sections": _fused(), "NAdam": _of("NAdam"),
    "Adafactor": _of("Adafactor"), "Prodigy": _of("prodigy"), "ScheduleFree": _of("schedule_free_adamw"),
    "adashift": _of("adashift"), "clipped": _of("clip_by_global_norm >> adamw"), "lookahead": _of("lookahead(adamw)"),
    "SM3": _of("sm3"), "Muon": _matrices("Muon"), "SOAP": _matrices("SOAP"),
    **{f"{name}, DTensors": _of(name) for name in ("AdamW", "LAMB", "Adafactor")},
    "AdamW, int8, DTensors": _of("AdamW", state_dtype="int8"),
}  # fmt: skip

EAGER = ("AdamW", "AdamW, int8", "AdamW, split", "LAMB")


def _fill_freed_memory(size: int) -> list[Tensor]:
    """Tensors of NaN that take the memory that was freed."""
    return [torch.full((max(1, size // 4),), float("nan")) for _ in range(4)]


def _parameters(dtype: torch.dtype) -> list[Tensor]:
    source = torch.Generator().manual_seed(1)
    return [torch.nn.Parameter(torch.randn(s, generator=source, dtype=torch.float64).to(dtype)) for s in SHAPES]


def _gradients(params: Sequence[Tensor], number: int) -> list[Tensor]:
    source = torch.Generator().manual_seed(number)
    return [torch.randn(p.shape, generator=source, dtype=torch.float64).to(p.dtype) for p in params]


def _distributed(tensors: Sequence[Tensor]) -> list[Tensor]:
    """The tensors as DTensors of a process group with this rank alone."""
    if not dist.is_initialized():
        dist.init_process_group("gloo", rank=0, world_size=1, store=dist.HashStore())
    mesh = init_device_mesh("cpu", (1,))
    return [distribute_tensor(tensor, mesh, [Shard(0)]) for tensor in tensors]


def _local(tensor: Tensor) -> Tensor:
    with torch.no_grad():
        return tensor.to_local() if isinstance(tensor, DTensor) else tensor


class Run:
    """Steps of an optimizer of one kind; where `eager`, each update is inside the backward pass."""

    def __init__(self, kind: str, eager: bool = False, make: Make | None = None) -> None:
        dtype, own = CLASSES[kind]
        self.params, self.eager, self.distributes = _parameters(dtype), eager, kind.endswith("DTensors")
        if self.distributes:
            self.params = [*map(torch.nn.Parameter, _distributed([p.detach() for p in self.params]))]
        self.optimizer: Any = (make or own)(self.params)
        if eager:
            self.outer = rulec.torch.EagerUpdate(self.params, lambda _: self.optimizer, contributions=1)

    def step(self, number: int) -> None:
        """One step with the gradients of this number."""
        gradients = _gradients(self.params, number)
        gradients = _distributed(gradients) if self.distributes else gradients
        if not self.eager:
            for param, gradient in zip(self.params, gradients, strict=True):
                param.grad = gradient
            self.optimizer.step()
            return
        with self.outer.backward():
            loss = sum(((p * g).sum() for p, g in zip(self.params, gradients, strict=True)), start=torch.zeros(()))
            loss.real.backward() if loss.is_complex() else loss.backward()
        self.outer.step()

    def reached(self) -> Iterator[tuple[int, str, Tensor]]:
        """The tensors of states that a user can reach, each with its parameter's place and its name."""
        for place, param in enumerate(self.params):
            for name, value in self.optimizer.state[param].items():
                if isinstance(value, Tensor):
                    yield place, name, _local(value)

    def end(self) -> list[Tensor]:
        """Copies of the parameters and states."""
        tensors = [*map(_local, self.params), *(value for *_, value in self.reached())]
        return [tensor.detach().clone() for tensor in tensors]


def moved(kind: str, move: str, eager: bool = False, make: Make | None = None, names: str = "") -> list[Tensor]:
    """The end of a run in which every reachable state, or those of one name, is moved after five steps and after seven.

    With `move` empty nobody moves them.
    """
    run = Run(kind, eager, make)
    for number in range(5):
        run.step(number)
    for number in (5, 7):
        if move:
            for _, name, tensor in [*run.reached()]:
                if not names or name == names:
                    MOVES[move](tensor)
                    _fill_freed_memory(tensor.numel() * tensor.element_size())
        run.step(number)
        run.step(number + 1)
    return run.end()


def differences(kinds: Sequence[str], moves: Sequence[str], eager: bool = False) -> list[str]:
    """The runs whose end is another than without a move, bit for bit."""
    wrong = []
    for kind in kinds:
        untouched = moved(kind, "", eager)
        for move in moves:
            try:
                end = moved(kind, move, eager)
            except RulecError as error:
                wrong.append(f"{kind}, {move}: {type(error).__name__}: {error}")
                continue
            if len(end) != len(untouched) or not all(map(torch.equal, end, untouched)):
                wrong.append(f"{kind}, {move}: another end")
    return wrong


def unrefused(kinds: Sequence[str]) -> list[str]:
    """The states with which a step was taken, or changed something, where no step can be taken."""
    wrong = []
    for kind in kinds:
        for name, damage in BREAKS.items():
            run = Run(kind)
            for number in range(4):
                run.step(number)
            resizable = [reached for reached in run.reached() if reached[2].untyped_storage().resizable()]
            place, state, tensor = max(resizable, key=lambda reached: reached[2].numel())
            damage(tensor)
            before = [p.detach().clone() for p in run.params]
            try:
                run.step(4)
                wrong.append(f"{kind}, {state} of {place} with {name}: no error")
            except RulecError:
                if not all(map(torch.equal, before, run.params)):
                    wrong.append(f"{kind}, {state} of {place} with {name}: parameters changed")
    return wrong


if __name__ == "__main__":
    warnings.simplefilter("ignore")
    asked = json.loads(sys.argv[1])
    print(json.dumps(differences(**asked) if "moves" in asked else unrefused(**asked)))
