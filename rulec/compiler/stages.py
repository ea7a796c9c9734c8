"""Cuts a program at its reductions and matrix functions.

A stage reads what it needs and recomputes rather than keeps: every store happens in the last stage, so each stage
sees the values from before the step, and no value is written before its last reader has run.
"""

from __future__ import annotations

from dataclasses import replace

from rulec.compiler.axes import AxisInference
from rulec.compiler.ir import Program, Result, Stage, Store
from rulec.language.node import Kind, Node, Op, node, rewrite, walk

_CUTTING = (Kind.REDUCE, Kind.MATRIX)


def split_stages(program: Program) -> Program:
    """The program as a list of stages, each ending in the reductions and matrix functions the next one reads."""
    stage = program.stages[0]
    roots = [s.value for s in stage.stores]
    level = _levels(roots)
    cuts = [n for n in walk(roots) if n.op.kind in _CUTTING]
    names = {cut: f"{cut.op.name.lower()}_{i}" for i, cut in enumerate(cuts)}
    memo: dict[Node, Node] = {cut: node(Op.RESULT, names[cut]) for cut in cuts}
    new_roots = rewrite(roots, lambda n: n, memo)
    inference = AxisInference(program)
    results: list[list[Result]] = [[] for _ in range(max((level[c] for c in cuts), default=0))]
    for cut in cuts:
        operands = rewrite(cut.args, lambda n: n, memo)
        results[level[cut] - 1].append(Result(names[cut], node(cut.op, *operands, cut.arg), inference.axes(cut)))
    labels = {memo.get(value, value): label for value, label in program.labels.items()}
    stages = [_reducing_stage(found) for found in results]
    stages.append(_storing_stage(program, stage.stores, new_roots))
    return replace(program, stages=tuple(stages), labels=labels)


def _levels(roots: list[Node]) -> dict[Node, int]:
    """For each value, how many stages must have finished before it can be computed."""
    level: dict[Node, int] = {}
    for part in walk(roots):
        below = max((level[a] for a in part.args), default=0)
        level[part] = below + (part.op.kind in _CUTTING)
    return level


def _reducing_stage(results: list[Result]) -> Stage:
    return Stage(
        reduces=tuple(r for r in results if r.value.op.kind is Kind.REDUCE),
        matrix=tuple(r for r in results if r.value.op.kind is Kind.MATRIX),
    )


def _storing_stage(program: Program, stores: tuple[Store, ...], values: list[Node]) -> Stage:
    done = [Store(s.buffer, v) for s, v in zip(stores, values, strict=True)]
    wide = [s for s in done if {"i", "j"} <= set(program.buffer(s.buffer).axes.letters)]
    return Stage(stores=tuple(wide), finish=tuple(s for s in done if s not in wide))
