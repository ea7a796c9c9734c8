"""The table of optax's functions: which rule each means, and what optax computes otherwise than the rule."""

from __future__ import annotations

import inspect

import optax

import rulec.jax
from rulec.jax.built import BUILT, Built
from rulec.jax.entries import Entry, entries, index
from tests.docs.table import table


def optax_functions() -> str:
    """Every function of optax's name, by the keywords that choose its rule."""
    by_name = {name: [_built(each)] for name, each in BUILT.items()}
    by_name |= {name: [*map(_row, entries(name))] for name in index()}
    rows = [row for function in sorted(by_name, key=_place) for row in by_name[function]]
    return table(["function", "where", "rule", "lines that are otherwise"], rows)


def optax_names() -> str:
    """optax's functions that make a transformation: the names here, and the other names."""
    rows = [_names("optax", optax, dir(rulec.jax)), _names("optax.contrib", optax.contrib, dir(rulec.jax.contrib))]
    return table(["of", "here", "optax's alone"], rows)


#: optax's functions without the type of their result that make a transformation all the same.
_UNTYPED = ("scale_by_factored_rms", "dog", "dowg", "hutchinson_estimator_diag_hessian")


def _names(title: str, module: object, here: list[str]) -> list[str]:
    functions = {name: f for name, f in vars(module).items() if inspect.isfunction(f) and not name.startswith("_")}
    make = [n for n, f in functions.items() if n in _UNTYPED or "GradientTransformation" in str(_result(f))]
    # Another name of one function, as nadam, has no entry of its own here.
    make += [name for name, other in vars(module).items() if name in here and name not in make and callable(other)]
    parts = [[n for n in sorted(set(make)) if (n in here) is known] for known in (True, False)]
    return [f"`{title}`", *(", ".join(f"`{name}`" for name in part) for part in parts)]


def _result(function: object) -> object:
    return inspect.signature(function).return_annotation  # type: ignore[arg-type]


def _place(function: str) -> tuple[bool, bool, str]:
    """optax's own functions before those of optax.contrib, and in both those for the direction alone last."""
    direction = entries(function)[0].scales if function in index() else ".scale_by" in f".{function}"
    return "." in function, direction, function


def _built(each: Built) -> list[str]:
    return [f"`{each.name}`", "", f"`{each.rule}`", each.otherwise]


def _row(entry: Entry) -> list[str]:
    said = {"nonzero": "not 0", "given": "given"}
    flags = ", ".join(f"`{key}` {said.get(str(value), value)}" for key, value in entry.when.items())
    starts = [f"`{name}` begins at `{value}`" for name, value in entry.start.items()]
    lines = [f"`{name} = {text}`" for name, text in entry.lines.items()]
    composed = {"l2": f"`l2 >> {entry.file}`", "decay": f"`{entry.file} + decay`"}
    return [f"`{entry.function}`", flags, composed.get(entry.decay, f"`{entry.file}`"), "<br>".join([*lines, *starts])]
