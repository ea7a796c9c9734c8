"""Prints Triton source for updates with a sum of noise in place of a gradient, and calls it. No gradient is in memory.

The records of the noise are on the device.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from rulec.compiler.ir import Program, Stage
from rulec.compiler.layout import Layout

from ..common.noise import RecordsCall, Table, require_estimate, sum_dtype
from ..common.scalars import has_scalars
from .blocks import INTERPRETER, Block
from .call import TritonCall
from .flat import FlatStage
from .memory import current, is_capturing, uploads
from .noise_words import noise_words
from .ops import rounded
from .scalars import ScalarSource
from .words import file_text, words_used
from .work import StageWork


def estimate_source(program: Program, layout: Layout, values: str) -> str:
    """The whole file. BackendUnsupported as in `require_estimate`."""
    require_estimate("triton", program, values)
    stages = ["\n".join(lines) for lines in NoisyStage(program, layout).functions()]
    scalars = ["\n".join(ScalarSource(program).function())] if has_scalars(program) else []
    title = f"{program.name} with a sum of {values} noise as its gradient, by the triton backend: {layout.text()}."
    noise = noise_words(values, sum_dtype(layout))
    words = words_used("\n".join([*stages, *scalars]))
    return file_text(program, f"{title}\nPrinted by rulec.", [*words, *noise, *stages, *scalars])


class NoisyStage(FlatStage):
    """The one stage of a rule with a sum of noise for its gradient."""

    gradient_in_memory = False
    local_names = frozenset(
        {"philox", "set_bits", "less_four", "in_order", "log_of_normal", "normals", "normals_64", "sum_of_noise"}
    )

    def __init__(self, program: Program, layout: Layout) -> None:
        super().__init__(program, layout, 0)
        self.emulates = self.emulates or layout.dtype("g") == "bfloat16"

    def gradient(self) -> str:
        """The noise of a block, rounded to the gradient's dtype."""
        noise, dtype = f"sum_of_noise({self.at['g']}, start, BLOCK)", self.layout.dtype("g")
        return self.computed(rounded(noise, dtype, sum_dtype(self.layout)), dtype)


#: The block of a kernel with noise: with popcount noise, each thread makes one block of words, and none is idle.
NOISY = Block(2048, 128)


class NoisyWork(StageWork):
    """The work over a bucket of a stage with noise for its gradient."""

    @staticmethod
    def emulates(stage: Stage, layout: Layout) -> bool:
        """Whether the kernel rounds to bfloat16, in stores or in gradients."""
        return StageWork.emulates(stage, layout) or layout.dtype("g") == "bfloat16"

    @staticmethod
    def flat_block(moved: int, device: str) -> Block:
        """The block, the same for any number of bytes."""
        return StageWork.flat_block(moved, device) if device == INTERPRETER else NOISY


class TritonNoiseCall(RecordsCall[StageWork], TritonCall):
    """A call with noise in place of gradients. Each tensor begins at element `offset` of its noise."""

    work_kind = NoisyWork

    def __init__(
        self, program: Program, layout: Layout, kernels: Mapping[str, Any], params: Sequence[Any],
        states: Sequence[dict[str, Any]], offset: int,
    ) -> None:  # fmt: skip
        super().__init__(program, layout, kernels, params, states, ())
        self._offset, self._dtype = offset, sum_dtype(layout)
        self._records = uploads(self._device, 0, self._ring)

    def _sent(self, table: Table, stream: Any) -> int:
        with current(self._device, stream):
            return self._address(self._records.put(table, stream, stream, is_capturing(self._device)))
