"""What mlx.optimizers calls the rules of the library: keywords, defaults, names of states, and lines that differ."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from rulec.errors import HyperError
from rulec.language.library import load, rules
from rulec.language.rule import Rule
from rulec.language.source import did_you_mean
from rulec.language.variant import variant


@dataclass(frozen=True)
class Entry:
    """A rule of the library, and where MLX's differs: lines, names of states; `decay` is added to the gradient."""

    file: str
    lines: Mapping[str, str] = field(default_factory=dict)
    state: Mapping[str, str] = field(default_factory=dict)
    decay: bool = False

    @functools.cached_property
    def rule(self) -> Rule:
        """The rule as MLX has it."""
        own = load(self.file)
        changed = variant(own, self.lines, {}, {}) if self.lines else own
        return load("l2") >> changed if self.decay else changed


_BETAS = {"betas": (0.9, 0.999), "eps": 1e-8}
_PLAIN = {"m_hat": "m", "sigma": "sqrt(v)"}
_HEAVY = {"m": "momentum*m + (1 - dampening)*g"}

#: The classes of mlx.optimizers: their keywords beside the learning rate, with their defaults.
KEYWORDS: Mapping[str, Mapping[str, Any]] = {
    "SGD": {"momentum": 0.0, "weight_decay": 0.0, "dampening": 0.0, "nesterov": False},
    "RMSprop": {"alpha": 0.99, "eps": 1e-8},
    "Adagrad": {"eps": 1e-8},
    "AdaDelta": {"rho": 0.9, "eps": 1e-6},
    "Adam": {**_BETAS, "bias_correction": False},
    "AdamW": {**_BETAS, "weight_decay": 0.01, "bias_correction": False},
    "Adamax": _BETAS,
    "Lion": {"betas": (0.9, 0.99), "weight_decay": 0.0},
}

_ENTRIES: Mapping[str, Entry] = {
    "RMSprop": Entry("rmsprop"), "Adagrad": Entry("adagrad", state={"s": "v"}), "AdaDelta": Entry("adadelta"),
    "Adamax": Entry("adamax", {"u": "maximum(beta2*u, abs(g))", "direction": "m/(u + eps)"}, {"u": "v"}),
    "Lion": Entry("lion"),
}  # fmt: skip

#: Classes of mlx.optimizers that no rule of the library computes, with the rule that is nearest.
OTHERS = {"Adafactor": "adafactor", "Muon": "muon"}


@functools.cache
def _entry(*key: Any) -> Entry:
    file, lines, state, decay = key
    return Entry(file, dict(lines), dict(state), decay)


def entry_of(name: str, keywords: Mapping[str, Any]) -> tuple[Entry, dict[str, Any]]:
    """The rule that keywords of a class of MLX mean, and the keywords that it takes."""
    given = dict(keywords)
    if name in ("Adam", "AdamW"):
        lines = {} if given.pop("bias_correction") else _PLAIN
        return _entry(name.lower(), tuple(lines.items()), (), False), given
    if name != "SGD":
        return _ENTRIES[name], given
    momentum, nesterov, decays = given["momentum"], given.pop("nesterov"), given["weight_decay"] != 0
    if nesterov and (momentum <= 0 or given["dampening"] != 0):
        raise HyperError("SGD with nesterov=True needs a momentum above 0 and dampening=0")
    unused = ["momentum", "dampening"] if momentum <= 0 else ["dampening"] if nesterov else []
    unused += [] if decays else ["weight_decay"]
    given = {k: v for k, v in given.items() if k not in unused}
    file = "sgd" if momentum <= 0 else "nesterov" if nesterov else "momentum"
    lines = _HEAVY if file == "momentum" else {}
    return _entry(file, tuple(lines.items()), (("m", "v"),), decays), given


def plain(rule: Rule) -> Entry:
    """A rule as it is."""
    entry = Entry(rule.name)
    entry.__dict__["rule"] = rule
    return entry


@functools.cache
def library_names() -> Mapping[str, str]:
    """The files of the library's rules by class name; those that MLX has are MLX's."""
    files = {load(file).name: file for file in rules() if "/" not in file}
    named = {"".join(c for c in name if c.isalnum() or c == "_"): file for name, file in files.items()}
    return {name: file for name, file in named.items() if name not in {*OTHERS, *KEYWORDS, "Adadelta"}}


def hyper_of(rule: Rule, keywords: Mapping[str, Any]) -> dict[str, float]:
    """The hyper-parameters of a rule by keywords, `betas` one tuple; HyperError for those that it does not have."""
    given = dict(keywords)
    betas = [name for name in ("beta1", "beta2", "beta3") if name in rule.settings]
    if "betas" in given:
        values = tuple(given.pop("betas"))
        if len(values) != len(betas):
            raise HyperError(f"betas of {rule.name} must be {len(betas)} numbers, not {len(values)}")
        given |= dict(zip(betas, values, strict=True))
    for name, value in given.items():
        if name not in rule.settings or name == "lr":
            known = ["learning_rate", *(n for n in rule.settings if n != "lr")]
            raise HyperError(f"{rule.name} has no keyword {name!r}{did_you_mean(name, known)}")
        rule.settings[name].check(name, value, rule.name)
    return given
