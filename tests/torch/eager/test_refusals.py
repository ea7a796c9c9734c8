"""What cannot be exact is refused, in a sentence that says what to do."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import rulec
from rulec.errors import HyperError, RulecError, RuleError, TensorError
from rulec.torch import EagerUpdate
from tests.torch.eager.training import gone, loss_of, model


def backward(opt: EagerUpdate, net: nn.Module, **keywords: Any) -> None:
    """The backward pass of a step, without the step."""
    with opt.backward():
        loss_of(net, 0).backward(**keywords)


def check_refused(message: str, act: Callable[[], object], error: type[Exception] = RulecError) -> None:
    """Asserts that `act` raises one sentence."""
    with pytest.raises(error, match=message) as caught:
        act()
    assert "\n" not in str(caught.value)


def test_a_backward_pass_outside_of_the_scope() -> None:
    net = model()
    opt = EagerUpdate(net, "adamw", contributions=1)
    check_refused(
        r"arrived outside of `with opt.backward\(\):`.*call zero_grad\(\)", lambda: loss_of(net, 0).backward()
    )
    opt.zero_grad()
    assert gone(net)
    backward(opt, net)
    opt.step()
    assert opt.report().fired == 9


def test_scopes_inside_each_other_and_steps_inside_scopes() -> None:
    net = model()
    opt = EagerUpdate(net, "adamw")
    with opt.backward():
        check_refused("cannot be entered again inside itself", lambda: backward(opt, net))
        check_refused(r"step\(\) was called inside of opt.backward\(\)", opt.step)
        check_refused(r"zero_grad\(\) was called inside", opt.zero_grad)
        check_refused(r"state_dict\(\) in the middle of a step", opt.state_dict)
        check_refused(r"close\(\) in the middle of a step", opt.close)
        loss_of(net, 0).backward()
    opt.step()


def test_a_second_backward_pass_in_one_step() -> None:
    net = model()
    opt = EagerUpdate(net, "adamw", contributions=1)
    backward(opt, net)
    check_refused(r"backward pass is over: call step\(\) before the next", lambda: backward(opt, net))
    check_refused(r"zero_grad\(\) was called between the backward pass and step\(\)", opt.zero_grad)
    check_refused(r"state_dict\(\) in the middle of a step", opt.state_dict)
    check_refused("in the middle of a step", lambda: opt.load_state_dict({}))
    check_refused("in the middle of a step", lambda: opt.add_param_group({"params": [nn.Parameter(torch.ones(1))]}))
    opt.step()
    backward(opt, net)
    opt.step()


@pytest.mark.filterwarnings("ignore:Using backward")
@pytest.mark.parametrize("keyword", ["create_graph", "retain_graph"])
def test_graphs_that_are_kept(keyword: str) -> None:
    net = model()
    opt = EagerUpdate(net, "adamw", contributions=1)
    check_refused(f"{keyword}=True", lambda: backward(opt, net, **{keyword: True}))
    assert gone(net), "a pass in which nothing was updated leaves nothing"
    backward(opt, net)
    opt.step()


def test_a_closure_belongs_elsewhere() -> None:
    opt = EagerUpdate(model(), "adamw")
    check_refused("takes no closure", lambda: opt.step(lambda: 0.0))


def test_hyper_parameters_hold_for_the_whole_step() -> None:
    net = model()
    opt = EagerUpdate(net, "adamw", contributions=1)
    backward(opt, net)
    opt.param_groups[0]["lr"] = 0.5
    check_refused("'lr' of a parameter group was changed between the backward pass", opt.step)
    opt.param_groups[0]["lr"] = 1e-3
    opt.step()


def test_gradients_that_are_used_must_not_be_changed_later() -> None:
    net = model()
    opt = EagerUpdate(net, "adamw", contributions=1)
    backward(opt, net)
    check_refused("clip them with max_grad_norm=", lambda: nn.utils.clip_grad_norm_(net.parameters(), 1.0))


def test_parameters_of_two_optimizers_and_parameters_that_share_memory() -> None:
    net = model()
    first = EagerUpdate(net, "adamw")
    check_refused("has an eager optimizer already: give each parameter one", lambda: EagerUpdate(net[1], "sgd"))
    first.close()
    EagerUpdate(net[1], "sgd").close()
    whole = torch.zeros(4)
    halves = [nn.Parameter(whole[:3]), nn.Parameter(whole[2:])]
    check_refused("share memory", lambda: EagerUpdate(halves, "adamw"), TensorError)
    foreign = lambda: EagerUpdate(halves, torch.optim.SGD, scope="elementwise")  # noqa: E731
    check_refused("share memory", foreign, TensorError)


@pytest.mark.parametrize(
    ("keywords", "error", "message"),
    [
        ({"rule": torch.optim.SGD}, HyperError, "say scope='elementwise' or scope='tensor'"),
        ({"rule": torch.optim.SGD, "scope": "model"}, HyperError, "say scope='elementwise' or scope='tensor'"),
        ({"rule": torch.optim.LBFGS, "scope": "tensor"}, RuleError, "LBFGS needs all gradients at once"),
        ({"rule": "adamw", "scope": "tensor"}, HyperError, "scope is read from the rule of AdamW: leave it out"),
        ({"rule": 3}, HyperError, "runs a rule, its name, a partition or a class of optimizers, not a int"),
        ({"rule": lambda params: 3}, HyperError, "must make a torch.optim.Optimizer"),
        ({"rule": torch.optim.SGD([torch.ones(1)])}, HyperError, "give the class SGD and its keywords"),
        ({"rule": "adamw", "contributions": 0}, HyperError, "contributions=0 must be how often"),
        ({"rule": "adamw", "accumulate": "mean"}, HyperError, "accumulate='mean' must be 'sum' or 'fold'"),
        ({"rule": "adamw", "accumulate": "fold"}, RuleError, r"AdamW cannot fold gradients .* through `v = .*'sum'"),
        ({"rule": "nesterov", "accumulate": "fold"}, RuleError, "cannot fold"),
        ({"rule": "lion", "accumulate": "fold"}, RuleError, "cannot fold"),
        ({"rule": torch.optim.SGD, "scope": "tensor", "accumulate": "fold"}, RuleError, "is not known here"),
        ({"rule": "signum", "accumulate": "fold", "max_grad_norm": 1.0}, HyperError, "cannot be clipped by the norm"),
        ({"rule": rulec.load("transforms/clip_by_global_norm") >> rulec.load("adamw")}, RuleError, "max_grad_norm="),
    ],
)
def test_what_cannot_be_made(keywords: dict[str, Any], error: type[Exception], message: str) -> None:
    given = {key: value for key, value in keywords.items() if key not in ("accumulate", "scope", "max_grad_norm")}
    rest = {key: value for key, value in keywords.items() if key not in given}
    rate = {"lr": 0.1} if isinstance(keywords["rule"], type) else {}
    check_refused(message, lambda: EagerUpdate(model(), **given, **rest, **rate), error)


def test_clipping_needs_two_passes() -> None:
    net = model()
    opt = EagerUpdate(net, "adamw", max_grad_norm=1.0)
    check_refused(r"max_grad_norm needs the norm of all gradients .*with opt.measure\(\)", lambda: backward(opt, net))
    plain = EagerUpdate(model(), "adamw")
    check_refused("there is nothing to measure", lambda: plain.measure().__enter__())


def test_a_scaler_is_refused_before_anything_is_written() -> None:
    net = model()
    opt = EagerUpdate(net, "adamw")
    scaler = torch.amp.GradScaler("cpu")
    before = [p.detach().clone() for p in net.parameters()]
    with opt.backward():
        scaler.scale(loss_of(net, 0)).backward()
    check_refused(r"with opt.measure\(scaler\)", lambda: scaler.step(opt))
    assert all(torch.equal(a, b) for a, b in zip(before, net.parameters(), strict=True))


def test_an_optimizer_that_counts_steps_in_its_groups_is_found_out() -> None:
    class Counted(torch.optim.SGD):
        def step(self, closure: Any = None) -> Any:
            self.param_groups[0]["steps"] = self.param_groups[0].get("steps", 0) + 1
            return super().step(closure)

    net = model()
    opt = EagerUpdate(net, Counted, scope="elementwise", lr=0.1)
    backward(opt, net)
    check_refused("a step of Counted changes 'steps' of its group", opt.step, RuleError)


def test_a_sparse_gradient_is_refused_by_name() -> None:
    net = nn.Sequential(nn.Embedding(7, 5, sparse=True))
    opt = EagerUpdate(net, "adamw", contributions=1)
    check_refused("the gradient of .* is sparse", lambda: backward(opt, net), TensorError)
    assert gone(net)
