"""The structure of a rule and its cost: levels, inputs, bytes of state, stages of kernels and the bytes they move."""

from __future__ import annotations

from dataclasses import dataclass
from functools import reduce

from rulec.analysis.flow import Flow
from rulec.compiler.axes import AxisInference
from rulec.compiler.ir import Program
from rulec.compiler.pipeline import compile
from rulec.language.expr.counts import level_text
from rulec.language.expr.node import LEVELS, PLACED, Kind, Node, Op, const, name, node, walk
from rulec.language.expr.text import expression_text
from rulec.language.rule_data import RuleData, State

#: Bytes of a float32.
ITEM = 4

_PER = {
    "element": "per parameter", "row": "rows", "col": "cols", "matrix": "per matrix", "tensor": "per tensor",
    "group": "per group", "model": "in all",
}  # fmt: skip


def scope_of(flow: Flow) -> str:
    """The widest level in the update of one element: `elementwise`, `tensor`, `group` or `model`."""
    parts = list(walk(flow.new.values()))
    placed = LEVELS.index("matrix")  # of axes and blocks
    levels = [str(n.arg) for n in parts if n.op.kind is Kind.REDUCE]
    widest = max((placed if level in PLACED else LEVELS.index(level) for level in levels), default=0)
    if widest > LEVELS.index("tensor"):
        return LEVELS[widest]
    return "tensor" if widest or any(n.op.kind is Kind.MATRIX for n in parts) else "elementwise"


def uses_matrices(flow: Flow) -> bool:
    """Whether matrix functions are part of the step."""
    return any(n.op.kind is Kind.MATRIX for n in walk(flow.new.values()))


def is_random(flow: Flow) -> bool:
    """Whether random numbers are part of the step."""
    return any(n.op.kind is Kind.RANDOM for n in walk(flow.new.values()))


def reads_step(flow: Flow) -> bool:
    """Whether the step, or a state's first value, reads `t`."""
    return name("t") in set(walk(flow.new.values()))


def reads_parameter(flow: Flow) -> bool:
    """Whether the move of `p`, or the value of a state, depends on `p`."""
    moved = [flow.taken[key] for key in flow.rule.state] + _displacements(flow.taken["p"])
    starts = [state.init for state in flow.rule.state.values()]
    return name("p") in set(walk([*moved, *starts]))


def _displacements(value: Node) -> list[Node]:
    """The terms added to `p` or subtracted from it; the whole value where it is not written as such a sum."""
    terms: list[Node] = []
    while value.op in (Op.ADD, Op.SUB):
        terms.append(value.args[1])
        value = value.args[0]
    return terms if value is name("p") else [*terms, value]


@dataclass(frozen=True)
class StateBytes:
    """Bytes of one state at float32: a formula, and the condition on shapes with this state."""

    formula: str
    condition: str = ""


def state_bytes(rule: RuleData) -> dict[str, StateBytes]:
    """State -> its bytes at float32, for each element or by its level."""
    sizes = {}
    for key, state in rule.state.items():
        condition = "" if state.condition is None else expression_text(state.condition)
        sizes[key] = StateBytes(_formula(state), condition)
    return sizes


def _formula(state: State, count: int = 1) -> str:
    """The bytes of `count` states of one kind."""
    size = ITEM * count
    if state.shape is not None:
        sides = [side for side in state.shape if side is not const(1)]
        return expression_text(reduce(lambda left, right: node(Op.MUL, left, right), sides, const(size)))
    if state.number is not None:
        return f"{size} for each index of {level_text(state.per, state.number)}"
    return f"{size}*{_PER[state.per]}" if state.per in ("row", "col") else f"{size} {_PER[state.per]}"


def bytes_text(rule: RuleData) -> str:
    """The bytes of all states at float32, added where they are of one kind: `8 per parameter`, `4*(rows + cols)`."""
    kinds: dict[str, dict[tuple[str, object], list[State]]] = {}
    for key, state in rule.state.items():
        same = kinds.setdefault(state_bytes(rule)[key].condition, {})
        same.setdefault((level_text(state.per, state.number), state.shape), []).append(state)
    parts = []
    for condition, alike in kinds.items():
        rows, cols = len(alike.get(("row", None), ())), len(alike.get(("col", None), ()))
        if rows == cols > 0:
            del alike["row", None], alike["col", None]
        terms = [f"{ITEM * rows}*(rows + cols)"] if rows == cols > 0 else []
        text = " + ".join([*(_formula(states[0], len(states)) for states in alike.values()), *terms])
        parts.append(f"{text} where {condition}" if condition else text)
    return "; ".join(parts) if parts else "none"


@dataclass(frozen=True)
class Cost:
    """The cost of a step of a matrix of 64 by 64 at float32: stages of kernels, and their bytes per parameter.

    Values narrower than the parameter are not counted, nor are the bytes moved inside matrix functions.
    """

    stages: int
    read: int
    written: int


def cost_of(rule: RuleData) -> Cost:
    """The cost of a rule's program."""
    program = compile(rule)
    read = sum(len(_wide_reads(program, index)) for index in range(len(program.stages)))
    written = sum(len(stage.stores) for stage in program.stages)
    return Cost(len(program.stages), ITEM * read, ITEM * written)


def _wide_reads(program: Program, index: int) -> set[str]:
    """The buffers and results of the parameter's shape read by one stage."""
    inference = AxisInference(program)
    leaves = [n for n in walk(program.stages[index].roots) if n.op in (Op.LOAD, Op.RESULT)]
    return {str(n.arg) for n in leaves if inference.axes(n).elementwise}
