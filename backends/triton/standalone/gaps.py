"""The values between the stages of a form, printed as operations of torch on vectors of all tensors of a batch."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from rulec.backend.printer import bare as unparsed
from rulec.backend.printer import is_number, unique_name
from rulec.compiler.ir import Buffer
from rulec.language.expr.node import Kind, Node, Op, is_boolean
from rulec.language.expr.static import GRAM, settings
from rulec.runtime.buckets.flat import axes_in_flat

from ...common.array_print import Dialect, operations
from .forms import Form

#: Reductions: their functions on a vector, and their numbers in kernels.
REDUCTIONS: Mapping[Op, tuple[str, int, str]] = {
    Op.SUM: ("torch.sum", 0, "0.0"), Op.MIN: ("torch.amin", 1, 'float("inf")'),
    Op.MAX: ("torch.amax", 2, '-float("inf")'),
}  # fmt: skip


#: The longest expression of a value without a line of its own.
_LONGEST = 64


def bare(text: str) -> str:
    """An expression without superfluous parentheses, with double quotes."""
    return unparsed(text).replace("'", '"')


class GapText:
    """The lines before each stage, and after the last.

    A value is a number for each tensor, one for all tensors, or a vector with axes. Values with several uses or a name
    of the author's have a line.
    """

    def __init__(
        self, form: Form, dialect: Dialect, taken: set[str], number: Callable[[float], str],
        host_column: Callable[[int], str], refuse: Callable[[str], None],
    ) -> None:  # fmt: skip
        self.form, self.program, self.plan, self.taken, self.number = form, form.program, form.plan, taken, number
        self.host_column, self.refuse = host_column, refuse
        self.ops = operations(dialect, "float64")
        values = [value for gap in self.plan.gaps for value in gap.values]
        uses: dict[Node, int] = {}
        for value in [*(a for v in values for a in v.args), *self._roots()]:
            uses[value] = uses.get(value, 0) + 1
        self._lined = {
            v for v in values
            if (v.op.kind is not Kind.LEAF and (uses.get(v, 0) > 1 or v in self.program.labels or self._always(v)))
            or (v.op is Op.LOAD and uses.get(v, 0) > 1 and not form.program.buffer(str(v.arg)).axes.elementwise)
        }  # fmt: skip
        #: The name of each result of a stage, and of each value with a line.
        self.results = {r.name: unique_name(r.name, taken) for s in self.program.stages for r in s.reduces}
        vectors = [v.name for v in self.program.vectors]
        self.rooms = {name: unique_name(f"{name}_room", taken) for name in (*form.scratch, *vectors)}
        self.names: dict[Node, str] = {}

    def _roots(self) -> list[Node]:
        return [self.program.columns[i].value for s in self.program.stages for i in s.columns] + [
            v.value for v in self.program.vectors
        ]

    def _always(self, value: Node) -> bool:
        """Whether a value has a line of its own always: a reduction over tensors, and what `finish` stores."""
        return value.op.kind is Kind.REDUCE or any(s.value is value for s in self.program.finish)

    # Lines

    def before(self, index: int) -> list[str]:
        """The lines before a stage: its values, late columns of the table, and vectors for the kernel."""
        lines = self._values(index)
        stage = self.program.stages[index]
        for column in stage.columns:
            text = self.text(self.program.columns[column].value, "")
            truth = is_boolean(self.program.columns[column].value)
            lines.append(f"table[:, {column}] = {f'({text}).double()' if truth else bare(text)}")
        for name in stage.vectors:
            vector = self.program.result(name)
            if vector.axes.elementwise:
                lines += self._matrices(self.rooms[name], vector.value)
            else:
                lines.append(f"{self.rooms[name]}.copy_({bare(self.text(vector.value, self.kernel_axes(name)))})")
        return lines

    def after(self) -> list[str]:
        """The lines after the last stage: values, and the states stored from them."""
        lines = self._values(len(self.program.stages))
        stores = []
        for store in self.program.finish:
            buffer = self.program.buffer(store.buffer)
            text = bare(self.text(store.value, axes_in_flat(buffer.axes) or ""))
            if store.value.op is Op.LOAD:  # another state, that may be written before
                name = unique_name(f"new_{buffer.name}", self.taken)
                lines.append(f"{name} = {text}.clone()")
                text = name
            stores.append(f"{self.state(buffer)}.copy_({text})")
        return lines + stores

    def kernel_axes(self, name: str) -> str:
        """The axes of a vector as a kernel reads it: for each matrix."""
        axes = axes_in_flat(self.program.result(name).axes)
        if self.program.result(name).axes.elementwise:
            return "bij"
        if axes is None:
            self.refuse(f"its value {name} has axes of its own")
        return axes if axes and "b" in axes else f"b{axes}"

    def _values(self, index: int) -> list[str]:
        lines = []
        for value in self.plan.gaps[index].values:
            self._check(value)
            if value.op is Op.NEWTON_SCHULZ or (value.op is Op.LOAD and value not in self._lined):
                continue
            text = bare(self._expression(value))
            if value in self._lined or (value.op.kind is not Kind.LEAF and len(text) > _LONGEST):
                name = unique_name(self.program.labels.get(value) or self._word(value), self.taken)
                self.names[value] = name
                lines.append(f"{name} = {text}")
        return lines

    def _word(self, value: Node) -> str:
        if value.op is Op.LOAD:
            return str(value.arg)
        stored = next((s.buffer for s in self.program.finish if s.value is value), None)
        return f"new_{stored}" if stored else "total" if value.op.kind is Kind.REDUCE else "x"

    def _check(self, value: Node) -> None:
        if value.op is Op.NEWTON_SCHULZ:
            if not any(v.value is value for v in self.program.vectors):
                self.refuse("it computes with the matrices of newton_schulz between its kernels")
            if "form" in settings(value):
                self.refuse(f"its newton_schulz has the form {GRAM!r}: leave that out")
            return
        if value.op is Op.CHANCE:
            self.refuse("it rounds rows or columns at random")
        if value.op.kind in (Kind.MATRIX, Kind.RANDOM, Kind.SHAPE) or self.plan.in_flat[value] is None:
            matrix = value.op is Op.LOAD and self.form.program.buffer(str(value.arg)).axes.elementwise
            if not matrix:
                self.refuse("it computes with matrices between its kernels")

    def _matrices(self, room: str, value: Node) -> list[str]:
        """The statement for a matrix function, stack by stack."""
        if value.op is not Op.NEWTON_SCHULZ:
            self.refuse("it computes with matrices between its kernels")
        operand, steps = value.args[:2]
        if operand.op is not Op.LOAD:
            self.refuse("it computes with matrices between its kernels")
        name = str(operand.arg)
        if name in self.rooms:
            source = self.rooms[name]
        else:
            arrays = {"g": "grads", "p": "self.params"}.get(name, f'[state["{name}"] for state in self.states]')
            source = f"self.vector({arrays}, torch.{self.form.layout.compute})"
        count = self._host(steps)
        dtype = f"torch.{settings(value).get('dtype') or self.form.layout.compute}"
        return [
            f"for x, out in zip(self.stacks({source}), self.stacks({room}), strict=True):",
            f"    out.copy_(newton_schulz(x, {count}, {dtype}))",
        ]

    def _host(self, value: Node) -> str:
        """A number that the host knows, the same for all tensors of a group, as a whole number."""
        if value.op is Op.SCALAR:
            text = self.host_column(int(str(value.arg)))
            return str(int(float(text))) if is_number(text) else f"int(({text})[0])"
        if value.op is not Op.CONST:
            self.refuse("the number of its iterations follows from a reduction")
        return str(int(float(value.arg)))  # type: ignore[arg-type]

    # Values

    def text(self, value: Node, axes: str) -> str:
        """A value as an expression, spread to these axes; a number without any."""
        text = self.names.get(value) or self._expression(value)
        letters = self.plan.in_flat[value] or ""
        if letters == axes or self._alone(value):
            return text
        return f'self.spread({bare(text)}, "{letters}", "{axes}")'

    def _alone(self, value: Node) -> bool:
        """Whether a value is one number for all tensors."""
        if value.op is Op.CONST:
            return True
        if value.op.kind is Kind.REDUCE and "n" not in self.plan.axes[value].letters:
            return "k" not in self.plan.axes[value].letters
        return value.op.kind is not Kind.LEAF and all(map(self._alone, value.args)) and self.plan.axes[value].number

    def _expression(self, value: Node) -> str:
        if value.op is Op.CONST:
            return self.number(float(value.arg))  # type: ignore[arg-type]
        if value.op is Op.SCALAR:
            column = int(str(value.arg))
            truth = is_boolean(self.program.columns[column].value)
            return f"(table[:, {column}] != 0)" if truth else f"table[:, {column}]"
        if value.op is Op.RESULT:
            return self.results[str(value.arg)]
        if value.op is Op.LOAD:
            return self._loaded(self.program.buffer(str(value.arg)))
        if value.op.kind is Kind.REDUCE:
            return self._reduction(value)
        axes = self.plan.in_flat[value] or ""
        operands = [self.text(a, axes) for a in value.args]
        form = self.ops.get(value.op)
        if form is None:
            self.refuse(f"it computes {value.op.symbol} between its kernels")
            raise AssertionError
        return form.format(*operands) if isinstance(form, str) else form(*operands)

    def state(self, buffer: Buffer) -> str:
        """A state that is a vector or a number, of all tensors."""
        place = "vectors" if axes_in_flat(buffer.axes) else "numbers"
        return f'self.{place}["{buffer.name}"]'

    def _loaded(self, buffer: Buffer) -> str:
        if buffer.name in self.form.host_numbers:
            return f"{self.state(buffer)}.to(self.device)"
        return f"{self.state(buffer)}.double()" if axes_in_flat(buffer.axes) else self.state(buffer)

    def _reduction(self, value: Node) -> str:
        (operand,) = value.args
        function, kind, nothing = REDUCTIONS[value.op]
        letters = self.plan.axes[value].letters
        before, after = self.plan.in_flat[operand] or "", self.plan.in_flat[value] or ""
        text = bare(self.text(operand, before))
        if before and before != after:
            whole = before if "b" in before else f"b{before}"
            text = f'self.within({kind}, {bare(self.text(operand, whole))}, "{whole}", "{after}")'
        if "n" in letters:
            return text
        if "n" not in self.plan.axes[operand].letters:
            self.refuse("it takes a sum over groups")
        if "k" not in letters:
            return f"(yield {function}, {function}({text}, 0))"
        part = f"{function}(torch.where(self.member, {text}, {nothing}), 1)"
        return f"(yield {function}, {part})[self.there]"


def reduction_place(letters: str, transposed: bool) -> str:
    """Where a kernel's reduction leaves numbers, as matrices lie in memory: in rows, columns, or one for a tensor."""
    if "i" in letters:
        return "column" if transposed else "row"
    if "j" in letters:
        return "row" if transposed else "column"
    return ""
