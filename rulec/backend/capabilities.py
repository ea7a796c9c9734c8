"""The capabilities of a backend beyond its three methods, asked for in this one module: `capabilities_of(backend)`.

A backend offers a capability by attributes and methods of its class, and the record `Capabilities` has them by type:

- a gradient as a sum of noise: kernels take a `Noise` in place of the gradient, which is never in memory;
- a gradient as a product: kernels take a `Product` in place of the gradient;
- the products of `newton_schulz` by the backend's own kernels, for stacks of matrices on its device;
- the reduction of runs of a vector by its own kernel, between the stages of a step on its device;
- the random numbers of rules for several tensors by one kernel, there too;
- products and convolutions of packed bits, and draws of bits, for binary layers. Bits lie in words of 64, the first in
  the lowest bit of the first word; bits behind the last one are zero.

docs/write-a-backend.md has the table, and `rulec.testing` the checks of each.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Literal, Protocol

import numpy as np

from rulec.backend.protocol import Backend, Call, Kernel, ReplayableCall, Rows, Scalars
from rulec.compiler.ir import Program
from rulec.compiler.layout import Layout
from rulec.language.expr.node import Op

#: Kinds of noise: standard normal; 1 or -1; the set bits of a byte less 4, from -4 to 4.
Values = Literal["normal", "rademacher", "popcount"]

#: The bit of the key's second word that sets noise apart from a rule's own random numbers.
_DOMAIN = 2**31

_WORD = 0xFFFFFFFF


@dataclass(frozen=True, eq=False)
class Noise:
    """A gradient as noise: element e is the sum over d of `weights[d] * value(first + d, e)`.

    The sum begins at 0 and goes over directions in order, in float64 for a gradient of float64 and in float32 for
    others; it is rounded to the gradient's dtype once. `weights` is of float32 or float64, one for each direction.
    Values of popcount are whole numbers of variance 2: the caller scales their weights. Weights have few significant
    bits, so that their products with whole numbers are exact: see `rulec.es.streams.short_weights`.

    Values are made from words of Philox4x32-10 under `key`. The counter is (block, `high` + the upper half of block's
    64 bits, direction, `step`), all of 32 bits. A block of four words serves 4 elements of normal noise, 128 of
    rademacher and 16 of popcount, the lowest bits of the first word first.
    """

    values: Values
    seed: int
    layer: int
    step: int
    weights: np.ndarray[Any, np.dtype[Any]]
    first: int = 0
    purpose: int = 0

    @property
    def key(self) -> tuple[int, int]:
        """The generator's key: two words of 32 bits."""
        return self.seed & _WORD, (self.layer + _DOMAIN) & _WORD

    @property
    def high(self) -> int:
        """The addend of the upper half of a block's number: the purpose, in the upper half of a word."""
        return self.purpose << 16

    @property
    def counted(self) -> tuple[np.ndarray[Any, np.dtype[np.int64]], np.ndarray[Any, np.dtype[Any]]]:
        """The directions with a weight other than zero, and these weights: a weight of zero changes no bit."""
        (places,) = np.nonzero(self.weights)
        return places + self.first, self.weights[places]


class EstimateKernels(Protocol):
    """Kernels for noise, of rules of one elementwise stage.

    They give the same bits as the program's own kernel with a gradient of the layout's dtype written by `fill_noise`.
    """

    def emit_estimate(self, program: Program, layout: Layout, values: Values) -> str:
        """The source for noise of these values; pure. Raises BackendUnsupported for a rule without such a kernel."""
        ...

    def build_estimate(self, program: Program, layout: Layout, values: Values, source: str) -> Kernel:
        """The kernel of the source: bound and called as any other, with Noise among its gradients."""
        ...


class FillsNoise(Protocol):
    """Writes noise into an array. With a single weight of 1 this is the noise of one direction."""

    def __call__(self, out: Any, noise: Noise, offset: int = 0) -> None:
        """Element i of `out`, contiguous and of floats, in its order in memory, is element `offset + i` of `noise`."""
        ...


class FillsLines(Protocol):
    """Writes the noise of several directions, as `FillsNoise` would one after the other."""

    def __call__(self, out: Any, noise: Noise, pairs: Sequence[int], offset: int = 0) -> None:
        """Line i of `out`, a contiguous matrix, is the noise of direction `pairs[i]`."""
        ...


@dataclass(frozen=True)
class Product:
    """The gradient `outputs.T @ inputs` of a layer's matrix.

    `outputs` are the gradients of the layer's outputs, `inputs` its inputs. Both are matrices of one dtype with a line
    for each token, in any memory order. The product is rounded to their dtype, as torch would, and then to the dtype of
    the gradient.
    """

    outputs: Any
    inputs: Any


class EpilogueKernels(Protocol):
    """Kernels for products, of rules of one elementwise stage."""

    def emit_epilogue(self, program: Program, layout: Layout, factors: str) -> str:
        """The source for factors of this dtype; pure. Raises BackendUnsupported for a rule without such a kernel."""
        ...

    def build_epilogue(self, program: Program, layout: Layout, factors: str, source: str) -> Kernel:
        """The kernel of the source: bound and called as any other, with products among its gradients."""
        ...


class GradientRows(Protocol):
    """A gradient computed some rows at a time, for updates tile by tile.

    A row is the part of the gradient at one index of its first dimension, as one line.
    """

    @property
    def dtype(self) -> Any:
        """The dtype of the computed rows; they are then rounded to the gradient's."""
        ...

    def rows(self, span: slice, out: Any) -> None:
        """Writes the rows of `span` into `out`, a contiguous matrix of as many rows."""
        ...


#: The dtypes of matrices that a GPU's backend has products for.
DTYPES = ("bfloat16", "float16")

#: From so many rows or columns on, whichever are fewer, half of a product is quicker than the whole by the library.
WORTH_HALVING = 256


class QuinticProducts(Protocol):
    """Products of stacks `(batch, rows, cols)` of one dtype, each summed in float32 and rounded once.

    Symmetric matrices have as many rows as the shorter side of the others. A result may be written to `out`, memory of
    its shape that no operand lies in.
    """

    def pays(self, rows: int, cols: int) -> bool:
        """Whether they are for matrices of this size. The library's own products are for all others."""
        ...

    def stack_size(
        self, device: Any, dtype: str, rows: int, cols: int, count: int, most: int, form: str = "direct"
    ) -> int:  # fmt: skip
        """How many of `count` matrices of this size go into one stack, of `most` elements or of one matrix.

        `form` is that of `newton_schulz`, and decides which products run how often.
        """
        ...

    def divided(self, y: Any, norms: Any, out: Any = None) -> Any:
        """Matrices over their `norms`, of shape `(batch, 1, 1)`: IEEE quotients, rounded once.

        They have the dtype of the products. The norms may be in float32; a matrix in another dtype has an `out`.
        """
        ...

    def gram(self, y: Any, out: Any = None) -> Any:
        """The products of matrices and their transposes: `y @ y.T`, of tall ones `y.T @ y`."""
        ...

    def polynomial(self, gram: Any, b: float, c: float, out: Any = None) -> Any:
        """`b*x + c*x @ x` of symmetric matrices."""
        ...

    def multiplied(self, x: Any, polynomial: Any, a: float, out: Any = None) -> Any:
        """`a*x + x @ p` of symmetric matrices that commute."""
        ...

    def following(self, y: Any, polynomial: Any, a: float, out: Any = None) -> Any:
        """`a*y + x @ y`, of tall matrices `a*y + y @ x`, for their polynomials `x`."""
        ...


class QuinticKernels(Protocol):
    """Products of `newton_schulz`. A matrix has the same bits in every stack, whatever its neighbours are."""

    def has_quintic(self, device: Any) -> bool:
        """Whether there are such kernels for a device of torch's."""
        ...

    def emit_quintic(self, dtype: str) -> str:
        """The source for matrices of this dtype; pure. Raises BackendUnsupported for a dtype without such kernels."""
        ...

    def build_quintic(self, dtype: str, source: str) -> QuinticProducts:
        """The products by the kernels of the source."""
        ...


#: The bits of a word.
WORD_BITS = 64

Counts = np.ndarray[Any, np.dtype[np.int64]]


def words_of(bits: int) -> int:
    """The number of words for `bits` bits."""
    return -(-bits // WORD_BITS)


@dataclass(frozen=True)
class Window:
    """The sizes of a convolution of packed bits, each member with weights of its own.

    Inputs are (members, samples, height, width, words), weights (members, outputs, *kernel, words), results int32
    (members, samples, *out, outputs). `bits` is the number of bits of a position. A product is a convolution with a
    size of (1, 1). Positions outside the inputs are not counted.
    """

    members: int
    samples: int
    size: tuple[int, int]
    bits: int
    outputs: int
    kernel: tuple[int, int] = (1, 1)
    stride: tuple[int, int] = (1, 1)
    padding: tuple[int, int] = (0, 0)

    @property
    def words(self) -> int:
        """The number of words of a position."""
        return words_of(self.bits)

    @cached_property
    def out(self) -> tuple[int, int]:
        """Height and width of the results."""
        return self._out(0), self._out(1)

    def _out(self, axis: int) -> int:
        return (self.size[axis] + 2 * self.padding[axis] - self.kernel[axis]) // self.stride[axis] + 1

    @property
    def shape(self) -> tuple[int, int, int, int, int]:
        """The shape of the results."""
        return self.members, self.samples, *self.out, self.outputs

    def first(self, axis: int) -> Counts:
        """For each position of the results along an axis, the start of its kernel in the inputs; it may be negative."""
        return np.arange(self.out[axis]) * self.stride[axis] - self.padding[axis]

    def inside(self, axis: int) -> np.ndarray[Any, np.dtype[np.bool_]]:
        """Positions of the results by places of the kernel along an axis: whether a place lies inside the inputs."""
        at = self.first(axis)[:, None] + np.arange(self.kernel[axis])
        return np.asarray((at >= 0) & (at < self.size[axis]))


@dataclass(frozen=True)
class Bits:
    """The bits to draw: of a layer's elements at a step, for each sign and each direction below `directions`.

    The word of an element is in `rulec.es.streams` under purpose BITS; the second sign has its complement.
    """

    seed: int
    layer: int
    step: int
    directions: int
    signs: int = 1

    @property
    def members(self) -> int:
        """The number of members, in the order (sign, direction)."""
        return self.signs * self.directions


class BinaryKernels(Protocol):
    """The kernels. Arrays are of the backend's kind and contiguous; words are uint64."""

    def convolve(self, inputs: Any, weights: Any, window: Window) -> Any:
        """2*(equal bits) - (all bits), int32 of shape `window.shape`."""
        ...

    def draw(self, thresholds: Any, shape: Sequence[int], bits: Bits) -> Any:
        """Words (members, *shape[:-1], words): 1 where an element's word is below its threshold (uint32, `shape`)."""
        ...

    def weighted_sum(self, words: Any, weights: Any, count: int) -> Any:
        """The sum over members of weight times bit, float64 (..., count), of words (members, ..., words).

        `weights` (members,) are NumPy's float64. Members are added in order.
        """
        ...


class ReducesSegments(Protocol):
    """Reduces runs of a contiguous vector of float64, each to a number of float64.

    `ends` has the end of each run after a 0, in int64 on the device of the vector. The order of adding depends on the
    number of terms alone, so a run has the same bits whatever its neighbours are. NaN among the terms gives NaN.
    """

    def __call__(self, op: Op, values: Any, ends: Any) -> Any: ...


class SegmentKernels(Protocol):
    """The reduction of runs by a kernel of the backend."""

    def emit_segments(self) -> str:
        """The source of the kernel; pure."""
        ...

    def build_segments(self, source: str) -> ReducesSegments:
        """The reduction by the kernel of the source."""
        ...


class DrawsNumbers(Protocol):
    """Writes random numbers of rules for several tensors: those of the stream in `rulec.array_api.random`.

    `out` is a contiguous vector of float32 or float64, in which the numbers of tensors lie one after the other. `ends`
    has the end of each after a 0, `most` is the greatest count, and `tensors` has the tensors' numbers in the stream,
    all on the device, in int64. The counts begin at element `first` of each draw. `op` is NORMAL or UNIFORM. `steps` is
    a whole number, or an array of float64 on the device with one number for all tensors or one for each: the numbers
    that draws are named by, which the kernel rounds towards zero.
    """

    def __call__(
        self, op: Op, out: Any, ends: Any, tensors: Any, steps: Any, *, most: int, seed: int, draw: int, first: int = 0
    ) -> None: ...


class DrawKernels(Protocol):
    """The random numbers of rules by a kernel of the backend.

    Uniform numbers are exact. A normal number is computed in float64 and rounded once, and has the bits of noise that
    `fill_noise` writes in float64.
    """

    def emit_draws(self) -> str:
        """The source of the kernel; pure."""
        ...

    def build_draws(self, source: str) -> DrawsNumbers:
        """The kernel of the source."""
        ...


def no_codes(program: Program, layout: Layout) -> bool:
    """The answer of a backend without `decodes`: its kernels read and write floats alone."""
    return False


@dataclass(frozen=True)
class Capabilities:
    """The capabilities of a backend beyond its three methods: None, or False, for each that is absent.

    With `on_device` its arrays are on a device, and nothing waits for it. With `narrow` its kernels take operands of
    `newton_schulz` in 16 bits. `decodes` tells of a program and a layout with `formats` whether its kernels read and
    write codes. `assembly` takes a program's name and its source, and gives the machine code as a text for an
    assembler; BackendUnavailable where its compiler is missing.
    """

    on_device: bool = False
    narrow: bool = False
    decodes: Callable[[Program, Layout], bool] = no_codes
    estimate: EstimateKernels | None = None
    fill_noise: FillsNoise | None = None
    fill_lines: FillsLines | None = None
    epilogue: EpilogueKernels | None = None
    quintic: QuinticKernels | None = None
    segments: SegmentKernels | None = None
    draws: DrawKernels | None = None
    binary: Callable[[], BinaryKernels] | None = None
    assembly: Callable[[str, str], str] | None = None

    @property
    def names(self) -> list[str]:
        """The names of the capabilities that there are."""
        return [name for name in MEMBERS if getattr(self, name) not in (None, False, no_codes)]


#: Capability -> the attributes and methods of a backend that offer it.
MEMBERS: Mapping[str, tuple[str, ...]] = {
    "on_device": ("on_device",),
    "narrow": ("narrow",),
    "decodes": ("decodes",),
    "estimate": ("emit_estimate", "build_estimate"),
    "fill_noise": ("fill_noise",),
    "fill_lines": ("fill_lines",),
    "epilogue": ("emit_epilogue", "build_epilogue"),
    "quintic": ("has_quintic", "emit_quintic", "build_quintic"),
    "segments": ("emit_segments", "build_segments"),
    "draws": ("emit_draws", "build_draws"),
    "binary": ("binary",),
    "assembly": ("assembly",),
}


def lacking(backend: Backend, capability: str) -> list[str]:
    """The members of a capability that a backend lacks. A member of None is absent."""
    return [member for member in MEMBERS[capability] if getattr(backend, member, None) is None]


def capabilities_of(backend: Backend) -> Capabilities:
    """The capabilities of a backend, by the attributes of its class or of itself.

    An attribute of None is none, and so is a capability with some of its members.
    """

    def whole(capability: str) -> Any:
        return None if lacking(backend, capability) else backend

    return Capabilities(
        on_device=bool(getattr(backend, "on_device", False)),
        narrow=bool(getattr(backend, "narrow", False)),
        decodes=getattr(backend, "decodes", None) or no_codes,
        estimate=whole("estimate"),
        fill_noise=getattr(backend, "fill_noise", None),
        fill_lines=getattr(backend, "fill_lines", None),
        epilogue=whole("epilogue"),
        quintic=whole("quintic"),
        segments=whole("segments"),
        draws=whole("draws"),
        binary=getattr(backend, "binary", None),
        assembly=getattr(backend, "assembly", None),
    )


#: The method `scalars` of `rulec.backend.protocol.ScalarCall`.
DeviceScalars = Callable[[Scalars], tuple[Any, dict[str, Any]]]


def scalars_of(call: Call) -> DeviceScalars | None:
    """A bound call's function for the scalar table on its device; None where it has none."""
    scalars: DeviceScalars | None = getattr(call, "scalars", None)
    return scalars


def replay_of(call: Call) -> Callable[[Rows], ReplayableCall] | None:
    """A bound call's way to a replayable call; None where it has none."""
    standing: Callable[[Rows], ReplayableCall] | None = getattr(call, "standing", None)
    return standing
