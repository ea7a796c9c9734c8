"""`Partitioned`: one torch optimizer over several rules, with parameters assigned by patterns of their names.

The partition becomes parameter groups. Keywords of classes are taken by either name: torch's or the rule's.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import chain
from typing import Any, TypeAlias, cast

import torch
from torch import Tensor
from torch.optim import Optimizer

from rulec.errors import HyperError, PartialUpdate, RulecError, RuleError, TensorError
from rulec.language.evaluations import check_single
from rulec.language.inputs import per_tensor
from rulec.language.partition import Part, Partition
from rulec.language.rule_data import reads_layers
from rulec.language.source import did_you_mean
from rulec.locks import Lockable, synchronized
from rulec.runtime.layers import with_count
from rulec.runtime.statistics import Statistics, StepStatistics, known_of
from rulec.torch.classes import optimizer
from rulec.torch.groups.inputs import by_parameter
from rulec.torch.groups.interface import OWN, Interface
from rulec.torch.groups.routes import Routes
from rulec.torch.optimizer import EvaluatedOptimizer, RuleOptimizer, check_groups_match
from rulec.torch.states.quantized import all_saved
from rulec.torch.tensors.fake import without_compiler

_add_param_group = without_compiler(Optimizer.add_param_group)


class Partitioned(Optimizer, Lockable):
    """A `torch.optim.Optimizer` over the rules of a partition: one optimizer for each, and groups for each pattern.

    `named_parameters` is what `model.named_parameters()` gives; a name such as `layer.0.bias` is the path
    `layer/0/bias`. Parameters whose entry is None are left out, and stay as they are. Keywords are the classes' own, or
    the rules' hyper-parameters: each is for every rule that has it, unless a part has its own value.

    `optimizers` are one optimizer for each class; `param_groups` has their groups in the order of the patterns, the
    same dicts, so that schedulers change them. What a rule remembers of the model it remembers of its own parameters. A
    step that fails raises PartialUpdate where the parameters of another rule were updated before. Other errors are
    those of `RuleOptimizer` and `Partition.places`.
    """

    def __init__(self, partition: Partition, named_parameters: Named, **keywords: Any) -> None:
        if not isinstance(partition, Partition):
            raise HyperError(f"Partitioned takes a rulec.partition({{...}}), not a {type(partition).__name__}")
        self.partition, self._keywords, self._complete = partition, keywords, False
        self._groups: list[dict[str, Any]] = []
        named = named_pairs(named_parameters)
        taken = parts_taken(partition, named)
        if not taken:
            raise TensorError("the partition trains no parameter: give one of them a rule")
        for part, _ in taken:
            check_single(part.rule, "Partitioned")
        kinds = list(dict.fromkeys(optimizer(part.origin) for part, _ in taken))
        #: The tags of each parameter by its name, of those too that are not trained.
        self._tags: dict[str, tuple[str, ...]] = {name: () for name, _ in named} | _tags_of(taken)
        taken = [(_in_model(part, self._tags), params) for part, params in taken]
        hypers: list[dict[str, Any]] = [{} for _ in kinds]
        for part, _ in taken:
            hypers[kinds.index(optimizer(part.origin))] |= part.hyper
        interfaces = [
            kind.interface.with_words({**keywords, **hyper}) for kind, hyper in zip(kinds, hypers, strict=True)
        ]
        check_keywords(interfaces, keywords)
        groups: list[list[dict[str, Any]]] = [[] for _ in kinds]
        #: For each group the index of its optimizer, and its index among the groups of this optimizer.
        self._homes: list[tuple[int, int]] = []
        for part, params in taken:
            place = kinds.index(optimizer(part.origin))
            self._homes.append((place, len(groups[place])))
            groups[place].append(group_of(interfaces[place], part, params, keywords))
        self.optimizers: list[RuleOptimizer] = [
            kind(members, **keywords_of(interface, keywords))
            for kind, interface, members in zip(kinds, interfaces, groups, strict=True)
        ]
        common = set.intersection(*({*each.defaults} for each in self.optimizers))
        param_groups = [self.optimizers[place].param_groups[index] for place, index in self._homes]
        super().__init__(param_groups, {k: v for k, v in self.optimizers[0].defaults.items() if k in common})
        self.state = cast(Any, _States(self.optimizers))
        self._complete = True

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        """The groups of all optimizers as they are now, in the order in which they came."""
        if not self._complete:
            return self._groups
        return [self.optimizers[place].param_groups[index] for place, index in self._homes]

    @param_groups.setter
    def param_groups(self, groups: list[dict[str, Any]]) -> None:
        self._groups = groups  # by torch's own class, which checks them one by one

    @synchronized
    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Adds named parameters that one pattern takes, with hyper-parameters of their own."""
        if not self._complete:
            _add_param_group(self, param_group)
            return
        named = named_pairs(param_group["params"])
        part = self._part_of(named)
        tags = self._tags | _tags_of([(part, named)])
        part = _in_model(part, tags)
        kind = optimizer(part.origin)
        rest = {key: value for key, value in param_group.items() if key not in ("params", "param_names")}
        part = replace(part, hyper={**part.hyper, **rest})
        interface = kind.interface.with_words({**self._keywords, **part.hyper})
        group = group_of(interface, part, named, self._keywords)
        place = next((i for i, each in enumerate(self.optimizers) if type(each) is kind), None)
        self._check_new([param for _, param in named])
        before, self._tags = self._tags, tags
        try:
            self._count_layers()
            if place is None:
                place = len(self.optimizers)
                self.optimizers.append(kind([group], **keywords_of(interface, self._keywords)))
                self.optimizers[-1].count_steps_of(self.optimizers[0])
            else:
                self.optimizers[place].add_param_group(group)
        except BaseException:
            self._tags = before
            self._count_layers()
            raise
        self._homes.append((place, len(self.optimizers[place].param_groups) - 1))

    def _count_layers(self) -> None:
        """Says in the tags of all groups how many layers the model has."""
        for each in self.optimizers:
            for group in each.param_groups:
                group["tags"] = _counted(group["tags"], each.interface, self._tags)

    def _part_of(self, named: Sequence[tuple[str, Tensor]]) -> Part:
        taken = parts_taken(replace(self.partition, allow_unused=True), named)
        if len(taken) != 1 or len(taken[0][1]) != len(named):
            raise HyperError(
                "a new group must be of parameters that one pattern takes and trains: give a group of each"
            )
        return taken[0][0]

    def _check_new(self, params: Sequence[Tensor]) -> None:
        known = {id(param) for group in self.param_groups for param in group["params"]}
        if any(id(param) in known for param in params):
            raise TensorError("a parameter of the new group is in another group already: leave it out")

    def routing(self) -> Routes:
        """The rule that each parameter goes to, by its name, shape and tags; printed, a table."""
        numbers = {home: number for number, home in enumerate(self._homes)}
        routes = [
            replace(route, group=numbers[place, route.group])
            for place, each in enumerate(self.optimizers)
            for route in each.routing()
        ]
        return Routes(sorted(routes, key=lambda route: route.group))

    @property
    def measures(self) -> bool:
        """Whether steps of a rule measure statistics."""
        return any(each.measures for each in self.optimizers)

    def statistics(self) -> StepStatistics:
        """The statistics of the last step, of all rules that have them: see `RuleOptimizer.statistics`."""
        parts = [each.statistics() for each in self.optimizers if each.measures]
        if not parts:
            raise RulecError(
                "Partitioned measures no statistics: make it with watch='norms', or with expressions by name"
            )
        return StepStatistics.joined(parts)

    # Steps

    def step(self, closure: Callable[[], Any] | None = None, *, inputs: Mapping[str, Any] | None = None) -> Any:
        """One step of every rule. Returns the loss of `closure`, which is called first, once, if given.

        `inputs` has what the rules name under `inputs`: see `RuleOptimizer.step`. A list has a tensor for each
        parameter in the order of `param_groups`.
        """
        loss = None
        try:
            if closure is not None:
                with torch.enable_grad():
                    loss = closure()
            arguments = self._arguments(inputs or {}, loss)
        except BaseException:
            for each in self.optimizers:
                each.refuse_early()
            raise
        scaling: dict[str, Any] = {
            key: self.__dict__[key] for key in ("grad_scale", "found_inf") if key in self.__dict__
        }
        with self._lock:
            self._check_memory()
            for place, each in enumerate(self.optimizers):
                self._step_of(
                    place, {name: arguments[name] for name in each.interface.inputs if name in arguments}, scaling
                )
        return loss

    def _check_memory(self) -> None:
        """TensorError or StateMismatch, and nothing updated, where a later rule could not take its step."""
        try:
            for each in self.optimizers[1:]:
                each.check_memory()
        except BaseException:
            for each in self.optimizers:
                each.refuse()
            raise

    def _arguments(self, inputs: Mapping[str, Any], loss: Any) -> dict[str, Any]:
        """The inputs of a step; tensors by their parameters."""
        kinds = {name: kind for each in self.optimizers for name, kind in each.interface.inputs.items()}
        params = [param for group in self.param_groups for param in group["params"]]
        arguments = {} if loss is None else {"loss": loss}
        for name, value in inputs.items():
            if name not in kinds:
                raise HyperError(f"no rule of the partition takes an input {name!r}{did_you_mean(name, kinds)}")
            arguments[name] = by_parameter(name, value, params) if per_tensor(kinds[name]) else value
        return arguments

    def _step_of(self, place: int, inputs: Mapping[str, Any], scaling: Mapping[str, Any]) -> None:
        each = self.optimizers[place]
        each.__dict__.update(scaling)
        try:
            each.step(inputs=inputs or None)
        except Exception as error:
            for later in self.optimizers[place + 1 :]:
                later.refuse()
            if not place:
                raise
            done = ", ".join(earlier.interface.name for earlier in self.optimizers[:place])
            raise PartialUpdate(f"a step failed after the parameters of {done} were updated: {error}") from error
        finally:
            for key in scaling:
                del each.__dict__[key]

    @property
    def _step_supports_amp_scaling(self) -> bool:
        """Answers torch's GradScaler: see `RuleOptimizer`."""
        return all(each._step_supports_amp_scaling for each in self.optimizers)

    @synchronized
    def eval(self) -> None:
        """Moves the parameters of rules with an `evaluate` point to that point; once there, does nothing."""
        for each in self.optimizers:
            if isinstance(each, EvaluatedOptimizer):
                each.eval()

    @synchronized
    def train(self) -> None:
        """Moves parameters back to where they are trained; once there, does nothing."""
        for each in self.optimizers:
            if isinstance(each, EvaluatedOptimizer):
                each.train()

    # Checkpoints

    @synchronized
    def state_dict(self) -> dict[str, Any]:
        """The state of all rules as torch.optim lays out that of one; its tensors are the optimizers' own."""
        return all_saved(super().state_dict(), self.param_groups)

    @synchronized
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Goes on from a `state_dict()` of the same partition and parameters.

        If it does not fit, StateMismatch, and everything is as it was.
        """
        for before in self._optimizer_load_state_dict_pre_hooks.values():
            state_dict = before(self, state_dict) or state_dict
        shares = self._shares(state_dict)
        old = [each.state_dict() for each in self.optimizers]
        try:
            for each, share in zip(self.optimizers, shares, strict=True):
                each.load_state_dict(share)
        except BaseException:
            for each, share in zip(self.optimizers, old, strict=True):
                each.load_state_dict(share)
            raise
        for after in self._optimizer_load_state_dict_post_hooks.values():
            after(self)

    def _shares(self, state_dict: Mapping[str, Any]) -> list[dict[str, Any]]:
        """The saved state of each optimizer, from that of all."""
        groups, states = state_dict["param_groups"], state_dict["state"]
        check_groups_match(self.param_groups, groups, "partition's", "patterns")
        shares: list[dict[str, Any]] = []
        for number in range(len(self.optimizers)):
            share = [group for group, (place, _) in zip(groups, self._homes, strict=True) if place == number]
            ids = {i for group in share for i in group["params"]}
            shares.append({"state": {i: states[i] for i in ids if i in states}, "param_groups": share})
        return shares

    @synchronized
    def __getstate__(self) -> dict[str, Any]:
        names = ("partition", "optimizers", "defaults", "_keywords", "_homes", "_tags", "_complete")
        return {name: self.__dict__[name] for name in names}

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        self.state = cast(Any, _States(self.optimizers))


class _States(Mapping[Tensor, Any]):
    """The states of several optimizers' parameters as they are now; of one without a state, an empty one."""

    def __init__(self, optimizers: Sequence[RuleOptimizer]) -> None:
        self._optimizers = optimizers

    def __getitem__(self, param: Tensor) -> Any:
        for each in self._optimizers:
            if param in each.state or any(p is param for group in each.param_groups for p in group["params"]):
                return each.state[param]
        raise KeyError(param)

    def __iter__(self) -> Iterator[Tensor]:
        return chain.from_iterable([*each.state] for each in self._optimizers)

    def __len__(self) -> int:
        return sum(len(each.state) for each in self._optimizers)


#: What `model.named_parameters()` gives.
Named: TypeAlias = Iterable[tuple[str, Tensor]]


def partitioned_groups(partition: Partition, named_parameters: Named) -> list[dict[str, Any]]:
    """The parameter groups of a partition whose parts are all of one rule: the argument of its class.

    There is one for each pattern that takes parameters, with its hyper-parameters and tags. A name such as
    `layer.0.bias` is the path `layer/0/bias`. RuleError where there are several rules: those need `Partitioned`.
    """
    taken = parts_taken(partition, named_pairs(named_parameters))
    kinds = {optimizer(part.origin): part.rule.name for part, _ in taken}
    if len(kinds) > 1:
        raise RuleError(
            f"one optimizer has one rule, and the partition has {', '.join(kinds.values())}: use "
            f"rulec.torch.Partitioned(partition, model.named_parameters())"
        )
    interfaces = [optimizer(part.origin).interface.with_words(part.hyper) for part, _ in taken]
    return [group_of(interface, part, params, {}) for interface, (part, params) in zip(interfaces, taken, strict=True)]


def named_pairs(parameters: Any) -> list[tuple[str, Tensor]]:
    """Named parameters in a list; TensorError for what has no names."""
    pairs = [*parameters] if isinstance(parameters, Iterable) else [parameters]
    for pair in pairs:
        if not (isinstance(pair, tuple) and len(pair) == 2 and isinstance(pair[0], str)):
            raise TensorError("a partition goes by names: give it model.named_parameters(), or pairs like these")
    return pairs


def parts_taken(
    partition: Partition, named: Sequence[tuple[str, Tensor]]
) -> list[tuple[Part, Sequence[tuple[str, Tensor]]]]:
    """The parts and their parameters. Parts without parameters are left out, and so are parameters without a part."""
    params: list[list[tuple[str, Tensor]]] = [[] for _ in partition.entries]
    places = partition.places([name.replace(".", "/") for name, _ in named])
    for place, pair in zip(places, named, strict=True):
        params[place].append(pair)
    entries = zip(partition.entries, params, strict=True)
    return [(part, members) for (_, part), members in entries if part is not None and members]


def _tags_of(taken: Iterable[tuple[Part, Sequence[tuple[str, Tensor]]]]) -> dict[str, tuple[str, ...]]:
    """The tags of parameters, by their names."""
    return {name: part.tags for part, params in taken for name, _ in params}


def _in_model(part: Part, tags: Mapping[str, tuple[str, ...]]) -> Part:
    """A part whose tags have the count of layers of the whole model, where its rule reads it."""
    return replace(part, tags=_counted(part.tags, optimizer(part.origin).interface, tags))


def _counted(words: tuple[str, ...], interface: Interface, tags: Mapping[str, tuple[str, ...]]) -> tuple[str, ...]:
    return with_count(words, tags) if any(map(reads_layers, interface.rules)) else words


def group_of(
    interface: Interface, part: Part, params: Sequence[tuple[str, Tensor]], keywords: Mapping[str, Any]
) -> dict[str, Any]:
    """A parameter group; with tags even where there are none: its rule may route tensors."""
    whole = {*OWN, *(["capturable"] if interface.asks_once else [])}
    for name in part.hyper:
        if name in whole:
            raise HyperError(f"{name} is of a whole optimizer, not of a pattern: give it to Partitioned")
    group_keywords = _translated(interface, part.hyper, keywords_of(interface, keywords))
    return {"params": [*params], "tags": part.tags, **group_keywords}


def keywords_of(interface: Interface, keywords: Mapping[str, Any]) -> dict[str, Any]:
    """The keywords of a class among these, under its names."""
    keywords = interface.in_own_words(keywords, "")
    known_keywords = {name: value for name, value in keywords.items() if _place(interface, name) is not None}
    dtypes = known_keywords.get("state_dtype")
    if isinstance(dtypes, Mapping):
        known = interface.state_names()
        known_keywords["state_dtype"] = {name: dtype for name, dtype in dtypes.items() if not name or name in known}
    if known_keywords.get("watch"):
        known_keywords["watch"] = known_of(interface.rules, known_keywords["watch"]) or None
    return _translated(interface, known_keywords, {})


def _translated(interface: Interface, hyper: Mapping[str, Any], others: Mapping[str, Any]) -> dict[str, Any]:
    """Keywords of a class, of which some are called as the rule calls its hyper-parameters.

    `others` and the defaults complete a tuple of which not all was given. HyperError for what the class does not have.
    """
    translated: dict[str, Any] = {}
    for name, value in interface.in_own_words(hyper, "").items():
        place = _place(interface, name)
        if place is None:
            raise HyperError(f"{interface.name} has no keyword {name!r}{interface.suggestion(name)}")
        keyword, position = place
        if position is None:
            translated[keyword] = value
            continue
        whole = translated.get(keyword, others.get(keyword, interface.signature.parameters[keyword].default))
        translated[keyword] = (*whole[:position], value, *whole[position + 1 :])
    return translated


def _place(interface: Interface, name: str) -> tuple[str, int | None] | None:
    """The keyword of a name, and the position in it where it is a tuple; None where there is none."""
    if name in interface.signature.parameters and name != "params":
        return name, None
    return next((entry.places[name] for entry in interface.entries if name in entry.places), None)


def _takes(interface: Interface, name: str, value: Any) -> bool:
    """Whether a class has this keyword, or this word of a namesake."""
    words = interface.in_own_words({name: value}, "")
    return name in interface.ignored or any(_place(interface, word) is not None for word in words)


def check_keywords(interfaces: Sequence[Interface], keywords: Mapping[str, Any]) -> None:
    """HyperError or TensorError for a keyword, or a state of `state_dtype`, that no class has."""
    known = {name: None for interface in interfaces for name in interface.signature.parameters}
    for name, value in keywords.items():
        if not any(_takes(interface, name, value) for interface in interfaces):
            raise HyperError(f"no rule of the partition has a keyword {name!r}{did_you_mean(name, known)}")
    if keywords.get("watch"):
        Statistics([rule for interface in interfaces for rule in interface.rules], keywords["watch"])
    dtypes = keywords.get("state_dtype")
    states = {state for interface in interfaces for state in interface.state_names()}
    for state in dtypes if isinstance(dtypes, Mapping) else ():
        if state and state not in states:
            raise TensorError(f"no rule of the partition has a state {state!r}{did_you_mean(state, states)}")
