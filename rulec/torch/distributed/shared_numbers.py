"""The hyper-parameters of what is computed from values of groups and the model alone, such as the bound of a clip."""

from __future__ import annotations

import functools
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from rulec.checkpoint.meaning import meaning
from rulec.errors import RulecError
from rulec.language.expr.node import Kind, Node, Op, walk
from rulec.language.rule import Rule, assignments
from rulec.runtime.buckets.runtime_launch import Launch

_LEVELS = ("group", "model")


@dataclass(frozen=True)
class _Value:
    """A value that is of elements or tensors, or `shared` by a group or the model, or of hyper-parameters alone.

    `names` are its hyper-parameters where it is not of elements or tensors.
    """

    wide: bool = False
    shared: bool = False
    names: frozenset[str] = frozenset()


@functools.lru_cache(maxsize=256)
def shared_hyper(rule: Rule) -> tuple[str, ...]:
    """The hyper-parameters in values of groups or of the model; without the learning rate, a stage may have another."""
    values: dict[str, _Value] = {}
    chosen: set[str] = set()
    for line in assignments(rule.standalone().step):
        values[line.target] = _value(line.value, rule, values, chosen)
    rate = "lr" if rule.rate is None else str(rule.rate.arg)
    return tuple(sorted(chosen - {"lr", rate}))


def _value(value: Node, rule: Rule, values: Mapping[str, _Value], chosen: set[str]) -> _Value:
    """The kind of an expression. The hyper-parameters of a shared value are added to `chosen`."""
    kinds = {n: _Value(shared=True) for n in walk([value]) if n.op.kind is Kind.REDUCE and n.arg in _LEVELS}
    for part in walk([value], kinds):
        kinds[part] = kind = _kind(part, [kinds[a] for a in part.args], rule, values)
        if kind.shared:
            chosen.update(kind.names)
    return kinds[value]


def _kind(part: Node, parts: list[_Value], rule: Rule, values: Mapping[str, _Value]) -> _Value:
    """The kind of a value whose operands are of the kinds `parts`."""
    if part.op is Op.NAME:
        name = str(part.arg)
        state = rule.state.get(name)
        if name in rule.hyper:
            return _Value(names=frozenset({name}))
        if state is not None:
            return _Value(wide=state.per not in _LEVELS, shared=state.per in _LEVELS)
        return values.get(name, _Value(wide=name != "t"))
    if part.op is Op.FACT or part.op.kind in (Kind.REDUCE, Kind.MATRIX, Kind.RANDOM) or any(x.wide for x in parts):
        return _Value(wide=True)
    return _Value(False, any(x.shared for x in parts), frozenset().union(*(x.names for x in parts)))


@functools.lru_cache(maxsize=256)
def _words_of(rule: Rule) -> tuple[int, int]:
    return zlib.crc32(rule.name.encode()), zlib.crc32(meaning(rule).encode())


def formula(launches: Sequence[Launch]) -> tuple[int, ...]:
    """Digests of the name and the equations of the first rule with values of groups or the model, and of its numbers.

    Zeros without one.
    """
    joining = [launch for launch in launches if not launch.version.plan.alone]
    if not joining:
        return 0, 0, 0
    launch = joining[0]
    rule, named = launch.version.program.rule, launch.common.hyper.named
    numbers = [sorted({*named[name].tolist()}) for name in shared_hyper(rule) if name in named]
    return *_words_of(rule), zlib.crc32(repr(numbers).encode())


def check_formulas(formulas: Sequence[Sequence[int]]) -> None:
    """RulecError where two processes have other equations of one rule, or other numbers of values of all."""
    known: dict[int, tuple[int, Sequence[int]]] = {}
    for process, (name, *words) in enumerate(formulas):
        first, before = known.setdefault(name, (process, words))
        if before != words:
            what = "equations" if before[0] != words[0] else "hyper-parameters of values of groups or of the model"
            raise RulecError(
                f"process {process} of reduce_over has other {what} than process {first} for the same rule: make their "
                f"optimizers alike; nothing was changed"
            )
