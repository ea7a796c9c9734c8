"""Random numbers of rules in Triton: one launch for all tensors, between the stages of a step.

A program of the grid has some neighbouring blocks of one tensor. Normal numbers are computed in float64 as in noise of
float64, with the same bits, and rounded once as they are stored.
"""

from __future__ import annotations

from typing import Any

from rulec.errors import BackendUnavailable
from rulec.language.expr.node import Op

from .memory import Launcher, current
from .noise_words import noise_words
from .words import source_text
from .work import compiler_errors, refusal

#: The kernel.
DRAWS = '''\
@triton.jit(do_not_specialize=[
    "out", "ends", "tensors", "steps", "step", "seed", "draw", "block", "before", "chunks",
])
def draws(
    out, ends, tensors, steps, step, seed, draw, block, before, chunks, EACH: tl.constexpr, UNIFORM: tl.constexpr,
    BLOCKS: tl.constexpr,
):
    """Random numbers of tensors, one after the other in `out`; `ends` has the end of each, after a 0.

    The first number of a tensor is number `before` of block `block` of its draw. A tensor has `chunks` programs of
    BLOCKS blocks. `steps` has the steps as float64, one for all or, with EACH, one for each; without, they are `step`.
    """
    tensor, chunk = tl.program_id(0) // chunks, (tl.program_id(0) % chunks).to(tl.int64)
    start, stop = tl.load(ends + tensor), tl.load(ends + tensor + 1)
    if 4 * BLOCKS * chunk - before < stop - start:
        if steps is None:
            at = step.to(tl.uint32)
        else:
            at = tl.load(steps + tensor * EACH).to(tl.int64).to(tl.uint32)
        here = block + BLOCKS * chunk + tl.arange(0, BLOCKS)
        low, high, number = here.to(tl.uint32), (here >> 32).to(tl.uint32), tl.load(tensors + tensor).to(tl.uint32)
        a, b, c, d = philox(low, high, draw.to(tl.uint32), at, seed.to(tl.uint32), number)
        if UNIFORM:
            w, x, y, z = uniforms(a), uniforms(b), uniforms(c), uniforms(d)
        else:
            w, x = normals_64(a, b)
            y, z = normals_64(c, d)
        place = 4 * BLOCKS * chunk - before + tl.arange(0, 4 * BLOCKS)
        numbers = tl.reshape(in_order(w, x, y, z), (4 * BLOCKS,)).to(out.dtype.element_ty)
        tl.store(out + start + place, numbers, mask=(place >= 0) & (place < stop - start))
'''

_UNIFORMS = '''\
@triton.jit
def uniforms(word):
    """Numbers between 0 and 1 from words, in float64: the upper 23 bits, in the middle of their cell."""
    return ((word >> 9).to(tl.float64) + 0.5) * 1.1920928955078125e-07
'''

#: The numbers in a block of the generator, the blocks of a program, and its warps.
_BLOCK, BLOCKS, WARPS = 4, 256, 4


def draws_source() -> str:
    """The whole file: the kernel `draws`."""
    *words, _ = noise_words("normal", "float64")
    title = "Random numbers of rules for several tensors by the triton backend. Printed by rulec."
    return source_text(title, [*words, _UNIFORMS, DRAWS])


class Draws:
    """The random numbers of rules on GPUs, by compiled kernels from the second launch of a kind on."""

    def __init__(self, kernel: Any) -> None:
        self._kernel = kernel
        self._launchers: dict[Any, Launcher] = {}

    def __call__(
        self, op: Op, out: Any, ends: Any, tensors: Any, steps: Any, *, most: int, seed: int, draw: int, first: int = 0
    ) -> None:  # fmt: skip
        """Writes numbers as `rulec.backend.capabilities.DrawsNumbers` says.

        BackendUnavailable where Triton does not compile the kernel for the device.
        """
        block, before = divmod(first, _BLOCK)
        chunks = -(-(most + before) // (_BLOCK * BLOCKS))
        if not most or not len(tensors):
            return
        known = isinstance(steps, int)
        words = [_signed(x) for x in (steps if known else 0, seed, draw)]
        arguments = (out, ends, tensors, None if known else steps, *words, block, before, chunks)
        each = not known and steps.numel() > 1
        launcher = self._launcher(out.device, op, each)
        with current(out.device, None):
            try:
                launcher.run(len(tensors) * chunks, arguments, (known, out.dtype, block >> 31 > 0))
            except compiler_errors() as error:
                raise BackendUnavailable(refusal("random numbers", out.device, error)) from error

    def _launcher(self, device: Any, op: Op, each: bool) -> Launcher:
        kind = device, op, each
        if kind not in self._launchers:
            constants = {"EACH": int(each), "UNIFORM": op is Op.UNIFORM, "BLOCKS": BLOCKS}
            options = {"num_warps": WARPS, "enable_fp_fusion": False}
            self._launchers[kind] = Launcher(self._kernel, constants | options)
        return self._launchers[kind]


def _signed(word: int) -> int:
    """The signed number with the bits of a word of 32 bits, so that all arguments of the kernel have one type."""
    return ((word & 0xFFFFFFFF) ^ 0x80000000) - 0x80000000
