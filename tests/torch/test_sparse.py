"""Sparse gradients of embeddings: torch's own classes are the oracle, and rows without a gradient do not move."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import rulec.torch as rt
from rulec.errors import TensorError
from rulec.torch.eager import EagerUpdate

ROWS, WIDTH = 50, 8


class Bag(torch.nn.Module):
    """An embedding, and a layer behind it unless `alone`."""

    def __init__(self, alone: bool, dtype: torch.dtype = torch.float64) -> None:
        super().__init__()
        self.table = torch.nn.Embedding(ROWS, WIDTH, sparse=True, dtype=dtype)
        self.rest = None if alone else torch.nn.Linear(WIDTH, 3, dtype=dtype)

    def forward(self, words: Tensor) -> Tensor:
        rows: Tensor = self.table(words)
        return rows if self.rest is None else self.rest(rows)


def words(step: int) -> Tensor:
    """Twenty words, among them some that come twice; none in step 3."""
    count = 0 if step == 3 else 5
    return torch.randint(0, ROWS // 2, (4, count), generator=torch.Generator().manual_seed(step))


def train(bag: Bag, optimizer: Any, steps: range) -> None:
    for step in steps:
        optimizer.zero_grad()
        bag(words(step)).pow(2).sum().backward()
        optimizer.step()


def both(name: str, **keywords: Any) -> list[tuple[Bag, Any]]:
    """The same model with torch's class and with ours."""
    torch.manual_seed(0)
    bag = Bag(alone=name == "SparseAdam")
    bags = [bag, copy.deepcopy(bag)]
    kinds: list[Any] = [getattr(torch.optim, name), getattr(rt, name)]
    return [(bag, kind(bag.parameters(), lr=0.1, **keywords)) for bag, kind in zip(bags, kinds, strict=True)]


@pytest.mark.parametrize("maximize", [False, True])
@pytest.mark.parametrize("name", ["SparseAdam", "SGD", "Adagrad"])
def test_steps_are_torchs(name: str, maximize: bool) -> None:
    (theirs, their_optimizer), (ours, our_optimizer) = both(name, maximize=maximize)
    before = ours.table.weight.detach().clone()
    train(theirs, their_optimizer, range(8))
    train(ours, our_optimizer, range(8))
    for a, b in zip(ours.parameters(), theirs.parameters(), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-13, atol=1e-14)
    their_state, our_state = their_optimizer.state_dict()["state"], our_optimizer.state_dict()["state"]
    for key, value in their_state.get(0, {}).items():
        torch.testing.assert_close(torch.as_tensor(our_state[0][key]).double(), torch.as_tensor(value).double())
    assert torch.equal(ours.table.weight[ROWS // 2 :], before[ROWS // 2 :])
    assert not torch.equal(ours.table.weight[: ROWS // 2], before[: ROWS // 2])


def test_a_checkpoint_of_torch_goes_on() -> None:
    (theirs, their_optimizer), (ours, our_optimizer) = both("SparseAdam", betas=(0.8, 0.9), eps=1e-3)
    train(theirs, their_optimizer, range(4))
    ours.load_state_dict(theirs.state_dict())
    our_optimizer.load_state_dict(copy.deepcopy(their_optimizer.state_dict()))
    train(theirs, their_optimizer, range(4, 8))
    train(ours, our_optimizer, range(4, 8))
    torch.testing.assert_close(ours.table.weight, theirs.table.weight, rtol=1e-13, atol=1e-14)


def test_two_sparse_dimensions_and_dense_gradients_of_the_same_parameter() -> None:
    start = torch.linspace(-1, 1, 3 * 4 * 5, dtype=torch.float64).view(3, 4, 5)
    places = torch.tensor([[0, 2, 0, 1], [1, 3, 1, 0]])
    values = torch.linspace(1, 2, 20, dtype=torch.float64).view(4, 5)
    ours = torch.nn.Parameter(start.clone())
    optimizer = rt.SparseAdam([ours], lr=0.1)  # type: ignore[attr-defined]
    ours.grad = torch.sparse_coo_tensor(places, values, (3, 4, 5))
    optimizer.step()
    flat = torch.nn.Parameter(start.view(12, 5).clone())
    oracle = torch.optim.SparseAdam([flat], lr=0.1)
    flat.grad = torch.sparse_coo_tensor(places[:1] * 4 + places[1:], values, (12, 5))
    oracle.step()
    torch.testing.assert_close(ours.view(12, 5), flat, rtol=1e-14, atol=1e-15)
    ours.grad = torch.ones_like(ours)
    optimizer.step()
    flat.grad = torch.ones_like(flat).to_sparse(1)
    oracle.step()
    torch.testing.assert_close(ours.view(12, 5), flat, rtol=1e-13, atol=1e-14)


@pytest.mark.parametrize("weights", ["split", "master", "kahan"])
def test_sixteen_bit_weights_keep_what_they_lost_row_by_row(weights: str) -> None:
    tables = []
    for sparse in (False, True):
        torch.manual_seed(0)
        table = torch.nn.Embedding(ROWS, WIDTH, sparse=sparse, dtype=torch.bfloat16)
        optimizer = rt.SGD(table.parameters(), lr=1e-3, weights=weights)  # type: ignore[attr-defined]
        for step in range(6):
            optimizer.zero_grad()
            table(words(step)).pow(2).sum().backward()
            optimizer.step()
        tables.append((table.weight.detach(), optimizer.state_dict()["state"][0]))
    (dense, dense_state), (sparse_weight, sparse_state) = tables
    assert torch.equal(dense, sparse_weight)
    assert dense_state.keys() == sparse_state.keys()
    assert all(torch.equal(dense_state[key], sparse_state[key]) for key in dense_state)


def test_updates_inside_the_backward_pass() -> None:
    (theirs, their_optimizer), (ours, _) = both("SGD")
    eager = EagerUpdate(ours, rt.SGD, lr=0.1)  # type: ignore[attr-defined]
    for step in range(4):
        their_optimizer.zero_grad()
        theirs(words(step)).pow(2).sum().backward()
        their_optimizer.step()
        with eager.backward():
            ours(words(step)).pow(2).sum().backward()
        eager.step()
    torch.testing.assert_close(ours.table.weight, theirs.table.weight, rtol=1e-13, atol=1e-14)


def transposed(table: torch.nn.Embedding) -> Tensor:
    weight = torch.nn.Parameter(table.weight.detach().t().contiguous().t())
    weight.grad = torch.sparse_coo_tensor(torch.tensor([[1]]), torch.ones(1, WIDTH), (ROWS, WIDTH))
    return weight


REFUSED: dict[str, tuple[Callable[[list[Tensor]], Any], str]] = {
    "Adam": (rt.Adam, "is sparse .*: use SparseAdam"),  # type: ignore[attr-defined]
    "momentum": (lambda p: rt.SGD(p, momentum=0.9), "Momentum does not take: use SparseAdam"),  # type: ignore[attr-defined]
    "decay": (lambda p: rt.SGD(p, weight_decay=0.1), "weight_decay would reach the rows"),  # type: ignore[attr-defined]
    "codes": (lambda p: rt.SparseAdam(p, state_dtype="dynamic8"), "keeps states in codes"),  # type: ignore[attr-defined]
    "random": (
        lambda p: rt.SGD([x.detach().bfloat16().requires_grad_() for x in p], weights="stochastic"),  # type: ignore[attr-defined]
        "draws random numbers",
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_rows_cannot_have_is_refused_and_nothing_written(case: str) -> None:
    make, why = REFUSED[case]
    table = torch.nn.Embedding(1000, WIDTH, sparse=True)
    optimizer = make([table.weight])
    (param,) = optimizer.param_groups[0]["params"]
    param.grad = torch.sparse_coo_tensor(torch.tensor([[1]]), torch.ones(1, WIDTH), (1000, WIDTH)).to(param.dtype)
    before = param.detach().clone()
    with pytest.raises(TensorError, match=why):
        optimizer.step()
    assert torch.equal(param, before)


def test_a_parameter_that_is_not_contiguous() -> None:
    weight = transposed(torch.nn.Embedding(ROWS, WIDTH))
    optimizer = rt.SparseAdam([weight])  # type: ignore[attr-defined]
    with pytest.raises(TensorError, match="parameter 0 is not contiguous: pass it contiguous"):
        optimizer.step()
