"""States in codes read by products of matrices: torch's classes over several refreshments, and parts of matrices.

The oracle is an optimizer with states in float32: it begins each step with the decoded states, in one process.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

import rulec.torch as rt
from rulec.formats import NAMES, decode, of_key
from tests.pairs import paired
from tests.runtime.test_coded_between import READERS, SHAPE, rule_of
from tests.torch.eager.processes import check_in_processes

#: Classes with a product that reads a state before its update, or all states in matrices of their own.
CLASSES = ["SOAP", "KLSOAP", "Shampoo", "KLShampoo", "Muon", "GaLore"]

#: Settings for which a few steps refresh bases and roots several times.
SETTINGS: dict[str, dict[str, Any]] = {
    "SOAP": {"every": 2}, "KLSOAP": {"every": 2}, "Shampoo": {"every": 2}, "GaLore": {"gap": 2},
}  # fmt: skip

STEPS = 7


def whole(array: Any) -> Tensor:
    """All elements of a tensor or a DTensor, in a copy."""
    value: Tensor = array.full_tensor() if isinstance(array, DTensor) else array
    return value.detach().clone()


def values(optimizer: Any, param: Any, state: str) -> Tensor:
    """All elements of a state, decoded where it is in codes."""
    held = optimizer.state[param]
    if state in held:
        return whole(held[state])
    form = of_key(optimizer.param_groups[0]["formats"][state])
    here, codes, scales = (
        x.to_local() if isinstance(x, DTensor) else x
        for x in (param.detach(), held[f"{state}::codes"], held[f"{state}::scale"])
    )
    part = torch.from_numpy(decode(form, codes.numpy(), scales.numpy(), tuple(here.shape)))
    if isinstance(param, DTensor):
        part = DTensor.from_local(part, param.device_mesh, param.placements, shape=param.shape, stride=param.stride())
    return whole(part)


def float_step(make: Any, before: dict[str, Tensor], start: Tensor, grad: Tensor) -> Tensor:
    """The parameter after a step from these states in float32, in one process."""
    twin = nn.Parameter(start.clone())
    floats = make([("w", twin)])
    if before:
        saved = floats.state_dict()
        saved["state"] = {0: before}
        floats.load_state_dict(saved)
    twin.grad = grad
    floats.step()
    return twin.detach()


def check(coded: Any, plain: Any, param: Any, steps: int, share: float = 0.0) -> int:
    """Steps of an optimizer in codes; the number of its states in codes. `share` is the error that is allowed."""
    optimizer = coded([("w", param)])
    for step in range(steps):
        grad = torch.randn(SHAPE, generator=torch.Generator().manual_seed(step)) / 4
        names = [name.removesuffix("::codes") for name in optimizer.state[param] if not name.endswith("::scale")]
        before = {name: values(optimizer, param, name) for name in names}
        start = whole(param)
        sharded = isinstance(param, DTensor)
        param.grad = distribute_tensor(grad, param.device_mesh, param.placements) if sharded else grad.clone()
        optimizer.step()
        wanted = float_step(plain, before, start, grad)
        moved = (wanted - start).abs().max().item()
        assert moved or not step, "every step but the first of SOAP moves something"
        assert (whole(param) - wanted).abs().max().item() <= share * moved, step
    return sum("::scale" in name for name in optimizer.state[param])


def first() -> Tensor:
    return torch.randn(SHAPE, generator=torch.Generator().manual_seed(99))


@pytest.mark.parametrize(("name", "form"), paired(CLASSES, [*NAMES, "bfloat16_sr"]))
def test_every_step_of_a_class_is_that_of_decoded_states(name: str, form: str) -> None:
    words: dict[str, Any] = {"lr": 1e-2, "backend": "c", **SETTINGS.get(name, {})}
    kind = getattr(rt, name)
    count = check(
        partial(kind, state_dtype=form, **words), partial(kind, state_dtype="float32", **words),
        nn.Parameter(first()), STEPS,
    )  # fmt: skip
    assert count or name not in ("SOAP", "KLSOAP") or form == "bfloat16_sr"


def parts_of(rank: int, names: Sequence[str], forms: Sequence[str]) -> None:
    """Rules over parts of matrices, along either side, and over a module of `fully_shard`."""
    mesh = init_device_mesh("cpu", (2,))
    for name in names:
        kind = getattr(rt, name, None) or rt.optimizer(rule_of(READERS[name], "in some steps"))
        words: dict[str, Any] = {"lr": 1e-2, "backend": "c", **SETTINGS.get(name, {})}
        for form in forms:
            coded = partial(kind, state_dtype={"m": form}, **words)
            for placed in (Shard(0), Shard(1)):
                param = nn.Parameter(distribute_tensor(first(), mesh, [placed]))
                assert check(coded, partial(kind, **words), param, 4, 1e-5) == 1
            layer = nn.Linear(*reversed(SHAPE), bias=False)
            with torch.no_grad():
                layer.weight.copy_(first())
            fully_shard(layer, mesh=mesh)
            assert check(coded, partial(kind, **words), layer.weight, 4, 1e-5) == 1


@pytest.mark.slow
def test_parts_of_matrices_travel_decoded() -> None:
    check_in_processes(partial(parts_of, names=["left", "factor first", "model", "tiles"], forms=["int8", "dynamic4"]))


@pytest.mark.slow
def test_parts_of_soap_travel_decoded() -> None:
    check_in_processes(partial(parts_of, names=["SOAP", "KLSOAP"], forms=["dynamic8", "dynamic4"]))
