"""Prints the class of a form's tensors: its tables, and its step."""

from __future__ import annotations

import copy
import textwrap
from collections.abc import Sequence
from functools import cached_property

from rulec.compiler.ir import Stage
from rulec.kernel.place import is_shaped
from rulec.language.expr.node import Node, Op, is_boolean, walk
from rulec.language.expr.text import expression_text

from ...common.python_standalone import call_lines, indented
from ..blocks import DEFAULT, Block, reducing, tile_for
from ..coded import CodedStage, coded_in, halved, lengthened, table_name
from ..flat import FlatStage
from ..plan import FLAT, SHAPED, moved, vector_width
from ..print import ShapedStage
from ..registers import most_registers
from .forms import Form, fact_text
from .gaps import REDUCTIONS, GapText, reduction_place
from .states import FormsFile

#: Chunks of a tensor, at most, of a stage without and with reductions.
_CHUNKS, _REDUCED = 65536, 4096


class KernelText:
    """One stage of a form: its kernels, and how it is launched."""

    def __init__(self, form: Form, index: int) -> None:
        self.form, self.index, self.stage = form, index, form.program.stages[index]
        program, layout = form.program, form.layout
        self.shaped, coded = is_shaped(program, self.stage, layout), coded_in(program, self.stage, layout)
        kind = ShapedStage if self.shaped else CodedStage if coded else FlatStage
        self.source: FlatStage | ShapedStage = kind(program, layout, index)
        self.vector = vector_width(program, self.stage, layout)
        self.block = self._block(self.stage)
        if coded:
            self.block = lengthened(halved(self.block), coded)

    @property
    def name(self) -> str:
        """The name of the kernel."""
        return f"{self.form.prefix}stage_{self.index}"

    @property
    def launch(self) -> str:
        """The name of its launch."""
        return self.name.upper()

    def _block(self, stage: Stage) -> Block:
        if self.shaped:
            return tile_for(self.vector, "")
        if not stage.reduces:
            return Block(1024, 128)
        count = sum(moved(self.form.program, stage, self.form.layout))
        return reducing(next(block for most, block in sorted(DEFAULT.items()) if count <= most))

    def launch_lines(self) -> list[str]:
        """The statement that makes its launch."""
        options = [f"BLOCK={self.block.elements}", *[f"VECTOR={self.vector}"] * self.shaped]
        options += ["EMULATED=INTERPRETED"] * self.source.emulates
        options += [f"num_warps={self.block.threads // 32}", "enable_fp_fusion=False"]
        if self.shaped:
            count = sum(moved(self.form.program, self.stage, self.form.layout))
            most = most_registers(count, self.vector, bool(self.stage.reduces), self.block.threads)
            options.append(f"**({{'maxnreg': {most}}} if torch.version.cuda else {{}})".replace("'", '"'))
        return call_lines(f"{self.launch} = Launch", [self.name, *options], "")

    def cut(self) -> str:
        """The expression of the cuts of all tensors."""
        if not self.shaped:
            most = _REDUCED if self.stage.reduces else _CHUNKS
            return f"[blocks(size, {self.block.elements}, {most}) for size in self.sizes]"
        places = [reduction_place(r.axes.letters, self.form.layout.transposed) for r in self.stage.reduces]
        columns, reduces = "column" in places, bool(places)
        return f"[tiles(*view, {self.block.elements}, {self.vector}, {columns}, {reduces}) for view in self.lying]"

    def fixed(self) -> list[str]:
        """The columns of `known` after the shape and the slots: addresses."""
        shape = SHAPED if self.shaped else FLAT
        return [*self.source.known[len(shape) + len(self.stage.reduces) :]]

    def stage_lines(self) -> list[str]:
        """The statement that makes its tables."""
        addresses = call_lines("", [self._address(name) for name in self.fixed()], "")
        addresses = [f"[{addresses[0][1:]}", *addresses[1:]]
        addresses[-1] = f"{addresses[-1][:-1]}]"
        reduces = [
            f'({REDUCTIONS[r.value.op][1]}, "{reduction_place(r.axes.letters, self.form.layout.transposed)}")'
            for r in self.stage.reduces
        ]
        lines = [f"{self.launch}, self.device, {self.cut()},", *addresses[:-1], f"{addresses[-1]},"]
        if reduces:
            lines.append(f"[{', '.join(reduces)}],")
        return [f"self.stage_{self.index} = Stage(", *indented(lines), ")"]

    def _address(self, name: str) -> str:
        if name == "p":
            return "[p.data_ptr() for p in self.params]"
        coded = [state for state, _ in self.form.layout.formats if table_name(state) == name]
        if coded:
            return f'[words["{coded[0]}"].data_ptr()] * len(self.params)'
        return f'self.at("{name}")'


class BatchText:
    """The class of a form."""

    def __init__(self, file: FormsFile, form: Form) -> None:
        self.file, self.form = copy.copy(file), form
        self.file.program, self.file.layout = form.program, form.layout
        self.file.facts = {}
        self.kernels = [KernelText(form, i) if s.roots else None for i, s in enumerate(form.program.stages)]
        self.scalars = self.file.scalars('self.numbers["{}"]')
        taken = {
            *file.reserved, *file.fields.values(), *_LOCALS, *(x.partition(" = ")[0] for x in self.scalars.lines),
        }  # fmt: skip
        self.between = GapText(
            form, file.dialect, taken, file.number_text, self.scalars.columns.__getitem__, file.cannot
        )  # fmt: skip

    # The class

    @cached_property
    def lines(self) -> list[str]:
        """The class, as lines."""
        about = textwrap.wrap(self._about(), 108)
        names = [*dict.fromkeys([*self._looked_at(), "step"])]
        base = "Vectors" if self.form.viewed else "Batch"
        update = self._update()
        return [
            f"class {self.form.class_name}({base}):",
            *indented([f'"""{about[0]}{chr(34) * 3 if len(about) == 1 else ""}', *about[1:]]),
            *indented(['"""'] * (len(about) > 1)), "",
            *indented(call_lines("names = ", [f'"{n}"' for n in names] + [""] * (len(names) == 1), "")), "",
            *indented(self._init(update)), "", *indented(self._first()), *indented(update),
        ]  # fmt: skip

    def _first(self) -> list[str]:
        """The methods for the states before the first step, in a class of a step."""
        return [] if self.form.word else [*self.file.first_lines(self.form), ""]

    def _about(self) -> str:
        words = {"to_evaluation": "moved to where the model is evaluated", "to_training": "moved back"}
        if self.form.word:
            return f"Parameters that are {words[self.form.word]}."
        conditions = self.file.family.conditions
        if self.form.class_name == "Tensors":
            return "Tensors and their step."
        ways = [
            " and ".join(
                expression_text(c) if truth else f"not ({expression_text(c)})"
                for c, truth in zip(conditions, truths, strict=True)
            )
            for truths in self.form.case.truths
        ]
        turned = ", seen transposed" if self.form.version.turned else ", seen as they are" * self.file.turns
        return f"Tensors with {' or '.join(filter(None, ways)) or 'any shape'}{turned}, and their step."

    def _looked_at(self) -> list[str]:
        stored = [name for k in self.kernels if k for name in k.fixed() if name != "p" and not name.endswith("::table")]
        return [*stored, *(b.name for b in (*self.form.vectors, *self.form.numbers))]

    def _init(self, update: Sequence[str]) -> list[str]:
        form = self.form
        coded, body = bool(form.layout.formats), []
        for place, buffers in (("vectors", form.vectors), ("numbers", form.numbers)):
            if buffers:
                body.append(f"self.{place} = {{")
                for b in buffers:
                    where = '"cpu"' if b.name in form.host_numbers else "self.device"
                    dtype = form.layout.dtype(b.name) if place == "vectors" else "float64"
                    body.append(f'    "{b.name}": joined(self.states, "{b.name}", torch.{dtype}, {where}),')
                body.append("}")
        body += self._facts()
        if self.file.named("self.member", update) or any("self.member" in line for line in update):
            body += [
                "number = torch.arange(int(self.group.max()) + 1).view(-1, 1)",
                "self.member, self.there = (self.group == number).to(self.device), self.group.to(self.device)",
            ]
        if coded:
            body += [
                'kind = {"dtype": torch.float32, "device": self.device}',
                "self.words = words = {name: torch.tensor(numbers, **kind) for name, numbers in WORDS.items()}",
            ]
        for k in filter(None, self.kernels):
            body += k.stage_lines()
        widths = [1 + len(k.source.moving) for k in self.kernels if k]
        columns = max(1, len(form.program.columns))
        body.append(f"self.uploads = Uploads(self.device, len(self.params), {widths}, {columns})")
        body.append("self.known_places = self.places()")
        return ["def __init__(self, tensors):", *indented(["super().__init__(tensors)", *body])]

    def _facts(self) -> list[str]:
        """The statements for facts of shapes, as vectors of float64."""
        lines = []
        for name in self.file.facts:
            text = {"rows": "[view[1] for view in self.extents]", "cols": "[view[2] for view in self.extents]"}.get(
                name, f"[{fact_text(name)} for p in self.params]"
            )  # fmt: skip
            if name in ("rows", "cols") and not self.form.viewed:
                place = 1 if name == "rows" else 2
                text = f"[matrices(p.shape)[{place}] for p in self.params]"
            lines.append(f"self.{name} = torch.tensor({text}, dtype=torch.float64)")
        return lines

    # The step

    def _update(self) -> list[str]:
        form, moves = self.form, bool(self.form.word)
        steps = self._step_lines()
        known = zip(self.scalars.columns, form.program.scalars.columns, strict=True)
        columns = [self._column(text, c.value) for text, c in known]
        work = [*self.scalars.lines, *columns, *self.scalars.stores.values(), *steps]
        facts = [f"{name} = self.{name}" for name in self.file.facts]
        head = [
            *self.file.reads('hyper["{}"]', work),
            *["t = self.steps.double()" + " + 1" * (not moves)] * self.file.named("t", work),
            *(x for x in facts if self.file.named(x.partition(" = ")[0], work)), *self._seeds(),
        ]  # fmt: skip
        hyper = ["hyper = self.hyper(groups)"] * any('hyper["' in line for line in head)
        told = "one launch of a kernel for each stage" if len(self.kernels) > 1 else "one launch of the kernel"
        arguments = "self, groups, grads" if not moves else "self, groups"
        body = [
            f'"""One step of all tensors: one copy of numbers to the device, and {told}."""' if not moves
            else '"""One launch of the kernel."""',
            *hyper, *head, *self.scalars.lines,
            "moving, table = self.uploads.begin()", *self._moving(), *self._table(columns),
            "with torch.cuda.device_of(self.params[0]):", *indented(["moving, table = self.uploads.copy()", *steps]),
            *[f'self.numbers["{b}"].copy_({text})' for b, text in self._stores().items()],
            *["self.steps += 1"] * (not moves),
            "torch.autograd.graph.increment_version(self.params)",
            *["yield None"] * self.file.yields,
        ]  # fmt: skip
        return [f"def update({arguments}):", *indented(body)]

    def _stores(self) -> dict[str, str]:
        stores = self.scalars.stores.items()
        return {b: text if self._is_vector(text) else f"torch.tensor({text})" for b, text in stores}

    def _column(self, text: str, value: Node) -> str:
        if is_boolean(value):
            return f"({text}).double()"
        return text if self._is_vector(text) else f"torch.full_like(self.steps, {text}, dtype=torch.float64)"

    def _is_vector(self, text: str) -> bool:
        """Whether a printed value depends on any tensor's numbers."""
        names = [*self.file.fields.values(), "t", *self.file.facts, "seed_low", "seed_high", "tensor_number"]
        names += [line.partition(" = ")[0] for line in self.scalars.lines]
        return "self.numbers[" in text or any(self.file.named(name, [text]) for name in names)

    def _seeds(self) -> list[str]:
        if not self.file.seeded or not any(n.arg == "seed_low" for n in self._leaves()):
            return []
        return [
            'seeds = torch.tensor([group["seed"] for group in groups])[self.group]',
            "seed_low, seed_high = (seeds % 65536).double(), (seeds // 65536).double()",
            "tensor_number = self.tensor_number",
        ]

    def _leaves(self) -> list[Node]:
        values = [*(c.value for c in self.form.program.scalars.columns)]
        return [n for n in walk(values) if n.op is Op.FACT]

    def _moving(self) -> list[str]:
        """The statements for memory of this step, and for its addresses and those of gradients."""
        form, lines = self.form, []
        if any("g" in k.source.moving for k in self.kernels if k):
            lines.append("at = torch.tensor([*map(torch.Tensor.data_ptr, grads)])")
        for name in form.scratch:
            lines.append(f'{self.between.rooms[name]} = self.room("bij", torch.{form.layout.dtype(name)})')
        for vector in form.program.vectors:
            axes, dtype = self.between.kernel_axes(vector.name), form.layout.result(vector.name)
            lines.append(f'{self.between.rooms[vector.name]} = self.room("{axes}", torch.{dtype})')
        for place, k in enumerate(filter(None, self.kernels)):
            for column, name in enumerate(k.source.moving, 1):
                if name == "g":
                    lines.append(f"moving[{place}][:, {column}] = at")
                else:
                    axes = "bij" if name in form.scratch else self.between.kernel_axes(name)
                    lines.append(f'moving[{place}][:, {column}] = self.parts({self.between.rooms[name]}, "{axes}")')
        return lines

    def _table(self, columns: Sequence[str]) -> list[str]:
        if not columns:
            return []
        late = f"[:, :{len(columns)}]" if self.form.program.late else ""
        stacked = f"torch.stack(columns, dim=1, out=table{late})"
        return ["columns = [", *indented([f"{c}," for c in columns]), "]", stacked]

    def _step_lines(self) -> list[str]:
        lines, place = [], 0
        for index, k in enumerate(self.kernels):
            lines += self.between.before(index)
            if k is None:
                continue
            results = ", ".join(self.between.results[r.name] for r in k.stage.reduces)
            target = f"({results},) = " if len(k.stage.reduces) == 1 else f"{results} = " if results else ""
            lines.append(f"{target}self.stage_{index}(moving[{place}], table)")
            place += 1
        return lines + self.between.after()


#: Names in a printed step.
_LOCALS = (
    "moving", "table", "columns", "grads", "groups", "hyper", "at", "x", "out", "words", "kind", "number", "seeds",
    "torch", "self", "state", "math",
)  # fmt: skip
