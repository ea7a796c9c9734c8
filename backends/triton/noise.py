"""Prints Triton source for updates with a sum of noise in place of a gradient. No gradient is in memory."""

from __future__ import annotations

from rulec.compiler.ir import Program
from rulec.compiler.layout import Layout

from ..common.noise import require_estimate, sum_dtype
from ..common.scalars import has_scalars
from .flat import FlatStage
from .noise_words import noise_words
from .ops import rounded
from .scalars import ScalarSource
from .words import file_text, words_used


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
