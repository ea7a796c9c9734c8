"""The loop of a step: launch by launch, or all together from one shared reduction to the next."""

from __future__ import annotations

import sys
import time
import warnings
from collections.abc import Mapping, Sequence
from typing import Any

from rulec.compiler.across_shapes import apart
from rulec.compiler.layout import traffic
from rulec.environment import LEVEL
from rulec.errors import PartialUpdate, RuleError
from rulec.runtime.buckets.bucket import Version
from rulec.runtime.buckets.launch import Launch
from rulec.runtime.buckets.reductions import Join, Joining, Processes, Waits, Writing, joined, joined_shares
from rulec.runtime.distributed.all_to_all import OwnerExchange, OwnerRequest, assign, worked
from rulec.runtime.distributed.shards import Partials, completed
from rulec.runtime.stages.run import StagedRun


def may_begin(launch: Launch) -> bool:
    """Whether a launch writes nothing before it waits for values of other launches, or of other ranks."""
    plan = launch.version.plan
    return launch.version.waits and plan.staged and not (plan.stored_early or plan.stored_before_joins)


def begin(launch: Launch) -> tuple[Joining, Waits | None]:
    """Runs a launch to where it waits for other launches or ranks; `run` goes on from there.

    Outside of `run` it is for launches that `may_begin`.
    """
    steps = _written(launch)
    wait = next(steps, None)
    launch.begun = steps, wait
    _take_back(launch, wait is None)
    return launch.begun


def run(launches: Sequence[Launch]) -> None:
    """Runs the launches of one engine or several; together where one needs values of the others.

    PartialUpdate where a later launch fails after an earlier one has written.
    """
    waiting = [launch for launch in launches if launch.version.waits]
    done: list[Launch] = []
    at: list[Launch] = []
    try:
        _check_joins(launches)
        if waiting:
            _run_together(waiting, done, at)
        for launch in launches:
            if not launch.version.waits:
                at[:] = [launch]
                for _ in _written(launch):
                    raise RuleError(f"{launch.name} needs a value of the whole model that no other tensor has")
                _take_back(launch, done=True)
                done.append(launch)
    except Exception as error:
        told = launches[0].common.processes.fail(error, [t.name for launch in at for t in launch.part.tensors])
        begun = [launch for launch in launches if launch.wrote]
        if begun:
            raise PartialUpdate(f"a step failed after {_updated(begun, done)}: {told}") from error
        if told is error:
            raise
        raise told from told.__cause__
    for launch in launches:
        if launch.skipped:
            _warn(launch)


def _check_joins(launches: Sequence[Launch]) -> None:
    """RuleError where launches take part in other reductions over tensors: of the step, or of its statistics."""
    joining = [launch.version for launch in launches if launch.version.program.joins]
    if len(joining) > 1 and len({_joins_of(version) for version in joining}) > 1:
        raise apart(launches[0].name)


def _joins_of(version: Version) -> tuple[Any, ...]:
    program, plan = version.program, version.plan
    return tuple((n.op, n.arg, program.sites[n], n in plan.joins) for n in program.joins)


def was_interrupted(launches: Sequence[Launch], error: BaseException) -> bool:
    """Whether an interrupt, such as KeyboardInterrupt, ended a run that had written; other errors say so themselves."""
    return not isinstance(error, Exception) and any(launch.wrote for launch in launches)


def _updated(begun: Sequence[Launch], done: Sequence[Launch]) -> str:
    """The tensors that a failed step has updated, in words."""
    names = [t.name for launch in done for t in launch.part.tensors]
    words = [f"{len(names)} tensors were updated ({', '.join(names[:5])}...)"] if done else []
    finished = {id(launch) for launch in done}
    some = [t.name for launch in begun if id(launch) not in finished for t in launch.part.tensors]
    words += [f"some of {', '.join(some[:5])} were updated"] if some else []
    return " and ".join(words)


def _warn(launch: Launch) -> None:
    warnings.warn(
        f"{launch.name} skipped the step of {', '.join(launch.skipped)[:80]}: its skip was true; parameters, states "
        f"and counts are as before",
        RuntimeWarning,
        stacklevel=3,
    )


def _written(launch: Launch) -> Joining:
    """Runs a launch. Yields where it needs values of other launches."""
    bucket, part = launch.part.bucket, launch.part
    begin = time.perf_counter() if LEVEL else 0.0
    if bucket.resident or launch.version.plan.staged:
        yield from StagedRun(launch).run()
    else:
        # Counts advance before the kernel, while they are in the processor's cache; they go back where it fails.
        launch.wrote = True
        bucket.counts.advance(part.fired)
        try:
            reduced = launch.kernel(0, launch.rows, part.positions, launch.grads, None)
            if launch.version.program.watch:
                launch.leave(reduced)
        except Exception:
            bucket.counts.advance(part.fired, -1)
            launch.wrote = False
            raise
        for state, values in launch.scalar_states.items():
            launch.keep_number(state, slice(None) if part.fired is None else part.fired, values)
    if bucket.versions.get(()) is not launch.version:
        launch.count_levels()
    if launch.version.turns:
        bucket.turn(part.fired)
        launch.common.turned += 1
    if LEVEL:
        _report(launch, time.perf_counter() - begin)


def _run_together(launches: Sequence[Launch], done: list[Launch], at: list[Launch]) -> None:
    """Runs launches that share reductions: all of them up to one reduction, then all up to the next.

    Reductions over ranks come first: the collectives of all launches are done together. As a rank may fail, launches
    write after all collectives of a step. `at` has the launches at work.
    """
    joining = [not launch.version.plan.alone for launch in launches]
    running: list[Joining] = []
    processes = launches[0].common.processes
    holds = processes.several
    try:
        waiting: list[Waits | None] = []
        for launch in launches:
            at[:] = [launch]
            steps, wait = launch.begun or begin(launch)
            running.append(steps)
            waiting.append(wait)
        while any(waiting):
            at.clear()
            writing = {i: None for i, wait in enumerate(waiting) if isinstance(wait, Writing)}
            results = ({} if holds else writing) or _of_processes(processes, waiting)
            if holds:
                processes.raise_failure()
            joins = {i: wait for i, wait in enumerate(waiting) if isinstance(wait, Join)}
            if not results and writing and len(joins) < max(1, sum(joining)):
                results = writing
                if holds:
                    processes.conclude()
            for i, result in (results or _joined(launches, joining, joins)).items():
                at[:] = [launches[i]]
                _resume(launches[i])
                try:
                    waiting[i] = running[i].send(result)
                except StopIteration:
                    waiting[i] = None
                    done.append(launches[i])
                _take_back(launches[i], waiting[i] is None)
        if holds:
            processes.end()
    finally:
        for launch in launches:
            stop(launch)


def stop(launch: Launch) -> None:
    """Ends the run of a launch that has begun, whole or not."""
    begun, launch.begun = launch.begun, None
    if begun is not None:
        begun[0].close()


def _resume(launch: Launch) -> None:
    """Has the arrays of a launch that goes on, where values between its stages may be views of them."""
    buffers = launch.version.plan.arrays_read
    if launch.transfers is not None and buffers:
        launch.transfers.bring(launch, buffers=buffers)


def _take_back(launch: Launch, done: bool) -> None:
    if launch.transfers is not None:
        launch.transfers.take_back(launch, done)


def _of_processes(processes: Processes, waiting: Sequence[Waits | None]) -> dict[int, Any]:
    """The results of the collectives of one kind that launches wait for, by launch; empty where no launch waits."""
    assigning = {i: wait for i, wait in enumerate(waiting) if isinstance(wait, OwnerRequest)}
    if assigning:
        assign([*assigning.values()], processes.coordinator)
        return dict.fromkeys(assigning)
    partials = {i: wait for i, wait in enumerate(waiting) if isinstance(wait, Partials)}
    if partials:
        assert processes.coordinator is not None
        return dict(zip(partials, completed([*partials.values()], processes.coordinator), strict=True))
    gatherings = {i: wait for i, wait in enumerate(waiting) if isinstance(wait, OwnerExchange)}
    if not gatherings:
        return {}
    assert processes.coordinator is not None
    return dict(zip(gatherings, worked([*gatherings.values()], processes.coordinator), strict=True))


def _joined(launches: Sequence[Launch], joining: Sequence[bool], joins: Mapping[int, Join]) -> dict[int, Any]:
    """The result of the next reduction over tensors, for each launch that has such reductions."""
    if len(joins) < sum(joining) or len({(j.site, j.op, j.level, j.per_group) for j in joins.values()}) > 1:
        raise apart(launches[0].name)
    shares = [share for i in joins if (share := launches[i].share) is not None]
    each = [*joins.values()]
    return dict(zip(joins, joined_shares(each, shares) if shares else joined(each), strict=True))


def _report(launch: Launch, seconds: float) -> None:
    bucket = launch.part.bucket
    where = f"{launch.name} by {bucket.backend.name} on {bucket.device}, {bucket.layout.text()}"
    line = f"rulec: {where}: {len(launch.grads)} tensors"
    if LEVEL >= 2:
        moved = sum(t.numel for t in launch.part.tensors) * sum(traffic(launch.version.program, bucket.layout))
        line += f", {seconds * 1e6:.1f} us, {moved / seconds / 1e9:.1f} GB/s"
    print(line, file=sys.stderr)
