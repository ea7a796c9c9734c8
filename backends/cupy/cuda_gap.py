"""Prints the kernel for the values between two stages of a rule with rows, columns or matrices: a block for a tensor.

The threads of the block share each loop over rows, columns or matrices, and all of them compute the tensor's numbers.
Every kernel computes again what it needs of earlier values: reductions and states stay as they are until the last one.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from rulec.backend.printer import identifier, unique_name
from rulec.compiler.ir import Program, Store
from rulec.compiler.layout import Layout
from rulec.language.expr.node import Node, Op, is_boolean
from rulec.runtime.buckets.flat import axes_in_flat

from ..cstyle.dialect import block, call_lines, indented
from ..cstyle.element import STORAGE, taken_in
from ..cstyle.numbers import LOOPS, Numbers, indexed, used
from ..cstyle.words import LIBRARY, RESERVED
from .plan import GIVEN, THREADS
from .stage import KIND, NOTHING
from .words import DIALECT

#: The extents of a tensor as matrices: words of a call.
EXTENTS = ("batch", "rows", "cols")

_LOCALS = frozenset(
    {"entry", "call", "row", "k", "work", "totals", "line", "column", "matrix", "size", "index", *EXTENTS}
)  # fmt: skip
_TAKEN = RESERVED | DIALECT.reserved | frozenset(LIBRARY) | _LOCALS


class BlockNumbers(Numbers):
    """The values of a tensor, computed by the threads of one block."""

    backend = DIALECT.backend

    @property
    def reserved_count(self) -> int:
        """The number of words that no value may be called."""
        return len(_TAKEN)

    def loop(self, variable: str, size: str, body: list[str], kept: bool) -> list[str]:
        """As of all languages; threads take the indices by turns."""
        head = f"for (int64_t {variable} = threadIdx.x; {variable} < {size}; {variable} += blockDim.x)"
        return [*block(head, body), *["__syncthreads();"] * kept]

    def reduced(self, op: Op, name: str, variable: str, size: str, text: str) -> list[str]:
        """As of all languages; the parts of threads are joined in an order that never changes."""
        loop = self.loop(variable, size, [taken_in(op, name, text)], False)
        return [f"double {name} = {NOTHING[op]};", *loop, f"{name} = over_all({KIND[op]}, {name});"]

    def reduced_sides(self, op: Op, name: str, array: str, side: str, text: str) -> list[str]:
        """As of all languages; 32 threads take a matrix."""
        inner = block(f"for (int64_t k = threadIdx.x % 32; k < {side}; k += 32)", [taken_in(op, name, text)])
        leave = block("if (threadIdx.x % 32 == 0)", [f"{array}[matrix] = {name};"])
        joined = f"{name} = over_lanes({KIND[op]}, {name}, 32);"
        head = "for (int64_t matrix = threadIdx.x / 32; matrix < batch; matrix += blockDim.x / 32)"
        return [*block(head, [f"double {name} = {NOTHING[op]};", *inner, joined, *leave]), "__syncthreads();"]


@dataclass(frozen=True)
class Words:
    """The words of a tensor: the names of its fixed addresses, and of the words of a call after `GIVEN`.

    `totals` has the reductions over all tensors; `refuse` is called with the reason why a value cannot be printed.
    """

    bound: Sequence[str]
    per_call: Sequence[str]
    totals: Sequence[Node]
    refuse: Callable[[str], None]


@dataclass(frozen=True)
class Targets:
    """What a kernel computes: columns of the scalar table, vectors for a stage, states, and one part of a total."""

    columns: Sequence[int] = ()
    vectors: Sequence[str] = ()
    stores: Sequence[Store] = ()
    part: int | None = None


class GapKernel:
    """The kernel `name` for some targets; `about` is its comment."""

    def __init__(
        self, program: Program, layout: Layout, words: Words, name: str, about: str, targets: Targets
    ) -> None:  # fmt: skip
        self._program, self._layout, self._words, self._targets = program, layout, words, targets
        self.name, self._about, self._taken = name, about, {*_TAKEN}
        self._numbers = BlockNumbers(program, self._roots(), self._leaf, self._taken)
        self._numbers.named |= {node: f"at<double>(totals[{i}].target)[0]" for i, node in enumerate(words.totals)}
        if targets.part is not None:
            del self._numbers.named[words.totals[targets.part]]
        self._pointers: dict[str, tuple[str, str, str]] = {}
        self._check()
        self.lines = self._computed()

    def _roots(self) -> Mapping[Node, str]:
        program, targets = self._program, self._targets
        roots = {program.columns[i].value: identifier(program.columns[i].name) for i in targets.columns}
        roots |= {program.result(name).value: identifier(name) for name in targets.vectors}
        roots |= {s.value: f"{identifier(s.buffer)}_new" for s in targets.stores}
        if targets.part is not None:
            roots[self._words.totals[targets.part].args[0]] = "part"
        return {value: name for value, name in roots.items() if value not in self._words.totals}

    def _check(self) -> None:
        for value in self._numbers.order:
            letters = self._numbers.letters(value)
            if letters and letters not in LOOPS:
                self._words.refuse("it computes with matrices, or with rows of all matrices, between its kernels")
            if value.op is Op.CHANCE:
                self._words.refuse("it rounds rows or columns at random")

    @property
    def sizes(self) -> list[str]:
        """The sizes of the arrays of double in which the kernel works."""
        return [size for _, size in self._numbers.work]

    # Leaves

    def _leaf(self, value: Node, index: str) -> str:
        name = str(value.arg)
        if value.op is Op.SCALAR:
            return self._column(int(name))
        if value.op is Op.STEP and not value.arg:
            return f"(double){self._call('t')}"
        if value.op not in (Op.RESULT, Op.LOAD) or name not in self._words.bound:
            self._words.refuse(f"a value between its kernels needs {name or 'the steps of the model'}")
        return self._element(name, index or "0")

    def _column(self, index: int) -> str:
        column = self._program.columns[index]
        if index >= len(self._program.scalars.columns):
            return self._numbers.text(column.value)
        return f"row[{index}]{' != 0' * is_boolean(column.value)}"

    def _element(self, name: str, index: str) -> str:
        """An element of a result or a state, as a double."""
        dtype = self._dtype(name)
        text = f"{self._pointer(name, STORAGE[dtype])}[{index}]"
        return f"from_{dtype}({text})" if dtype in ("bfloat16", "float16") else text

    def _dtype(self, name: str) -> str:
        states = {b.name: b for b in self._program.states}
        return self._layout.dtype(name) if name in states and axes_in_flat(states[name].axes) else "float64"

    def _pointer(self, name: str, kind: str) -> str:
        """The variable of an address of the tensor."""
        if name not in self._pointers:
            self._pointers[name] = unique_name(f"{identifier(name)}_at", self._taken), kind, self._word(name)
        return self._pointers[name][0]

    def _word(self, name: str) -> str:
        return f"entry[{self._words.bound.index(name)}]" if name in self._words.bound else self._call(name)

    def _call(self, name: str) -> str:
        return f"call[{len(GIVEN) + self._words.per_call.index(name)}]"

    # Text

    def text(self) -> str:
        """The kernel."""
        head = f'extern "C" __global__ void __launch_bounds__({THREADS}) {self.name}'
        inputs = ["const int64_t *bound", "const int64_t *per_call", "double *table"]
        lines = call_lines(head, [[*inputs, *["const Finish *totals"] * bool(self._words.totals)]], "")
        return "\n".join([f"// {self._about}", *lines, "{", *indented([*self._begin(), *self.lines]), "}"])

    def _computed(self) -> list[str]:
        """The statements that compute and write all targets: every value is computed before the first store."""
        wanted = [*self._roots()]
        lines = self._numbers.lines(wanted)
        stores = [*self._vectors(), *self._states()]
        single = self._single()
        waits = any(s.buffer for s in self._targets.stores)
        return [*lines, *["__syncthreads();"] * waits, *stores, *single]

    def _single(self) -> list[str]:
        """The numbers that one thread writes."""
        lines = [
            f"row[{i}] = {self._numbers.text(self._program.columns[i].value)};" for i in self._targets.columns
        ]  # fmt: skip
        for store in self._targets.stores:
            if not self._letters(store.buffer):
                lines.append(f"{self._pointer(store.buffer, 'double')}[0] = {self._numbers.text(store.value)};")
        if self._targets.part is not None:
            part = self._numbers.text(self._words.totals[self._targets.part].args[0])
            lines.append(f"at<double>(totals[{self._targets.part}].source)[{self._call('index')}] = {part};")
        return block("if (threadIdx.x == 0)", lines) if lines else []

    def _letters(self, state: str) -> str:
        axes = self._program.buffer(state).axes
        return "".join(c for c in axes.letters if c in "bij")

    def _vectors(self) -> list[str]:
        lines = []
        for name in self._targets.vectors:
            vector = self._program.result(name)
            letters = "".join(c for c in vector.axes.letters if c in "bij")
            kind = STORAGE[self._layout.compute]
            lines += self._stored(name, kind, vector.value, letters, self._layout.compute)
        return lines

    def _states(self) -> list[str]:
        lines = []
        for store in self._targets.stores:
            letters, dtype = self._letters(store.buffer), self._dtype(store.buffer)
            if letters:
                lines += self._stored(store.buffer, STORAGE[dtype], store.value, letters, dtype)
        return lines

    def _stored(self, name: str, kind: str, value: Node, letters: str, dtype: str) -> list[str]:
        """The loop that stores a vector, rounded once."""
        variable, size, _ = LOOPS[letters]
        text = self._numbers.text(value, letters)
        if dtype in ("bfloat16", "float16"):
            text = f"to_{dtype}(to_odd({text}))"
        elif dtype != "float64":
            text = f"(float)({text})"
        body = indexed([f"{self._pointer(name, kind)}[{variable}] = {text};"], letters)
        return self._numbers.loop(variable, size, body, False)

    def _begin(self) -> list[str]:
        """The variables of the block: what of its tensor its lines name."""
        arrays = [f"double *const {name} = work{self._before(i)};" for i, (name, _) in enumerate(self._numbers.work)]
        stored = {s.buffer for s in self._targets.stores} | {*self._targets.vectors}
        kinds = {name: f"{'const ' * (name not in stored)}{kind}" for name, (_, kind, _) in self._pointers.items()}
        pointers = [
            f"{kinds[name]} *const {at} = at<{kinds[name]}>({word});" for name, (at, _, word) in self._pointers.items()
        ]  # fmt: skip
        work = [f"double *const work = at<double>({self._word('work')});"] * bool(arrays)
        later = [*pointers, *work, *arrays, *self.lines]
        extents = [f"const int64_t {x} = {self._call(x)};" for x in EXTENTS if used(later, x)]
        bases = {
            "entry": f"const int64_t *const entry = bound + {len(self._words.bound)} * blockIdx.x;",
            "call": f"const int64_t *const call = per_call + {len(GIVEN) + len(self._words.per_call)} * blockIdx.x;",
            "row": f"double *const row = table + {len(self._program.columns)} * blockIdx.x;",
        }
        named = [text for name, text in bases.items() if any(re.search(rf"\b{name}\[", x) for x in [*extents, *later])]
        return [*named, *extents, *pointers, *work, *arrays]

    def _before(self, place: int) -> str:
        return "".join(f" + {size}" for _, size in self._numbers.work[:place])
