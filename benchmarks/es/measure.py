"""`rulec bench es`: populations in one batch, noise that is never stored, and the cosines of estimates."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

from benchmarks.es import binary as es_binary
from benchmarks.es import cosine as es_cosine
from benchmarks.es import fused as es_fused
from benchmarks.es import layers as es_layers
from benchmarks.es import spsa as es_spsa
from benchmarks.kernels import threads
from benchmarks.result import Result, Row
from benchmarks.tensors import have_torch

NOTES = (
    f"layers: a batch of {es_layers.MEMBERS} rows, each another member's, {es_layers.MEMBERS // 2} antithetic pairs; "
    f"no bias; one step's noise is kept from forward to forward where a row does not say that it is drawn",
    f"one member at a time: torch draws the member's noise, adds it to the weight and runs one row; "
    f"{es_layers.SAMPLE} members are timed and the time is scaled to {es_layers.MEMBERS}",
    f"noise in the kernel: {es_fused.ELEMENTS:,} float32 numbers, a tenth of them with 64 directions of normal noise",
    f"cosines: a perceptron {'-'.join(map(str, es_cosine.WIDTHS))} on the handwritten digits, every member sees "
    f"{es_cosine.SAMPLES} of them; means over {es_cosine.STEPS} steps of {es_cosine.MEMBERS} members, or of as many as "
    f"take the time of {es_cosine.MEMBERS} of {es_cosine.REFERENCE}, at most {es_cosine.MOST} times as many",
)


def parts(quick: bool, only: Sequence[str] = ()) -> int:
    """The number of calls of `advance` in `measure`."""
    fused = len(es_fused.plan(only))
    return fused if only else fused + len(es_layers.plan(quick)) + es_spsa.parts() + es_cosine.parts() + 1


def measure(quick: bool, only: Sequence[str] = (), advance: Callable[[], object] = lambda: None) -> Result:
    """The measurement; `only` restricts it to steps of some rules. `advance` is called after parts."""
    notes = list(NOTES)
    rows = list(_rows(quick, only, advance)) if have_torch(notes) else []
    return Result("es", rows, quick, threads(), notes)


def _rows(quick: bool, only: Sequence[str], advance: Callable[[], object]) -> Iterator[Row]:
    if not only:
        for layer, family in es_layers.plan(quick):
            yield from es_layers.rows(layer, family, quick)
            advance()
    for rule, values, directions in es_fused.plan(only):
        yield from es_fused.rows(rule, values, directions, quick)
        advance()
    if not only:
        yield from es_spsa.rows(quick, advance)
        yield from es_cosine.rows(quick, advance)
        yield from es_binary.rows(quick)
        advance()
