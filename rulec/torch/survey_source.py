"""The text of the function that surveys a step: it compares words of memory, and writes a few."""

from __future__ import annotations

from rulec.torch.anatomy import DIMENSIONS, Anatomy

#: The words of a job: whether to write, tables with their lengths, the answer.
JOB = (
    "writes", "spans", "spans_at", "records", "records_at", "versions", "versions_at", "counts", "counts_at", "same",
)  # fmt: skip

#: The words of a span: memory that is to hold certain words.
SPAN = ("at", "words", "like")

#: The words of a record, for a parameter. `out` and `row` take the address of its gradient.
RECORD = (
    "entry", "object", "kind", "impl", "look", "storage", "meta", "version", "data", "grad", "offset", "out", "row",
    "last", "memory",
)  # fmt: skip

#: The words of a bucket's step counts, for steps that repeat each other: see `Repeat`.
COUNTS = ("at", "length", "t", "table", "stride", "next")

#: The tensors ahead of the one looked at whose memory is fetched.
_AHEAD = 16


def survey_source(places: Anatomy) -> str:
    """The text, for the cpu backend's compiler."""
    same = [f"((word(at, {place}) ^ word(like, {i})) & {mask})" for i, (place, mask) in enumerate(places.steady)]
    count = len(same)
    for i, first in enumerate((places.extents, places.strides)):
        for dim in range(DIMENSIONS):
            like, counted = count + DIMENSIONS * i + dim, count + 2 * DIMENSIONS + dim
            same.append(f"((word(at, {first + dim}) ^ word(like, {like})) & word(like, {counted}))")
    alike = " | ".join(same)
    of = {name: f"word(record, {i})" for i, name in enumerate(RECORD)}
    shares = "".join(
        f" | (word({of['storage']}, {place}) ^ word(record, {len(RECORD) + i}))"
        for i, place in enumerate(places.shares)
    )
    return _TEXT.format(
        alike=alike, shares=shares, fetches="\n    ".join(_fetches(places, of)), ahead=_AHEAD,
        size=8 * (len(RECORD) + len(places.shares)), counts_size=8 * len(COUNTS), places=places,
        last_at=RECORD.index("last"), memory_at=RECORD.index("memory"), t_at=COUNTS.index("t"),
        same=8 * JOB.index("same"), **{f"job_{name}": f"word(job, {i})" for i, name in enumerate(JOB)},
        **{f"count_{name}": f"word(count, {i})" for i, name in enumerate(COUNTS)}, **of,
    )  # fmt: skip


def _fetches(places: Anatomy, of: dict[str, str]) -> list[str]:
    end = 8 * places.end - 8
    lines = [(of["object"], 0), (of["storage"], 0), (of["meta"], 8 * places.grad), (of["version"], 8 * places.count)]
    lines += [(of[name], line) for name in ("impl", "last") for line in (*range(0, end, 64), end)]
    return [f"fetch_line({at}, {line})" for at, line in (*lines, (of["memory"], 8 * places.data))]


_TEXT = '''"""A survey of parameters and gradients in torch's memory. Printed by rulec."""

from rulec_backends.cpu.words import (
    compiled, fetch_add, fetch_line, float32, load_float32, number, store_bits_float64, store_float32, store_float64,
    word,
)


@compiled
def alike(at, like):
    """Whether a tensor is what another was."""
    return ({alike}) == 0


@compiled
def unchanged(span):
    """Whether memory holds the same words."""
    other = 0
    for i in range(word(span, 1)):
        other |= word(word(span, 0), i) ^ word(word(span, 2), i)
    return other == 0


@compiled
def unmoved(record):
    """Whether a parameter is the same, in the same memory."""
    if word({entry}, 0) != {object}:
        return False
    if ((word({object}, {places.kind}) ^ {kind}) | (word({object}, {places.impl}) ^ {impl})) != 0:
        return False
    other = (word({impl}, {places.storage}) ^ {storage}) | (word({impl}, {places.meta}) ^ {meta})
    other |= (word({impl}, {places.version}) ^ {version}) | (word({impl}, {places.owner}) ^ {object})
    if other != 0 or not alike({impl}, {look}):
        return False
    return ((word({storage}, {places.data}) ^ {data}){shares}) == 0


@compiled
def read(record):
    """Whether the gradient is as it was; its address is kept."""
    if {grad} == 0:
        return {meta} == 0 or word({meta}, {places.grad}) == {offset}
    grad = word({meta}, {places.grad})
    if not alike(grad, {grad}):
        return False
    memory = word(grad, {places.storage})
    data = word(memory, {places.data})
    if data == 0:
        return False
    store_bits_float64({out}, 0, 0, data + {offset})
    store_bits_float64({row}, 0, 0, data + {offset})
    store_bits_float64(record, {last_at}, 0, grad)
    store_bits_float64(record, {memory_at}, 0, memory)
    return True


@compiled
def fetch(record):
    """Has the memory fetched that a look at a record reads."""
    {fetches}


@compiled
def looked(job):
    """Whether everything is as it was; the addresses of gradients are kept."""
    for i in range({job_spans}):
        if not unchanged({job_spans_at} + 24 * i):
            return False
    for i in range(min({ahead}, {job_records})):
        fetch({job_records_at} + {size} * i)
    for i in range({job_records}):
        record = {job_records_at} + {size} * i
        if i + {ahead} < {job_records}:
            fetch(record + {ahead} * {size})
        if not unmoved(record) or not read(record):
            return False
    for b in range({job_counts}):
        count = {job_counts_at} + {counts_size} * b
        for i in range({count_length}):
            if load_float32({count_at}, i, 0) != float32(number(count, {t_at})):
                return False
    return True


@compiled
def kernel(job):
    """Looks, where 1 or 3 is asked for; after that, and where 2 is, notes the writes of a step, as 3 for a repeat."""
    if {job_writes} != 2:
        if not looked(job):
            return
        fetch_add(job + {same}, 1)
    if {job_writes} == 1:
        return
    for i in range({job_versions}):
        fetch_add(word({job_versions_at}, i), 1)
    if {job_writes} == 2:
        return
    for b in range({job_counts}):
        count = {job_counts_at} + {counts_size} * b
        t = number(count, {t_at}) + 1.0
        for i in range({count_length}):
            store_float32({count_at}, i, 0, float32(t))
        store_float64(count, {t_at}, 1, t)
        fetch_add({count_table}, {count_stride})
        store_bits_float64({count_next}, 0, 1, 0)
'''
