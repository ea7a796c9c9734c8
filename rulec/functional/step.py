"""One step as a pure function: new parameters, or their changes, and a new state, out of old ones.

It is traced as a whole, so that a framework's compiler sees every stage of every bucket at once. The loop is as in
`rulec.runtime`: for each bucket its stages, and between them values narrower than a parameter, in float64.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from rulec.compiler.across_shapes import apart
from rulec.functional.bucket_step import BucketStep
from rulec.functional.step_values import StepValues
from rulec.functional.values import Values
from rulec.runtime.buckets.reductions import Joining, joined


def run_step(step: StepValues, kind: type[BucketStep] = BucketStep) -> tuple[list[Any], Values]:
    """Runs all buckets: the results of all leaves in order, and the new state."""
    return run_buckets(step, [kind(step, bucket) for bucket in step.plan.buckets])


def run_buckets(step: StepValues, runs: Sequence[BucketStep]) -> tuple[list[Any], Values]:
    """The same, of the shares of all buckets in order."""
    together: dict[int, list[BucketStep]] = {}
    for run in runs:
        if not run.bucket.plan.alone:
            together.setdefault(id(run.bucket.owner), []).append(run)
            continue
        for _ in run.steps():
            raise AssertionError("a bucket that is alone waits for another")
    for partners in together.values():
        _run_together(partners)
    step.new.count = step.counted()
    return [step.result(place) for place in range(len(step.plan.leaves))], step.new


def _run_together(runs: Sequence[BucketStep]) -> None:
    """Runs the buckets of one rule together: each stops at a shared reduction until all have reached it."""
    running = [run.steps() for run in runs]
    waiting: list[Any] = [next(steps, None) for steps in running]
    while any(waiting):
        joins = [join for join in waiting if join is not None]
        if len(joins) < len(waiting) or len({(join.site, join.op, join.level, join.per_group) for join in joins}) > 1:
            raise apart(runs[0].bucket.owner.name, "leaves")
        results = joined(joins)
        waiting = [_next(steps, result) for steps, result in zip(running, results, strict=True)]


def _next(steps: Joining, result: Any) -> Any:
    try:
        return steps.send(result)
    except StopIteration:
        return None
