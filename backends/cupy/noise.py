"""Prints CUDA C for updates with a sum of noise in place of a gradient, and launches it. No gradient is in memory.

A warp takes 32 packs of neighbouring elements at a time. With bits and bytes, a block of words serves many elements:
each lane makes one block, of one of several directions, in shared memory, and reads its elements' words from it. The
records of the noise are on the device.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from rulec.compiler.ir import Program
from rulec.compiler.layout import Layout
from rulec.kernel.multi_tensor.uploads import Ring, Uploads
from rulec.kernel.place import ELEMENT

from ..common.noise import ELEMENTS, RECORD, RecordsCall, Table, require_estimate, sum_dtype
from ..common.text import filled
from ..cstyle.dialect import block, indented
from ..cstyle.element import STORAGE, Parameter
from .call import CudaCall
from .memory import Functions, Memory, used
from .plan import THREADS
from .print import file_text
from .stage import StageKernel
from .words import DIALECT
from .work import Work

#: Lanes of a warp.
LANES = 32

_TYPES = """\
// A direction and its weight.
struct Direction {
    <whole> number;
    <real> weight;
};

// Noise in the place of a gradient: its key, what is added to the upper half of a block's number, the step, and the
// element that the tensor's first one is.
struct Noise {
    int64_t <record>;
};

// The words of a block, whose number may be beyond 32 bits.
__device__ inline Words words_of(const Noise &noise, int64_t block, <whole> direction)
{
    return philox((uint32_t)block, (uint32_t)(block >> 32) + (uint32_t)noise.high, (uint32_t)direction,
        (uint32_t)noise.step, (uint32_t)noise.seed, (uint32_t)noise.layer);
}
"""

#: The loops over directions, where a lane makes the words of only its own elements.
_ALONE = """\
    const int64_t first = noise.offset + start + <wide> * lane;
#pragma unroll 1
    for (int64_t d = 0; d < noise.count; ++d) {
        const Direction direction = directions[d];
#pragma unroll
        for (int e = 0; e < <wide>; e += <step>) {
            const Words quad = words_of(noise, (first + e) / 4, direction.number);
<add>
        }
    }
"""

#: The same, where lanes make words for one another.
_SHARED = """\
    const int64_t first = noise.offset + start;  // blocks have <each> elements, and a warp <blocks> of them
    const unsigned first_of_lane = <first_of_lane>;
    __shared__ Pack<Words, 1> quads[<threads>];
    Pack<Words, 1> *const mine = quads + threadIdx.x / 32 * 32;
#pragma unroll 1
    for (int64_t d = 0; d < noise.count; d += <together>) {
        mine[lane].at[0] = words_of(noise, first / <each> + lane % <blocks>, directions[d + lane / <blocks>].number);
        __syncwarp();
        const int some = noise.count - d < <together> ? (int)(noise.count - d) : <together>;
#pragma unroll <unrolled>
        for (int k = 0; k < some; ++k) {
            const <real> weight = directions[d + k].weight;
            const Words &words = mine[<blocks> * k + first_of_lane / <each>].at[0];
<add>
        }
        __syncwarp();
    }
"""

_FUNCTION = """\
// <wide> neighbouring elements of each lane, those of the first from `start` on: sums of noise, direction by direction
// in order. All lanes of a warp call it together.
__device__ inline Pack<<storage>, <wide>> sum_of_noise(const Noise &noise, int64_t start)
{
    const unsigned lane = threadIdx.x % 32;
    const Direction *const directions = at<const Direction>(noise.directions);
    <real> sums[<wide>] = {};
<loops>
    Pack<<storage>, <wide>> values;
#pragma unroll
    for (int e = 0; e < <wide>; ++e)
        values.at[e] = <rounded>;
    return values;
}
"""

#: CUDA C with the names of the functions of noise.
_NOISY = replace(
    DIALECT,
    reserved=DIALECT.reserved | {"Noise", "Direction", "Words", "noise", "start", "words_of", "sum_of_noise"},
)


def estimate_source(program: Program, layout: Layout, values: str) -> str:
    """The whole file. BackendUnsupported as in `require_estimate`."""
    require_estimate("cupy", program, values)
    title = f"{program.name} with a sum of {values} noise as its gradient, by the cupy backend: {layout.text()}."
    return file_text(program, title, _NoisyKernel(program, layout, values).texts())


class _NoisyKernel(StageKernel):
    """The kernel of a rule with a sum of noise for its gradient."""

    dialect = _NOISY

    def __init__(self, program: Program, layout: Layout, values: str) -> None:
        super().__init__(program, layout, program.stages[0], "step", "element")
        self.values, self.single = values, sum_dtype(layout) == "float32"
        self.noise_real = "float" if self.single else "double"

    def texts(self) -> list[str]:
        """The functions of noise, the function of an element, and the kernel."""
        return [*(filled(text, self._marks()) for text in (_TYPES, _FUNCTION)), *super().texts()]

    def _marks(self) -> Mapping[str, object]:
        """The parts of the texts by mark, for `filled`."""
        dtype, each, wide = self.layout.dtype("g"), ELEMENTS[self.values], self.wide
        blocks = max(1, LANES * wide // each)
        together = LANES // min(blocks, LANES)
        position = f"{wide} * lane" if LANES * wide >= each else f"(unsigned)(first % {each}) + {wide} * lane"
        rounded = f"to_{dtype}(sums[e])" if dtype in ("bfloat16", "float16") else "sums[e]"
        return {
            "<loops>": (_ALONE if self.values == "normal" else _SHARED).rstrip("\n"), "<add>": self._add(),
            "<first_of_lane>": position, "<cast>": "" if self.single else "(double)", "<f>": "f" if self.single else "",
            "<each>": each, "<wide>": wide, "<step>": min(4, wide), "<blocks>": blocks, "<together>": together,
            "<unrolled>": min(4, together), "<threads>": THREADS,
            "<storage>": STORAGE[dtype], "<rounded>": rounded, "<real>": self.noise_real,
            "<whole>": "uint32_t" if self.single else "int64_t", "<record>": ", ".join(RECORD),
        }  # fmt: skip

    def _add(self) -> str:
        """The statements that add the values of one direction, as the loops are indented."""
        if self.values == "normal":
            # An index of a register must be a constant, so a lane with half a block chooses between two.
            halves = ["quad.at[0]", "quad.at[1]"] if self.wide > 2 else [_HALF.format(i, i + 2) for i in range(2)]
            pairs = [halves, ["quad.at[2]", "quad.at[3]"]][: max(1, min(self.wide, 4) // 2)]
            lines = [line for i, pair in enumerate(pairs) for line in self._pair(2 * i, *pair)]
            return "\n".join(indented(indented(indented(["<real> x, y;", *lines]))))
        lines = _BITS if self.values == "rademacher" else self._bytes()
        return "\n".join(indented(indented(indented(lines))))

    def _pair(self, e: int, one: str, other: str) -> list[str]:
        """Two elements from two words."""
        return [
            f"normals<f>({one}, {other}, &x, &y);",
            f"sums[e + {e}] += direction.weight * x;", f"sums[e + {e + 1}] += direction.weight * y;",
        ]  # fmt: skip

    def _bytes(self) -> list[str]:
        """The elements of a word, or all elements of a lane if they are fewer."""
        count = min(4, self.wide)
        shift = " >> 8 * (first_of_lane % 4)" if count < 4 else ""
        sums = [
            f"sums[e + {i}] = fma<f>(weight, <cast>less_four(bits{f' >> {8 * i}' * (i > 0)} & 255), sums[e + {i}]);"
            for i in range(count)
        ]
        return [
            "#pragma unroll",
            *block(
                f"for (int e = 0; e < <wide>; e += {count})",
                [f"const uint32_t bits = set_bits(words.at[(first_of_lane + e) % 16 / 4]){shift};", *sums],
            ),
        ]

    # The kernel

    def _address(self, name: str, kind: str) -> list[str]:
        """The address of an array, or the noise in place of the gradient."""
        if name != "g":
            return super()._address(name, kind)
        word = self._word("g")
        return [f"Noise noise = *at<const Noise>({word});", f"noise.directions += {word};  // they lie behind it"]

    def _load(self, p: Parameter, start: str) -> list[str]:
        return [] if p.of == "g" else super()._load(p, start)

    def _side_by_side(self) -> list[str]:
        """The loop over packs: all lanes of a warp make noise, also lanes with elements behind the chunk's end."""
        wide, name = self.wide, self.writer.names["g"]
        return [
            "// A warp takes packs side by side, for its lanes share words: whole ones where addresses allow them.",
            "#pragma unroll 1",
            f"for (int64_t start = chunk.start + {wide} * (threadIdx.x & ~31u); start < chunk.stop; "
            f"start += {wide} * blockDim.x) {{",
            *indented([
                f"const auto {name} = sum_of_noise(noise, start);",
                f"const int64_t i = start + {wide} * (threadIdx.x % 32);",
                *self._pack_or("i", "chunk.stop", self._packed("i"), [
                    "#pragma unroll", *block(f"for (int e = 0; e < {wide}; ++e)", self._one_of_pack()),
                ]),
            ]),
            "}",
        ]  # fmt: skip

    def _one_of_pack(self) -> list[str]:
        """The statement for one element of a pack, with its gradient in a register and its other arrays in memory."""
        arrays = [p for p in self.parameters if p.kind == "buffer" or p.place == ELEMENT]
        arguments = {"i": "e", **{p.name: f"{p.name} + i" for p in arrays}}
        arguments[self.writer.at["g"]] = f"{self.writer.names['g']}.at"
        return block("if (i + e < chunk.stop)", self.writer.call(arguments))


_HALF = "first % 4 ? quad.at[{1}] : quad.at[{0}]"

#: Elements from the bits of a word.
_BITS = [
    "const uint32_t bits = words.at[first_of_lane % 128 / 32] >> first_of_lane % 32;",
    "#pragma unroll",
    *block("for (int e = 0; e < <wide>; ++e)", ["sums[e] += signed_by<f>(bits >> e & 1, weight);"]),
]


class CudaNoiseCall(RecordsCall[Work], CudaCall):
    """A call with noise in place of gradients. Each tensor begins at element `offset` of its noise."""

    def __init__(
        self, program: Program, layout: Layout, functions: Functions, threads: int, memory: Memory,
        params: Sequence[Any], states: Sequence[dict[str, Any]], offset: int, ring: Ring | None,
    ) -> None:  # fmt: skip
        super().__init__(program, layout, functions, threads, memory, params, states, (), ring)
        self._offset, self._dtype = offset, sum_dtype(layout)
        self._records = Uploads(self._ring, 0, spares=0 if ring else 1)

    def _sent(self, table: Table, stream: Any) -> int:
        with used(self._memory, stream) as current:
            return int(self._records.put(table, current, current.ptr, bool(current.is_capturing())).data.ptr)


@functools.cache
def shared_ring(device: int) -> Ring:
    """The one ring of all calls bound with `once` on a device: a call with its own ring would wait at its end."""
    return Ring(Memory(device))
