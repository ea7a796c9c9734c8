"""What the interop sections say of torch and optax is true of torch and optax."""

from __future__ import annotations

from collections.abc import Callable
from itertools import product
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest
import torch

import rulec
from rulec.tools.compare.target import entry_for, translate
from tests.jax.agreement import root_in_float64
from tests.rules.interop import Entry, entries
from tests.rules.matrices import MATRICES
from tests.rules.measure import Trial, largest_difference
from tests.rules.peers import PEERS
from tests.rules.reducing import REDUCING
from tests.rules.runs import Hyper, OptaxRun, OurRun, TorchRun

pytestmark = [
    pytest.mark.peer,
    pytest.mark.filterwarnings("ignore:`optimistic_adam` is deprecated:DeprecationWarning"),
]

ENTRIES = entries()
ROWS = (*PEERS, *REDUCING, *MATRICES)

#: One entry of each rule for each class or function.
FIRST = list({(entry.rule, entry.callable): entry for entry in reversed(ENTRIES)}.values())


def everyday(entry: Entry) -> Any:
    """Another name of what is compared already takes its turn in the slow run."""
    marks = [pytest.mark.slow] if entry.callable in ("nadam", "nadamw") else []
    return [pytest.param(entry, *flavour, marks=marks) for flavour in entry.decays()]


FLAVOURS = [flavour for entry in ENTRIES for flavour in everyday(entry)]


def values(entry: Entry) -> dict[str, float]:
    """Hyper-parameters that are not the defaults, where theirs has them; the rest at our defaults."""
    chosen = {name: value for peer in reversed(ROWS) if peer.rule == entry.rule for name, value in peer.hyper.items()}
    theirs = {name for value in entry.names.values() for name in (value if isinstance(value, list) else [value])}
    values = {k: chosen.get(k, default) if k in theirs else default for k, default in entry.our_defaults.items()}
    wanted = {entry.names[k] for k in warms_up(entry)}
    return {k: 4 if k in wanted else value for k, value in values.items() if value is not None}


def warms_up(entry: Entry) -> list[str]:
    """The keyword of optax's own schedule, which computes in float32 whatever the parameters are."""
    return [k for k in entry.when if k == "warmup_steps" and entry.when[k] == "nonzero"]


def trial_of(entry: Entry, steps: int) -> Trial:
    """A trial with tensors that the rule applies to."""
    matrices = rulec.load(entry.rule).applies_to is not None
    return Trial("float64", steps, ((5, 4), (3, 4), (2, 6))) if matrices else Trial("float64", steps)


def start(entry: Entry, trial: Trial, hyper: Hyper, extra: dict[str, Any]) -> TorchRun | OptaxRun:
    """Their side, made of nothing but the entry."""

    def keywords(now: Hyper) -> dict[str, Any]:
        decay = {"weight_decay": now["weight_decay"]} if entry.weight_decay else {}
        return {**entry.keywords(now), **decay, **extra}

    def make(tensors: Any, foreach: bool, **given: Any) -> Any:
        return entry.function(tensors, **given, **({"foreach": foreach} if "foreach" in entry.signature else {}))

    if entry.package == "torch":
        return TorchRun(make, keywords, trial.params, hyper, shipped=False)
    _, first = next(iter(trial.moves(hyper)))  # a state may begin at the learning rate
    return OptaxRun(lambda now: entry.function(**keywords(now)), trial.params, first)


@pytest.mark.parametrize(("entry", "decay", "extra"), FLAVOURS, ids=lambda x: str(x) if isinstance(x, Entry) else None)
def test_same_numbers(entry: Entry, decay: str, extra: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    # torch orthogonalizes in bfloat16, whatever the parameter's type: here in the parameter's.
    monkeypatch.setattr(torch.Tensor, "bfloat16", torch.Tensor.clone)
    if entry.callable == "contrib.madgrad":
        monkeypatch.setattr(jnp, "sqrt", root_in_float64)
    rule = entry.meant
    hyper = values(entry)
    if decay:
        rule = rulec.load("l2") >> rule if decay == "l2" else rule + rulec.load("decay")
        hyper["weight_decay"] = 0.07
    trial = trial_of(entry, steps=12)  # ASGD begins to average in the ninth
    ours = OurRun(rule, trial.params, hyper, "numpy")
    theirs = start(entry, trial, hyper, extra)
    close = 1e-6 if warms_up(entry) else 1e-12
    assert largest_difference(ours, theirs, trial, hyper).relative <= close
    for index in range(len(trial.params)):
        mine, stored = ours.state(index), theirs.state(index)
        here = {name for name in entry.state if name in mine or rule.state[name].condition is None}
        for name in here:
            value = stored[entry.state[name]]
            np.testing.assert_allclose(
                mine[name].reshape(value.shape), value, rtol=close, atol=1e-2 * close, err_msg=name
            )


@pytest.mark.parametrize("entry", ENTRIES, ids=str)
def test_keywords_and_defaults(entry: Entry) -> None:
    known = set(entry.signature)
    assert set(entry.when) | set(entry.args) | set(entry.defaults) <= known | {"weight_decay"}
    decay = {"weight_decay": 0} if entry.weight_decay else {}
    expected = {**entry.keywords(entry.our_defaults), **decay, **entry.defaults}
    for key, default in expected.items():
        theirs = entry.signature[key].default
        if key not in entry.when and theirs is not None and theirs is not entry.signature[key].empty:
            assert default == theirs, f"{key} is {theirs} by default there, {default} here"


@pytest.mark.parametrize("entry", FIRST, ids=str)
def test_the_diff_command_reads_entries_alike(entry: Entry) -> None:
    hyper = values(entry)
    section = entry_for(rulec.load(entry.rule), entry.package, entry.callable)
    found = translate(hyper, entry.function, section, {}).keywords
    here = entry.keywords(hyper)
    # What has no number, as a default that is an expression, is left to them.
    without = {key for key, value in here.items() if key not in entry.when and _has_none(value)}
    assert found == {key: value for key, value in here.items() if key not in without}


def _has_none(value: Any) -> bool:
    return value is None or (isinstance(value, tuple) and None in value)


@pytest.mark.parametrize("theirs", sorted({(e.package, e.callable) for e in ENTRIES}), ids=".".join)
def test_flags_choose_one_rule(theirs: tuple[str, str]) -> None:
    rivals = [entry for entry in ENTRIES if (entry.package, entry.callable) == theirs]
    flags = sorted({(key, type(value) is bool) for entry in rivals for key, value in entry.when.items()})
    settings = [dict(zip([k for k, _ in flags], given, strict=True)) for given in product(*_choices(flags))]
    matches = {str(given): [e.rule for e in rivals if _means(e, given)] for given in settings}
    assert all(len(found) <= 1 for found in matches.values()), matches
    assert {entry.rule for entry in rivals} == {rule for found in matches.values() for rule in found}


def _choices(flags: list[tuple[str, bool]]) -> list[tuple[Any, ...]]:
    return [(False, True) if boolean else (None, 0, 0.9) for _, boolean in flags]


def _means(entry: Entry, given: dict[str, Any]) -> bool:
    """Whether the entry is what their class with these keywords means."""
    open_ones: dict[Any, Callable[[Any], bool]] = {"nonzero": bool, "given": lambda value: value is not None}
    return all(open_ones[v](given[k]) if v in open_ones else given[k] == v for k, v in entry.when.items())


@pytest.mark.parametrize("entry", FIRST, ids=str)
def test_state_names(entry: Entry) -> None:
    """Every state of ours has a key of theirs, and every key of theirs is named."""
    trial = trial_of(entry, steps=2)
    hyper = {**values(entry), "weight_decay": 0.07}
    theirs = start(entry, trial, hyper, {})
    for grads, now in trial.moves(hyper):
        theirs.step(grads, now)
    states = rulec.load(entry.rule).state
    assert set(entry.state) == set(states)
    found = set()
    for index, param in enumerate(trial.params):
        stored = theirs.state(index)
        if entry.package == "torch":
            assert ("step" in stored) == (entry.step == "step")
        found |= set(stored) - {"step", *entry.signature}
        for ours, key in entry.state.items():
            assert key in stored or states[ours].condition is not None
            if states[ours].per not in ("row", "col") and key in stored:
                assert stored[key].shape == (param.shape if states[ours].per == "element" else ())
    assert found == set(entry.state.values())
