"""The rules of the library under the names of mlx.optimizers: lines that differ, names of states, and keywords."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from rulec.errors import HyperError
from rulec.functional.optimizer import check_keywords
from rulec.language.compose.wrap import variant
from rulec.language.library.load import load, titles
from rulec.language.rule import Rule
from rulec.mlx.forms import adafactor, muon

_Pairs = tuple[tuple[str, str], ...]


@dataclass(frozen=True)
class Entry:
    """A rule, and state -> name in MLX, for states with another name there.

    `missing` is state -> the axis of one element that it has here, and not in MLX.
    """

    rule: Rule
    state: Mapping[str, str] = field(default_factory=dict)
    missing: Mapping[str, int] = field(default_factory=dict)


@functools.cache
def _entry(file: str, lines: _Pairs = (), state: _Pairs = (), decay: bool = False) -> Entry:
    """The entry of a library rule with these lines; `decay` adds the weights to the gradient."""
    rule = variant(load(file), dict(lines), {}, {}) if lines else load(file)
    return Entry(load("l2") >> rule if decay else rule, dict(state))


_PLAIN = (("m_hat", "m"), ("sigma", "sqrt(v)"))
_HEAVY = (("m", "momentum*m + (1 - dampening)*g"),)
_ADAMAX = (("u", "maximum(beta2*u, abs(g))"), ("direction", "m/(u + eps)"))

#: Class of mlx.optimizers -> arguments of `_entry`. SGD and bias corrections depend on keywords.
CLASSES: Mapping[str, tuple[Any, ...]] = {
    "SGD": ("sgd",), "RMSprop": ("rmsprop",), "Adagrad": ("adagrad", (), (("s", "v"),)), "AdaDelta": ("adadelta",),
    "Adam": ("adam", _PLAIN), "AdamW": ("adamw", _PLAIN), "Adamax": ("adamax", _ADAMAX, (("u", "v"),)),
    "Lion": ("lion",),
}  # fmt: skip

#: Classes of mlx.optimizers that are no variant of a library rule's lines.
FORMS = ("Adafactor", "Muon")

#: What else mlx.optimizers has: its base class, its class around several optimizers, schedules and clipping.
THEIRS = (
    "MultiOptimizer", "Optimizer", "clip_grad_norm", "cosine_decay", "exponential_decay", "join_schedules",
    "linear_schedule", "step_decay",
)  # fmt: skip


def entry_of(name: str, keywords: Mapping[str, Any]) -> tuple[Entry, dict[str, Any]]:
    """The entry for all keywords of a class of MLX but the learning rate, and the keywords that its rule has."""
    hyper = dict(keywords)
    if name == "SGD":
        return _momentum(hyper)
    if name == "Muon":
        return Entry(muon(bool(hyper.pop("nesterov"))), {"m": "v"}), hyper
    if name == "Adafactor":
        return _adafactor(hyper)
    if hyper.pop("bias_correction", False):
        return _entry(CLASSES[name][0]), hyper
    return _entry(*CLASSES[name]), hyper


def _momentum(hyper: dict[str, Any]) -> tuple[Entry, dict[str, Any]]:
    heavy, nesterov, decay = hyper["momentum"] > 0, hyper.pop("nesterov"), hyper["weight_decay"] != 0
    if nesterov and (not heavy or hyper["dampening"] != 0):
        raise HyperError("SGD with nesterov=True needs a momentum above 0 and dampening=0")
    file = "nesterov" if nesterov else "momentum" if heavy else "sgd"
    entry = _entry(file, _HEAVY if file == "momentum" else (), (("m", "v"),), decay)
    return entry, {name: value for name, value in hyper.items() if name in entry.rule.settings}


#: The states of Adafactor in MLX.
_MOMENTS = {"r": "exp_avg_sq_row", "c": "exp_avg_sq_col", "v": "exp_avg_sq", "m": "exp_avg"}


def _adafactor(hyper: dict[str, Any]) -> tuple[Entry, dict[str, Any]]:
    flags = {name: bool(hyper.pop(name)) for name in ("scale_parameter", "relative_step", "warmup_init")}
    if hyper["beta_1"] is None:
        del hyper["beta_1"]
    hyper["eps1"], hyper["eps2"] = hyper.pop("eps")
    rule = adafactor("beta_1" in hyper, **flags)
    names = {name: theirs for name, theirs in _MOMENTS.items() if name in rule.state}
    return Entry(rule, names, {"r": -1, "c": -2}), hyper


def library_names() -> Mapping[str, str]:
    """Class name -> file, for the rules of the library without a class of mlx.optimizers."""
    return {name: file for name, file in titles().items() if name not in {*FORMS, *CLASSES, "Adadelta"}}


def hyper_of(rule: Rule, keywords: Mapping[str, Any]) -> dict[str, float]:
    """The hyper-parameters of a rule by keywords, `betas` one tuple; HyperError for a keyword or value out of place."""
    hyper = dict(keywords)
    if "betas" in hyper:
        names = [name for name in ("beta1", "beta2", "beta3") if name in rule.settings]
        betas = tuple(hyper.pop("betas"))
        if len(betas) != len(names):
            raise HyperError(f"betas of {rule.name} must be {len(names)} numbers, not {len(betas)}")
        hyper |= dict(zip(names, betas, strict=True))
    check_keywords(rule, hyper)
    return hyper
