"""Inputs that are a matrix for each parameter, with a shape of its own: in torch, on one process and on several."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

import rulec
import rulec.torch
from rulec.compiler.reference import ReferenceOptimizer
from rulec.errors import HyperError, RulecError, RuleError, TensorError
from tests.torch.eager.processes import check_in_processes

BOTH_SIDES = rulec.parse("""
name: BothSides
hyper: {damping: 0.5}
inputs: {a: {shape: [cols, cols]}, b: {shape: [rows, rows]}}
state: {m: 0}
applies_to: ndim >= 2
otherwise: sgd
view: {flatten: rest}
step: |
  m = 0.5*m + g
  left = solve(b + damping*eye(rows), m)
  direction = transpose(solve(a + damping*eye(cols), transpose(left)))
""")

SHAPES = {"wide": (4, 6), "tall": (7, 3), "kernel": (4, 2, 3, 1), "bias": (5,)}


def values(seed: int, dtype: torch.dtype) -> dict[str, Tensor]:
    made = torch.Generator().manual_seed(seed)
    return {name: torch.randn(shape, generator=made, dtype=torch.float64).to(dtype) for name, shape in SHAPES.items()}


def matrices(seed: int, dtype: torch.dtype) -> dict[str, dict[str, Tensor]]:
    """For each input, a positive definite matrix for each parameter that is a matrix."""
    each = {name: value.flatten(1) for name, value in values(seed, torch.float64).items() if value.dim() > 1}
    return {
        "a": {name: (x.T @ x).to(dtype) for name, x in each.items()},
        "b": {name: (x @ x.T).to(dtype) for name, x in each.items()},
    }


class Model(nn.Module):
    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        for name, value in values(0, dtype).items():
            self.register_parameter(name, nn.Parameter(value))


def given(model: nn.Module, dtype: torch.dtype, seed: int) -> dict[str, dict[Any, Tensor]]:
    known = dict(model.named_parameters())
    return {key: {known[name]: x for name, x in of.items()} for key, of in matrices(seed, dtype).items()}


def trained(model: nn.Module, dtype: torch.dtype = torch.float64, **words: Any) -> nn.Module:
    optimizer = rulec.torch.optimizer(BOTH_SIDES)(model.named_parameters(), lr=0.1, **words)
    for step in (1, 2):
        for name, p in model.named_parameters():
            grad = values(step, p.dtype)[name]
            p.grad = distribute_tensor(grad, p.device_mesh, p.placements) if isinstance(p, DTensor) else grad
        optimizer.step(inputs=given(model, dtype, step))
    return model


def reference() -> list[Any]:
    kept = ReferenceOptimizer(BOTH_SIDES, [v.numpy() for v in values(0, torch.float64).values()], {"lr": 0.1})
    for step in (1, 2):
        of = matrices(step, torch.float64)
        inputs = {key: [of[key][name].numpy() if name in of[key] else None for name in SHAPES] for key in of}
        kept.step([v.numpy() for v in values(step, torch.float64).values()], inputs=inputs)
    return kept.params


def check_is_reference(model: nn.Module, tolerance: float = 1e-12) -> None:
    for p, wanted in zip(model.parameters(), reference(), strict=True):
        whole = p.full_tensor() if isinstance(p, DTensor) else p  # type: ignore[no-untyped-call]
        close = torch.from_numpy(wanted).to(whole.dtype)
        torch.testing.assert_close(whole.detach(), close, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("backend", ["cpu", "c"])
def test_steps_are_the_reference_s(backend: str) -> None:
    check_is_reference(trained(Model(torch.float64), backend=backend))


@pytest.mark.parametrize("words", [{}, {"weights": "master"}])
def test_weights_of_16_bits_take_matrices_in_float32(words: Any) -> None:
    check_is_reference(trained(Model(torch.bfloat16), torch.float32, **words), 0.1)
    with pytest.raises(TensorError, match="'a' of wide is of bfloat16, where float32 is expected"):
        trained(Model(torch.bfloat16), torch.bfloat16)


def test_a_list_has_none_for_parameters_without_a_matrix() -> None:
    model = Model(torch.float64)
    optimizer = rulec.torch.optimizer(BOTH_SIDES)(model.named_parameters(), lr=0.1)
    for step in (1, 2):
        for name, p in model.named_parameters():
            p.grad = values(step, p.dtype)[name]
        of = matrices(step, torch.float64)
        optimizer.step(inputs={key: [of[key].get(name) for name in SHAPES] for key in of})
    check_is_reference(model)


@pytest.mark.parametrize(
    ("matrix", "message"),
    [
        (None, r"the input 'a' of wide is missing: BothSides needs a matrix of it for this parameter"),
        (torch.eye(4).double(), r"the input 'a' of wide has shape \(4, 4\), where \(6, 6\) is expected"),
        (torch.ones(36).double(), r"the input 'a' of wide has shape \(36,\), where \(6, 6\) is expected"),
        (torch.eye(6), "the input 'a' of wide is of float32, where float64 is expected"),
        (torch.eye(6, dtype=torch.int64), "a tensor of torch.int64 cannot be optimized"),
        (torch.eye(6, dtype=torch.complex128), "'a' of a parameter of shape .* is complex: give a dense, real tensor"),
        (torch.eye(6).double().to_sparse(), "'a' of a parameter of shape .* is sparse .*: give a dense, real tensor"),
        (torch.eye(6, device="meta").double(), "the input 'a' of wide is on meta, and its parameter on cpu"),
        (1.0, "the input 'a' of wide is a float: BothSides needs a matrix of it for this parameter"),
    ],
)
def test_what_does_not_fit_is_refused_before_anything_is_written(matrix: Any, message: str) -> None:
    model = Model(torch.float64)
    optimizer = rulec.torch.optimizer(BOTH_SIDES)(model.named_parameters(), lr=0.1)
    for name, p in model.named_parameters():
        p.grad = values(1, p.dtype)[name]
    inputs = given(model, torch.float64, 1)
    inputs["a"][model.wide] = matrix
    with pytest.raises(RulecError, match=message):
        optimizer.step(inputs=inputs)
    for name, p in model.named_parameters():
        assert torch.equal(p, values(0, p.dtype)[name])


@pytest.mark.parametrize("kind", ["states", "step"])
def test_offload_is_refused_when_the_optimizer_is_made(kind: str) -> None:
    with pytest.raises(HyperError, match="takes the input 'a' for each parameter, which offload="):
        rulec.torch.optimizer(BOTH_SIDES)(Model(torch.float32).named_parameters(), offload=kind)


def test_an_update_inside_the_backward_pass_is_refused() -> None:
    with pytest.raises(RuleError, match="takes the input 'a' at every step"):
        rulec.torch.EagerUpdate(Model(torch.float32), BOTH_SIDES)


def test_a_partition_gives_each_rule_its_matrices() -> None:
    model = Model(torch.float64)
    partition = rulec.partition({"kernel": BOTH_SIDES, ...: BOTH_SIDES.renamed("Others")})
    optimizer = rulec.torch.Partitioned(partition, model.named_parameters(), lr=0.1)
    for step in (1, 2):
        for name, p in model.named_parameters():
            p.grad = values(step, p.dtype)[name]
        optimizer.step(inputs=given(model, torch.float64, step))
    check_is_reference(model)


def placed(model: nn.Module, dim: Callable[[Tensor], int]) -> nn.Module:
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    for name, p in [*model.named_parameters()]:
        model.register_parameter(name, nn.Parameter(distribute_tensor(p.detach(), mesh, [Shard(dim(p))])))
    return model


def _shards(rank: int) -> None:
    model = placed(Model(torch.float64), lambda p: 0)
    check_is_reference(trained(model))
    check_is_reference(trained(placed(Model(torch.float64), lambda p: 1 if p.dim() == 2 else 0)))
    inputs = given(model, torch.float64, 1)
    inputs["a"][model.wide] = distribute_tensor(torch.eye(6).double(), model.wide.device_mesh, [Shard(0)])  # type: ignore[union-attr, arg-type]
    with pytest.raises(TensorError, match="is a DTensor: give a dense, real tensor of the whole matrix"):
        rulec.torch.optimizer(BOTH_SIDES)(model.named_parameters(), lr=0.1).step(inputs=inputs)


def test_every_rank_gives_the_whole_matrices_of_dtensors() -> None:
    check_in_processes(_shards)
