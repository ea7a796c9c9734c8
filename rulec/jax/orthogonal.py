"""Muon as optax.contrib has it: any axes of a leaf as a matrix, other normalizations, and AdamW for other leaves."""

from __future__ import annotations

import functools
import operator
from collections.abc import Callable, Mapping
from typing import Any

import jax
import numpy as np
import optax
from optax.contrib import MuonDimensionNumbers

from rulec.errors import HyperError, TensorError
from rulec.functional.axes import AxisRoles, Orientation
from rulec.jax.built import BUILT, built
from rulec.jax.drop_ins import function_named
from rulec.jax.leaves import flat
from rulec.jax.masks import Maker, marked
from rulec.jax.recipe import Group
from rulec.jax.theirs import FieldMap, renamed, with_state_of
from rulec.jax.transform import options
from rulec.jax.views import View, view_of
from rulec.language.library.load import parse
from rulec.language.rule import Rule

#: The step of muon with optax's corrections of the momentum. A leaf is a matrix here, or a batch of matrices.
_MUON = """
name: Muon
hyper: {{momentum: 0.95{hyper}}}
applies_to: ndim == 2 or ndim == 3
state: {{m: 0}}
step: |
  m = momentum*m + (1 - momentum)*g
  h = {momentum}
  {normalized}
  o = newton_schulz(x, steps={steps}, coefficients={coefficients}, normalize="none")
  {end}
"""

#: By `nesterov`: the mean of gradients that is orthogonalized.
_MOMENTUM = {
    True: "momentum*m/(1 - momentum**(t + 1)) + (1 - momentum)*g/(1 - momentum**t)",
    False: "m/(1 - momentum**t)",
}

#: optax's word -> the lines that divide a matrix before the first iteration.
_NORMALIZED = {
    "frobenius": 'x = h/(norm(h, per="matrix") + eps)',
    "spectral": """if rows <= cols:
    values, vectors = eigh(h @ transpose(h))
  else:
    values, vectors = eigh(transpose(h) @ h)
  x = h/(sqrt(maximum(max(values, per="matrix"), 0)) + eps)""",
    "schatten": """if rows <= cols:
    a = norm(h @ transpose(h), per="matrix")
  else:
    a = norm(transpose(h) @ h, per="matrix")
  x = h*rsqrt(maximum(a, 1e-8))""",
    "aol": """if rows <= cols:
    x = h*rsqrt(maximum(sum(abs(h @ transpose(h)), per="row"), 1e-8))
  else:
    x = h*rsqrt(maximum(sum(abs(transpose(h) @ h), per="col"), 1e-8))""",
}

#: By whether `consistent_rms` is a number: the factor of the step.
_SIZES = {False: "sqrt(maximum(1, cols/rows))", True: "consistent_rms*sqrt(maximum(rows, cols))"}

#: Polynomials by optax's word for them, which are Jordan's, and Dion's of five iterations.
_POLYNOMIALS: dict[str, Any] = {
    "standard": (3.4445, -4.7750, 2.0315),
    "dion": (
        (4.0848, -6.8946, 2.9270), (3.9505, -6.3029, 2.6377), (3.7418, -5.5913, 2.3037), (2.8769, -3.1427, 1.2046),
        (2.8366, -3.0525, 1.2012),
    ),
}  # fmt: skip


@functools.cache
def _rule(
    polynomials: tuple[tuple[float, ...], ...], steps: int, nesterov: bool, adaptive: bool, word: str, size: str
) -> Rule:
    """The rule for optax's keywords; without a `size` it is the direction alone."""
    lines = [
        *(["o = sum(h*o)*o"] if adaptive else []),
        f"p = p - lr*({size}*o + weight_decay*p)" if size else "p = p + o",
    ]
    hyper = {
        "eps": "1e-8" if word in ("frobenius", "spectral") and steps else "", "lr": "1e-3" if size else "",
        "weight_decay": "0" if size else "", "consistent_rms": "0.2" if "consistent_rms" in size else "",
    }  # fmt: skip
    text = _MUON.format(
        hyper="".join(f", {name}: {default}" for name, default in hyper.items() if default),
        momentum=_MOMENTUM[nesterov], normalized=_NORMALIZED[word] if steps else "x = h", steps=steps,
        coefficients=[[*row] for row in polynomials], end="\n  ".join(lines),
    )  # fmt: skip
    return parse(text)


def _polynomials(name: str, values: Mapping[str, Any]) -> tuple[tuple[tuple[float, ...], ...], int]:
    """The polynomials of the iterations and their number, as optax reads its keywords."""
    coefficients, steps = values["ns_coeffs"], values["ns_steps"]
    if isinstance(coefficients, str) and coefficients not in _POLYNOMIALS:
        raise HyperError(
            f"rulec.jax.{name} has ns_coeffs={coefficients!r}: give {' or '.join(_POLYNOMIALS)}, or numbers"
        )
    try:
        rows = np.asarray(_POLYNOMIALS[coefficients] if isinstance(coefficients, str) else coefficients, np.float64)
        count = operator.index(steps)
    except (TypeError, ValueError, jax.errors.JAXTypeError) as error:
        raise HyperError(
            f"rulec.jax.{name} has ns_coeffs={coefficients!r} and ns_steps={steps!r}, which decide what is compiled: "
            f"give numbers of Python, and under inject_hyperparams name both among the static_args"
        ) from error
    if rows.ndim not in (1, 2) or rows.shape[-1] != 3 or not rows.size:
        raise HyperError(f"ns_coeffs of rulec.jax.{name} must have shape (3,) or (n, 3), and has {rows.shape}")
    if rows.ndim == 2 and rows.shape[0] > count:
        raise HyperError(
            f"rulec.jax.{name} has {rows.shape[0]} rows of ns_coeffs and ns_steps={count}: give as many steps"
        )
    table = tuple(tuple(map(float, row)) for row in rows.reshape(-1, 3))
    return table, count if rows.ndim == 1 else len(table)


# Axes


class _Axes:
    """The axes of a leaf that are its matrix; no tree, so it stands at a leaf."""

    def __init__(self, numbers: Any) -> None:
        self.numbers = numbers


def _is_word(x: Any) -> bool:
    return x is None or isinstance(x, MuonDimensionNumbers)


def _axes_of(dimensions: Any, params: Any) -> Any:
    """A tree like the parameters of the axes of each leaf; None at a leaf stands for one that is no matrix."""
    words = dimensions(params) if callable(dimensions) else dimensions
    if words is None:
        return jax.tree.map(lambda p: _Axes(MuonDimensionNumbers() if p.ndim == 2 else None), params)
    try:
        return jax.tree.map(
            lambda word, part: jax.tree.map(lambda _: _Axes(word), part), words, params, is_leaf=_is_word
        )
    except ValueError as error:
        raise TensorError(
            "the tree of MuonDimensionNumbers is not that of the parameters: give one, or None, for each leaf or part"
        ) from error


def _views(name: str, dimensions: Any, params: Any) -> Any:
    """A tree like the parameters of the views of its leaves."""

    def view(leaf: Any, axes: Any) -> View:
        if axes.numbers is None:
            raise TensorError(
                f"rulec.jax.{name} takes leaves of 2 axes, or of those that weight_dimension_numbers names, and one "
                f"has shape {leaf.shape}: leave it to another transformation, as with optax.partition"
            )
        plain = view_of(leaf.shape, axes.numbers, "the axes of MuonDimensionNumbers")
        # A square matrix is orthogonalized as it lies, as by optax: rows may be scaled.
        return View(plain.shape, (0,), (1,)) if len(set(leaf.shape)) == 1 and leaf.ndim == 2 else plain

    return jax.tree.map(view, params, _axes_of(dimensions, params))


def _layout(name: str, dimensions: Any) -> FieldMap:
    def view(tree: Any, params: Any) -> Any:
        return jax.tree.map(lambda x, view: view.of(x), tree, _views(name, dimensions, params))

    def back(tree: Any, params: Any) -> Any:
        return jax.tree.map(lambda x, view: view.back(x), tree, _views(name, dimensions, params))

    return FieldMap(
        lambda known, params: {"m": view(known["mu"], params)}, lambda new, params: {"mu": back(new.m, params)},
        view, back,
    )  # fmt: skip


def _muon(
    name: str, values: Mapping[str, Any], dimensions: Any, hyper: Mapping[str, Any], size: str, mask: Any = None
) -> optax.GradientTransformationExtraArgs:
    """The transformation of leaves that are matrices; without a `size` it is the direction alone."""
    polynomials, steps = _polynomials(name, values)
    word = values["preconditioning"]
    if word not in _NORMALIZED:
        raise HyperError(f"rulec.jax.{name} has preconditioning={word!r}: give {', '.join(_NORMALIZED)}")
    rule = _rule(polynomials, steps, bool(values["nesterov"]), bool(values["adaptive"]), word, size)
    known = rule.settings
    every = {"momentum": values["beta"], "eps": values["eps"], **hyper}
    group = Group(rule, {name: value for name, value in every.items() if name in known})
    storage = options({} if values["mu_dtype"] is None else {"m": values["mu_dtype"]}, False, 0)

    def ours(params: Any, count: Any) -> optax.GradientTransformationExtraArgs:
        return Maker(group, marked(mask, params), storage).transformation()

    group.check()
    return with_state_of(BUILT[name].theirs(**values), ours, _layout(name, dimensions))


def _numbers_by(axes: AxisRoles) -> Callable[[Any], Any]:
    """The function from parameters to optax's numbers of axes, by their roles: None for a leaf that is no matrix."""

    def numbers(params: Any) -> Any:
        tree = flat(params, "the parameter")
        axes.check(tree.names)
        pairs = zip(tree.names, tree.arrays, strict=True)
        return tree.holding([_numbers_of(axes.of(name, array.shape), array.ndim) for name, array in pairs])

    return numbers


def _numbers_of(one: Orientation | None, count: int) -> MuonDimensionNumbers | None:
    """optax's numbers of axes of a leaf with an orientation; without one it lies as torch keeps matrices."""
    if one is None:
        return MuonDimensionNumbers(1, 0) if count == 2 else None
    outputs = tuple(axis for axis, role in enumerate(one.roles) if role == "outputs")
    inputs = tuple(axis for axis, role in enumerate(one.roles) if role in ("inputs", "window"))
    return MuonDimensionNumbers(inputs, outputs) if inputs and outputs else None


@built(
    "contrib.scale_by_muon",
    "muon",
    "a momentum corrected for its start; `ns_coeffs`, `preconditioning`, `adaptive`",
    ("weight_dimension_numbers", _numbers_by),
)
def scale_by_muon(values: Mapping[str, Any]) -> optax.GradientTransformationExtraArgs:
    """The direction of Muon alone, for a learning rate to follow."""
    return _muon("contrib.scale_by_muon", values, values["weight_dimension_numbers"], {}, "")


@built(
    "contrib.muon",
    "muon",
    "as `scale_by_muon`; `consistent_rms`; any axes as a matrix",
    ("muon_weight_dimension_numbers", _numbers_by),
)
def muon(values: Mapping[str, Any]) -> optax.GradientTransformationExtraArgs:
    """Orthogonalized momentum for matrices, and AdamW for all else."""
    name, dimensions, rms = "contrib.muon", values["muon_weight_dimension_numbers"], values["consistent_rms"]
    rate = values["learning_rate"]
    hyper = {"lr": rate, "weight_decay": values["weight_decay"]} | ({} if rms is None else {"consistent_rms": rms})
    matrices = _muon(name, values, dimensions, hyper, _SIZES[rms is not None], values["weight_decay_mask"])
    adam = function_named("adamw")(
        rate if values["adam_learning_rate"] is None else values["adam_learning_rate"], b1=values["adam_b1"],
        b2=values["adam_b2"], eps=values["eps"], eps_root=values["adam_eps_root"],
        weight_decay=values["adam_weight_decay"], mu_dtype=values["mu_dtype"], nesterov=values["nesterov"],
    )  # fmt: skip
    rest = with_state_of(adam, lambda params, count: adam, renamed(mu="mu", nu="nu"))

    def labels(params: Any) -> Any:
        return jax.tree.map(lambda axes: "adam" if axes.numbers is None else "muon", _axes_of(dimensions, params))

    parts = optax.partition({"muon": matrices, "adam": rest}, labels)
    return optax.GradientTransformationExtraArgs(BUILT[name].theirs(**values).init, parts.update)
