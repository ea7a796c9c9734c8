"""Whole steps through the runtime, beside the reference: all stages, the values between them, and several tensors."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, cast

import numpy as np

from rulec.array.arrays import NumpyArrays
from rulec.compiler.inputs import drawn_input
from rulec.compiler.matrix import takes_eigenvectors
from rulec.compiler.reference import ReferenceOptimizer
from rulec.errors import RulecError
from rulec.language.expr.node import Op, walk
from rulec.language.expr.static import inside, settings
from rulec.language.inputs import LIKE_P, InputKind, per_tensor
from rulec.language.rule import Rule
from rulec.language.rule_data import assignments
from rulec.runtime.arrays import Arrays
from rulec.runtime.engine import Engine, default_hyper
from rulec.testing.cases import gradients, hyper_values, parameters
from rulec.testing.interval import Array
from rulec.testing.kinds import EPS, ArrayKind
from rulec.testing.trial import Subject

#: Of one to four dimensions, batches of matrices, tall and wide, in two groups; and nothing at all.
SHAPES: tuple[tuple[int, ...], ...] = ((), (7,), (12, 5), (0,), (6, 9), (3, 5, 4), (2, 4, 3, 5), (12, 5))

#: The same for rules with eigenvectors, with only square matrices, also when a batch of them is joined. Eigenvectors of
#: a matrix without full rank are not determined: rounding chooses them, and differs between libraries.
SQUARE_SHAPES: tuple[tuple[int, ...], ...] = ((), (7,), (5, 5), (0,), (8, 8), (6, 2, 3), (8, 2, 2, 2), (5, 5))

#: Largest difference of a tensor from the reference's, relative to its largest element: a million times the rounding of
#: float64, as rules may enlarge it, and far less than the effect of a wrong formula.
TOLERANCE = 2.0**-32


def tolerance(rule: Rule) -> float:
    """The tolerance of a rule: larger for matrix functions in fewer digits, by a few units of their last place."""
    values = walk([line.value for line in assignments(rule.step)])
    narrow = [EPS[settings(n)["dtype"] or "float64"] for n in values if inside(n).op is Op.NEWTON_SCHULZ]
    return max([TOLERANCE, *(8 * eps for eps in narrow if eps > EPS["float64"])])


def runtime_arrays(kind: ArrayKind) -> Arrays | None:
    """The runtime's interface to a kind of arrays; None for arrays unknown to the runtime."""
    if kind.name == "numpy":
        return NumpyArrays()
    if kind.name == "torch":
        from rulec.torch.tensors.tensors import TorchArrays

        return TorchArrays()
    if kind.name == "cupy":
        from rulec.array.cupy import CupyArrays

        return CupyArrays(0)
    return None


def check_whole(subject: Subject, rule: Rule) -> None:
    """MUST serve the runtime: a rule's steps in float64 are the reference's, for tensors of many shapes at once.

    Rules without a reference run on these shapes, and arrays unknown to the runtime, are not checked.
    """
    if runtime_arrays(subject.kind) is None:
        return
    shapes = SQUARE_SHAPES if takes_eigenvectors(rule) else SHAPES
    try:
        reference = _reference(rule, shapes, 0)
        reference.step(_gradients(shapes, 0), inputs=_inputs(rule, shapes, 0))
    except RulecError:
        return
    check_against_reference(subject, rule, shapes)


def check_against_reference(
    subject: Subject, rule: Rule, shapes: Sequence[tuple[int, ...]], seed: int = 0, special: bool = False
) -> None:
    """Runs four steps of a rule, of all tensors or of some, through the runtime and in the reference.

    AssertionError where they differ. The numbers follow from `seed`; with `special`, the last gradients have infinities
    and NaN.
    """
    arrays = runtime_arrays(subject.kind)
    if arrays is None:
        raise ValueError(f"the runtime does not know the arrays of {subject.kind.name}")
    reference = _reference(rule, shapes, seed)
    engine = Engine(rule, arrays, cast(Any, subject.backend))
    params = [subject.kind.make(p) for p in parameters(shapes, seed + 5)]
    ids = [engine.add(p, _group(i), f"tensor {i}", layer=(i, len(params))) for i, p in enumerate(params)]
    table = engine.hyper_table([default_hyper(rule, hyper_values(rule, 1)[0], "float64")] * 2)
    for step in range(4):
        grads = _gradients(shapes, seed + step, special and step == 3)
        inputs = _inputs(rule, shapes, step)
        fired = (ids[1::2] or ids) if step == 2 else ids
        reference.step([g if i in fired else None for i, g in enumerate(grads)], inputs=inputs)
        arguments = {
            k: [subject.kind.make(v[i]) for i in fired] if isinstance(v, list) else v for k, v in inputs.items()
        }
        engine.step(tuple(fired), [subject.kind.make(grads[i]) for i in fired], table, arguments)
        _compare(subject, rule, step + 1, [subject.kind.read(p) for p in params], reference.params)


def _group(index: int) -> int:
    return index % 2


def _reference(rule: Rule, shapes: Sequence[tuple[int, ...]], seed: int) -> ReferenceOptimizer:
    hyper = hyper_values(rule, 1)[0]
    groups = [_group(i) for i in range(len(shapes))]
    return ReferenceOptimizer(rule, parameters(shapes, seed + 5), [hyper, hyper], groups=groups)


def _gradients(shapes: Sequence[tuple[int, ...]], seed: int, special: bool = False) -> list[Array]:
    return list(gradients(shapes, 100 + seed, special).values())


def _inputs(rule: Rule, shapes: Sequence[tuple[int, ...]], step: int) -> dict[str, Any]:
    """Input of the rule -> a number, or an array for each tensor."""
    return {
        name: _arrays(rule, kind, shapes, 50 + step) if per_tensor(kind) else 1.5 / (1 + step)
        for name, kind in rule.inputs.items()
    }


def _arrays(rule: Rule, kind: InputKind, shapes: Sequence[tuple[int, ...]], seed: int) -> list[Array]:
    if kind == LIKE_P:
        return parameters(shapes, seed)
    rng = np.random.default_rng(seed)
    return [drawn_input(rule, kind, shape, rng, hyper_values(rule, 1)[0]) for shape in shapes]


def _compare(subject: Subject, rule: Rule, step: int, got: Sequence[Array], wanted: Sequence[Array]) -> None:
    allowed = tolerance(rule)
    for ours, theirs in zip(got, wanted, strict=True):
        size = np.max(np.abs(theirs), initial=0.0, where=np.isfinite(theirs))
        with np.errstate(invalid="ignore"):
            near = np.abs(ours - theirs) <= allowed * size
        same = (ours == theirs) | (np.isnan(ours) & np.isnan(theirs)) | near
        if not same.all():
            at = tuple(int(i) for i in np.unravel_index(int(np.argmax(~same)), same.shape))
            raise AssertionError(
                f"backend {subject.backend.name!r}, {rule.name} in float64: after step {step} of the runtime, "
                f"element {at} of a tensor of shape {ours.shape} is {ours[at]:.17g} where the reference has "
                f"{theirs[at]:.17g}"
            )
