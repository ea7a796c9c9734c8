"""The interfaces of classes: torch's own for its rules, and for any other made from the rule and its namesakes.

A class of a rule takes the rule's hyper-parameters, weight decay, and the words of the same optimizer elsewhere: those
of `authors`, `pytorch_optimizer` and `timm` in the interop section of the rule's file. There a flag may choose another
rule file, or a transform of the library.
"""

from __future__ import annotations

import functools
import inspect
import re
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import chain
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer
from torch.optim.optimizer import ParamsT

from rulec.errors import RuleError
from rulec.language.expr.node import Node
from rulec.language.hyper import AT_START, Hyper
from rulec.language.library.load import CORRECTED, interop_entries, interop_index, load
from rulec.language.rule import Rule
from rulec.language.rule_data import reads_layers
from rulec.language.sizes import lists_of
from rulec.torch.distributed.cross_process import reaches_across
from rulec.torch.groups.entries import Entry, Place, list_places, reads_tags, shared_states
from rulec.torch.groups.interface import OWN, TAKEN, Interface, StateDtype, WatchKeyword
from rulec.torch.groups.options import DEFAULT_BUFFER
from rulec.torch.groups.variants import LIBRARIES, each_of, is_changed, meant_rule, namesakes, with_forms, with_rests
from rulec.torch.tensors.fake import without_compiler


def torch_classes() -> Mapping[str, Sequence[str]]:
    """Class of torch.optim -> the files of the rules that it may mean."""
    return interop_index("torch", "class")


def torch_interface(kind: str, wide: bool = False) -> Interface:
    """The interface of a class of torch.optim, as the torch installed has it; if `wide`, with words of namesakes."""
    theirs = getattr(torch.optim, kind)
    entries = []
    for file in torch_classes()[kind]:
        rule = load(file)
        sections = [fields for fields in interop_entries(rule, "torch") if fields["class"] == kind]
        entries += with_rests(rule, [_entry(kind, meant_rule(rule, fields), fields) for fields in sections])
    entries.sort(key=lambda entry: entry.rule.name != kind)
    entries = with_forms(_with_namesakes(entries) if wide else entries)
    parameters = [*list(inspect.signature(theirs).parameters.values())]
    known = {p.name for p in parameters}
    routed = _distinct(chain.from_iterable(map(_routed_parameters, entries)), known)
    asking = [] if "capturable" in known else [_flag("capturable")]
    decay = _decay_parameters(entries, of_torch=True)
    words = _flag_parameters(entries)
    words = [*decay, *words, *_variant_parameters(entries)] if wide else words
    words = _distinct(words, {*known, *(p.name for p in routed)})
    parameters = sorted([*parameters, *routed, *asking, *words, *_own_parameters(entries)], key=lambda p: p.kind)
    signature = inspect.Signature(parameters, return_annotation=None)
    example = _example(theirs)
    fixed = {k: v for k, v in example.defaults.items() if k not in signature.parameters} | _fixed(entries)
    full = bool(example.state)
    interface = Interface(
        kind, signature, entries, fixed, full, refuses=bool(routed) and not wide, asks_once=bool(asking),
        wider=None if wide else functools.partial(torch_interface, kind, wide=True),
    )  # fmt: skip
    return _with_words(interface, entries[0].rule)


def _with_namesakes(entries: Sequence[Entry]) -> list[Entry]:
    """The entries of a class of torch's, also with the words of its namesakes elsewhere.

    A rule of another file has only such flags for its own weight decay as torch's rule has.
    """
    first = entries[0]
    falling = _corrections(first.rule)
    words = [replace(e, when={**e.when, **_own_when(e.rule)}, decays={**e.decays, **falling}) for e in entries]
    words = [replace(e, decays=_DECAYS) if dict(e.decays) == {"default": "l2"} else e for e in words]
    flags = {flag for entry in words for flag in entry.decays}
    others = [
        replace(
            e, decays={f: how for f, how in e.decays.items() if f in flags or "weight_decay" not in e.rule.all_hyper}
        )
        for e in _variants(first.rule)
    ]
    return _exclusive([*words, *others]) if others else words


def _example(theirs: Any) -> Optimizer:
    """An optimizer of torch's, over one matrix of one number, which every rule of torch's takes."""
    body = {"add_param_group": without_compiler(Optimizer.add_param_group)}
    example: Optimizer = type(theirs.__name__, (theirs,), body)([torch.zeros(1, 1, device="cpu")])
    return example


def rule_interface(rule: Rule, source: str = "") -> Interface:
    """The interface of a rule by itself: its hyper-parameters, betas in one tuple, weight decay, flags of namesakes."""
    entries = with_forms(_exclusive(with_rests(rule, [_own_entry(rule, _own_when(rule)), *_variants(rule)])))
    for entry in entries:
        _check_free(entry, entry.rule.settings)
    parameters = [inspect.Parameter("params", inspect.Parameter.POSITIONAL_OR_KEYWORD, annotation=ParamsT)]
    parameters += _keyword_parameters(entries[0], rule.settings, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    further = [
        *_decay_parameters(entries), *_flag_parameters(entries), *_variant_parameters(entries), _flag("maximize"),
        *map(_hint, ("foreach", "fused")), _flag("capturable"), _flag("differentiable"), *_own_parameters(entries),
    ]  # fmt: skip
    signature = inspect.Signature([*parameters, *_distinct(further, {p.name for p in parameters})])
    return _with_words(Interface(rule.name, signature, entries, _fixed(entries), source=source, asks_once=True), rule)


def _with_words(interface: Interface, rule: Rule) -> Interface:
    """The interface with the words of the rule's namesakes elsewhere."""
    aliases, ends = _aliases(interface)
    return replace(
        interface, aliases=aliases, aliased_ends=ends, ignored=_listed(rule, "ignores"), choices=_choices(rule),
        functions=tuple(sorted(_listed(rule, "functions"))),
    )  # fmt: skip


def _own_entry(
    rule: Rule, when: Mapping[str, Any], owner: str = "", flags: Mapping[str, str] | None = None, said: Any = None
) -> Entry:
    """The entry of a rule with its own words, for these values of flags, and the word `said` on weight decay."""
    fields = next(iter(interop_entries(rule, "torch")), {})
    args = fields.get("args") or _betas(rule.settings)
    return Entry(
        owner or rule.name, rule, when, places=_places(rule, rule.settings, args) | list_places(rule),
        states=fields.get("state", {}), decays=_decays(rule, _author_decay(rule) if said is None else said),
        transforms=_transforms(rule) if flags is None else flags, takes_rows=bool(fields.get("rows")),
    )  # fmt: skip


def _is_of(fields: Mapping[str, Any], rule: Rule) -> bool:
    """Whether an entry is of the class with the rule's own name."""
    return str(fields.get("class")).casefold() == rule.name.casefold()


def _own_when(rule: Rule) -> Mapping[str, Any]:
    """The keywords of the classes of this name elsewhere, with their values that mean this very rule."""
    entries = [e for e in namesakes(rule) if _is_of(e, rule) and not is_changed(e)]
    return {flag: value for e in reversed(entries) for flag, value in e.get("when", {}).items()}


def _variants(rule: Rule) -> list[Entry]:
    """The entries of other files' rules, or with other lines, for keywords of the class of this name."""
    entries = []
    for package in LIBRARIES:
        index = interop_index(package, "class")
        theirs = [name for name in index if name.casefold() == rule.name.casefold()]
        for file in dict.fromkeys(file for name in theirs for file in index[name]):
            other = load(file)
            for fields in chain.from_iterable(map(each_of, interop_entries(other, package))):
                meant_elsewhere = other.name != rule.name or is_changed(fields)
                if fields["class"] in theirs and "when" in fields and meant_elsewhere:
                    said = _author_decay(other)
                    entry = _own_entry(meant_rule(other, fields), fields["when"], rule.name, _transforms(rule), said)
                    states, decays = fields.get("state", entry.states), {**entry.decays, **_corrections(rule)}
                    entries.append(replace(entry, states=states, decays=decays))
    return entries


def _exclusive(entries: Sequence[Entry]) -> list[Entry]:
    """The entries, each with a value for every flag of others: the first entry's, or off; none where any will do."""
    off = {flag: _off(value) for entry in entries for flag, value in entry.when.items()}
    wholes = [off | {**entries[0].when} | {**entry.when} for entry in entries]
    chosen = [{flag: value for flag, value in whole.items() if value != "any"} for whole in wholes]
    return [replace(entry, when=when) for entry, when in zip(entries, chosen, strict=True)]


def _off(value: Any) -> Any:
    """The value of a flag that does not choose the entry with this value."""
    if isinstance(value, bool):
        return not value
    return {"nonzero": 0, 0: "nonzero"}.get(value)


def _transforms(rule: Rule) -> dict[str, str]:
    """Flag of a namesake -> the transform that it puts before or around the rule."""
    return {
        flag: name for fields in namesakes(rule) for flag, name in fields.get("flags", {}).items() if name != CORRECTED
    }


#: The transforms that `weight_decay` stands for, by flags that classes with it have; the first flag that holds counts.
_DECAYS = {"not weight_decouple": "l2", "fixed_decay": "fixed_decay", "default": "decay"}


def _decays(rule: Rule, said: Any) -> Mapping[str, str]:
    """The transforms that `weight_decay` stands for; none where the rule has its own, or has no meaning for decay.

    A rule with its own decay has the flags for another one where its file has `said` which its own is.
    """
    falling = _corrections(rule)
    if isinstance(said, Mapping):
        return said
    if "weight_decay" in rule.all_hyper:
        flags = {} if said is None else {flag: how for flag, how in _DECAYS.items() if flag != "default"}
        return flags | falling
    return {} if said == "none" or (rule.assigns_parameter and said is None) else _DECAYS | falling


def _corrections(rule: Rule) -> dict[str, str]:
    """The flags of namesakes for a decay that falls with the square of the learning rate."""
    flags = (fields.get("flags", {}) for fields in namesakes(rule))
    return {flag: name for each in flags for flag, name in each.items() if name == CORRECTED}


def _author_decay(rule: Rule) -> Any:
    """The rule file's word on weight decay in its authors' code: `l2`, `decay`, `none` or a transform for each flag.

    None where the file has no word.
    """
    return next((each["weight_decay"] for each in interop_entries(rule, "authors") if "weight_decay" in each), None)


def _decay_parameters(entries: Sequence[Entry], of_torch: bool = False) -> list[inspect.Parameter]:
    """Keywords for the weight decay of rules without their own; `weight_decouple` is False where authors couple it."""
    if not any(entry.decays for entry in entries):
        return []
    decoupled = not of_torch and _author_decay(entries[0].rule) in (None, "decay")
    kind = inspect.Parameter.KEYWORD_ONLY
    keywords = [inspect.Parameter("weight_decay", kind, default=0.0, annotation=float)]
    flags = dict.fromkeys(flag.removeprefix("not ") for entry in entries for flag in entry.decays if flag != "default")
    for flag in flags:
        default = flag == "weight_decouple" and decoupled
        keywords.append(inspect.Parameter(flag, kind, default=default, annotation=bool))
    if any(CORRECTED in entry.decays.values() for entry in entries):
        keywords.append(inspect.Parameter(AT_START, kind, default=None, annotation=float | None))
    return keywords


def _flag_parameters(entries: Sequence[Entry]) -> list[inspect.Parameter]:
    """Keywords that choose another rule or a transform, by default this rule without it."""
    kind = inspect.Parameter.KEYWORD_ONLY
    parameters = [
        inspect.Parameter(flag, kind, default=0.0, annotation=float) if f"={flag}" in transform else _flag(flag)
        for flag, transform in entries[0].transforms.items()
    ]
    numbers = {entry.place(name)[0] for entry in entries for name in entry.rule.all_hyper}
    for flag, default in entries[0].when.items():
        absent = float | None if flag in numbers else str | None
        annotation = bool if isinstance(default, bool) else float if isinstance(default, int | float) else absent
        parameters.append(inspect.Parameter(flag, kind, default=default, annotation=annotation))
    return parameters


def _distinct(parameters: Iterable[inspect.Parameter], known: Collection[str]) -> list[inspect.Parameter]:
    """The parameters without those of known names; of several with one name, the first."""
    first: dict[str, inspect.Parameter] = {}
    for parameter in parameters:
        if parameter.name not in known:
            first.setdefault(parameter.name, parameter)
    return [*first.values()]


def _variant_parameters(entries: Sequence[Entry]) -> Iterator[inspect.Parameter]:
    """Keywords for the hyper-parameters of all entries but the first."""
    for entry in entries[1:]:
        yield from _keyword_parameters(entry, entry.rule.settings, inspect.Parameter.KEYWORD_ONLY)


def _aliases(interface: Interface) -> tuple[dict[str, tuple[str, ...]], dict[str, tuple[str, int]]]:
    """Other words for keywords of a class, each for one or for several that a tuple has; and for the end of a tuple."""
    aliases: dict[str, tuple[str, ...]] = {}
    ends: dict[str, tuple[str, int]] = {}
    for entry in interface.entries:
        for fields in namesakes(entry.rule):
            for theirs, ours in fields.get("args", {}).items():
                names = ours if isinstance(ours, list) else [ours]
                keyword, position = entry.place(names[0])
                if theirs in interface.signature.parameters:
                    continue
                if len(names) == 1 and position is not None:
                    ends[theirs] = keyword, position
                else:
                    aliases[theirs] = tuple(dict.fromkeys(entry.place(name)[0] for name in names))
    return aliases, ends


def _choices(rule: Rule) -> Mapping[str, Mapping[str, Mapping[str, Any]]]:
    """The words of namesakes for a choice, each with the values of this class's keywords for every answer."""
    named = {word: answers for fields in namesakes(rule) for word, answers in fields.get("choices", {}).items()}
    return {word: {_FLAGS.get(key, key): value for key, value in answers.items()} for word, answers in named.items()}


#: A flag as a key of a file -> the flag.
_FLAGS: Mapping[str, Any] = {"true": True, "false": False}


def _listed(rule: Rule, key: str) -> frozenset[str]:
    """The words of namesakes under this key: `ignores`, without an effect on the numbers, or `functions`."""
    return frozenset(word for fields in namesakes(rule) for word in fields.get(key, ()))


def _hint(name: str) -> inspect.Parameter:
    """A keyword of torch's classes on how to run."""
    return inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=None, annotation=bool | None)


def _check_free(entry: Entry, settings: Mapping[str, Hyper]) -> None:
    """RuleError where a keyword or state of the rule has a name that means something else in torch."""
    rule, meaning = entry.rule, "which torch's optimizers have for something else"
    for name in settings:
        if entry.place(name)[0] in TAKEN:
            raise RuleError(
                f"{rule.name} has a hyper-parameter {name!r}, {meaning}: call it otherwise, as {name}_, in the rule or "
                f"by bind({name}={name + '_'!r})"
            )
    keywords = {entry.place(name)[0] for name in settings}
    for name in sorted(shared_states(entry.rules).keys() & {*keywords, *TAKEN}):
        raise RuleError(f"{rule.name} has a state {name!r}, {meaning}: call it otherwise, as {name}_")
    called = ["step", *map(entry.outside, rule.state)]
    for name in called:
        if called.count(name) > 1:
            raise RuleError(f"the interop section of {rule.name} calls a state {name!r}, as another value is called")


def _fixed(entries: Sequence[Entry]) -> dict[str, Any]:
    """The entries of a group that are no keyword, and how they begin."""
    rules = [rule for entry in entries for rule in entry.rules]
    fixed: dict[str, Any] = {"tags": None} if reads_tags(rules) or any(map(reads_layers, rules)) else {}
    return fixed | ({"train_mode": True} if any(rule.evaluate is not None for rule in rules) else {})


def _flag(name: str) -> inspect.Parameter:
    """A keyword that is False unless it is given."""
    return inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=False, annotation=bool)


def _routed_parameters(entry: Entry) -> list[inspect.Parameter]:
    """Keywords for the hyper-parameters of the rules that an entry of torch's class routes tensors to."""
    main = entry.rules[0].hyper
    others = {name: hyper for name, hyper in entry.settings("").items() if name not in main}
    return _keyword_parameters(entry, others, inspect.Parameter.KEYWORD_ONLY)


def _keyword_parameters(entry: Entry, settings: Mapping[str, Hyper], kind: Any) -> list[inspect.Parameter]:
    keywords: dict[str, Any] = {}
    for name in sorted(settings, key=lambda name: name != "lr"):
        keyword, position = entry.place(name)
        default = settings[name].default
        default = None if isinstance(default, Node) or entry.when.get(keyword) == "given" else default
        keywords[keyword] = default if position is None else (*keywords.get(keyword, ()), default)
    lists = lists_of(entry.rule)
    types = {k: Sequence[float] if k in lists else _type(k, v) for k, v in keywords.items()}
    return [inspect.Parameter(k, kind, default=v, annotation=types[k]) for k, v in keywords.items()]


def _type(keyword: str, default: Any) -> Any:
    if isinstance(default, tuple):
        return tuple[tuple([_type("", x) for x in default])]  # type: ignore[misc]
    if default is None:
        return float | None
    return float | Tensor if keyword == "lr" else float


def _own_parameters(entries: Sequence[Entry]) -> list[inspect.Parameter]:
    types = {
        "state_dtype": StateDtype, "weights": str | None, "backend": str | None, "reduce_over": Any,
        "watch": WatchKeyword, "watch_every": int, "offload": str | None, "offload_buffer": int,
        "offload_pinned": bool,
    }  # fmt: skip
    kind, rules = inspect.Parameter.KEYWORD_ONLY, [rule for entry in entries for rule in entry.rules]
    names = [name for name in OWN if name != "reduce_over" or reaches_across(rules)]
    defaults = {"watch_every": 1, "offload_buffer": DEFAULT_BUFFER, "offload_pinned": True}
    parameters = [inspect.Parameter(name, kind, default=defaults.get(name), annotation=types[name]) for name in names]
    auto = [_flag("auto")] if reads_tags(rules) else []
    return [*parameters, inspect.Parameter("seed", kind, default=0, annotation=int), *auto]


def _entry(kind: str, rule: Rule, fields: Mapping[str, Any]) -> Entry:
    decays = fields.get("weight_decay", {})
    settings = rule.settings
    args = fields.get("args", {})
    others = {name: hyper for name, hyper in settings.items() if name not in rule.standalone().hyper}
    return Entry(
        kind, rule, fields.get("when", {}),
        places=_places(rule, settings, args | _betas(others)) | list_places(rule),
        states=fields.get("state", {}), decays={"default": decays} if isinstance(decays, str) else decays,
        counted=fields.get("step") != "absent", takes_rows=bool(fields.get("rows")),
    )  # fmt: skip


def _places(rule: Rule, settings: Mapping[str, Hyper], args: Mapping[str, Any]) -> dict[str, Place]:
    places: dict[str, Place] = {}
    for keyword, ours in args.items():
        for position, name in enumerate(ours if isinstance(ours, list) else [ours]):
            if name not in settings:
                raise RuleError(f"the interop section of {rule.name} names {name!r}, which is no hyper-parameter")
            places[name] = (keyword, position if isinstance(ours, list) else None)
    return places


def _betas(settings: Mapping[str, Hyper]) -> dict[str, list[str]]:
    """torch's custom for rules that torch does not have: beta1, beta2, ... are one tuple, betas."""
    names = [name for name in settings if re.fullmatch(r"beta\d+", name)]
    betas = [f"beta{i}" for i in range(1, 1 + len(names))]
    return {"betas": betas} if len(betas) > 1 and sorted(names) == betas and "betas" not in settings else {}
