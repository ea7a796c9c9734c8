"""What a rule is made of, and what it costs: levels, inputs, bytes of state, kernel stages and the bytes they move."""

from __future__ import annotations

from dataclasses import dataclass
from functools import reduce

from rulec.analysis.flow import Flow
from rulec.compiler.axes import AxisInference
from rulec.compiler.ir import Program
from rulec.compiler.pipeline import compile
from rulec.language.node import LEVELS, Kind, Node, Op, const, name, node, walk
from rulec.language.rule import Rule, State
from rulec.language.text import expression_text

#: Bytes of a float32.
ITEM = 4

_PER = {
    "element": "per parameter", "row": "rows", "col": "cols", "matrix": "per matrix", "tensor": "per tensor",
    "group": "per group", "model": "in all",
}  # fmt: skip


def scope_of(flow: Flow) -> str:
    """What the update of one element depends on: `elementwise`, `tensor`, `group` or `model`."""
    parts = list(walk(flow.new.values()))
    widest = max((LEVELS.index(str(n.arg)) for n in parts if n.op.kind is Kind.REDUCE), default=0)
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
    """Whether how far `p` moves, or what a state becomes, depends on where `p` is."""
    moved = [flow.taken[key] for key in flow.rule.state] + _displacements(flow.taken["p"])
    starts = [state.init for state in flow.rule.state.values()]
    return name("p") in set(walk([*moved, *starts]))


def _displacements(value: Node) -> list[Node]:
    """What is added to `p` and taken from it, where the new value is written so; else all of it."""
    found: list[Node] = []
    while value.op in (Op.ADD, Op.SUB):
        found.append(value.args[1])
        value = value.args[0]
    return found if value is name("p") else [*found, value]


@dataclass(frozen=True)
class StateBytes:
    """Bytes of one state at float32: a formula, and the condition on the shape for there being such a state."""

    formula: str
    condition: str = ""


def state_bytes(rule: Rule) -> dict[str, StateBytes]:
    """The bytes of every state: for each element, or in the words of its level."""
    found = {}
    for key, state in rule.state.items():
        condition = "" if state.condition is None else expression_text(state.condition)
        found[key] = StateBytes(_formula(state), condition)
    return found


def _formula(state: State, count: int = 1) -> str:
    """The bytes of so many states that are alike."""
    size = ITEM * count
    if state.shape is not None:
        sides = [side for side in state.shape if side is not const(1)]
        return expression_text(reduce(lambda left, right: node(Op.MUL, left, right), sides, const(size)))
    return f"{size}*{_PER[state.per]}" if state.per in ("row", "col") else f"{size} {_PER[state.per]}"


def bytes_text(rule: Rule) -> str:
    """The bytes of all states at float32, those that are alike added: `8 per parameter`, `4*(rows + cols)`."""
    kinds: dict[str, dict[tuple[str, object], list[State]]] = {}
    for key, state in rule.state.items():
        same = kinds.setdefault(state_bytes(rule)[key].condition, {})
        same.setdefault((state.per, state.shape), []).append(state)
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
    """What a step of a matrix of 64 by 64 takes at float32: stages of kernels, and the bytes these move per parameter.

    What is narrower than the parameter counts nothing, and neither does what matrix functions move inside.
    """

    stages: int
    read: int
    written: int


def cost_of(rule: Rule) -> Cost:
    """The cost of the program a rule compiles to."""
    program = compile(rule)
    read = sum(len(_wide_reads(program, index)) for index in range(len(program.stages)))
    written = sum(len(stage.stores) for stage in program.stages)
    return Cost(len(program.stages), ITEM * read, ITEM * written)


def _wide_reads(program: Program, index: int) -> set[str]:
    """The buffers and results of the parameter's shape that one stage reads."""
    inference = AxisInference(program)
    leaves = [n for n in walk(program.stages[index].roots) if n.op in (Op.LOAD, Op.RESULT)]
    return {str(n.arg) for n in leaves if inference.axes(n).elementwise}
