"""Prints the scalar program as a kernel: each lane makes the row of one tensor, in float64.

So what follows from hyper-parameters and step counts can stay on the device, and a captured graph computes it anew.
"""

from __future__ import annotations

from dataclasses import dataclass

from rulec.backend.printer import StagePrinter, bare, unique_name
from rulec.compiler.ir import Program, Stage, Store
from rulec.language.node import Node, Op, is_boolean, walk

from .ops import constant, operations
from .stage import RESERVED, call, indented

#: Tensors whose rows one program makes.
LANES = 128

_LOCALS = {"n", "counts", "groups", "group", "group_t", "model_t", "hyper", "new", "tensors", "kinds", "t", "LANES"}


@dataclass(frozen=True)
class ScalarInputs:
    """What the kernel of a scalar program reads beside counts, groups and hyper-parameters, in the order of arguments.

    `levels` are `group` and `model`, where it counts their steps.
    """

    facts: tuple[str, ...]
    states: tuple[str, ...]
    levels: tuple[str, ...]


def has_scalars(program: Program) -> bool:
    """Whether there is a scalar program to print."""
    return bool(program.scalars.columns or program.scalars.stores)


def scalar_inputs(program: Program) -> ScalarInputs:
    """What the scalar program reads."""
    parts = list(walk(_roots(program)))

    def named(op: Op) -> tuple[str, ...]:
        return tuple(sorted({str(n.arg) for n in parts if n.op is op}))

    levels = {str(n.arg) for n in parts if n.op is Op.STEP and n.arg is not None}
    return ScalarInputs(named(Op.FACT), named(Op.LOAD), tuple(sorted(levels)))


def _roots(program: Program) -> list[Node]:
    return [*(c.value for c in program.scalars.columns), *(s.value for s in program.scalars.stores)]


class _Printer(StagePrinter):
    """The shared printer, with names for what only a scalar program reads."""

    leaves: dict[tuple[Op, str], str]

    def text(self, value: Node, defining: bool = False) -> str:
        if value.op in (Op.HYPER, Op.MODEL_HYPER):
            return self.leaves[Op.HYPER, str(value.arg)]
        if value.op is Op.FACT:
            return self.leaves[Op.FACT, str(value.arg)]
        if value.op is Op.STEP:
            return "t" if value.arg is None else f"{value.arg}_t"
        return super().text(value, defining)


class ScalarSource:
    """The names and lines of the kernel `scalars`."""

    def __init__(self, program: Program) -> None:
        self.program, self.inputs = program, scalar_inputs(program)
        taken = set(RESERVED) | _LOCALS
        used = {str(n.arg) for n in walk(_roots(program)) if n.op in (Op.HYPER, Op.MODEL_HYPER)}
        self.hyper = {name: unique_name(name, taken) for name in program.hyper if name in used}
        self.facts = {name: unique_name(name, taken) for name in self.inputs.facts}
        self.states = {name: unique_name(name, taken) for name in self.inputs.states}
        self.at = {name: unique_name(f"{name}_at", taken) for name in (*self.inputs.facts, *self.inputs.states)}
        stage = Stage(stores=tuple(Store(f"\0{i}", value) for i, value in enumerate(_roots(program))))
        loads = {b.name: self.states.get(b.name, b.name) for b in program.buffers}
        self.printer = _Printer(
            "triton", program, stage, operations("float64"), lambda v: constant(v, "float64"), loads.__getitem__,
            frozenset(taken),
        )  # fmt: skip
        self.printer.leaves = {(Op.HYPER, n): x for n, x in self.hyper.items()}
        self.printer.leaves |= {(Op.FACT, n): x for n, x in self.facts.items()}

    def function(self) -> list[str]:
        """The kernel, as lines."""
        levels = [f"{level}_counts" for level in self.inputs.levels]
        arrays = ["counts", "groups", "hyper", *self.at.values(), *levels, "table", "new"]
        arguments = [*arrays, "tensors", "kinds"]
        names = ", ".join(f'"{a}"' for a in arguments)
        body = [
            '"""The row of each tensor of `table`, and the `new` values of states, a line for each: in float64.', "",
            "`tensors` is how many there are, `kinds` how many groups, each with a number in every line of `hyper`.",
            '"""',
            "n = tl.program_id(0) * LANES + tl.arange(0, LANES)",
            "inside = n < tensors",
            "group = tl.load(groups + n, mask=inside, other=0)",
            "t = tl.load(counts + n, mask=inside, other=0).to(tl.float64) + 1",
            *self._load_lines(),
            *(f"{name} = {bare(text)}" for name, text in self.printer.lines()),
            *self._store_lines(),
        ]  # fmt: skip
        head = call("@triton.jit", [f"do_not_specialize=[{names}]"])
        return [*head, *call("def scalars", [*arguments, "LANES: tl.constexpr"], ":"), *indented(body)]

    def _load_lines(self) -> list[str]:
        lines = []
        for level in self.inputs.levels:
            index = " + group, mask=inside" if level == "group" else ""
            lines.append(f"{level}_t = tl.load({level}_counts{index}).to(tl.float64)")
        for name, own in self.hyper.items():
            place = [*self.program.hyper].index(name)
            lines.append(f"{own} = tl.load(hyper + {place} * kinds + group, mask=inside)")
        lines += [f"{own} = tl.load({self.at[fact]} + n, mask=inside)" for fact, own in self.facts.items()]
        return lines + [f"{own} = {self._state(state)}" for state, own in self.states.items()]

    def _state(self, name: str) -> str:
        letters = self.program.buffer(name).axes.letters
        index = " + n, mask=inside" if "n" in letters else " + group, mask=inside" if "k" in letters else ""
        return f"tl.load({self.at[name]}{index}).to(tl.float64)"

    def _store_lines(self) -> list[str]:
        """Columns, late ones as zeros, and new states."""
        columns, known = len(self.program.columns), len(self.program.scalars.columns)
        values = [self._number(c.value) for c in self.program.scalars.columns] + ["0.0"] * (columns - known)
        lines = [f"row = table + {columns} * n"] if columns else []
        lines += [f"tl.store(row + {i}, {value}, mask=inside)" for i, value in enumerate(values)]
        return lines + [
            f"tl.store(new + {i} * tensors + n, {self._number(s.value)}, mask=inside)"
            for i, s in enumerate(self.program.scalars.stores)
        ]

    def _number(self, value: Node) -> str:
        text = bare(self.printer.text(value))
        return f"tl.where({text}, 1.0, 0.0)" if is_boolean(value) else text
