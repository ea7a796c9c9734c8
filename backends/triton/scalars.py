"""Prints the scalar program as a kernel: each lane computes the row of one tensor, in float64.

So hyper-parameters, step counts and the scalar table can stay on the device, and a captured graph computes them anew.
"""

from __future__ import annotations

from rulec.backend.printer import StagePrinter, bare
from rulec.compiler.ir import Program
from rulec.language.expr.node import Node, Op, is_boolean, node

from ..common.scalars import Argument, ScalarKernel, argument_of, arguments, scalar_leaves, scalar_stage
from .ops import constant, operations
from .stage import RESERVED, call, indented

#: The tensors of one program.
LANES = 128

_LOCALS = {"n", "counts", "groups", "group", "hyper", "new", "tensors", "kinds", "LANES"}

#: The index and mask of a value in an array, by the level of the array. Every lane has a value of the model: Triton's
#: interpreter compares no number with a block.
_INDEX = {"tensor": " + n, mask=inside", "group": " + group, mask=inside", "model": " + 0 * n, mask=inside"}


def scalar_arguments(program: Program) -> list[Argument]:
    """The arrays for the kernel beside counts, groups and hyper-parameters, in order."""
    return sorted(arguments(_leaves(program)), key=lambda argument: argument.kind == "level")


def _leaves(program: Program) -> list[Node]:
    """The leaves in the order of their reads: counts, hyper-parameters, facts, states."""
    hyper = list(program.hyper)

    def place(leaf: Node) -> tuple[int, int, str]:
        argument = argument_of(leaf)
        if argument is None:
            return (0, 0, "") if leaf.op is Op.STEP else (2, hyper.index(str(leaf.arg)), "")
        return {"level": 1, "fact": 3, "state": 4}[argument.kind], 0, argument.key

    return sorted(dict.fromkeys([node(Op.STEP), *map(_read_once, scalar_leaves(program))]), key=place)


def _read_once(leaf: Node) -> Node:
    """The leaf, with a plain hyper-parameter in place of the model's, as both have the same line."""
    return node(Op.HYPER, leaf.arg) if leaf.op is Op.MODEL_HYPER else leaf


class ScalarSource(ScalarKernel):
    """The names and lines of the kernel `scalars`."""

    level_array = "{}_counts"

    def __init__(self, program: Program) -> None:
        taken = set(RESERVED) | _LOCALS
        super().__init__(program, _leaves(program), taken)
        self.printer = StagePrinter(
            "triton", program, scalar_stage(program), operations("float64"), lambda v: constant(v, "float64"),
            reserved=frozenset(taken), known=lambda value: self.names.get(_read_once(value)),
        )  # fmt: skip

    def function(self) -> list[str]:
        """The kernel, as lines."""
        arrays = ["counts", "groups", "hyper", *(self.at[a] for a in scalar_arguments(self.program)), "table", "new"]
        parameters = [*arrays, "tensors", "kinds"]
        names = ", ".join(f'"{a}"' for a in parameters)
        body = [
            '"""The row of each tensor of `table`, and the `new` values of states, a line for each: in float64.', "",
            "`tensors` is how many there are, `kinds` how many groups, each with a number in every line of `hyper`.",
            '"""',
            "n = tl.program_id(0) * LANES + tl.arange(0, LANES)",
            "inside = n < tensors",
            "group = tl.load(groups + n, mask=inside, other=0)",
            *(f"{name} = {self._read(leaf)}" for leaf, name in self.names.items()),
            *(f"{name} = {bare(text)}" for name, text in self.printer.lines()),
            *self._store_lines(),
        ]  # fmt: skip
        head = call("@triton.jit", [f"do_not_specialize=[{names}]"])
        return [*head, *call("def scalars", [*parameters, "LANES: tl.constexpr"], ":"), *indented(body)]

    def _read(self, leaf: Node) -> str:
        """A leaf's value."""
        argument = argument_of(leaf)
        if argument is not None:
            load = f"tl.load({self.at[argument]}{_INDEX[self.level(argument)]})"
            return load if argument.kind == "fact" else f"{load}.to(tl.float64)"
        if leaf.op is Op.STEP:
            return "tl.load(counts + n, mask=inside, other=0).to(tl.float64) + 1"
        return f"tl.load(hyper + {self.hyper_line(leaf)} * kinds + group, mask=inside)"

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
