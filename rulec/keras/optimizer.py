"""A rule as an optimizer of Keras: its states are variables of Keras, so that Keras saves and loads them."""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import Any

import keras
from keras import ops

from rulec.compiler.routing import Router
from rulec.errors import BackendUnavailable, HyperError, TensorError
from rulec.functional.axes import reads_layout, reads_tensors, roles_of
from rulec.functional.hyper import peak_of
from rulec.functional.optimizer import check_keywords, check_rule, first_rate
from rulec.keras.axes import Table, entry_of, keras_axes, keras_tags, plain, untracked
from rulec.keras.trained import Trained
from rulec.language.hyper import AT_START, checked_seed
from rulec.language.library.load import load, parse
from rulec.language.partition import Partition
from rulec.language.rule import Rule
from rulec.language.rule_data import reads_tags
from rulec.language.sizes import sized
from rulec.runtime.keyed import Key

#: The keywords of Keras' own base class, but for the learning rate.
_OF_KERAS = [*inspect.signature(keras.optimizers.Optimizer.__init__).parameters][2:-1]

#: The hyper-parameter of rules that decay weights themselves, and the keyword of Keras.
_DECAY = "weight_decay"


@keras.saving.register_keras_serializable("rulec")
class RuleOptimizer(keras.optimizers.Optimizer):  # type: ignore[misc]
    """A rule as Keras' `compile` takes it, on the backends JAX and torch.

    `rule` is a Rule, a library name, a path or a rule's text. `learning_rate` is a number, a `LearningRateSchedule` or
    a function, by default the rule's own. Keywords of Keras' optimizers mean what they mean there; others are the
    rule's hyper-parameters. `weight_decay` is the rule's own where it has one, else Keras'. `axes` has path of a
    variable -> the roles of its axes, as from `keras_axes`, for rules that look at rows and columns. `tags` has path ->
    words, as from `keras_tags`. `seed` is for the rule's random numbers.
    Variables are float32, float64, float16 or bfloat16, and states have their variable's dtype.

    HyperError for a keyword, and for a rule that Keras has no place for; TensorError for a variable or a gradient.
    """

    def __init__(
        self, rule: Rule | str | Path, learning_rate: Any = None, *, axes: Table | None = None,
        tags: Table | None = None, seed: int = 0, **keywords: Any,
    ) -> None:  # fmt: skip
        loaded, of_rule = _rule_of(rule), dict(keywords)
        of_keras = {name: of_rule.pop(name) for name in _OF_KERAS if name in of_rule}
        chosen, hyper = sized(loaded, of_rule)
        _check_rule(chosen)
        if _DECAY in chosen.settings and of_keras.get(_DECAY) is not None:
            hyper[_DECAY] = of_keras.pop(_DECAY)
        check_keywords(chosen, hyper, _OF_KERAS)
        rate = _rate_of(chosen, learning_rate)
        super().__init__(rate, **{"name": chosen.key, **of_keras})
        if AT_START in chosen.settings and AT_START not in hyper:
            hyper |= {AT_START: _start_of(rate)}
        self._rule, self._hyper, self._seed = chosen, MappingProxyType(hyper), checked_seed(seed)
        # Keras' class tracks what lies in a dict or a list.
        self._axes, self._tags = untracked(axes), untracked(tags)
        lists = {name: value for name, value in of_rule.items() if name not in hyper}
        self._config = MappingProxyType({"rule": _text_of(rule, loaded), "seed": self._seed, **lists, **hyper})

    @property
    def rule(self) -> Rule:
        """The rule."""
        return self._rule

    @property
    def hyper(self) -> Mapping[str, float]:
        """The hyper-parameters that were given, except for the learning rate; they stay as they are."""
        return self._hyper

    def build(self, variables: Sequence[Any]) -> None:
        """Makes the states of these variables. TensorError where the rule needs roles or tags that are not known."""
        if self.built:
            return
        super().build(variables)
        moved = [v for v in variables if not self._overwrite_variable_with_gradient(v)]
        trained = [self._trained_of(place, variable) for place, variable in enumerate(moved)]
        hyper = [self._hyper, {**self._hyper, _DECAY: 0.0}] if any(each.group for each in trained) else [self._hyper]
        self._steps = _steps_of(self._rule, trained, hyper, self._seed)
        self._places = MappingProxyType({self._var_key(each.variable): i for i, each in enumerate(trained)})
        states = self._steps.states(self.learning_rate).items()
        names = [name for each in trained for name in each.names]
        self._states = MappingProxyType({key: self._state(key, names, trained, value) for key, value in states})

    def _trained_of(self, place: int, variable: Any) -> Trained:
        path, shape, words = variable.path, tuple(variable.shape), entry_of(self._tags, variable.path, place)
        if self._tags is None and any(map(reads_tags, Router(self._rule).rules)):
            raise TensorError(
                f"{self._rule.name} asks for the tags of variables, such as those of embeddings and the output layer: "
                f"give model=model, or tags={{}} to choose by shape alone"
            )
        roles, orientation = entry_of(self._axes, path, place), None
        if roles and reads_tensors(self._rule):
            orientation = roles_of([(path, roles)]).of(path, shape)
        elif len(shape) > 1 and reads_layout(self._rule):
            raise TensorError(
                f"{self._rule.name} looks at rows and columns, and the roles of the axes of {path}, of shape {shape}, "
                f"are not known: give model=model, or axes={{{path!r}: ('inputs', 'outputs')}} for a layer of your own"
            )
        decays = _DECAY not in self._rule.settings or self._use_weight_decay(variable)
        return Trained(variable, orientation, frozenset(words or ()), 0 if decays else 1)

    def _state(self, key: Key, names: Sequence[str], trained: Sequence[Trained], value: Any) -> Any:
        """A variable of Keras for a state; on torch it lies in the memory that steps write."""
        name, place = key
        owner = "rule" if place is None else names[place].replace("/", "_")
        parts = [each for each in trained for _ in each.names]
        like = None if place is None or value.shape != parts[place].variable.shape else parts[place].variable
        variable = self.add_variable(
            tuple(value.shape), lambda *_, **__: value, keras.backend.standardize_dtype(value.dtype),
            layout=getattr(like, "_layout", None), name=f"{owner}_{name}",
        )  # fmt: skip
        if keras.backend.backend() == "torch":
            variable._value = type(variable.value)(value, requires_grad=False)
        return variable

    # Steps

    def _backend_update_step(
        self, grads: Sequence[Any], trainable_variables: Sequence[Any], learning_rate: Any
    ) -> None:
        places = [self._places[self._var_key(variable)] for variable in trainable_variables]
        self._steps.step(places, grads, learning_rate, self._states)

    # Files

    def get_config(self) -> dict[str, Any]:
        """All that makes an equal optimizer; the rule is its name in the library, or its text.

        Once it has states, roles and tags are in the order of the variables, as paths may be others in a loaded model.
        """
        tables = {
            name: plain(table) for name, table in (("axes", self._axes), ("tags", self._tags)) if table is not None
        }
        if self.built:
            trained = self._steps.trained
            roles = [[*each.orientation.roles] if each.orientation else [] for each in trained]
            of = {"axes": roles, "tags": [sorted(each.tags) for each in trained]}
            tables = {name: of[name] for name in tables}
        return {**super().get_config(), **self._config, **tables}


def optimizer(
    rule: Rule | str | Path, learning_rate: Any = None, *, model: keras.Model | None = None, **keywords: Any
) -> RuleOptimizer:
    """The optimizer of a rule, a library name (`"lion"`) or the path of a rule file, for `model.compile`.

    Keywords are those of `RuleOptimizer`. With a built `model`, `axes` and `tags` are those of its layers.
    """
    known = {} if model is None else {"axes": keras_axes(model), "tags": keras_tags(model)}
    return RuleOptimizer(rule, learning_rate, **{**known, **keywords})


def _steps_of(rule: Rule, trained: Sequence[Trained], hyper: Sequence[Mapping[str, float]], seed: int) -> Any:
    """The steps on Keras' backend; BackendUnavailable where rules cannot run on it."""
    kind = keras.backend.backend()
    if kind == "jax":
        from rulec.keras.on_jax import JaxSteps

        return JaxSteps(rule, trained, hyper, seed)
    if kind == "torch":
        from rulec.keras.on_torch import TorchSteps

        return TorchSteps(rule, trained, hyper, seed)
    raise BackendUnavailable(
        f"Keras runs on {kind} here, and rulec.keras on jax and torch: set KERAS_BACKEND to one of them before keras "
        f"is imported"
    )


def _rule_of(rule: Any) -> Rule:
    """The rule that a user or a file means; HyperError for a partition."""
    if isinstance(rule, Partition):
        raise HyperError(
            "an optimizer of Keras takes one rule and not a partition: give keras.optimizers.MultiOptimizer an "
            "optimizer for each part"
        )
    if isinstance(rule, Rule):
        return rule
    return parse(rule) if "\n" in str(rule) else load(rule)


def _text_of(rule: Any, loaded: Rule) -> str:
    """The rule as a file of Keras has it: a name of the library, else the whole text."""
    return rule if isinstance(rule, str) and "." not in rule else loaded.to_yaml()


def _check_rule(rule: Rule) -> None:
    """HyperError or RulecError for a rule that needs more than gradients and parameters."""
    check_rule(rule, "Keras")
    if any(routed.evaluate is not None for routed in Router(rule).rules):
        raise HyperError(
            f"{rule.name} is evaluated elsewhere than where it is trained, and Keras evaluates where it trains: use "
            f"another rule with use_ema=True for an average of the parameters"
        )


def _rate_of(rule: Rule, rate: Any) -> Any:
    """The learning rate for Keras' class, which always has one; HyperError where the rule has none, or no such one."""
    if "lr" in rule.settings:
        rate = first_rate(rule, rate, "a number, a schedule or a function")
        return rate if callable(rate) else float(rate)
    if rate not in (None, 1.0):
        raise HyperError(f"{rule.name} has no learning rate: leave learning_rate out")
    return 1.0


def _start_of(rate: Any) -> float:
    """The learning rate that second rates are relative to: of a schedule its peak."""
    if not isinstance(rate, keras.optimizers.schedules.LearningRateSchedule):
        return float(rate() if callable(rate) else rate)
    many = partial(ops.vectorized_map, rate)
    return peak_of(lambda counts: ops.convert_to_numpy(many(ops.convert_to_tensor(counts))), rate) or 0.0
