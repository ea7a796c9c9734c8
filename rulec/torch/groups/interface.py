"""The interface of an optimizer class: its keywords, and the rules that their values select.

A class of torch.optim may stand for several rules (`amsgrad`, `nesterov`, `centered`). The `interop` sections of the
library have an entry for each, with torch's names for hyper-parameters and states (rules/README.md).
"""

from __future__ import annotations

import functools
import inspect
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch.optim import Optimizer

from rulec.errors import HyperError
from rulec.language.expr.node import Node
from rulec.language.inputs import InputKind
from rulec.language.rule import Rule
from rulec.language.sizes import lists_of
from rulec.language.source import did_you_mean
from rulec.runtime.buckets.launch_builder import inputs_of
from rulec.runtime.evaluations import EvaluationNames
from rulec.torch.groups.entries import AS_NONE, Entry, GroupRule, draws, sees_sections, shared_states
from rulec.torch.tensors.fake import without_compiler

#: Keywords of torch.optim that say how to run, not what to compute.
HINTS = ("foreach", "fused", "capturable", "differentiable")

#: The keywords that ask for step counts and scalars on the device.
ASKING = ("capturable", "fused")

#: Keywords of every class of this package: of the whole optimizer, not of a group.
OWN = (
    "state_dtype", "weights", "backend", "reduce_over", "watch", "watch_every", "offload", "offload_buffer",
    "offload_pinned",
)  # fmt: skip

#: Entries of a group that say what its parameters are joined of.
SPLITTING = ("split", "split_dim")

#: Entries of a group that choose the rule of its tensors, and their random numbers.
CHOOSING = ("tags", "seed")

#: Entries of a group that say whether its parameters get tags one by one, and which they have.
TAGGING = ("auto", "param_tags")

#: Entries of a group where rules remember something of groups or the model: how many steps these have taken.
COUNTS = {"group": "updates", "model": "model_updates"}

#: Names that neither a hyper-parameter of a rule nor its states of groups or the model may have.
TAKEN = (
    "self", "params", "param_names", "initial_lr", "maximize", "train_mode", *HINTS, *OWN, *CHOOSING, *TAGGING,
    *SPLITTING, *COUNTS.values(),
)  # fmt: skip

#: Keys of groups that schedulers and trainers write for themselves.
_OF_OTHERS = frozenset((
    "params", "param_names", "name", "names", "group_name", *SPLITTING, *CHOOSING, *TAGGING, *COUNTS.values(),
    "formats", "initial_lr", "max_lr", "min_lr", "swa_lr", "base_lr", "lr_scale", "lr_mult", "lr_multiplier",
    "decay_mult", "wd_mult", "wd_multiplier", "initial_weight_decay", "base_momentum", "max_momentum",
    "initial_momentum", "initial_betas", "lr_at_start", "train_mode", "is_expert_parallel", "layer_id", "group_id",
))  # fmt: skip

#: The classes and keys of groups that were warned of.
_warned: set[tuple[str, str]] = set()

#: The type of `watch`: the name of a set or a statistic, names, or expressions by name.
WatchKeyword = str | Sequence[str] | Mapping[str, str] | None

#: The type of `state_dtype`: for all states, or by name, ours or torch's.
StateDtype = torch.dtype | str | Mapping[str, torch.dtype | str] | None


@dataclass(frozen=True)
class Interface:
    """A class's keywords (without `params`) and the rules they may mean.

    `fixed` are keys of a group beside the keywords. `full_at_once`: states exist before the first step. `refuses`: a
    tensor is routed to another rule only where its group has tags, for torch's class refuses it. `asks_once`:
    `capturable` is of the whole optimizer, for torch's class has no such keyword. `aliases` are other words for
    keywords, each for one of them or for several that a tuple has, `aliased_ends` words for the last entry of a tuple,
    and `ignored` words that change nothing. `choices` has keyword of a namesake -> word given for it -> the keywords
    here and their values. `functions` are keywords of namesakes for functions that run at first and after each step.
    `wider` gives the interface of a class of torch's with the words of its namesakes, which are in the groups only
    where one of them is given.
    """

    name: str
    signature: inspect.Signature
    entries: Sequence[Entry]
    fixed: Mapping[str, Any] = field(default_factory=dict)
    full_at_once: bool = False
    source: str = ""
    refuses: bool = False
    asks_once: bool = False
    aliases: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    aliased_ends: Mapping[str, tuple[str, int]] = field(default_factory=dict)
    ignored: frozenset[str] = frozenset()
    choices: Mapping[str, Mapping[str, Mapping[str, Any]]] = field(default_factory=dict)
    functions: tuple[str, ...] = ()
    wider: Callable[[], Interface] | None = None

    def sized(self, values: Mapping[str, Any]) -> Interface:
        """The interface for the lengths in a group's keywords."""
        entries = [entry.sized(values) for entry in self.entries]
        if all(new is old for new, old in zip(entries, self.entries, strict=True)):
            return self
        return replace(self, entries=entries, source=entries[0].rule.to_yaml() if self.source else "")

    @functools.cached_property
    def rules(self) -> Sequence[Rule]:
        """Every rule that a tensor may go to."""
        return [rule for entry in self.entries for rule in entry.rules]

    @functools.cached_property
    def shared(self) -> Mapping[str, str]:
        """The states with one number for a group or for the model: name -> `group` or `model`."""
        return shared_states(self.rules)

    @functools.cached_property
    def evaluates(self) -> bool:
        """Whether the model is to be evaluated elsewhere than where it is trained."""
        return any(rule.evaluate is not None for rule in self.rules)

    @functools.cached_property
    def skips(self) -> bool:
        """Whether a rule may skip a step."""
        return any(rule.skip is not None for rule in self.rules)

    @functools.cached_property
    def sees_sections(self) -> bool:
        """Whether a rule treats a fused parameter otherwise than its sections."""
        return any(map(sees_sections, self.rules))

    @functools.cached_property
    def takes_rows(self) -> bool:
        """Whether a rule takes sparse gradients."""
        return any(entry.takes_rows for entry in self.entries)

    @functools.cached_property
    def passes(self) -> EvaluationNames:
        """The passes of a step beside the first gradient."""
        return EvaluationNames(self.rules)

    @functools.cached_property
    def inputs(self) -> Mapping[str, InputKind]:
        """The inputs of a step beside gradients, with their kinds."""
        return {name: kind for rule in self.rules for name, kind in inputs_of(rule).items()}

    @functools.cached_property
    def group_keywords(self) -> tuple[str, ...]:
        """The keys of a group that matter to its numbers."""
        known = {k for entry in self.entries for k in entry.keywords} | {"maximize", *self._choosing, *self._asking}
        return tuple(k for k in (*self.signature.parameters, *self.fixed) if k in known)

    @functools.cached_property
    def draws(self) -> bool:
        """Whether a rule draws random numbers; then `seed` is in the groups."""
        return draws(self.rules)

    @property
    def _choosing(self) -> tuple[str, ...]:
        return CHOOSING if self.draws else tuple(key for key in CHOOSING if key != "seed")

    @property
    def _asking(self) -> tuple[str, ...]:
        return () if self.asks_once else ASKING

    @functools.cached_property
    def flag_keywords(self) -> tuple[str, ...]:
        """The keys of a group that decide its rule."""
        flags = {k for f in self.entries for k in (*f.when, *f.flags, *f.unset_keywords)}
        flags |= {"maximize", *self._choosing, *self._asking}
        if any(entry.decays for entry in self.entries):
            flags.add("weight_decay")
        return tuple(k for k in self.group_keywords if k in flags)

    def bind(self, args: Sequence[Any], keywords: Mapping[str, Any]) -> dict[str, Any]:
        """Every keyword's value, given or by default; HyperError for a keyword that there is not."""
        known = self.signature.parameters
        keywords = self.in_own_words(keywords, "")
        for key in keywords:
            if key not in known:
                raise HyperError(f"{self.name} has no keyword {key!r}{self.suggestion(key)}")
        try:
            bound = self.signature.bind(None, *args, **keywords)
        except TypeError as error:
            raise HyperError(f"{self.name}: {error}") from None
        bound.apply_defaults()
        del bound.arguments["params"]
        for key, value in bound.arguments.items():
            plain = isinstance(value, str | tuple) or (isinstance(value, list) and key not in self.lists)
            if (
                isinstance(value, Sequence) and not plain
            ):  # such as a list of a configuration, which no file should have
                bound.arguments[key] = tuple(value)
        self._check_unnamed(bound.arguments)
        return dict(bound.arguments)

    def with_words(self, keywords: Iterable[str]) -> Interface:
        """The interface for these keywords: the wider one where they have a word of a namesake."""
        foreign = {*keywords} - self.signature.parameters.keys()
        wider = self.wider() if foreign and self.wider is not None else self
        return wider if foreign & wider.signature.parameters.keys() else self

    def completed(self, values: Mapping[str, Any]) -> dict[str, Any]:
        """The values of a group, with defaults for the keywords of its rule that it lacks."""
        parameters = self.signature.parameters
        lacking = [key for key in self.group_keywords if key in parameters and key not in values]
        return {**values, **{key: parameters[key].default for key in lacking}}

    def take_functions(self, keywords: dict[str, Any]) -> list[Callable[[], Any]]:
        """Takes the functions out of the keywords; HyperError for what is no function."""
        values = {key: keywords.pop(key) for key in self.functions if key in keywords}
        for key, value in values.items():
            if value is not None and not callable(value):
                raise HyperError(f"{key} of {self.name} must be a function without arguments, not {value!r}")
        return [value for value in values.values() if value is not None]

    def in_own_words(
        self, values: Mapping[str, Any], whose: str, defaults: Mapping[str, Any] | None = None
    ) -> dict[str, Any]:
        """The values under this class's keywords, without those that change nothing; `whose` is `a group of ` or empty.

        `defaults` are the optimizer's where it has any, for the entries of a tuple that are not given.
        A number for a word that stands for several keywords is the value of each, and None leaves them as they are.
        HyperError where two words for one keyword are given, or a tuple has another length than the keywords it gives.
        """
        done = {key: value for key, value in values.items() if key not in self.ignored}
        for word in self.choices.keys() & done.keys():
            answer, answers = done.pop(word), self.choices[word]
            if answer not in answers:
                known = " or ".join(map(repr, answers))
                raise HyperError(f"{whose}{self.name} does not support {word}={answer!r}: give {known}")
            done = _answered(answers[answer], done)
        for alias, keywords in self.aliases.items():
            if alias not in done:
                continue
            value = done.pop(alias)
            if value is None:
                continue
            parts = [*value] if isinstance(value, tuple | list) and len(keywords) > 1 else [value] * len(keywords)
            if len(parts) != len(keywords):
                raise HyperError(f"{alias}={value!r} of {whose}{self.name} must be ({', '.join(keywords)})")
            for keyword, part in zip(keywords, parts, strict=True):
                if keyword in done:
                    raise HyperError(
                        f"{whose}{self.name} was given {alias} and {keyword}, which are one: leave one out"
                    )
                done[keyword] = part
        usual = {key: parameter.default for key, parameter in self.signature.parameters.items()}
        return self._with_ends(done, {**usual, **(defaults or {})})

    def _with_ends(self, values: dict[str, Any], defaults: Mapping[str, Any]) -> dict[str, Any]:
        """The values, with those of words for the last entry of a tuple in the tuple; `defaults` has what is not given.

        A tuple without such an entry has the default's.
        """
        done = dict(values)
        for word, (keyword, position) in self.ends.items():
            tuple_now = done.get(keyword, defaults[keyword])
            if word in done:
                value = done.pop(word)
                done[keyword] = (*tuple_now[:position], *([] if value is None else [value]))
            elif keyword in done and word in self.aliased_ends and isinstance(tuple_now, tuple | list):
                done[keyword] = (*tuple_now, *defaults[keyword][position:]) if len(tuple_now) == position else tuple_now
        return done

    @functools.cached_property
    def ends(self) -> Mapping[str, tuple[str, int]]:
        """Words for the last entry of a tuple: the rule's own where its default follows from others, and aliases."""
        entry = self.entries[0]
        derived = {
            name: (keyword, position) for name, (keyword, position) in entry.places.items()
            if position is not None and name in entry.rule.hyper and isinstance(entry.rule.hyper[name].default, Node)
        }  # fmt: skip
        return {**derived, **self.aliased_ends}

    @functools.cached_property
    def lists(self) -> set[str]:
        """The keywords that are lists."""
        return {key for entry in self.entries for key in lists_of(entry.rule)}

    def _check_unnamed(self, values: Mapping[str, Any]) -> None:
        """A keyword that torch has and no rule knows may only keep its default: it could mean anything."""
        known = {*self.group_keywords, *HINTS, *ASKING, *OWN, *TAGGING, "params", "seed"}
        for key, value in values.items():
            default = self.signature.parameters[key].default if key in self.signature.parameters else value
            if key not in known and value not in (default, AS_NONE.get(key, default)):
                words = torch_words(self.name, key, value)
                raise HyperError(f"{self.name} does not support {key}={value!r}: leave it at {default!r}{words}")

    def suggestion(self, key: str) -> str:
        """A hint at the keyword that was meant; empty where there is none."""
        for entry in self.entries:
            keyword, position = entry.places.get(key, ("", None))
            if position is not None:
                names = [name for name, (k, _) in entry.places.items() if k == keyword]
                return f": give {keyword}=({', '.join(names)})"
        if key == "weight_decay":
            return ": weight decay has no meaning for its rule"
        return did_you_mean(key, [*self.signature.parameters, *self.aliases])

    def take_group(self, group: dict[str, Any], defaults: Mapping[str, Any]) -> None:
        """Brings the keys of a new parameter group into this class's words.

        HyperError for a weight decay that the rule has no use for. A key that nothing reads, neither the class nor a
        scheduler or trainer, is left there with a warning.
        """
        whose = "a group of "
        values = self.in_own_words(group, whose, defaults)
        if "weight_decay" not in self.signature.parameters and values.get("weight_decay", 0) != 0:
            raise HyperError(
                f"{whose}{self.name} has weight_decay={values['weight_decay']!r}{self.suggestion('weight_decay')}"
            )
        for key in group.keys() - values.keys():
            del group[key]
        group.update(values)
        known = {*self.signature.parameters, *self.fixed, "weight_decay", *_OF_OTHERS}
        for key in group:
            if key not in known and not key.startswith("_") and (self.name, key) not in _warned:
                _warned.add((self.name, key))
                hint = self.suggestion(key) or ": remove it, if nothing else reads it"
                warnings.warn(f"{whose}{self.name} has {key!r}, which {self.name} does not read{hint}", stacklevel=2)

    def choose(self, values: Mapping[str, Any]) -> GroupRule:
        """The rule that a group's keywords mean. HyperError where they mean none."""
        if values.get("differentiable"):
            raise HyperError(
                f"{self.name} cannot be differentiable=True: autograd does not record what a fused kernel computes"
            )
        for key in values:
            if key not in self.signature.parameters and any(key in f.places for f in self.entries):
                raise HyperError(f"a group of {self.name} has {key!r}, which is no keyword{self.suggestion(key)}")
        self._check_unnamed(values)
        for entry in self.entries:
            if entry.matches(values):
                return entry.group_rule(values)
        flags = {k: values[k] for entry in self.entries for k in entry.when}
        said = ", ".join(f"{key}={value!r}" for key, value in flags.items())
        unknown = [key for key, value in flags.items() if isinstance(value, str) and value not in self._choices_of(key)]
        words = self._words_on(unknown[0], flags[unknown[0]]) if unknown else ""
        raise HyperError(f"{self.name} has no rule for {said}{words}")

    def _words_on(self, key: str, value: Any) -> str:
        """torch's words for a value of a keyword that no rule has, or else the known values."""
        known = " or ".join(map(repr, dict.fromkeys(self._choices_of(key))))
        return torch_words(self.name, key, value) or f": {key} is {known}"

    def _choices_of(self, key: str) -> list[Any]:
        """The values of a keyword that choose a rule."""
        return [entry.when[key] for entry in self.entries if key in entry.when]

    def state_names(self) -> set[str]:
        """Every name a state may be called by, ours and theirs."""
        names = {state for rule in self.rules for state in rule.state}
        return names | {entry.outside(state) for entry in self.entries for state in entry.rule.state}


def _answered(answer: Mapping[str, Any], values: Mapping[str, Any]) -> dict[str, Any]:
    """The values and the answer of a choice; `=eps` in an answer takes the value from the keyword eps."""
    moves = {keyword: value[1:] for keyword, value in answer.items() if str(value).startswith("=")}
    moved = {keyword: values[source] for keyword, source in moves.items() if source in values}
    kept = {keyword: value for keyword, value in values.items() if keyword not in moves.values()}
    return {keyword: value for keyword, value in answer.items() if keyword not in moves} | moved | kept


def torch_words(class_name: str, keyword: str, value: Any) -> str:
    """torch's own words for this value of a keyword, in brackets; empty where torch takes it, or has no such class."""
    theirs = getattr(torch.optim, class_name, None)
    if theirs is None or not theirs.__module__.startswith("torch."):  # a program may put another class there
        return ""
    if keyword not in inspect.signature(theirs).parameters:
        return ""
    body = {"add_param_group": without_compiler(Optimizer.add_param_group)}
    arguments = {"params": [torch.zeros(1, 1, device="cpu")], keyword: value}
    try:
        type(class_name, (theirs,), body)(**arguments)
    except (ValueError, TypeError) as error:
        return f" ({error})"
    return ""
