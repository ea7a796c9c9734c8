"""Parameters whose memory others move while a step evaluates the model several times: as if nobody had."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import rulec
import rulec.torch
from rulec.errors import RulecError, StateMismatch, TensorError
from tests.language.test_passes import EVERY_OTHER, THREE
from tests.pairs import paired

BRAIN = torch.bfloat16


# Ways to move a parameter's memory


def by_data(p: Tensor) -> None:
    p.data = p.data.clone()


def by_set(p: Tensor) -> None:
    with torch.no_grad():
        p.set_(p.detach().clone())  # type: ignore[call-overload]


def by_swap(p: Tensor) -> None:
    other = nn.Parameter(p.detach().clone())
    other.grad = p.grad
    torch.utils.swap_tensors(p, other)


def by_sharing(p: Tensor) -> None:
    p.share_memory_()


def by_resizing(p: Tensor) -> None:
    """The storage grows, and lies elsewhere."""
    storage = p.untyped_storage()
    storage.resize_(storage.nbytes() + (1 << 20))


def by_module(p: Tensor) -> None:
    module = nn.Module()
    module.p = p
    module._apply(torch.clone)


def by_order(p: Tensor) -> None:
    """The memory order is another, too."""
    if p.dim() == 2:
        p.data = p.data.t().contiguous().t()
    else:
        by_data(p)


MOVES = [by_data, by_set, by_swap, by_sharing, by_resizing, by_module, by_order]


# Kinds of optimizers and parameters


def plain(dtype: torch.dtype = torch.float32) -> list[Tensor]:
    drawn = torch.Generator().manual_seed(0)
    return [nn.Parameter(torch.randn(shape, generator=drawn).to(dtype)) for shape in ((4, 6), (5,), (2, 4))]


def with_gaps() -> list[Tensor]:
    return [nn.Parameter(torch.randn(4, 6, generator=torch.Generator().manual_seed(1))[:, ::2]), *plain()[1:]]


def of_rule(rule: Any, params: Callable[[], list[Tensor]] = plain, **keywords: Any) -> Callable[[], Any]:
    def make() -> Any:
        tensors = params()
        return tensors, rulec.torch.optimizer(rule)(tensors, **keywords)

    return make


def of_sections() -> Any:
    params = plain()
    groups = [{"params": params[:1], "split": 2, "tags": ["qkv"]}, {"params": params[1:], "tags": ["bias"]}]
    return params, rulec.torch.optimizer("sam(muon)")(groups, rho=0.1)


def of_search(search: str | None) -> Callable[[], Any]:
    def make() -> Any:
        params = plain(torch.float64)
        return params, rulec.torch.LBFGS(params, lr=0.5, max_iter=4, line_search_fn=search)

    return make


KINDS: dict[str, Callable[[], Any]] = {
    "sam": of_rule("sam(sgd)", lr=0.1, rho=0.5),
    "asam": of_rule("asam(adamw)", lr=0.1),
    "gsam": of_rule("gsam(adamw)", lr=0.1),
    "looksam": of_rule("looksam(adamw, k=2)", lr=0.1),
    "friendly": of_rule("friendly_sam(lion)", lr=0.1),
    "wsam": of_rule("wsam(sgd)", lr=0.1),
    "two passes": of_rule(rulec.parse(THREE)),
    "some steps": of_rule(rulec.parse(EVERY_OTHER), lr=0.1),
    "norms": of_rule("sam(lamb)", lr=0.1),
    "sections": of_sections,
    "gaps": of_rule("sam(adamw)", with_gaps, lr=0.1),
    "complex": of_rule("sam(sgd)", lambda: plain(torch.complex64), lr=0.1),
    "codes": of_rule("sam(adamw)", lambda: [nn.Parameter(torch.ones(64, 65))], lr=0.1, state_dtype="int8"),
    **{
        kind: of_rule("sam(adamw)", lambda: plain(BRAIN), lr=0.1, weights=kind)
        for kind in ("split", "split24", "master", "kahan", "stochastic")
    },
    **{f"search {search}": of_search(search) for search in (None, "strong_wolfe", "zoom", "backtracking")},
}


@pytest.fixture(params=[True, False], ids=["surveys", "no surveys"])
def surveys(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Steps that look at all parameters at once, or ask torch for each, as with RULEC_SURVEY=0."""
    if not request.param:
        monkeypatch.setattr("rulec.torch.fastpath.survey.exports", lambda: None)


def loss_of(params: list[Tensor]) -> Tensor:
    return sum((p.abs().float().square().mean() + p.abs().float().sin().sum() for p in params), torch.zeros(()))


def run(
    make: Callable[[], Any], move: Callable[[Tensor], None], moved_at: Callable[[int, int], bool], calls: bool = False,
    steps: int = 4,
) -> list[Tensor]:  # fmt: skip
    """Parameters, and losses, after steps in which evaluations move the memory of every second parameter.

    `moved_at` says it of an evaluation of a step, both counted from 0. With `calls`, `next_pass` asks for the passes.
    """
    params, opt = make()
    losses = []
    for step in range(steps):
        evaluation = -1

        def closure() -> Tensor:
            nonlocal evaluation
            evaluation += 1
            opt.zero_grad()
            loss = loss_of(params)
            loss.backward()  # type: ignore[no-untyped-call]
            if moved_at(step, evaluation):  # noqa: B023
                for param in params[::2]:
                    move(param)
            return loss

        if calls:
            losses.append(closure().detach())
            while opt.next_pass():
                closure()
            opt.step()
        else:
            losses.append(opt.step(closure).detach())
    return [*(p.detach() for p in params), *losses]


def close(ours: list[Tensor], other: list[Tensor]) -> bool:
    return all(torch.allclose(a, b, rtol=2e-2 if a.dtype is BRAIN else 1e-5) for a, b in zip(ours, other, strict=True))


def alike(ours: list[Tensor], other: list[Tensor]) -> bool:
    return all(torch.equal(a, b) for a, b in zip(ours, other, strict=True))


@pytest.mark.parametrize(("kind", "move"), paired([*KINDS], MOVES))
def test_a_step_goes_on_where_a_parameter_now_lies(kind: str, move: Callable[[Tensor], None], surveys: None) -> None:
    """Moved at each evaluation of the third step, by turns, and in every second evaluation of all steps."""
    calls = not kind.startswith("search") and move in (by_data, by_swap)
    untouched = run(KINDS[kind], move, lambda step, evaluation: False, calls)
    same = close if move is by_order else alike  # sums in another order
    for chosen in (0, 1, 2):
        assert same(run(KINDS[kind], move, lambda s, e, c=chosen: (s, e) == (2, c), calls), untouched), chosen
    assert same(run(KINDS[kind], move, lambda s, e: e % 2 == 1, calls), untouched)


def failing_at(opt: Any, params: list[Tensor], failing: int, act: Callable[[], None]) -> Callable[[], Tensor]:
    """A closure that acts at the end of one of its calls, counted from 1."""
    count = 0

    def closure() -> Tensor:
        nonlocal count
        count += 1
        opt.zero_grad()
        loss = loss_of(params)
        loss.backward()  # type: ignore[no-untyped-call]
        if count == failing:
            act()
        return loss

    return closure


@pytest.mark.parametrize("kind", ["sam", "split", "gaps", "sections", "search strong_wolfe"])
def test_a_moved_parameter_is_put_back_after_an_error(kind: str) -> None:
    def fail(params: list[Tensor], move: Callable[[Tensor], None]) -> None:
        for param in params:
            move(param)
        raise ZeroDivisionError

    for move in MOVES:
        params, opt = KINDS[kind]()
        opt.step(failing_at(opt, params, 0, lambda: None))
        before = [p.detach().clone() for p in params]
        with pytest.raises(ZeroDivisionError):
            opt.step(failing_at(opt, params, 2, partial(fail, params, move)))
        assert alike([p.detach() for p in params], before), move


def to_shape(p: Tensor) -> None:
    p.data = p.data.reshape(-1)[:-1].clone()


def to_nothing(p: Tensor) -> None:
    p.untyped_storage().resize_(0)


def to_meta(p: Tensor) -> None:
    torch.utils.swap_tensors(p, nn.Parameter(torch.empty_like(p, device="meta")))


@pytest.mark.parametrize("change", [to_shape, to_nothing, to_meta])
@pytest.mark.parametrize("kind", ["sam", "split", "gaps", "two passes", "search None", "search zoom"])
def test_a_parameter_that_cannot_be_put_back_is_named(kind: str, change: Callable[[Tensor], None]) -> None:
    """And all others are back."""
    params, opt = KINDS[kind]()
    others = [p.detach().clone() for p in params[1:]]

    def act() -> None:
        params[0].grad = None
        change(params[0])

    with pytest.raises(TensorError, match=r"parameter 0 was given another shape or device, or no memory, between two"):
        opt.step(failing_at(opt, params, 2, act))
    assert alike([p.detach() for p in params[1:]], others)


def test_the_dtype_of_a_parameter_between_passes() -> None:
    """Numbers of before the step are rounded to it, and the step goes on; a search refuses it, in a sentence."""

    def widen(p: Tensor) -> None:
        p.data = p.data.double()

    for kind in ("sam", "two passes"):
        wide = run(KINDS[kind], widen, lambda s, e: (s, e) == (2, 1))
        assert [p.dtype for p in wide[:3]] == [torch.float64, torch.float32, torch.float64]
        for ours, other in zip(wide, run(KINDS[kind], widen, lambda s, e: False), strict=True):
            torch.testing.assert_close(ours.float(), other, rtol=1e-5, atol=1e-6)
    params = plain()
    opt: Any = rulec.torch.LBFGS(params, line_search_fn="zoom")
    before = [p.detach().clone() for p in params]
    with pytest.raises(TensorError, match="parameter 0 was given another shape, dtype or device in the closure"):
        opt.step(failing_at(opt, params, 2, lambda: widen(params[0])))
    assert alike([p.detach().float() for p in params], before)


@pytest.mark.parametrize("change", [lambda x: x.double(), lambda x: torch.zeros(7)])
def test_a_search_does_not_go_on_with_vectors_of_other_parameters(change: Callable[[Tensor], Tensor]) -> None:
    params = plain()
    opt = rulec.torch.LBFGS(params, max_iter=2)
    opt.step(failing_at(opt, params, 0, lambda: None))
    params[0].data = change(params[0].data)
    params[0].grad = None
    before = [p.detach().clone() for p in params]
    with pytest.raises(StateMismatch, match=r"LBFGS remembers vectors of 37 numbers of torch.float32 on cpu, and "):
        opt.step(failing_at(opt, params, 0, lambda: None))
    assert alike([p.detach() for p in params], before)


@pytest.mark.parametrize("move", MOVES)
def test_evaluation_and_training_points_follow_a_moved_parameter(move: Callable[[Tensor], None]) -> None:
    found = []
    for moving in (True, False):
        params = plain()
        opt = rulec.torch.ScheduleFreeAdamW(params, lr=0.1)
        for step in range(4):
            for number, param in enumerate(params):
                param.grad = torch.full_like(param, 1.0 + number + step)
            opt.step()
            opt.eval()
            for param in params[::2] if moving else ():
                move(param)
            opt.train()
        found.append([p.detach() for p in params])
    assert alike(*found)


def test_states_beside_weights_are_put_back_where_they_lie() -> None:
    """The low halves, whose tensor in `state` others have replaced between passes."""
    params, opt = KINDS["split"]()
    opt.step(failing_at(opt, params, 0, lambda: None))
    before = [*(p.detach().clone() for p in params), *(opt.state[p]["param::low"].clone() for p in params)]
    failing_at(opt, params, 0, lambda: None)()
    assert opt.next_pass()
    for param in params:
        opt.state[param]["param::low"] = opt.state[param]["param::low"].clone()
    opt.put_back()
    assert alike([*(p.detach() for p in params), *(opt.state[p]["param::low"] for p in params)], before)


@pytest.mark.parametrize("steps", [0, 1, 4])
def test_a_parameter_whose_storage_was_emptied_is_refused(steps: int) -> None:
    params = plain()
    opt = rulec.torch.AdamW(params)
    for _ in range(steps):
        for param in params:
            param.grad = torch.ones_like(param)
        opt.step()
    before = [p.detach().clone() for p in params[1:]]
    for param in params:
        param.grad = torch.ones_like(param)
    params[0].untyped_storage().resize_(8)
    with pytest.raises(RulecError, match=r"parameter 0 has shape \(4, 6\) and memory of 8 bytes, where it needs 96"):
        opt.step()
    assert alike([p.detach() for p in params[1:]], before)
