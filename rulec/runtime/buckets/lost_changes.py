"""A warning where a state moves by less than its storage can tell: it would stand still, and nothing else says so."""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Mapping

from rulec.analysis.flow import flow_of
from rulec.analysis.slow import pace
from rulec.compiler.ir import Program
from rulec.compiler.layout import Layout
from rulec.formats import UNBIASED
from rulec.language.rule import Rule


def warn_of_lost_changes(
    program: Program, layout: Layout, words: Mapping[str, str], hyper: Mapping[str, float]
) -> None:  # fmt: skip
    """Warns of states with a word for a storage that loses their changes.

    `words` are the words of the storage, `hyper` the hyper-parameters. Sums without decay are looked at in every
    storage. Means are looked at in bfloat16 and float16: codes follow the largest of a block, and lose less.
    """
    stored = {state: (form.name if (form := layout.format(state)) else dtype) for state, dtype in layout.dtypes}
    asked = {state: words.get(state, words.get("")) for state in program.rule.state if state in stored}
    named = {state: stored[state] for state, word in asked.items() if word and word != UNBIASED}
    for state, storage, what in _lost(program.rule, named, hyper):
        warnings.warn(
            f"{state} of {program.name} {what}, and a change below half of the spacing of {storage} is lost: give "
            f"state_dtype={{{state!r}: {UNBIASED!r}}}, which rounds at random, or float32",
            RuntimeWarning, stacklevel=2,
        )  # fmt: skip


def _lost(rule: Rule, storages: Mapping[str, str], hyper: Mapping[str, float]) -> Iterator[tuple[str, str, str]]:
    """The states that lose changes, each with its storage and a clause on how it moves."""
    if not storages:
        return
    flow, proofs = flow_of(rule), rule.analysis.storage
    for state, storage in storages.items():
        moves = None if proofs[state].exact else pace(state, flow.taken[state], hyper)
        if moves is None or storage not in moves.too_slow(proofs[state].unsigned):
            continue
        if moves.kept == 1:
            yield state, storage, "adds without decay"
        elif storage in ("bfloat16", "float16"):
            yield state, storage, f"moves by {1 - moves.kept:.2g} of the way at a step"
