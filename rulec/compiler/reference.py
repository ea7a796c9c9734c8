"""The reference: an optimizer that runs a rule by the interpreter, over a list of arrays.

Tests compare every backend and adapter with it.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from rulec.compiler.foreseen import check_counts, decide
from rulec.compiler.interpreter import Array, Key, Run, Tensor
from rulec.compiler.interpreter import arithmetic as named_arithmetic
from rulec.compiler.ir import Program
from rulec.compiler.pipeline import compile
from rulec.compiler.routing import Router
from rulec.compiler.scalars import resolve_hyper
from rulec.compiler.view import static_of, view_of
from rulec.errors import HyperError, RuleError, TensorError
from rulec.language.evaluations import settings_of, standalone
from rulec.language.hyper import AT_START, followed, followers
from rulec.language.rule_data import RuleData
from rulec.language.sizes import sized
from rulec.language.source import did_you_mean
from rulec.language.statistics import Watched


class ReferenceOptimizer:
    """A rule run by the interpreter over a list of parameters: the oracle of the tests.

    `params` are arrays of any shape. `hyper` has the values that differ from their defaults: one dict, or one for each
    group, with `groups` giving each parameter's group. `arithmetic` is `float64` or `mpmath`. `tags` are each
    parameter's words for `tagged(...)`. `layers` are each parameter's `depth` and `depths`: by default each is a layer.
    `watch` gives the statistics that a step measures, for the rule of a parameter.
    Raises HyperError for an unknown name or a value outside its range, and RuleError for a parameter without a rule.
    """

    def __init__(
        self, rule: RuleData, params: Sequence[Any],
        hyper: Mapping[str, float] | Sequence[Mapping[str, float]] | None = None,
        arithmetic: str = "float64", *, groups: Sequence[int] | None = None, tags: Sequence[set[str]] | None = None,
        layers: Sequence[tuple[int, int]] | None = None, seed: int = 0,
        watch: Callable[[RuleData], Watched] = lambda rule: (),
    ) -> None:  # fmt: skip
        self.how = named_arithmetic(arithmetic)
        settings = [hyper or {}] if not isinstance(hyper, Sequence) else list(hyper)
        for place, chosen in enumerate(settings):
            rule, settings[place] = sized(rule, chosen)
        self.rule = rule
        self.seed, self._watch = seed, watch
        #: The statistics of the last step: name -> place, such as `tensor 0`, `group 0` or `model` -> value. What was
        #: skipped is not there.
        self.statistics: dict[str, dict[str, Array]] = {}
        group_of = list(groups or [0] * len(params))
        words = list(tags or [set()] * len(params))
        self.tensors: list[Tensor] = []
        self._parts: dict[Hashable, _Part] = {}
        self._shared: dict[int, dict[tuple[str, Key], Array]] = {}
        router = Router(rule)
        for index, (param, group) in enumerate(zip(params, group_of, strict=True)):
            eps = _machine_eps(np.asarray(param).dtype)
            routed = router.choose(np.shape(param), words[index], f"parameter {index}")
            hyper_of = [resolve_hyper(routed.hyper, _settings_of(g, routed), eps, routed.name) for g in settings]
            view = view_of(routed, np.shape(param), static_of(routed, hyper_of[group]))
            tensor = Tensor(view, view.matrices(self.how.array(param)).copy(), group, index, eps)
            tensor.in_group = group_of[:index].count(group), group_of.count(group)
            tensor.layer = layers[index] if layers else (index, len(params))
            self.tensors.append(tensor)
            self._add(index, routed, hyper_of)
        known = settings_of(rule)
        for key in (key for group in settings for key in group):
            if key not in known:
                raise HyperError(f"{rule.name} has no hyper-parameter {key!r}{did_you_mean(key, known)}")
        start = ({AT_START: resolve_hyper(known, g, 2.0**-52, rule.name)[AT_START]} for g in settings)
        self._settings = [{**g, **begun} for g, begun in zip(settings, start, strict=True)] if followers(known) else []
        self._follow()

    def _follow(self) -> None:
        """Has second learning rates follow `lr`."""
        known = settings_of(self.rule)
        for group, settings in enumerate(self._settings if followers(known) else ()):
            values = followed(known, resolve_hyper(known, settings, 2.0**-52, self.rule.name))
            for part in self._parts.values():
                part.hyper[group].update({key: values[key] for key in followers(known) if key in part.hyper[group]})

    def _add(self, index: int, rule: RuleData, hyper: list[dict[str, float]]) -> None:
        tensor = self.tensors[index]
        static, watch = static_of(rule, hyper[tensor.group]), self._watch(rule)
        program = compile(rule, tensor.view.facts, static, whole=True, watch=watch)
        # A default may be the machine epsilon of the tensor's own dtype.
        values = tuple(tuple(group.items()) for group in hyper)
        shared = self._shared.setdefault(id(rule), {})
        part = self._parts.setdefault((id(program), values), _Part(program, hyper, shared))
        part.tensors.append(tensor)

    def _initialise(self, part: _Part, tensor: Tensor, state: str) -> None:
        buffer = part.program.buffer(state)
        key = tensor.index if "n" in buffer.axes.letters else tensor.group if "k" in buffer.axes.letters else None
        run = Run(part.program, [tensor], part.hyper, self.how, part.shared, {}, self.seed)
        assert buffer.init is not None
        value = run.one(buffer.init)
        if "n" not in buffer.axes.letters:
            part.shared.setdefault((state, key), value)
            return
        # A state of one segment of the batch has its extent in place of the batch's.
        parts = {str(k): n for k, n in enumerate(tensor.view.segments)}
        batch = next((n for part, n in parts.items() if part in buffer.axes.letters), tensor.view.batch)
        extent = {"b": batch, "i": 1, "j": 1}
        for letter, size in (("i", buffer.axes.rows), ("j", buffer.axes.cols)):
            if size is not None:
                extent[letter] = int(run.one(size))
        letters = {"b" if c in parts else c for c in buffer.axes.letters}
        shape = tuple(extent[c] if c in letters else 1 for c in "bij")
        tensor.states[state] = np.broadcast_to(value, shape).copy()

    def copy(self) -> ReferenceOptimizer:
        """An independent optimizer with the same parameters, states and counts."""
        twin = copy.copy(self)
        # A step replaces arrays and changes none in place, so the copy may share them.
        twin.tensors = [replace(t, states=dict(t.states)) for t in self.tensors]
        twin._shared = {key: dict(shared) for key, shared in self._shared.items()}
        places = {id(shared): key for key, shared in self._shared.items()}
        twin._parts = {
            key: _Part(
                part.program, [dict(h) for h in part.hyper], twin._shared[places[id(part.shared)]],
                [twin.tensors[t.index] for t in part.tensors],
            )
            for key, part in self._parts.items()
        }  # fmt: skip
        return twin

    @property
    def params(self) -> list[Array]:
        """The parameters now, in their own shapes."""
        return [t.view.tensor(t.value) for t in self.tensors]

    def state(self, index: int) -> dict[str, Array]:
        """The states of one parameter now, elementwise states in its shape. Empty before its first gradient."""
        tensor = self.tensors[index]
        return {k: tensor.view.tensor(v) if v.shape == tensor.value.shape else v for k, v in tensor.states.items()}

    def adopt(self, values: Sequence[Mapping[str, Any]]) -> None:
        """Takes for each parameter its value as `p` and, after its first gradient, its states, as another has them."""
        for part in self._parts.values():
            for tensor in part.tensors:
                for name, value in values[tensor.index].items():
                    if name == "p" or tensor.t:
                        self._adopt(part, tensor, name, self.how.array(value))

    def _adopt(self, part: _Part, tensor: Tensor, name: str, value: Array) -> None:
        view = tensor.view
        if name == "p":
            tensor.value = view.matrices(value).copy()
        elif name in tensor.states:
            old = tensor.states[name]
            like_p = value.shape == view.shape and old.shape == tensor.value.shape
            tensor.states[name] = (view.matrices(value) if like_p else value.reshape(old.shape)).copy()
        else:
            letters = part.program.buffer(name).axes.letters
            part.shared[name, tensor.group if "k" in letters else None] = value.reshape(())

    def step(
        self, grads: Sequence[Any | None], hyper: Mapping[str, float] | None = None,
        inputs: Mapping[str, Any] | None = None, gradient: Callable[[list[Array]], Sequence[Any | None]] | None = None,
    ) -> None:  # fmt: skip
        """One step with these gradients; None leaves a parameter as it is. `hyper` changes values from now on.

        `inputs` gives each of the rule's inputs: a number for a scalar, or a list of one array per parameter.
        `gradient` gives the gradients at other parameters, for a rule with passes. Raises TensorError for a missing
        input.
        """
        inputs = dict(inputs or {})
        missing = [key for key in self.rule.inputs if key not in inputs]
        if missing:
            raise TensorError(f"{self.rule.name} needs the input {missing[0]!r} at every step")
        for part in self._parts.values():
            for group in part.hyper if hyper else ():
                group.update({k: v for k, v in (hyper or {}).items() if k in group})
        if hyper and self._settings:
            known = settings_of(self.rule)
            self._settings = [{**s, **{k: v for k, v in hyper.items() if k in known}} for s in self._settings]
            self._follow()
        for place in range(max((len(part.program.rule.moves) for part in self._parts.values()), default=0)):
            inputs |= {part.program.rule.moves[place].gradient: grads for part in self._moving(place)}
            if any(self._wants(place)):
                if gradient is None:
                    raise RuleError(f"{self.rule.name} evaluates the model again in a step: give step() a gradient=")
                grads = gradient(self._at(place, grads, inputs))
        self._advance(grads, inputs)

    def _advance(self, grads: Sequence[Any | None], inputs: Mapping[str, Any]) -> None:
        """The step of the rules as they are."""
        runs = self.runs(grads, inputs)
        done = [run.execute() for run in runs]
        self.statistics = {}
        advanced: dict[tuple[int, tuple[str, Key]], dict[tuple[str, Key], Array]] = {}
        for run, (pending, skipped) in zip(runs, done, strict=True):
            advanced |= {(id(run.shared), key): run.shared for key in run.write(pending, skipped)}
            for (name, place), value in run.measured(pending, skipped).items():
                self.statistics.setdefault(name, {})[place] = value
            for tensor in run.tensors:
                tensor.t -= tensor.index in skipped
        for (_, key), shared in advanced.items():
            shared[key] = np.asarray(shared.get(key, 0)) + 1

    def runs(self, grads: Sequence[Any | None], inputs: Mapping[str, Any]) -> list[Run]:
        """The runs of a step, with the counts and first states of its tensors, before anything is computed."""
        runs = [run for part in self._parts.values() if (run := self._run(part, grads, inputs)).tensors]
        for run in runs:
            run.family = runs
        return runs

    def _moving(self, place: int) -> list[_Part]:
        """The parts whose rule has a pass at this place."""
        return [part for part in self._parts.values() if place < len(part.program.rule.moves)]

    def _wants(self, place: int) -> Iterator[bool]:
        """Of each tensor whose rule has a pass at this place, whether it has it in the next step."""
        for part in self._moving(place):
            when = part.program.rule.moves[place].when
            for t in part.tensors:
                known = {**part.hyper[t.group], **t.facts, "machine_eps": t.machine_eps, "t": t.t + 1.0}
                yield when is None or bool(decide(when, known))

    def _at(self, place: int, grads: Sequence[Any | None], inputs: Mapping[str, Any]) -> list[Array]:
        """The parameters at the point of a pass."""
        twin = self.copy()
        for part in twin._parts.values():
            moves, program = part.program.rule.moves, part.program
            if place < len(moves):
                static = {k: v for k, v in part.hyper[part.tensors[0].group].items() if program.hyper[k].static}
                facts = {**part.tensors[0].view.facts, "machine_eps": part.tensors[0].machine_eps}
                part.program = compile(moves[place].rule, facts, static, whole=True)
        moving = {t.index for part in twin._parts.values() if part.program not in self._programs for t in part.tensors}
        twin._advance([g if i in moving else None for i, g in enumerate(grads)], inputs)
        return twin.params

    @property
    def _programs(self) -> list[Program]:
        return [part.program for part in self._parts.values()]

    def _run(self, part: _Part, grads: Sequence[Any | None], inputs: Mapping[str, Any]) -> Run:
        active = [t for t in part.tensors if grads[t.index] is not None]
        for tensor in active:
            # As in an optimizer, states begin with the hyper-parameters of the tensor's first update.
            if tensor.t == 0:
                check_counts(part.program, {**tensor.view.facts, **part.hyper[tensor.group]})
            for buffer in part.program.states if tensor.t == 0 else ():
                self._initialise(part, tensor, buffer.name)
            tensor.t += 1
        gradients = {t.index: t.view.matrices(self.how.array(grads[t.index])) for t in active}
        arrays = self._inputs(part.program, active, inputs)
        return Run(part.program, active, part.hyper, self.how, part.shared, gradients, self.seed, arrays)

    def _inputs(
        self, program: Program, active: Sequence[Tensor], inputs: Mapping[str, Any]
    ) -> dict[tuple[str, Key], Array]:
        arrays: dict[tuple[str, Key], Array] = {}
        for buffer in program.buffers:
            if buffer.role == "input" and not buffer.axes.letters:
                arrays[buffer.name, None] = self.how.array(inputs[buffer.name])
            elif buffer.role == "input":
                for t in active:
                    array, letters = self.how.array(inputs[buffer.name][t.index]), buffer.axes.letters
                    fitted = t.view.matrices(array) if buffer.axes.elementwise else t.view.kept(array, letters)
                    arrays[buffer.name, t.index] = fitted
        return arrays


def _machine_eps(dtype: np.dtype[Any]) -> float:
    """The distance from 1 to the next number of a dtype; of float64 for whole numbers."""
    if dtype.name == "bfloat16":
        return 2.0**-7
    return float(np.finfo(dtype).eps) if dtype.kind == "f" else 2.0**-52


@dataclass
class _Part:
    """The tensors of one program, with their hyper-parameters by group and their shared states and counts."""

    program: Program
    hyper: list[dict[str, float]]
    shared: dict[tuple[str, Key], Array]
    tensors: list[Tensor] = field(default_factory=list)


def _settings_of(settings: Mapping[str, float], rule: RuleData) -> dict[str, float]:
    """The settings for hyper-parameters of a routed rule."""
    known = set(standalone(rule).hyper)
    return {k: v for k, v in settings.items() if k in known}
