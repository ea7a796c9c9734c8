"""`check_backend`: the backend protocol as a test, for our backends and everyone else's.

A backend MUST keep these points:

- It has a name. Its reason for being unavailable is None or one line.
- It prints the same text for the same program and layout, without importing a framework.
- It prints any program, or refuses it as BackendUnsupported.
- It computes every elementwise operation by the definition in `rulec.language.expr.arithmetic`, within its stated ulps,
  also for zeros, infinities, NaN and the ends of the formats.
- It computes every rule it prints, in every dtype and for tensors of any shape, empty and 0-d ones included. Elements
  may begin anywhere in memory. Each tensor has its own row of the scalar table, by the index.
- It computes every value of a step before it stores one.
- It runs rules with any names in them, programs without a store, and programs with an unused input.
- It runs a stage for all tensors, or for only `tensors`, in their order. Every bit of other tensors, of gradients, and
  of buffers without a store in the stage stays as it was.
- It reduces per tensor, row and column of the rule's matrices, in float64. An empty sum is 0, and empty extremes are
  infinite.
- It reduces for statistics of a step as for a rule, in one pass with it.
- It reads the scratch, inputs, vectors and late columns of each call, and keeps none of them.
- It gives the same bits for a tensor's reductions with any neighbours, and every time.
- It stores parameters, gradients and each state in dtypes of their own.
- It propagates NaN and infinity as in IEEE 754.
- It negates gradients in a layout with `maximize`.
- It serves several sets of tensors with one kernel.
- It has what it offers beyond its three methods, as `rulec.backend.capabilities` defines it.
- With `on_device`, it takes the scalar table as NumPy's or as an array of the tensors' kind. It reduces tensors with
  `stays` and leaves them as they were, and it divides gradients by `scale`.
- It gives the reference's steps in the runtime, where the runtime knows its arrays.
- It returns `(params, states)`: the bound arrays where arrays are mutable, otherwise new ones.

It SHOULD give the same bits for a tensor's stored values with any neighbours, and every time. It MAY refuse rules, as
BackendUnsupported.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

import rulec
from rulec.backend import registry
from rulec.backend.capabilities import capabilities_of
from rulec.backend.protocol import Backend, Kernel
from rulec.compiler.layout import Layout, array_buffers, layout_for
from rulec.compiler.pipeline import compile
from rulec.compiler.view import view_of
from rulec.errors import BackendUnavailable, BackendUnsupported
from rulec.language.rule import Rule
from rulec.language.statistics import watched
from rulec.testing.capabilities import check_capabilities
from rulec.testing.cases import (
    LARGE_SHAPES,
    MATRIX_SHAPES,
    SHAPES,
    SPECIAL,
    STATISTICS,
    Bucket,
    buckets_of,
    gradients,
    hostile_rules,
    hyper_values,
    loaded,
    operation_rules,
    parameters,
    staged_rules,
)
from rulec.testing.drawn import OnDevice
from rulec.testing.interval import Array
from rulec.testing.kinds import IEEE, MLX, XLA, ArrayKind, Numerics, kind_named, kind_of
from rulec.testing.purity import check_emit_is_pure
from rulec.testing.trial import Subject, Trial
from rulec.testing.whole import check_whole

#: Backend -> its arithmetic, where it is not IEEE's.
_NUMERICS = {"jax": XLA, "mlx": MLX}

_NOT_ELEMENTWISE = (
    "name: Normed\nstep: |\n  direction = g/norm(g)\n",
    "name: Squared\nstep: |\n  direction = g @ transpose(g) @ g\n",
)


@dataclass
class Report:
    """The result for a backend that passed.

    It was tested on `rules` and `dtypes`, and refused the rules in `refused`. `unmet` has a sentence for each SHOULD
    that does not hold. `stages` is true where it runs programs of several stages, as for reductions. `capabilities` are
    the names of what it has beyond its three methods, as `rulec.backend.capabilities.Capabilities` names them.
    """

    backend: str
    rules: list[str] = field(default_factory=list)
    dtypes: list[str] = field(default_factory=list)
    refused: list[str] = field(default_factory=list)
    unmet: list[str] = field(default_factory=list)
    stages: bool = True
    capabilities: list[str] = field(default_factory=list)


def check_backend(
    backend: str | Backend, rules: Iterable[str] | None = None, dtypes: Iterable[str] | None = None,
    arrays: str | ArrayKind | None = None, *, numerics: Numerics | None = None,
) -> Report:  # fmt: skip
    """Checks a backend, by name or itself, against the protocol. Returns a report where it passes.

    `rules` are names or paths of rules, by default the whole library. `dtypes` are for parameters, gradients and
    states, by default all dtypes of the arrays. `arrays` is the kind of arrays for the backend: "numpy", "torch",
    "jax", or an object like `rulec.testing.NumpyKind`. `numerics` is the exactness of its arithmetic, by default IEEE:
    every tolerance follows from it.

    Raises AssertionError, in one sentence, at the first MUST that does not hold, and BackendUnavailable where the
    backend cannot run here.
    """
    subject = _subject(backend, arrays, numerics)
    chosen = list(dtypes or subject.kind.dtypes)
    report = Report(subject.backend.name, dtypes=chosen)
    for piece in contract(list(rules) if rules is not None else rulec.rules(), chosen):
        piece.check(subject, report)
    return report


@dataclass(frozen=True)
class Piece:
    """A piece of the contract, named by its rule or its subject, that can be checked alone.

    `check` takes the subject and a report, and adds to the report. It raises AssertionError where a MUST does not hold.
    """

    name: str
    check: Callable[[Subject, Report], None]


def contract(names: Sequence[str], dtypes: Sequence[str]) -> list[Piece]:
    """All of `check_backend` for rules and dtypes, in its order. Names are different."""
    ends = list({dtypes[0]: 0, dtypes[-1]: 0})
    return [
        Piece("printing", lambda subject, _: check_emit_is_pure(subject.backend, names, dtypes)),
        Piece("refusal", lambda subject, _: check_refusal(subject.backend)),
        Piece("capabilities", lambda subject, report: report.capabilities.extend(check_capabilities(subject))),
        *(_operations(dtype) for dtype in dtypes if dtype in ("float32", "float64")),
        *(_of_library(name, dtypes) for name in names),
        *(_of_rule(rule, ends) for rule in hostile_rules()),
        *(_of_stages(rule, dtypes) for rule in staged_rules()),
        *(_of_statistics(name, dtypes) for name in ("adamw", "lamb")),
        Piece("storage", lambda subject, report: _check_storage(subject, report, names, dtypes)),
    ]


def _operations(dtype: str) -> Piece:
    return Piece(f"operations in {dtype}", lambda subject, _: check_operations(subject, dtype))


def _of_library(name: str, dtypes: Sequence[str]) -> Piece:
    def check(subject: Subject, report: Report) -> None:
        try:
            rule = loaded(name)
            for dtype in dtypes:
                check_rule(subject, rule, dtype)
            if "float64" in dtypes:
                check_whole(subject, rule)
            report.rules.append(name)
        except BackendUnsupported:
            report.refused.append(name)

    return Piece(name, check)


def _of_rule(rule: Rule, dtypes: Sequence[str]) -> Piece:
    def check(subject: Subject, _: Report) -> None:
        for dtype in dtypes:
            check_rule(subject, rule, dtype)

    return Piece(rule.name, check)


def _of_stages(rule: Rule, dtypes: Sequence[str]) -> Piece:
    def check(subject: Subject, report: Report) -> None:
        try:
            check_stages(subject, rule, dtypes)
        except BackendUnsupported:
            report.stages = False

    return Piece(rule.name, check)


def _of_statistics(name: str, dtypes: Sequence[str]) -> Piece:
    def check(subject: Subject, report: Report) -> None:
        try:
            for dtype in dtypes:
                check_statistics(subject, loaded(name), dtype)
        except BackendUnsupported:
            report.stages = False

    return Piece(f"statistics of {name}", check)


def _check_storage(subject: Subject, report: Report, names: Sequence[str], dtypes: Sequence[str]) -> None:
    """Storage, ascent and shared kernels of the rule with the most states.

    The rule is an accepted one of the report, or any of `names` where the report has tried none.
    """
    tried = report.rules or report.refused
    accepted = sorted(map(loaded, report.rules if tried else names), key=lambda r: len(r.state))
    for rule in accepted[-1:]:
        check_mixed_dtypes(subject, rule, dtypes)
        check_maximize(subject, rule, dtypes[0])
        check_one_kernel_for_two(subject, rule, dtypes[0])
        check_on_device(subject, rule, dtypes[0])
        report.unmet += unmet(subject, rule, dtypes[0])


def _subject(backend: str | Backend, arrays: str | ArrayKind | None, numerics: Numerics | None) -> Subject:
    tested = registry.get(backend) if isinstance(backend, str) else backend
    if not isinstance(tested, Backend) or not isinstance(tested.name, str) or not tested.name:
        raise AssertionError(f"{tested!r} is no backend: it needs a name, unavailable_reason, emit and build")
    reason = tested.unavailable_reason()
    if reason is not None:
        if not isinstance(reason, str) or "\n" in reason.strip() or not reason.strip():
            raise AssertionError(f"backend {tested.name!r} gives {reason!r} as its reason: one line is wanted, or None")
        raise BackendUnavailable(f"backend {tested.name!r} cannot be checked here: {reason}")
    kind = kind_of(tested) if arrays is None else kind_named(arrays) if isinstance(arrays, str) else arrays
    return Subject(tested, kind, numerics or _NUMERICS.get(tested.name, IEEE))


def check_refusal(backend: Backend) -> None:
    """MUST print or refuse any program, without another error for reductions and matrix functions."""
    for text in _NOT_ELEMENTWISE:
        program = compile(rulec.parse(text))
        try:
            source = backend.emit(program, layout_for(program, "float32"))
        except BackendUnsupported:
            continue
        except Exception as error:
            fault = f"raises {type(error).__name__} for {program.name}, where it may only raise BackendUnsupported"
            raise AssertionError(f"backend {backend.name!r} {fault}") from error
        if not isinstance(source, str):
            kind = type(source).__name__
            raise AssertionError(f"backend {backend.name!r} prints {program.name} as {kind}, not as text")


def check_operations(subject: Subject, dtype: str) -> None:
    """MUST compute every operation, on all pairs of special values, within its ulps."""
    with np.errstate(all="ignore"):
        values = np.array(SPECIAL).astype(dtype).astype(np.float64)
    g, p = (x.reshape(-1) for x in np.meshgrid(values, values))
    for rule in operation_rules():
        program = compile(rule)
        try:
            trial = Trial(subject, rule, program, layout_for(program, dtype), [p], [{}])
        except BackendUnsupported:
            continue  # it MAY refuse an operation
        trial.step({0: g})


def check_rule(subject: Subject, rule: Rule, dtype: str, shapes: Sequence[tuple[int, ...]] = SHAPES) -> None:
    """MUST run a rule on tensors of many shapes, on some of them alone, and with NaN and infinity."""
    for bucket in buckets_of(rule, shapes):
        run(trial_of(subject, bucket, layout_of(bucket, dtype)))


def layout_of(bucket: Bucket, param: str, **options: Any) -> Layout:
    """The layout of a bucket, with further options of `layout_for`."""
    return layout_for(bucket.program, param, transposed=bucket.transposed, **options)


def trial_of(
    subject: Subject, bucket: Bucket, layout: Layout, kernel: Kernel | None = None,
    shapes: Sequence[tuple[int, ...]] | None = None,
) -> Trial:  # fmt: skip
    """A trial on the tensors of a bucket, or on other `shapes` of its program, with parameters drawn from a seed."""
    chosen = bucket.shapes if shapes is None else shapes
    hyper = hyper_values(bucket.rule, len(chosen))
    return Trial(subject, bucket.rule, bucket.program, layout, parameters(chosen, 0), hyper, kernel)


def run(trial: Trial, seed: int = 0) -> None:
    """Steps of all tensors, of some, of one, with some skipped, and with NaN and infinity in gradients."""
    shapes = trial.shapes
    for step, special in enumerate((False, False, False, False, True, False)):
        grads = gradients(shapes, 10 * seed + step, special)
        everything = list(grads)
        fired = {1: everything[1::2], 3: everything[::-3]}.get(step) or everything
        trial.step({i: grads[i] for i in fired}, skipped=fired[1::3] if step in (2, 3) else ())


def check_stages(subject: Subject, rule: Rule, dtypes: Sequence[str]) -> None:
    """MUST run every stage of a program with its reductions, in all dtypes, views and sizes."""
    for dtype in dtypes[:1] if rule.view else dtypes:
        check_rule(subject, rule, dtype, MATRIX_SHAPES)
    for bucket in buckets_of(rule, LARGE_SHAPES):
        trial_of(subject, bucket, layout_of(bucket, dtypes[0])).step(gradients(bucket.shapes, 0))
    bucket = buckets_of(rule, MATRIX_SHAPES[6:])[0]
    run(trial_of(subject, bucket, layout_of(bucket, dtypes[-1], grad=dtypes[0], maximize=True)))
    check_neighbours(subject, rule, dtypes[0])
    check_on_device(subject, rule, dtypes[-1], MATRIX_SHAPES[2:])
    if "float64" in dtypes:
        check_whole(subject, rule)


def check_statistics(
    subject: Subject, rule: Rule, dtype: str, shapes: Sequence[tuple[int, ...]] = MATRIX_SHAPES
) -> None:
    """MUST reduce for statistics of a step as for a rule: of its values, per tensor, row and column."""
    for bucket in buckets_of(rule, shapes):
        facts = view_of(bucket.rule, bucket.shapes[0]).facts
        measuring = replace(bucket, program=compile(bucket.rule, facts, watch=watched(bucket.rule, STATISTICS)))
        trial = trial_of(subject, measuring, layout_of(measuring, dtype))
        for step, special in enumerate((False, True)):
            trial.step(gradients(bucket.shapes, step, special))


def check_on_device(subject: Subject, rule: Rule, dtype: str, shapes: Sequence[tuple[int, ...]] = SHAPES) -> None:
    """MUST, with `on_device`, run steps with rows, `stays` and `scale` on the device."""
    if not capabilities_of(subject.backend).on_device:
        return
    for bucket in buckets_of(rule, shapes):
        trial = trial_of(subject, bucket, layout_of(bucket, dtype))
        everything = list(range(len(bucket.shapes)))
        trial.step(gradients(bucket.shapes, 0), on_device=OnDevice())
        trial.step(gradients(bucket.shapes, 1), on_device=OnDevice(stays=everything[::2], scale=3.0))
        grads = gradients(bucket.shapes, 2)
        trial.step({i: grads[i] for i in everything[::-2]}, on_device=OnDevice(stays=[], scale=65536.0))
        trial.step(gradients(bucket.shapes, 3, True), on_device=OnDevice(stays=everything))
        trial.step(gradients(bucket.shapes, 4))


def check_neighbours(subject: Subject, rule: Rule, dtype: str) -> None:
    """MUST give the same bits for a tensor's reductions alone and among others, and every time."""
    for bucket in buckets_of(rule, [(33, 65), (2, 9, 40), (33, 65), (301, 250)]):
        # One is judged; equal bits need no second judge.
        first, again, alone = (
            [x.tobytes() for x in _first_reductions(subject, bucket, dtype, shapes, judged)]
            for shapes, judged in ((bucket.shapes, True), (bucket.shapes, False), (bucket.shapes[:1], False))
        )
        title = f"backend {subject.backend.name!r}, {rule.name} in {dtype}:"
        if first != again:
            raise AssertionError(f"{title} a second run gives other bits of a reduction")
        if first != alone:
            raise AssertionError(f"{title} the bits of a tensor's reductions depend on its neighbours")


def _first_reductions(
    subject: Subject, bucket: Bucket, dtype: str, shapes: Sequence[tuple[int, ...]], judged: bool
) -> list[Array]:
    """The reductions of the first tensor in a step."""
    trial = trial_of(subject, bucket, layout_of(bucket, dtype), shapes=shapes)
    trial.step(gradients(shapes, 1), judged=judged)
    return [arrays[0] for arrays in trial.reductions.values()]


def _main_bucket(rule: Rule) -> Bucket:
    """The bucket of a rule with the most shapes."""
    return max(buckets_of(rule, MATRIX_SHAPES), key=lambda bucket: len(bucket.shapes))


def check_mixed_dtypes(subject: Subject, rule: Rule, dtypes: Sequence[str]) -> None:
    """MUST store parameters, gradients and each state in dtypes of their own."""
    bucket = _main_bucket(rule)
    states = [b.name for b in array_buffers(bucket.program) if b.role == "state"]
    for turn, dtype in enumerate(dtypes):
        others = [*dtypes[turn + 1 :], *dtypes[:turn], dtype]
        chosen = {name: others[i % len(others)] for i, name in enumerate(states)}
        layout = layout_of(bucket, dtype, grad=others[-2 % len(others)], states=chosen)
        run(trial_of(subject, bucket, layout, shapes=bucket.shapes[:4]))


def check_maximize(subject: Subject, rule: Rule, dtype: str) -> None:
    """MUST negate gradients in a layout with `maximize`."""
    bucket = _main_bucket(rule)
    run(trial_of(subject, bucket, layout_of(bucket, dtype, maximize=True), shapes=bucket.shapes[:4]))


def check_one_kernel_for_two(subject: Subject, rule: Rule, dtype: str) -> None:
    """MUST serve several sets of tensors with one kernel, turn by turn."""
    bucket = _main_bucket(rule)
    layout = layout_of(bucket, dtype)
    kernel = subject.kernel(bucket.program, layout)
    trials = [trial_of(subject, bucket, layout, kernel, shapes) for shapes in (bucket.shapes[-3:], bucket.shapes[:2])]
    for step in range(2):
        for trial in trials:
            trial.step(gradients(trial.shapes, step))


def unmet(subject: Subject, rule: Rule, dtype: str) -> list[str]:
    """A sentence for each SHOULD that does not hold: the same bits alone and among others, and every time."""
    bucket = _main_bucket(rule)
    shapes = bucket.shapes[::-1]

    def bits(count: int) -> list[bytes]:
        trial = trial_of(subject, bucket, layout_of(bucket, dtype), shapes=shapes[:count])
        trial.step(gradients(trial.shapes, 1))
        return [value.tobytes() for value in trial.values(0).values()]

    first, again, alone = bits(3), bits(3), bits(1)
    faults = [] if first == again else ["a second run gives other bits"]
    return faults + ([] if first == alone else ["a tensor's bits depend on its neighbours"])
