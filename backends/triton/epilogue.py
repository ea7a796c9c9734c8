"""Prints a product with an elementwise rule as its epilogue: a layer's gradient, the product, never exists in memory.

The gradient of a weight of shape (height, width) is `outputs.T @ inputs`: the gradients of the layer's outputs and its
inputs, with a line of each for a token. A program of the grid computes one tile of it in float32, rounds it like the
product and the gradient in memory, and updates the same tile of the parameter and its states.
"""

from __future__ import annotations

from rulec.compiler.ir import Program
from rulec.compiler.layout import Layout
from rulec.errors import BackendUnsupported
from rulec.kernel.place import moving_lines

from .ops import rounded
from .stage import StageSource, call, indented
from .words import file_text, words_used

#: The dtypes of the factors.
FACTORS = ("float32", "bfloat16", "float16")

_HALVES = '''\
@triton.jit
def halves(x, HIGH: tl.constexpr, WIDE: tl.constexpr):
    """The left and the right half of a tile."""
    return tl.split(tl.permute(tl.reshape(x, (HIGH, 2, WIDE // 2)), (0, 2, 1)))
'''

_FACTOR = '''\
@triton.jit
def factor(at, inside, known, ALL: tl.constexpr, EVEN: tl.constexpr):
    """Some tokens of a factor: zeros where a token is not `known`, or an element not `inside`."""
    if ALL:
        if EVEN:
            return tl.load(at)
        return tl.load(at, mask=known, other=0.0)
    return tl.load(at, mask=known & inside, other=0.0)
'''

_PRODUCT = '''\
@triton.jit
def tile_of_product(
    outputs, inputs, top, left, tokens, height, width, outputs_line, inputs_line,
    HIGH: tl.constexpr, WIDE: tl.constexpr, DEEP: tl.constexpr, PRECISION: tl.constexpr, DESCRIBED: tl.constexpr,
    ALL: tl.constexpr, EVEN: tl.constexpr, EMULATED: tl.constexpr,
):
    """The tile of `outputs.T @ inputs` that begins at row `top`, column `left`: summed in float32.

    Factors that are DESCRIBED know their own ends, where they have zeros.
    """
    line, rows, columns = tl.arange(0, DEEP)[:, None], tl.arange(0, HIGH)[None, :], tl.arange(0, WIDE)[None, :]
    if not DESCRIBED:
        output_at = outputs + top + line * outputs_line + rows
        input_at = inputs + left + line * inputs_line + columns
    total = tl.zeros((HIGH, WIDE), tl.float32)
    for first in range(0, tokens, DEEP):
        if DESCRIBED:
            output, input = outputs.load([first, top]), inputs.load([first, left])
        else:
            known = line < tokens - first
            output = factor(output_at, rows < height - top, known, ALL, EVEN)
            input = factor(input_at, columns < width - left, known, ALL, EVEN)
            output_at += DEEP * outputs_line
            input_at += DEEP * inputs_line
        if EMULATED:  # the interpreter's product takes bfloat16 for integers
            output, input = output.to(tl.float32), input.to(tl.float32)
        total = tl.dot(tl.trans(output), input, total, input_precision=PRECISION)
    return total
'''

_TABLES = ["table", "row", "stays", "scale"]
_SIZES = ["tokens", "height", "width", "outputs_line", "inputs_line"]
_SHAPE = ["HIGH", "WIDE"]
_DEPTH = ["DEEP", "PRECISION", "DESCRIBED"]
_ENDS = ["ALL", "EVEN"]


def fits(program: Program, layout: Layout) -> bool:
    """Whether a rule's update can be an epilogue: one elementwise stage, in float32, without other inputs or codes."""
    plain = program.elementwise and layout.compute == "float32" and not layout.formats
    return plain and not moving_lines(program, program.stages[0])


def epilogue_source(program: Program, layout: Layout, factors: str) -> str:
    """The whole file: the kernel `product`, for factors of this dtype.

    BackendUnsupported for unknown factors, and for a rule with reductions, matrix functions, inputs or float64.
    """
    if not fits(program, layout) or factors not in FACTORS:
        what = "reductions, matrix functions, other inputs or float64 in the epilogue of a product"
        what = "states in codes in the epilogue of a product" if layout.formats else what
        raise BackendUnsupported("triton", what, program.name)
    functions = ["\n".join(lines) for lines in EpilogueStage(program, layout, factors).functions()]
    words = words_used("\n".join(functions))
    title = f"{program.name} in the epilogue of its gradient's product, by the triton backend: {layout.text()},"
    parts = [*words, _HALVES, _FACTOR, _PRODUCT, *functions]
    return file_text(program, f"{title}\nfactors in {factors}. Printed by rulec.", parts)


class EpilogueStage(StageSource):
    """The one stage of an elementwise rule, over a tile with its gradient in registers."""

    works_on = True
    local_names = frozenset(
        {
            "gradient", "outputs", "inputs", "output", "input", "total", "known", "one", "other", "high", "halves",
            "factor", "tile_of_product", "update_tile", "update_parts", "product", "output_at", "input_at",
            "HIGH", "DEEP", "TALL", "PARTS", *_TABLES, *_SIZES, *_DEPTH, *_ENDS,
        }
    )  # fmt: skip

    def __init__(self, program: Program, layout: Layout, factors: str) -> None:
        super().__init__(program, layout, 0)
        self.factors = factors
        self.fixed = [b for b in self.buffers if b != "g"]
        self.emulates = True
        self._values = [*(self.at[a] for a in self.fixed), *self.scalars]
        self._values += ["scale"] * self.scaled + ["stays", "row"] * self.guarded
        self._place = ["gradient", "top", "left", "height", "width"]

    def functions(self) -> list[list[str]]:
        """The update of a tile, of a tile part by part, and the kernel, each as lines."""
        return [self._tile(), self._parts(), self._kernel()]

    def _switches(self, *names: str, typed: bool = False) -> list[str]:
        switches = [*names, "EMULATED"]
        return [f"{name}: tl.constexpr" for name in switches] if typed else switches

    # The update

    def gradient(self) -> str:
        """The tile of the product."""
        return "gradient"

    def _tile(self) -> list[str]:
        arguments = [*self._place, *self._values, *self._switches(*_SHAPE, "ALL", typed=True)]
        body = [
            f'"""Updates the tile that begins at row `top`, column `left`, in {self.compute}: ALL of it, or what of it',
            "lies in the matrix.", '"""',
            *self.before_lines(),
            "down, along = tl.arange(0, HIGH)[:, None], tl.arange(0, WIDE)[None, :]",
            "start = top.to(tl.int64) * width + left",
            "i = down * width + along",
            "inside = None if ALL else (down < height - top) & (along < width - left)",
            *self.load_lines(), *self.value_lines(), *self.store_lines(),
        ]  # fmt: skip
        return ["@triton.jit", *call("def update_tile", arguments, ":"), *indented(body)]

    def _parts(self) -> list[str]:
        typed = self._switches(*_SHAPE, "PARTS", "ALL", typed=True)
        half = self._switches("HIGH", "WIDE // 2", "PARTS // 2", "ALL")
        right = ["other", "top", "left + WIDE // 2", *self._place[3:]]
        whole = [f"gradient = {self.rounded()}"]
        whole += call("update_tile", [*self._place, *self._values, *self._switches(*_SHAPE, "ALL")])
        halved = ["one, other = halves(gradient, HIGH, WIDE)"]
        halved += call("update_parts", ["one", *self._place[1:], *self._values, *half])
        halved += call("update_parts", [*right, *self._values, *half])
        body = [
            '"""The same in PARTS side by side, one after the other: what is kept of each element must fit into',
            "registers.", '"""',
            "if PARTS == 1:", *indented(whole), "else:", *indented(halved),
        ]  # fmt: skip
        return ["@triton.jit", *call("def update_parts", [*self._place, *self._values, *typed], ":"), *indented(body)]

    def rounded(self) -> str:
        """The product in the compute dtype, rounded to the gradient's dtype before, if narrower than the factors'."""
        return f"{rounded('gradient', self.layout.dtype('g'), self.factors)}.to(tl.{self.compute})"

    # The kernel

    def _kernel(self) -> list[str]:
        pointers = [self.at[a] for a in self.fixed]
        typed = self._switches(*_SHAPE, "DEEP", "TALL", "PARTS", "PRECISION", "DESCRIBED", *_ENDS, typed=True)
        factors = ["outputs", "inputs", "top", "left", *_SIZES, *self._switches(*_SHAPE, *_DEPTH, *_ENDS)]
        columns = len(self.program.columns)
        body = [
            *self._about(), *_PLACE,
            *call("gradient = tile_of_product", factors),
            f"gradient = {rounded('gradient', self.factors, 'float32')}",
            *[f"values = table + {columns} * row"] * bool(self.scalars), *self.scalar_lines(),
            *call("update_parts", [*self._place, *self._values, *self._switches(*_SHAPE, "PARTS", "ALL")]),
        ]  # fmt: skip
        same = ", ".join(f'"{t}"' for t in [*_TABLES, "tokens"])
        arguments = ["outputs", "inputs", *pointers, *_TABLES, *_SIZES, *typed]
        return [f"@triton.jit(do_not_specialize=[{same}])", *call("def product", arguments, ":"), *indented(body)]

    def _about(self) -> list[str]:
        stores = ", ".join(s.buffer for s in self.stage.stores)
        return [
            f'"""One tile of `outputs.T @ inputs`, and with it as the gradient the update, which stores {stores}.', "",
            "A line of `outputs` has `height` elements, one of `inputs` `width`; lines are so many elements apart.",
            "`row` is the tensor's in `table`. Tiles are HIGH by WIDE; TALL of them, one below the other, come before",
            "those beside them. ALL says that all are whole, EVEN that tokens are a multiple of DEEP.", '"""',
        ]  # fmt: skip


#: The tile of a program: neighbouring programs share factors in the last cache.
_PLACE = [
    "across, deep = tl.cdiv(width, WIDE), tl.cdiv(height, HIGH)",
    "number = tl.program_id(0)",
    "first = number // (TALL * across) * TALL",
    "number = number % (TALL * across)",
    "high = tl.minimum(deep - first, TALL)",
    "top, left = (first + number % high) * HIGH, number // high * WIDE",
]
