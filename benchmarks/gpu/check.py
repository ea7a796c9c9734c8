"""Every rule on the device against the float64 reference, in every dtype, on small tensors."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np

import rulec
from benchmarks.gpu.device import Bench
from benchmarks.gpu.part import Checked, Part, sentence
from benchmarks.reductions import rule_of
from rulec.backend import registry
from rulec.compiler.layout import FLOATS, layout_for
from rulec.errors import BackendUnavailable, BackendUnsupported
from rulec.language.rule import Rule
from rulec.testing import conformance
from rulec.testing.cases import (
    SHAPES,
    SPECIAL,
    buckets_of,
    hostile_rules,
    hyper_values,
    loaded,
    operation_rules,
    parameters,
    staged_rules,
)
from rulec.testing.interval import Array, Range
from rulec.testing.judge import Judge, Values
from rulec.testing.kinds import IEEE, TorchKind
from rulec.testing.trial import Subject, Trial
from rulec.testing.whole import check_whole

#: The backends that run on a GPU through torch's tensors.
BACKENDS = ("triton", "cupy")

#: The dtypes that arithmetic is done in.
_COMPUTED = ("float32", "float64")

#: Seconds for one rule in all dtypes, and for a slow one in one dtype.
PER_RULE, PER_DTYPE = 80.0, 150.0

#: Rules whose kernels take minutes to compile: their dtypes are parts of their own.
SLOW = ("ranger21",)

#: Rules whose steps are checked with statistics: of one stage, of several, and of rows and columns.
MEASURED = ("adamw", "lamb", "adafactor")


class Measure(Judge):
    """A judge that keeps the largest difference from the reference, relative to the largest number of its buffer."""

    difference = 0.0

    def is_rounded(self, *_: Any) -> bool:
        """No: the difference is measured also where NumPy rounds alike."""
        return False

    def compare(
        self, fired: Sequence[int], name: str, after: Values, allowed: Range, want: Array, stays: Sequence[int]
    ) -> None:
        """Also compares the buffer with the reference's, and keeps the difference where it is the largest."""
        super().compare(fired, name, after, allowed, want, stays)
        got = np.concatenate([np.asarray(after[i][name]).astype(np.float64).reshape(-1) for i in fired])
        usual = np.isfinite(got) & np.isfinite(want)
        size = np.max(np.abs(want), initial=0.0, where=usual)
        if size > 0:
            far = float(np.max(np.abs(got - want), initial=0.0, where=usual))
            self.difference = max(self.difference, far / float(size))


def _difference(trial: Trial) -> float:
    """The largest difference in a trial with a `Measure` as its judge."""
    assert isinstance(trial.judge, Measure)
    return trial.judge.difference


def usable_backends() -> tuple[list[str], list[str]]:
    """The backends that can be checked here, and a sentence for each of the others with the reason."""
    usable, reasons = [], []
    for name in BACKENDS:
        try:
            registry.usable(name)
            usable.append(name)
        except BackendUnavailable as error:
            reasons.append(f"correctness, {name}: not run: {error}")
    return usable, reasons


def parts(backends: Sequence[str], only: Sequence[str]) -> list[Part]:
    """A part for each rule on each backend, of the whole library or of `only`; without `only` also hard test rules."""
    return [part for backend in backends for part in _parts(backend, only)]


def _parts(backend: str, only: Sequence[str]) -> Iterator[Part]:
    names = only or rulec.rules()
    yield from rule_parts(backend, [name for name in names if name in SLOW])  # what takes longest is begun first
    if not only:
        yield from operation_parts(backend)
        yield from hard_parts(backend)
        yield from statistics_parts(backend)
    yield from rule_parts(backend, [name for name in names if name not in SLOW])


def operation_parts(backend: str) -> Iterator[Part]:
    """Every operation, in each dtype of arithmetic."""
    for dtype in _COMPUTED:
        yield Part(f"operations in {dtype}, {backend}", operations, (backend, dtype), 2 * PER_RULE)


def hard_parts(backend: str) -> Iterator[Part]:
    """Each rule made to be hard."""
    for test in (*hostile_rules(), *staged_rules()):
        yield Part(f"stages of {test.name}, {backend}", stages, (backend, test.name), 2 * PER_RULE)


def rule_parts(backend: str, names: Iterable[str]) -> Iterator[Part]:
    """Each of these rules; of a slow one each dtype."""
    for name in names:
        if name not in SLOW:
            yield Part(f"correctness of {name}, {backend}", rule, (backend, name), PER_RULE)
            continue
        for dtype in FLOATS:
            title = f"correctness of {name} in {dtype}, {backend}"
            yield Part(title, rule, (backend, name, (dtype,)), PER_DTYPE)


def statistics_parts(backend: str) -> Iterator[Part]:
    """Statistics of steps of a few rules."""
    for name in MEASURED:
        yield Part(f"statistics of {name}, {backend}", statistics, (backend, name), PER_RULE)


def subject_of(bench: Bench, backend: str) -> Subject:
    """A backend on the device, with torch's tensors."""
    return Subject(registry.usable(backend), TorchKind(bench.device.name), IEEE)


def rule(bench: Bench, backend: str, name: str, dtypes: Sequence[str] = FLOATS) -> Iterator[Checked]:
    """A rule of the library in these dtypes, stage by stage, and in float64 through the engine as well."""
    subject = subject_of(bench, backend)
    tested = loaded(name) if name in rulec.rules() else rule_of(name)
    for dtype in (dtype for dtype in _dtypes(bench) if dtype in dtypes):
        yield _guarded(bench, Checked(backend, name, dtype), partial(_by_stages, subject, tested, dtype))


def _dtypes(bench: Bench) -> list[str]:
    """All dtypes, or in a quick run the dtypes of arithmetic."""
    return list(_COMPUTED if bench.quick else FLOATS)


def _by_stages(subject: Subject, tested: Rule, dtype: str) -> float:
    """The largest difference over the steps of the conformance suite; AssertionError where one is not allowed."""
    largest = 0.0
    for bucket in buckets_of(tested, SHAPES):
        layout = conformance.layout_of(bucket, dtype)
        hyper = hyper_values(bucket.rule, len(bucket.shapes))
        params = parameters(bucket.shapes, 0)
        trial = Trial(subject, bucket.rule, bucket.program, layout, params, hyper, judge=Measure)
        conformance.run(trial)
        largest = max(largest, _difference(trial))
    if dtype == "float64":
        check_whole(subject, tested)
    return largest


def operations(bench: Bench, backend: str, dtype: str) -> Iterator[Checked]:
    """Every operation, on all pairs of numbers among which are zeros, infinities, NaN and the ends of the formats."""
    subject = subject_of(bench, backend)
    for one in operation_rules():
        checked = Checked(backend, one.name, dtype, kind="operations")
        yield _guarded(bench, checked, partial(_operation, subject, one, dtype))


def _operation(subject: Subject, one: Rule, dtype: str) -> float:
    with np.errstate(all="ignore"):
        values = np.array(SPECIAL).astype(dtype).astype(np.float64)
    g, p = (x.reshape(-1) for x in np.meshgrid(values, values))
    program = rulec.compile(one)
    trial = Trial(subject, one, program, layout_for(program, dtype), [p], [{}], judge=Measure)
    trial.step({0: g})
    return _difference(trial)


def stages(bench: Bench, backend: str, name: str) -> Iterator[Checked]:
    """A rule made to be hard: reductions of every kind in every view, one stage after another, and odd names."""
    subject = subject_of(bench, backend)
    (tested,) = (one for one in (*hostile_rules(), *staged_rules()) if one.name == name)
    checked = Checked(backend, name, "every dtype", kind="test rules")
    yield _guarded(bench, checked, partial(_all_views, subject, tested, _dtypes(bench)))


def _all_views(subject: Subject, tested: Rule, dtypes: Sequence[str]) -> float:
    conformance.check_stages(subject, tested, dtypes)
    return 0.0


def statistics(bench: Bench, backend: str, name: str) -> Iterator[Checked]:
    """Steps of a rule that measure the set norms, and a reduction of every kind, in each dtype."""
    subject = subject_of(bench, backend)
    for dtype in _dtypes(bench):
        checked = Checked(backend, name, dtype, kind="steps with statistics")
        yield _guarded(bench, checked, partial(_with_statistics, subject, loaded(name), dtype))


def _with_statistics(subject: Subject, tested: Rule, dtype: str) -> float:
    conformance.check_statistics(subject, tested, dtype)
    return 0.0


def _guarded(bench: Bench, checked: Checked, check: Callable[[], float]) -> Checked:
    """The outcome of a check; an error that leaves the device useless is raised."""
    try:
        return replace(checked, difference=check())
    except BackendUnsupported as error:
        return replace(checked, refused=sentence(error))
    except Exception as error:
        if not bench.recover():
            raise
        return replace(checked, fault=sentence(error))
