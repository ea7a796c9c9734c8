"""Tensors that torch leaves negated or conjugated in memory, wherever a user can give one: their numbers are read."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard
from torch.testing._internal.distributed.fake_pg import FakeStore

import rulec
import rulec.torch
from rulec.errors import TensorError
from rulec.torch.es.strategy import _on_host
from rulec.torch.es.thresholds import pack_bits, unpack_bits
from rulec.torch.tensors.dtensor import local_tensor

#: Makes a tensor of another one: of the same numbers.
Turn = Callable[[Tensor], Tensor]


def negated(x: Tensor) -> Tensor:
    """A view of the negative in memory, in the memory order of `x`."""
    view = torch._neg_view(-x)
    assert view.is_neg()
    assert torch.equal(view, x)
    return view


def of_imaginary_parts(x: Tensor) -> Tensor:
    """The same by public calls alone, contiguous: imaginary parts of a conjugate, as if they lay side by side."""
    if x.dtype not in (torch.float32, torch.float64) or not x.is_contiguous():
        return negated(x)
    memory = torch.zeros(x.numel() + 1, dtype=x.dtype.to_complex())
    view = memory.conj().imag.as_strided(x.shape, x.stride())
    view.copy_(x)
    assert view.is_neg()
    assert view.is_contiguous()
    assert torch.equal(view, x)
    return view


TURNS = [negated, of_imaginary_parts]


def drawn(seed: int, *shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def trained(params: list[Tensor], opt: Any, turn: Turn, steps: int = 5) -> list[Tensor]:
    """Parameters after steps in which the gradients of the first, third and last are turned."""
    for step in range(steps):
        for number, param in enumerate(params):
            grad = (
                drawn(10 * step + number, *param.shape).to(param.dtype).contiguous(memory_format=torch.preserve_format)
            )
            param.grad = turn(grad) if step in (0, 2, steps - 1) else grad
        opt.step()
    return [param.detach() for param in params]


def plain(*shapes: tuple[int, ...], dtype: torch.dtype = torch.float32) -> list[Tensor]:
    return [nn.Parameter(drawn(n, *shape).to(dtype)) for n, shape in enumerate(shapes)]


#: What makes an optimizer and its parameters.
WAYS: dict[str, Callable[[], tuple[list[Tensor], Any]]] = {
    "elements": lambda: (p := plain((3, 4), (5,), ()), rulec.torch.AdamW(p)),
    "float64": lambda: (p := plain((3, 4), dtype=torch.float64), rulec.torch.SGD(p, lr=0.1, momentum=0.9)),
    "norms": lambda: (p := plain((3, 4), (5,)), rulec.torch.LAMB(p)),
    "rows": lambda: (p := plain((3, 4), (5,)), rulec.torch.Adafactor(p)),
    "matrices": lambda: (p := plain((4, 4)), rulec.torch.Muon(p)),
    "sections": lambda: (p := plain((6, 4)), rulec.torch.AdamW([{"params": p, "split": 2}])),
    "gaps": lambda: (p := [nn.Parameter(drawn(0, 4, 6)[:, ::2])], rulec.torch.AdamW(p)),
    "channels": lambda: (
        p := [nn.Parameter(drawn(0, 2, 3, 4, 4).to(memory_format=torch.channels_last))],
        rulec.torch.AdamW(p),
    ),
    "codes": lambda: (p := plain((64, 64)), rulec.torch.AdamW(p, state_dtype="int8")),
    "two words": lambda: (p := plain((64,), dtype=torch.bfloat16), rulec.torch.AdamW(p, weights="split")),
    "of c": lambda: (p := plain((3, 4)), rulec.torch.AdamW(p, backend="c")),
    "partition": lambda: (
        p := plain((3, 4)),
        rulec.torch.Partitioned(rulec.partition({"*": "adamw"}), [("w", p[0])]),
    ),
    "complex": lambda: (p := plain((3, 4), dtype=torch.complex64), rulec.torch.AdamW(p)),
}


@pytest.mark.parametrize("turn", TURNS)
@pytest.mark.parametrize("way", WAYS)
def test_a_gradient_that_lies_negated_is_read_rightly(way: str, turn: Turn) -> None:
    """As it is for the same numbers that lie as they are; after steps in which kernels read gradients as they lay."""
    found = [trained(*WAYS[way](), turn=each) for each in (turn, torch.clone)]
    assert all(torch.equal(ours, other) for ours, other in zip(*found, strict=True))


def test_a_gradient_that_lies_negated_is_read_as_by_torch() -> None:
    found = []
    for library in (rulec.torch, torch.optim):
        params = plain((3, 4), (5,))
        found.append(trained(params, library.SGD(params, lr=0.5, foreach=False), of_imaginary_parts))
    assert all(torch.equal(ours, theirs) for ours, theirs in zip(*found, strict=True))


def test_complex_gradients_that_lie_negated_and_conjugated_are_read_rightly() -> None:
    turns: list[Turn] = [torch.clone, negated, lambda g: negated(g.conj()).conj(), lambda g: g.conj().clone().conj()]
    found = []
    for turn in turns:
        params = plain((3,), dtype=torch.complex64)
        found.append(trained(params, rulec.torch.AdamW(params, lr=0.1), turn)[0])
    assert all(torch.equal(each, found[0]) for each in found)


def passed(x: Tensor, turn: Turn) -> Tensor:
    """A tensor as it is, whose gradient is turned."""
    there: Tensor = Turned.apply(x, turn)  # type: ignore[no-untyped-call]
    return there


class Turned(torch.autograd.Function):
    """The identity."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, turn: Turn) -> Tensor:
        ctx.turn = turn
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        return ctx.turn(grad.contiguous()), None


@pytest.mark.parametrize("turn", TURNS)
def test_eager_updates_read_a_gradient_that_lies_negated(turn: Turn) -> None:
    found = []
    for each in (turn, torch.clone):
        weight, x = nn.Parameter(drawn(0, 4, 4)), drawn(1, 2, 4)
        eager = rulec.torch.EagerUpdate([weight], "adamw", lr=0.1)
        for _ in range(4):
            with eager.backward():
                (x @ passed(weight, each)).square().sum().backward()
            eager.step()
        found.append(weight.detach())
    assert torch.equal(*found)


def test_factors_of_a_gradient_reach_kernels_as_they_lie(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a product that the update makes, both factors."""
    from rulec.torch.eager import epilogue

    seen: list[Any] = []

    def note(_: Any, product: Any) -> bool:
        seen.append(product)
        return True

    monkeypatch.setattr(epilogue, "_is_made", note)
    layer = nn.Linear(4, 4, bias=False)
    eager = rulec.torch.EagerUpdate(layer, "adamw", epilogue=True)
    with eager.backward():
        passed(layer(of_imaginary_parts(drawn(0, 2, 4))), negated).sum().backward()
    assert [seen[0].inputs.is_neg(), seen[0].outputs.is_neg()] == [False, False]


def test_other_steps_read_a_gradient_that_lies_negated() -> None:
    """Those of stores of gradients, of passes, of sparse rows, and of searches."""

    def stored(param: Tensor, turn: Turn) -> None:
        opt = rulec.torch.AdamW([param])
        store = rulec.torch.GradStore([(param, turn(drawn(1, *param.shape)))])
        store.extend([(param, turn(drawn(2, *param.shape)))])
        store.step(opt)

    def climbed(param: Tensor, turn: Turn) -> None:
        closure = closure_of(param, turn)
        rulec.torch.optimizer("sam(adamw)")([param], lr=0.1, rho=0.5).step(closure)

    def searched(param: Tensor, turn: Turn) -> None:
        rulec.torch.LBFGS([param], lr=0.1).step(closure_of(param, turn))

    def sparse(param: Tensor, turn: Turn) -> None:
        values = turn(drawn(1, 2, param.shape[1]))
        places = turn(torch.tensor([[0, 2]])) if turn is negated else torch.tensor([[0, 2]])
        param.grad = torch.sparse_coo_tensor(places, values, param.shape, is_coalesced=True, check_invariants=False)
        rulec.torch.SparseAdam([param], lr=0.1).step()

    def closure_of(param: Tensor, turn: Turn) -> Callable[[], Any]:
        def closure() -> Any:
            param.grad = turn(3 * param.detach() ** 2)
            return (param.detach() ** 3).sum()

        return closure

    for way in (stored, climbed, searched, sparse):
        found = []
        for turn in (negated, of_imaginary_parts, torch.clone):
            param = nn.Parameter(drawn(0, 4, 3))
            way(param, turn)
            found.append(param.detach())
        assert [torch.equal(each, found[2]) for each in found] == [True] * 3, way.__name__


def test_an_input_and_a_rate_that_lie_negated_are_read_rightly() -> None:
    rule = rulec.parse("name: H\nsummary: g by h.\nhyper: {lr: 0.1}\ninputs: {h: like p}\nstep: p = p - lr*g*h\n")
    found = []
    for turn in (negated, of_imaginary_parts, torch.clone):
        param = nn.Parameter(drawn(0, 5))
        opt = rulec.torch.optimizer(rule)([param], lr=turn(torch.tensor(0.5)))
        for step in range(3):
            param.grad = drawn(step, 5)
            opt.step(inputs={"h": [turn(drawn(9 + step, 5))]})
        found.append(param.detach())
    assert torch.equal(found[0], found[2])
    assert torch.equal(found[1], found[2])


@pytest.fixture
def two() -> Iterator[Any]:
    """A mesh of two processes, of which this is the first and the other is none."""
    dist.init_process_group("fake", rank=0, world_size=2, store=FakeStore())
    yield init_device_mesh("cpu", (2,))
    dist.destroy_process_group()


def test_the_part_of_a_gradient_that_lies_negated_is_read_rightly(two: Any) -> None:
    found = []
    for turn in (negated, of_imaginary_parts, torch.clone):
        param = nn.Parameter(DTensor.from_local(drawn(0, 3, 4), two, [Shard(0)]))
        opt = rulec.torch.AdamW([param], lr=0.1)
        for step in range(3):
            param.grad = DTensor.from_local(turn(drawn(step + 1, 3, 4)), two, [Shard(0)])
            opt.step()
        found.append(local_tensor(param).detach())
    assert torch.equal(found[0], found[2])
    assert torch.equal(found[1], found[2])


@pytest.mark.parametrize("after", [None, "int8", "dynamic8", "bfloat16_sr"])
@pytest.mark.parametrize("before", [None, "int8", "dynamic8", "bfloat16_sr"])
def test_states_that_lie_negated_are_loaded_and_edited(before: Any, after: Any) -> None:
    param = nn.Parameter(drawn(0, 64, 64))
    first = rulec.torch.AdamW([param], state_dtype=before)
    param.grad = drawn(1, 64, 64)
    first.step()
    saved = first.state_dict()
    found = []
    for turn in (negated, torch.clone):
        turned = {
            name: turn(value) if value.dtype != torch.uint8 else value for name, value in saved["state"][0].items()
        }
        second = rulec.torch.AdamW([param], state_dtype=after)
        second.load_state_dict({**saved, "state": {0: turned}})
        state = second.state[param]
        for name in [name for name, value in state.items() if value.is_floating_point()]:
            state[name] = turn(state[name].clone())
        second.storage()
        found.append([*second.state[param].values()])
    assert all(torch.equal(ours, other) for ours, other in zip(*found, strict=True))


@pytest.mark.parametrize("steps", [0, 1, 4])
@pytest.mark.parametrize("turn", [lambda x: torch._neg_view(x), lambda x: torch.complex(x, x).conj()])
@pytest.mark.parametrize("in_place", [True, False])
def test_a_parameter_that_comes_to_lie_negated_is_refused(steps: int, turn: Turn, in_place: bool) -> None:
    """In the memory that it had, where kernels would write the negative, or in other memory."""
    numbers = drawn(0, 4)
    turned = turn(numbers)
    param = nn.Parameter(turned.resolve_conj().resolve_neg().clone())
    other = nn.Parameter(drawn(1, 3))
    opt = rulec.torch.SGD([param, other], lr=0.1)
    for _ in range(steps):
        param.grad, other.grad = torch.ones_like(param), torch.ones(3)
        opt.step()
    memory = param.data if in_place else param.data.clone()
    param.data = memory.conj() if memory.is_complex() else torch._neg_view(memory)
    before = [p.detach().clone() for p in (param, other)]
    param.grad, other.grad = torch.ones_like(before[0]), torch.ones(3)
    with pytest.raises(TensorError, match=r"is a conjugate or negative view: pass param.resolve_conj\(\)"):
        opt.step()
    assert all(torch.equal(p.detach(), was) for p, was in zip((param, other), before, strict=True))


def test_a_file_has_the_numbers_of_a_weight(tmp_path: Path) -> None:
    from rulec.torch.checkpoint import stored, tensor_of

    for dtype in (torch.float32, torch.bfloat16):
        numbers = drawn(0, 5, dtype=dtype)
        assert torch.equal(tensor_of(stored(negated(numbers))), numbers)


def test_strategies_read_what_lies_negated() -> None:
    fitness = drawn(0, 5, dtype=torch.float64)
    assert np.array_equal(_on_host(negated(fitness)), fitness.numpy())
    bits = drawn(1, 3, 70) > 0
    words = pack_bits(bits)
    assert torch.equal(unpack_bits(torch._neg_view(-words), 70), bits)
