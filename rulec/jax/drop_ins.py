"""Functions of optax's own names and signatures, made from the interop sections of the rules that compute the same."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Mapping
from typing import Any

import jax
import optax

from rulec.compiler.layout import FLOATS
from rulec.errors import HyperError
from rulec.functional.axes import AS_SEEN, AxisRoles
from rulec.functional.plan import Options
from rulec.jax.built import BUILT, Built
from rulec.jax.entries import MASKS, Entry, entries, index
from rulec.jax.leaves import COMPLEX
from rulec.jax.masks import Maker
from rulec.jax.oriented import axis_roles
from rulec.jax.recipe import Group
from rulec.jax.state import Shown
from rulec.jax.transform import options
from rulec.language.source import did_you_mean


def names(prefix: str = "") -> list[str]:
    """The names of optax's functions, or with the prefix `contrib.` of those of optax.contrib, without the prefix."""
    every = [*index(), *BUILT]
    return [name.removeprefix(prefix) for name in every if name.startswith(prefix) and ("." in name) == bool(prefix)]


@functools.cache
def function_named(name: str) -> Callable[..., optax.GradientTransformationExtraArgs]:
    """The function of that name, such as `adamw` or `contrib.prodigy`; KeyError where there is none."""
    known = BUILT.get(name)
    theirs = known.signature if known else entries(name)[0].signature
    signature = theirs.replace(return_annotation=optax.GradientTransformationExtraArgs)
    signature = with_axes(signature) if known is None or known.axes else signature
    make = functools.partial(_built, known) if known else functools.partial(_transformation, name)

    def function(*args: Any, **keywords: Any) -> optax.GradientTransformationExtraArgs:
        known = signature.parameters
        for keyword in keywords:
            if keyword not in known:
                raise HyperError(f"rulec.jax.{name} has no keyword {keyword!r}{did_you_mean(keyword, known)}")
        bound = signature.bind(*args, **keywords)
        bound.apply_defaults()
        roles = axis_roles(bound.arguments.pop(AXES, None))
        return make(bound.arguments, roles)

    package, _, function.__name__ = f"rulec.jax.{name}".rpartition(".")
    function.__qualname__, function.__module__ = function.__name__, package
    function.__signature__ = signature  # type: ignore[attr-defined]
    function.__annotations__ = {p.name: p.annotation for p in signature.parameters.values()}
    function.__annotations__["return"] = signature.return_annotation
    function.__doc__ = _built_documentation(known) if known else _documentation(name, entries(name))
    return function


#: The keyword that the functions have beside optax's: the roles of axes, as `rulec.jax.transform` takes them.
AXES = "axes"


def with_axes(signature: inspect.Signature) -> inspect.Signature:
    """The signature with the keyword `axes`."""
    parameters = [*signature.parameters.values()]
    behind = len(parameters) - any(p.kind is inspect.Parameter.VAR_KEYWORD for p in parameters)
    parameters.insert(behind, inspect.Parameter(AXES, inspect.Parameter.KEYWORD_ONLY, default=None))
    return signature.replace(parameters=parameters)


def _built(known: Built, values: dict[str, Any], axes: AxisRoles) -> optax.GradientTransformationExtraArgs:
    if not (known.axes and axes.entries):
        return known.build(values)
    keyword, numbers = known.axes
    if values[keyword] is not None:
        raise HyperError(f"rulec.jax.{known.name} has axes and {keyword}, which say the same: leave one out")
    return known.build({**values, keyword: numbers(axes)})


def _built_documentation(known: Built) -> str:
    return f"{known.summary}\n\nTakes what `optax.{known.name}` takes, and has its states.\n"


def _documentation(name: str, choices: tuple[Entry, ...]) -> str:
    rule = choices[0].base
    ways = "\n".join(f"    {entry.file}{_condition(entry)}" for entry in choices)
    what = "The direction of the rule alone, for a learning rate to follow" if choices[0].scales else rule.summary
    return f"{what.rstrip('.')}.\n\nTakes what `optax.{name}` takes, and computes by the rule:\n\n{ways}\n"


def _condition(entry: Entry) -> str:
    words = [f"{k} is {_SAID[v]}" if v in _SAID else f"{k}={v!r}" for k, v in entry.when.items()]
    return f" where {', '.join(words)}" if words else ""


def _transformation(name: str, values: Mapping[str, Any], axes: AxisRoles) -> optax.GradientTransformationExtraArgs:
    entry = _entry(name, values)
    entry.check(values)
    rule = entry.rule(values)
    hyper = entry.hyper(values, rule)
    mask = next((values[k] for k in MASKS if values.get(k) is not None), None)
    maker = Maker(
        Group(rule, hyper), mask if "weight_decay" in hyper else None, _options(entry, values), _shown(entry, values),
        axes if axes.entries else AS_SEEN,
    )  # fmt: skip
    return _with_inputs(maker.transformation(), entry) if entry.inputs else maker.transformation()


def _with_inputs(plain: optax.GradientTransformationExtraArgs, entry: Entry) -> optax.GradientTransformationExtraArgs:
    """The transformation with the keywords of optax's update for the inputs of the rule."""

    def update(grads: Any, state: Any, params: Any = None, **extra: Any) -> Any:
        for keyword in entry.inputs.values():
            if extra.get(keyword) is None:
                call = f"call update(grads, state, params, {keyword}=...)"
                raise HyperError(f"rulec.jax.{entry.function} needs {keyword}: {call}")
        inputs = {ours: extra[theirs] for ours, theirs in entry.inputs.items()}
        return plain.update(grads, state, params, **{**extra, **inputs})

    return optax.GradientTransformationExtraArgs(plain.init, update)


def _entry(name: str, values: Mapping[str, Any]) -> Entry:
    choices = entries(name)
    for entry in choices:
        if entry.matches(values):
            return entry
    flags = {keyword: None for entry in choices for keyword in entry.when}
    keywords = ", ".join(f"{k}={values[k]!r}" for k in flags)
    differing = [entry.differs(values) for entry in choices]
    least = min(map(len, differing))
    nearest = [one for one in differing if len(one) == least]
    changes = dict.fromkeys(" and ".join(f"{k} is {_said(v)}" for k, v in one.items()) for one in nearest)
    raise HyperError(f"rulec.jax.{name} has no rule for {keywords}: it has one where {', or where '.join(changes)}")


def _said(wanted: Any) -> str:
    """The value that `when` wants of a keyword, in words."""
    return _SAID.get(str(wanted), repr(wanted))


#: Words of `when` that stand for many values of a keyword.
_SAID = {"nonzero": "not 0", "given": "given"}


def _options(entry: Entry, values: Mapping[str, Any]) -> Options:
    return options({state: _dtype(keyword, values[keyword]) for state, keyword in _kept(entry, values)}, False, 0)


def _shown(entry: Entry, values: Mapping[str, Any]) -> dict[str, Shown]:
    """The fields of states with other names than the rule's, or in a complex dtype that was asked for."""
    complexes = [state for state, keyword in _kept(entry, values) if _is_complex(values[keyword])]
    return {state: Shown(entry.state.get(state, state), state in complexes) for state in [*entry.state, *complexes]}


def _kept(entry: Entry, values: Mapping[str, Any]) -> list[tuple[str, str]]:
    """The states with a dtype of the user's, and its keyword."""
    named = [(keyword, states) for keyword, states in entry.dtypes.items() if values.get(keyword) is not None]
    return [
        (state, keyword) for keyword, states in named for state in ([states] if isinstance(states, str) else states)
    ]


def _is_complex(dtype: Any) -> bool:
    return str(jax.dtypes.canonicalize_dtype(dtype)) in COMPLEX.values()


def _dtype(keyword: str, value: Any) -> str:
    """The dtype of the real numbers of a state, which are the parts of a complex one."""
    dtype = str(jax.dtypes.canonicalize_dtype(value))
    dtype = {kind: part for part, kind in COMPLEX.items()}.get(dtype, dtype)
    if dtype not in FLOATS:
        raise HyperError(f"{keyword}={value!r} is none of {', '.join(FLOATS)}")
    return dtype
