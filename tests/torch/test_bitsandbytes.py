"""States of bitsandbytes: every number goes there and comes back, and what is damaged or computes something else is
refused before anything is written."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import rulec
import rulec.torch as rt
from rulec.errors import StateMismatch
from tests.torch.write_peers import CASES, run, weights

State = dict[str, Any]

#: Class -> its keywords, none at its default; those that bitsandbytes has not stay at 0.
NUMBERS: Mapping[str, Mapping[str, Any]] = {
    "AdamW": {"lr": 0.02, "betas": (0.5, 0.6), "eps": 1e-3, "weight_decay": 0.3},
    "Adam": {"lr": 0.02, "betas": (0.5, 0.6), "eps": 1e-3},
    "Lion": {"lr": 0.02, "betas": (0.5, 0.6), "weight_decay": 0.3},
    "SGD": {"lr": 0.02, "momentum": 0.5, "weight_decay": 0.3},
    "RMSprop": {"lr": 0.02, "alpha": 0.5, "eps": 1e-3, "weight_decay": 0.3},
    "Adagrad": {"lr": 0.02, "eps": 1e-3, "weight_decay": 0.3},
    "AdEMAMix": {
        "lr": 0.02, "betas": (0.5, 0.6, 0.7), "alpha": 3.0, "alpha_warmup": 100, "beta3_warmup": 50.5, "eps": 1e-3,
        "weight_decay": 0.3,
    },
}  # fmt: skip


def gradient(param: nn.Parameter) -> Tensor:
    return torch.randn(param.shape, generator=torch.Generator().manual_seed(1))


def made(kind: str, shape: tuple[int, ...] = (64, 128), **keywords: Any) -> Any:
    """An optimizer after a step."""
    param = nn.Parameter(torch.ones(shape))
    param.grad = gradient(param)
    optimizer = getattr(rt, kind)([param], **keywords)
    optimizer.step()
    return optimizer


def values(optimizer: Any) -> list[Tensor]:
    (param,) = optimizer.param_groups[0]["params"]
    state = optimizer.state[param]
    return [param.detach().clone(), *(torch.as_tensor(state[key]).clone() for key in sorted(state))]


@pytest.mark.parametrize("word", [None, "dynamic8"])
@pytest.mark.parametrize("kind", NUMBERS)
@pytest.mark.filterwarnings("ignore:bitsandbytes stores states otherwise")
def test_every_number_comes_back(kind: str, word: str | None) -> None:
    first = made(kind, state_dtype=word, **NUMBERS[kind])
    second = made(kind, state_dtype=word, **({"lr": 1.0, "momentum": 0.1} if kind == "SGD" else {}))
    second.load_state_dict(first.state_dict(layout="bitsandbytes"))
    for key, value in first.param_groups[0].items():
        if key not in ("params", "formats"):
            assert second.param_groups[0][key] == value, key


@pytest.mark.parametrize("kind", NUMBERS)
def test_a_run_that_was_there_is_the_uninterrupted_one(kind: str) -> None:
    first = made(kind, **NUMBERS[kind])
    second = made(kind, **({"lr": 1.0, "momentum": 0.1} if kind == "SGD" else {}))
    second.load_state_dict(first.state_dict(layout="bitsandbytes"))
    (p,), (q,) = (each.param_groups[0]["params"] for each in (first, second))
    with torch.no_grad():
        q.copy_(p)
    for each in (first, second):
        each.step()
    assert torch.equal(p, q)


def saved(kind: str = "AdamW", word: str | None = "dynamic8", **keywords: Any) -> dict[str, Any]:
    """A state dict of bitsandbytes, in which tensors are apart as the library has them."""
    there = made(kind, state_dtype=word, **keywords).state_dict(layout="bitsandbytes")
    state = there["state"][0]
    nested = {key: state.pop(key) for key in [key for key in state if key != "step"]}
    state["__bnb_optimizer_quant_state__"] = nested
    return there


def check_refused(there: dict[str, Any], words: str, optimizer: Any) -> None:
    """The state is refused, and the optimizer stays what it was."""
    before, group = values(optimizer), dict(optimizer.param_groups[0])
    with pytest.raises(StateMismatch, match=words):
        optimizer.load_state_dict(there)
    assert all(torch.equal(a, b) for a, b in zip(before, values(optimizer), strict=True))
    assert dict(optimizer.param_groups[0]) == group


def _set(key: str, change: Callable[[Any], Any]) -> Callable[[State], None]:
    return lambda state: state.update({key: change(state[key])})


def _first(number: float) -> Callable[[Tensor], Tensor]:
    return lambda x: torch.cat([torch.tensor([number]), x.reshape(-1)[1:]]).reshape(x.shape)


DAMAGE: Mapping[str, tuple[Callable[[State], None], str]] = {
    "codes cast to floats": (_set("state1", lambda x: x.float()), "state1 of .* in torch.float32 beside qmap1"),
    "codes cast to bfloat16": (_set("state2", lambda x: x.bfloat16()), "state2 of .* beside qmap2"),
    "codes cast to integers": (_set("state1", lambda x: x.int()), "state1 of .* in torch.int32"),
    "no table": (lambda s: s.pop("qmap1"), "its qmap1 or absmax1 is missing"),
    "no scales": (lambda s: s.pop("absmax2"), "its qmap2 or absmax2 is missing"),
    "half of the scales": (_set("absmax1", lambda x: x[: len(x) // 2]), "8192 codes and 16 scales"),
    "scales of another block": (_set("absmax1", lambda x: x[: len(x) // 8]), "blocks of 256 and 2048 elements"),
    "one scale more": (_set("absmax2", lambda x: torch.cat([x, x[:1]])), "8192 codes and 33 scales"),
    "a short table": (_set("qmap1", lambda x: x[:200]), "qmap1 of .* must have 256 finite numbers"),
    "a table with NaN": (_set("qmap2", _first(math.nan)), "qmap2 of .* must have 256 finite numbers"),
    "a scale of NaN": (_set("absmax1", _first(math.nan)), "absmax1 of .* has nan among its scales"),
    "a scale of inf": (_set("absmax2", _first(math.inf)), "absmax2 of .* has inf among its scales"),
    "a negative scale": (_set("absmax1", _first(-1.0)), "absmax1 of .* has -1 among its scales"),
    "scales of integers": (_set("absmax1", lambda x: x.int()), "absmax1 of .* must be a tensor of floats"),
    "scales in a list": (_set("absmax1", lambda x: x.tolist()), "absmax1 of .* must be a tensor of floats"),
    "a table in a list": (_set("qmap1", lambda x: x.tolist()), "qmap1 of .* must have 256"),
    "a state in a list": (_set("state1", lambda x: x.tolist()), "state1 of .* which is no tensor"),
    "a state of another shape": (_set("state1", lambda x: x.t()), r"state1 of .* shape \(128, 64\), where"),
    "a flat state": (_set("state2", lambda x: x.reshape(-1)), r"state2 of .* shape \(8192,\), where"),
    "codes without memory": (_set("state1", lambda x: x.to("meta")), "state1 of .* on the device meta"),
    "scales without memory": (_set("absmax1", lambda x: x.to("meta")), "absmax1 of .* on the device meta"),
    "sparse codes": (_set("state1", lambda x: x.to_sparse()), "state1 of .* with layout torch.sparse_coo"),
    "no second state": (lambda s: s.pop("state2"), "has no state2"),
}  # fmt: skip

COUNTS = {"text": "3", "half": 2.5, "negative": -1, "none": None, "list": [3], "nan": math.nan}


@pytest.mark.parametrize("damage", DAMAGE)
@pytest.mark.parametrize("word", [None, "dynamic8"])
def test_damaged_states_are_refused_and_nothing_changes(damage: str, word: str | None) -> None:
    there = saved()
    change, words = DAMAGE[damage]
    change(there["state"][0]["__bnb_optimizer_quant_state__"])
    check_refused(there, words, made("AdamW", state_dtype=word))


@pytest.mark.parametrize("count", COUNTS)
def test_a_step_that_is_no_count_is_refused(count: str) -> None:
    for kind in ("AdamW", "SGD"):
        keywords = {"lr": 0.1, "momentum": 0.9} if kind == "SGD" else {}
        there = saved(kind, **keywords)
        there["state"][0]["step"] = COUNTS[count]
        check_refused(there, "step", made(kind, **keywords))
        del there["state"][0]["step"]
        check_refused(there, "step", made(kind, **keywords))


@pytest.mark.parametrize(
    ("kind", "keywords", "words"),
    [
        ("Adam", {"weight_decay": 0.1}, None),
        ("NAdam", {}, "no optimizer that computes NAdam"),
        ("LAMB", {}, "no optimizer that computes LAMB"),
        ("Adafactor", {}, "no optimizer that computes Adafactor"),
        ("AdamW", {"amsgrad": True}, "no optimizer that computes AMSGrad"),
        ("Lion", {}, "has state2, which lion has not"),
    ],
)
def test_states_of_adamw_go_to_nothing_that_computes_otherwise(
    kind: str, keywords: dict[str, Any], words: str | None
) -> None:
    if words is None:
        words = "decays weights by weight_decay=0.3 as AdamW does"
    check_refused(saved(**NUMBERS["AdamW"]), words, made(kind, **keywords))


@pytest.mark.parametrize(
    ("keywords", "words"),
    [({"nesterov": True}, "computes Nesterov"), ({}, "has no state2")],
)
def test_states_of_sgd_go_to_nothing_that_computes_otherwise(keywords: dict[str, Any], words: str) -> None:
    there = saved("SGD", **NUMBERS["SGD"])
    kind, more = ("SGD", {"lr": 0.1, "momentum": 0.9}) if keywords else ("AdamW", {})
    check_refused(there, words, made(kind, **more, **keywords))


@pytest.mark.parametrize("name", ["unorm_vec", "gnorm_vec"])
@pytest.mark.parametrize("kind", ["AdamW", "LAMB", "SGD", "LARS"])
def test_states_of_steps_that_norms_scale_are_refused(kind: str, name: str) -> None:
    """bitsandbytes' LAMB and LARS, which keep a norm of the update."""
    keywords = {"lr": 0.1, "momentum": 0.9} if kind == "SGD" else {}
    there = saved("SGD", **NUMBERS["SGD"]) if kind in ("SGD", "LARS") else saved()
    there["state"][0]["__bnb_optimizer_quant_state__"][name] = torch.zeros(1)
    check_refused(there, f"have {name}: its LAMB, its LARS", made(kind, **keywords))


def test_a_rule_of_the_name_alone_takes_no_states() -> None:
    smooth = rulec.parse(
        "name: Lion\nhyper: {lr: 1e-4, beta1: 0.9, beta2: 0.99, weight_decay: 0}\nstate: {m: 0}\nstep: |\n"
        "  direction = tanh(beta1*m + (1 - beta1)*g) + weight_decay*p\n  m = beta2*m + (1 - beta2)*g\n"
    )
    optimizer = rt.optimizer(smooth)([nn.Parameter(torch.ones(64, 128))])
    with pytest.raises(StateMismatch, match="no optimizer that computes Lion as here"):
        optimizer.load_state_dict(saved("Lion"))


#: Optimizer there -> keywords, with those that it takes and does not heed.
UNHEEDED: Mapping[str, Mapping[str, Any]] = {
    "SGD": {"momentum": 0.5, "dampening": 0.3}, "RMSprop": {"alpha": 0.6, "momentum": 0.4},
    "AdEMAMix": {"betas": (0.8, 0.95, 0.999), "alpha": 3.0, "t_alpha": 10, "t_beta3": 8, "eps": 1e-3},
    "AdamW": {"betas": (0.8, 0.95), "eps": 1e-4}, "Lion": {"betas": (0.8, 0.95)}, "Adagrad": {"eps": 1e-3},
}  # fmt: skip


@pytest.mark.parametrize("bits", [8, 32])
@pytest.mark.parametrize("kind", UNHEEDED)
def test_a_run_of_the_library_goes_on_with_its_numbers(kind: str, bits: int) -> None:
    """Here with the defaults of the class, and from here there again."""
    library = pytest.importorskip("bitsandbytes.optim")
    if kind == "AdEMAMix" and bits == 32:
        pytest.skip("32-bit AdEMAMix of bitsandbytes 0.50 does not run on a CPU")
    keywords = {"lr": 1e-2, "weight_decay": 0.2, **UNHEEDED[kind]}
    theirs, ours, again = weights(), weights(), weights()
    there = getattr(library, f"{kind}{bits}bit")([theirs], **keywords)
    run(there, theirs, range(3))
    here = getattr(rt, kind)([ours], **({"lr": 1.0} if kind == "SGD" else {}))
    here.load_state_dict(copy.deepcopy(there.state_dict()))
    back = getattr(library, f"{kind}{bits}bit")([again], lr=1.0, **({"momentum": 0.1} if kind == "SGD" else {}))
    back.load_state_dict(here.state_dict(layout="bitsandbytes"))
    with torch.no_grad():
        start = theirs.detach().clone()
        ours.copy_(start)
        again.copy_(start)
    for optimizer, param in ((there, theirs), (here, ours), (back, again)):
        run(optimizer, param, range(3, 4))
    moved = (theirs - start).abs().max()
    assert (ours - theirs).abs().max() <= 2e-4 * moved
    assert (again - theirs).abs().max() <= 2e-4 * moved


@pytest.mark.parametrize("name", [name for name, case in CASES.items() if case.library == "bitsandbytes"])
def test_states_that_the_library_wrote_go_on_with_its_numbers(name: str) -> None:
    """From the file of a run there, with the defaults of the class here."""
    from tests.torch.test_peers import ARRAYS, KEPT, check_within_the_format, saved_by

    param = weights()
    optimizer = getattr(rt, CASES[name].ours)([param], **({"lr": 1.0} if CASES[name].ours == "SGD" else {}))
    optimizer.load_state_dict(saved_by(name))
    run(optimizer, param, range(3, 4))
    check_within_the_format(
        name, param.detach().reshape(-1)[:KEPT], torch.from_numpy(np.asarray(ARRAYS[f"{name}.updated"]))
    )
