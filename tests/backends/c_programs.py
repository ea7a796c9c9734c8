"""The element functions of rules, for tests that compile them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import rulec
from rulec.compiler.ir import Program
from rulec.compiler.layout import Layout, kernel_for
from rulec.testing.cases import (
    MATRIX_SHAPES,
    buckets_of,
    hostile_rules,
    loaded,
    operation_rules,
    staged_rules,
)
from rulec_backends.cstyle.dialect import Dialect
from rulec_backends.cstyle.element import ElementWriter
from rulec_backends.cstyle.words import words_used
from tests.backends.kinds import rule_of


def programs(dtype: str, names: Sequence[str] | None = None) -> Iterator[tuple[Program, Layout]]:
    """The programs of these rules, or of all of the library and the suite, for tensors of several shapes."""
    if names is None:
        rules = [*map(loaded, rulec.rules()), *hostile_rules(), *operation_rules(), *staged_rules()]
    else:
        rules = [rule_of(name) for name in names]
    for rule in rules:
        for bucket in buckets_of(rule, MATRIX_SHAPES):
            yield kernel_for(bucket.program, dtype, transposed=bucket.transposed)


def every_element(dialect: Dialect, dtype: str, names: Sequence[str] | None = None) -> str:
    """The functions of all stages of these programs, under names of their own, and the words they use."""
    writers = [
        ElementWriter(program, layout, stage, dialect, scaled=True)
        for program, layout in programs(dtype, names) for stage in program.stages if stage.roots
    ]  # fmt: skip
    texts = []
    for number, writer in enumerate(writers):
        writer.name = f"element_{number}"
        texts.append(f"/* {writer.program.name.replace('*/', '')} */\n{writer.text()}")
    body = "\n".join(texts)
    return "\n".join([*words_used(body, dialect), body])
