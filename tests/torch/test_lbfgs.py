"""L-BFGS with a line search, beside torch's own: the same iterates, and checkpoints both ways."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Mapping
from typing import Any

import pytest
import torch
from torch import Tensor

import rulec.torch
from rulec.errors import HyperError, RulecError, StateMismatch, TensorError

Loss = Callable[[list[Tensor]], Tensor]


def flat(params: list[Tensor]) -> Tensor:
    return torch.cat([p.reshape(-1) for p in params])


def rosenbrock(params: list[Tensor]) -> Tensor:
    x = flat(params)
    return (100 * (x[1:] - x[:-1] ** 2) ** 2 + (1 - x[:-1]) ** 2).sum()


def quadratic(params: list[Tensor]) -> Tensor:
    x = flat(params)
    return (torch.logspace(0, 2, x.numel(), dtype=x.dtype) * (x - 1) ** 2).sum() + 0.3 * x.sum() ** 2


def network(params: list[Tensor]) -> Tensor:
    generator = torch.Generator().manual_seed(0)
    inputs = torch.randn(16, 3, generator=generator, dtype=torch.float64)
    wanted = torch.randn(16, 2, generator=generator, dtype=torch.float64)
    first, bias, second = params
    return (torch.tanh(inputs @ first + bias) @ second - wanted).square().mean()


#: Loss -> the shapes of its parameters, and a step that does not diverge without a search.
LOSSES: Mapping[Loss, tuple[list[tuple[int, ...]], float]] = {
    rosenbrock: ([(3,), (2, 2)], 1e-3),
    quadratic: ([(3,), (2, 2), ()], 0.5),
    network: ([(3, 4), (4,), (4, 2)], 0.5),
}


class Run:
    """An optimizer with its parameters and its loss."""

    def __init__(self, kind: Any, loss: Loss, dtype: torch.dtype = torch.float64, **keywords: Any) -> None:
        generator = torch.Generator().manual_seed(1)
        self.loss = loss
        self.params: list[Any] = [
            torch.nn.Parameter(0.5 * torch.randn(shape, generator=generator, dtype=dtype)) for shape in LOSSES[loss][0]
        ]
        self.optimizer = kind(self.params, **keywords)
        self.calls = 0

    def closure(self) -> Tensor:
        self.calls += 1
        self.optimizer.zero_grad()
        loss = self.loss(self.params)
        loss.backward()  # type: ignore[no-untyped-call]
        return loss

    def steps(self, count: int) -> list[Tensor]:
        """The losses and parameters of some steps."""
        seen = []
        for _ in range(count):
            loss = self.optimizer.step(self.closure).detach()
            seen.append(torch.cat([loss.reshape(1), flat(self.params).detach()]))
        return seen


@pytest.mark.peer
@pytest.mark.parametrize("search", [None, "strong_wolfe"])
@pytest.mark.parametrize("loss", LOSSES)
def test_iterates_are_those_of_torch(loss: Loss, search: str | None) -> None:
    lr = 1.0 if search else LOSSES[loss][1]
    for more in ({}, {"history_size": 3}, {"max_iter": 4, "max_eval": 3}, {"max_iter": 1, "tolerance_change": 0.0}):
        keywords = {"lr": lr, "line_search_fn": search, **more}
        ours, theirs = Run(rulec.torch.LBFGS, loss, **keywords), Run(torch.optim.LBFGS, loss, **keywords)
        for mine, other in zip(ours.steps(4), theirs.steps(4), strict=True):
            torch.testing.assert_close(mine, other, rtol=1e-12, atol=1e-14)
        states = [run.optimizer.state[run.params[0]] for run in (ours, theirs)]
        assert [ours.calls, ours.calls] == [theirs.calls, states[0]["func_evals"]]
        assert all(states[0][key] == states[1][key] for key in ("func_evals", "n_iter"))


@pytest.mark.peer
def test_complex_numbers_are_pairs() -> None:
    start = torch.tensor([1 + 2j, -0.5 + 0.1j], dtype=torch.complex128)

    def ended(kind: Any) -> Tensor:
        param = torch.nn.Parameter(start.clone())
        optimizer = kind([param], line_search_fn="strong_wolfe", max_iter=6)

        def closure() -> Tensor:
            optimizer.zero_grad()
            loss = ((param - 1j).abs() ** 4 + param.real.square()).sum()
            loss.backward()  # type: ignore[no-untyped-call]
            return loss

        optimizer.step(closure)
        return param.detach()

    torch.testing.assert_close(ended(rulec.torch.LBFGS), ended(torch.optim.LBFGS), rtol=1e-12, atol=1e-14)


def test_parameters_without_gradients_stay() -> None:
    still = torch.nn.Parameter(torch.ones(2, dtype=torch.float64))
    run = Run(lambda params, **keywords: rulec.torch.LBFGS([still, *params], **keywords), quadratic)
    run.steps(2)
    assert torch.equal(still.detach(), torch.ones(2, dtype=torch.float64))
    run.closure()
    assert max(float(p.grad.abs().max()) for p in run.params) < 1e-3


@pytest.mark.parametrize("kinds", [(rulec.torch.LBFGS, rulec.torch.LBFGS), (torch.optim.LBFGS, rulec.torch.LBFGS),
                                   (rulec.torch.LBFGS, torch.optim.LBFGS)])  # fmt: skip
def test_a_state_goes_on_with_the_same_bits(kinds: tuple[Any, Any]) -> None:
    keywords = {"history_size": 4, "line_search_fn": "strong_wolfe", "max_iter": 3}
    whole, second = Run(kinds[0], rosenbrock, **keywords), Run(kinds[1], rosenbrock)
    assert not second.optimizer.state_dict()["state"]
    whole.steps(3)
    saved = copy.deepcopy(whole.optimizer.state_dict())
    with torch.no_grad():
        for param, before in zip(second.params, whole.params, strict=True):
            param.copy_(before)
    second.optimizer.load_state_dict(saved)
    assert all(map(torch.equal, whole.steps(3), second.steps(3)))
    again = copy.deepcopy(whole.optimizer)
    assert again.state_dict().keys() == saved.keys()


def test_a_state_keeps_the_dtype_of_its_vector() -> None:
    def pair() -> tuple[Any, Any]:
        params = [torch.nn.Parameter(torch.ones(2, dtype=dtype) / 3) for dtype in (torch.float32, torch.float64)]
        return params, rulec.torch.LBFGS(params, max_iter=3)

    def step(params: Any, optimizer: Any) -> None:
        def closure() -> Any:
            optimizer.zero_grad()
            loss = sum(((p.double() - i) ** 4).sum() for i, p in enumerate(params))
            loss.backward()  # type: ignore[union-attr]
            return loss

        optimizer.step(closure)

    (params, optimizer), (others, second) = pair(), pair()
    step(params, optimizer)
    second.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    assert second.state[others[0]]["d"].dtype == torch.float64
    with torch.no_grad():
        for param, before in zip(others, params, strict=True):
            param.copy_(before)
    step(params, optimizer)
    step(others, second)
    assert all(map(torch.equal, params, others))


def from_a_wall(kind: Any, beyond: float) -> float:
    """Where a step ends that begins with a trial beyond a wall: the loss has another value there."""
    param = torch.nn.Parameter(torch.tensor([4.0], dtype=torch.float64))
    optimizer = kind([param], lr=40, line_search_fn="strong_wolfe")

    def closure() -> Tensor:
        optimizer.zero_grad()
        loss = (param - param.log()).sum() if float(param.detach()) > 0 else param.sum() * 0 + beyond
        loss.backward()  # type: ignore[no-untyped-call]
        return loss

    optimizer.step(closure)
    return float(param.detach())


@pytest.mark.parametrize("beyond", [math.inf, -math.inf, math.nan])
def test_a_step_ends_before_a_wall(beyond: float) -> None:
    assert from_a_wall(rulec.torch.LBFGS, beyond) == pytest.approx(1, abs=1e-5)


@pytest.mark.peer
def test_torch_goes_through_a_wall() -> None:
    """torch interpolates with the infinite value, and goes to no number."""
    assert math.isnan(from_a_wall(torch.optim.LBFGS, math.inf))
    with pytest.raises(IndexError):
        from_a_wall(torch.optim.LBFGS, math.nan)


@pytest.mark.parametrize("search", ["backtracking", "zoom"])
def test_other_searches_find_the_minimum(search: str) -> None:
    run = Run(rulec.torch.LBFGS, rosenbrock, line_search_fn=search, max_iter=200, tolerance_change=1e-14)
    run.steps(1)
    torch.testing.assert_close(flat(run.params).detach(), torch.ones(7, dtype=torch.float64), rtol=0, atol=1e-6)


def test_an_error_in_the_closure_puts_the_parameters_back() -> None:
    run = Run(rulec.torch.LBFGS, rosenbrock, line_search_fn="strong_wolfe")
    run.steps(1)
    before, state = flat(run.params).detach().clone(), copy.deepcopy(run.optimizer.state_dict())

    def failing() -> Tensor:
        if run.calls > 40:
            raise ZeroDivisionError
        return run.closure()

    run.calls = 36
    with pytest.raises(ZeroDivisionError):
        run.optimizer.step(failing)
    assert torch.equal(flat(run.params), before)
    assert torch.equal(run.optimizer.state_dict()["state"][0]["d"], state["state"][0]["d"])
    with pytest.raises(RulecError, match="the closure of LBFGS returned None: let it return the loss"):
        run.optimizer.step(lambda: None)
    run.optimizer.zero_grad()
    with pytest.raises(RulecError, match="left no parameter with a gradient: let it do the backward pass"):
        run.optimizer.step(lambda: torch.zeros(()))


@pytest.mark.parametrize(("keywords", "message"), [
    ({"lr": -1.0}, "lr=-1.0: give a number, 0 or larger \\(Invalid learning rate: -1.0\\)"),
    ({"lr": torch.ones(2)}, "Tensor lr must be 1-element, and lr of LBFGS has shape"),
    ({"tolerance_grad": math.nan}, "tolerance_grad=nan: give a number, 0 or larger"),
    ({"history_size": 0}, "history_size=0: give a whole number, 1 or larger"),
    ({"max_iter": 0}, "max_iter=0: give a whole number, 1 or larger"),
    ({"max_eval": 2.5}, "max_eval=2.5: give a whole number, 1 or larger"),
    ({"line_search_fn": "armijo"}, "'armijo': give None or one of 'strong_wolfe', 'backtracking', 'zoom'"),
])  # fmt: skip
def test_wrong_settings(keywords: dict[str, Any], message: str) -> None:
    with pytest.raises(HyperError, match=message):
        rulec.torch.LBFGS([torch.nn.Parameter(torch.ones(2))], **keywords)


def test_what_cannot_be_is_refused() -> None:
    first, second = (torch.nn.Parameter(torch.ones(2)) for _ in range(2))
    with pytest.raises(HyperError, match="LBFGS takes one group of parameters, for they are one vector, and has 2"):
        rulec.torch.LBFGS([{"params": [first]}, {"params": [second]}])
    optimizer = rulec.torch.LBFGS([first])
    with pytest.raises(HyperError, match="has 2: give all parameters in one, or make an optimizer for each"):
        optimizer.add_param_group({"params": [second]})
    with pytest.raises(RulecError, match="give step\\(\\) a closure that does zero_grad"):
        optimizer.step()
    with pytest.raises(TensorError, match="share memory"):
        rulec.torch.LBFGS([first, torch.nn.Parameter(first.detach()[:1])])
    optimizer.param_groups[0]["history_size"] = 0
    with pytest.raises(HyperError, match="history_size=0"):
        optimizer.step(lambda: first.sum())
    meta = torch.nn.Parameter(torch.ones(2, device="meta"))
    with pytest.raises(TensorError):
        rulec.torch.LBFGS([first, meta])


def test_states_of_others_are_refused() -> None:
    run = Run(rulec.torch.LBFGS, quadratic)
    run.steps(1)
    saved = run.optimizer.state_dict()
    state = saved["state"][0]

    def refused(message: str, **changes: Any) -> None:
        with pytest.raises(StateMismatch, match=message):
            run.optimizer.load_state_dict({**saved, "state": {0: {**state, **changes}}})

    refused("d was saved with shape \\(3,\\), where the parameters have 8 elements in all", d=torch.ones(3))
    refused("old_dirs was saved with shape", old_dirs=[torch.ones(2)] * len(state["ro"]))
    refused("not of LBFGS", n_iter=torch.ones(1))
    refused("lists of different lengths", ro=state["ro"][:1])
    short = {key: value for key, value in state.items() if key != "H_diag"}
    with pytest.raises(StateMismatch, match="lacks H_diag"):
        run.optimizer.load_state_dict({**saved, "state": {0: short}})
    other = torch.optim.Adam(run.params)
    run.closure()
    other.step()
    with pytest.raises(StateMismatch, match="not of LBFGS"):
        run.optimizer.load_state_dict({**saved, "state": other.state_dict()["state"]})
    assert run.optimizer.state_dict()["state"][0]["func_evals"] == state["func_evals"]
