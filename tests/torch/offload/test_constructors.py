"""Every way to make an optimizer, with an offload: it takes steps, or is refused in a sentence that says what to do."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import rulec
import rulec.torch
from rulec.errors import HyperError, RulecError
from rulec.es.perturbation import Perturbation
from rulec.integrations.huggingface import optimizer_cls_and_kwargs
from rulec.torch.classes import class_names
from tests.torch.offload.runs import assert_same_bits, take_steps

#: From the model, a folder for files, and keywords to what takes the steps of the model's parameters.
Make = Callable[[nn.Module, Path, dict[str, Any]], Any]


def model() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(12, 8), nn.Linear(8, 3)).to(torch.bfloat16)


TEXT = "name: Mine\nhyper: {lr: 0.1}\nstate: {m: 0}\nstep: |\n  m = m + g\n  p = p - lr*m\n"


def of_a_file(net: nn.Module, folder: Path, words: dict[str, Any]) -> Any:
    (folder / "mine.yaml").write_text(TEXT)
    return rulec.torch.optimizer(folder / "mine.yaml")(net.parameters(), **words)


def of_a_partition(rules: dict[str, Any]) -> Make:
    return lambda net, folder, words: rulec.torch.Partitioned(rulec.partition(rules), net.named_parameters(), **words)


def of_groups(net: nn.Module, folder: Path, words: dict[str, Any]) -> Any:
    groups = rulec.torch.partitioned_groups(rulec.partition({"...": "adamw"}), net.named_parameters())
    return rulec.torch.AdamW(groups, **words)


def of_a_strategy(net: nn.Module, folder: Path, words: dict[str, Any]) -> Any:
    strategy = rulec.torch.perturb(net, Perturbation("lowrank", directions=8, sigma=0.1, seed=3))
    return rulec.torch.AdamW(strategy.parameters.values(), **words)


def of_a_trainer(net: nn.Module, folder: Path, words: dict[str, Any]) -> Any:
    kind, keywords = optimizer_cls_and_kwargs("adamw", lr=1e-3, **words)
    return kind(net.named_parameters(), **keywords)


def eager(rule: Any, **more: Any) -> Make:
    return lambda net, folder, words: rulec.torch.EagerUpdate(net, rule, **more, **words)


WORKING: dict[str, Make] = {
    "a class": lambda net, folder, words: rulec.torch.Adafactor(net.parameters(), **words),
    "a function": lambda net, folder, words: rulec.torch.optimizer("nsgdm")(net.parameters(), **words),
    "a file": of_a_file,
    "a partition": of_a_partition({"**/bias": "lion", "...": "adamw"}),
    "a partition of a clip": of_a_partition({"**/bias": "clip_by_global_norm >> adamw", "...": "adamw"}),
    "groups of a partition": of_groups,
    "the class and keywords of a trainer": of_a_trainer,
    "an evolution strategy": of_a_strategy,
    "eager updates": eager("adamw"),
    "eager updates of a partition": eager(rulec.partition({"**/bias": "lion", "...": "adamw"})),
    "eager updates of a function": eager(lambda params, **words: rulec.torch.AdamW(params, **words)),
}


def train(net: nn.Module, optimizer: Any) -> list[Tensor]:
    """Takes three steps. The parameters after them."""
    params = [*net.parameters()]
    if not isinstance(optimizer, rulec.torch.EagerUpdate):
        take_steps(optimizer, params, 3)
        return params
    for number in range(3):
        with optimizer.backward():
            net(torch.full((2, 12), 0.1 * number + 0.2).bfloat16()).float().square().sum().backward()
        optimizer.step()
    return params


@pytest.mark.parametrize("offload", ["step", "states"])
@pytest.mark.parametrize("name", WORKING)
def test_steps_have_the_bits_of_those_without_offload(name: str, offload: str, tmp_path: Path) -> None:
    runs = [[*model().parameters()]]
    for words in ({"weights": "master"}, {"weights": "master", "offload": offload, "offload_buffer": 512}):
        net = model()
        runs.append(train(net, WORKING[name](net, tmp_path, words)))
    assert_same_bits(runs[2], runs[1])
    assert not all(map(torch.equal, runs[1], runs[0]))


SAYS_RULES = r"offload='\w+' is for rules, and .* is none: leave it out$"
MOVES_NOT = r", which offload='\w+' does not move: leave offload out"

REFUSED: dict[str, tuple[Make, str]] = {
    "L-BFGS": (lambda net, folder, words: rulec.torch.LBFGS(net.parameters(), **words), MOVES_NOT),
    "SAM": (lambda net, folder, words: rulec.torch.optimizer("sam(adamw)")(net.parameters(), **words), MOVES_NOT),
    "a partition of an input": (of_a_partition({"**/bias": "adamw", "...": "sophia"}), MOVES_NOT),
    "eager updates of SAM": (eager("sam(adamw)"), MOVES_NOT),
    "eager updates of L-BFGS": (eager(rulec.torch.LBFGS, scope="tensor"), SAYS_RULES),
    "eager updates of a class of torch": (eager(torch.optim.AdamW, scope="tensor"), SAYS_RULES),
    "a function that passes the keyword on": (
        eager(lambda params, **words: torch.optim.AdamW(params, **words), scope="tensor"), SAYS_RULES,
    ),
    "a function that drops the keyword": (
        eager(lambda params, **words: torch.optim.AdamW(params), scope="tensor"), SAYS_RULES,
    ),
}  # fmt: skip


#: The classes whose rules take a tensor for each parameter beside its gradient.
TAKE_INPUTS = ("AdaHessian", "BSAM", "EKFAC", "FOOF", "KFAC", "NewtonMuon", "Sophia")


@pytest.mark.parametrize("offload", ["step", "states"])
@pytest.mark.parametrize("name", REFUSED)
def test_others_are_refused_when_they_are_made(name: str, offload: str, tmp_path: Path) -> None:
    make, message = REFUSED[name]
    with pytest.raises(HyperError, match=message):
        make(model(), tmp_path, {"offload": offload})


def test_a_joined_rule_inside_the_backward_pass_needs_its_step_on_the_host() -> None:
    with pytest.raises(RulecError, match=r"needs a value of the whole model for the update of one tensor.*: use the"):
        rulec.torch.EagerUpdate(model(), "clip_by_global_norm >> adamw", offload="states")


def test_every_class_is_made_or_refused() -> None:
    for offload in ("step", "states"):
        for name in class_names():
            params = [torch.ones(8, 6, dtype=torch.bfloat16, requires_grad=True)]
            if name in TAKE_INPUTS:
                with pytest.raises(HyperError, match=f"which offload={offload!r} does not move: leave offload out$"):
                    getattr(rulec.torch, name)(params, offload=offload)
            else:
                getattr(rulec.torch, name)(params, offload=offload)


def test_eager_updates_take_no_line_search() -> None:
    for kind in (rulec.torch.LBFGS, torch.optim.LBFGS):
        with pytest.raises(RulecError, match="LBFGS needs all gradients at once, several times in a step: use the"):
            rulec.torch.EagerUpdate(model(), kind, scope="tensor")
