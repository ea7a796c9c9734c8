"""The manual's pages of benchmark figures, made from the results in docs/benchmarks.

The first has charts, and there is a chapter for each measurement. Long chapters show a line for each measure, and its
table when it is opened.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from html import escape
from pathlib import Path
from typing import Any

from benchmarks.charts import charts
from benchmarks.result import Result, Row, read_result
from benchmarks.suite import MEASUREMENTS
from rulec.cli.console import write_text
from rulec.errors import RulecError

_HEAD = """\
# Benchmarks

`rulec bench` measures, counts or calculates every figure, and writes these pages from its results. A run times all
contenders by turns, and compares the medians of their times. The project set each target before it measured.

The *limit* of a kernel is another kernel, which reads and writes the same arrays and computes nothing.
"""

_NONE = """\
No results are recorded. `rulec bench --json docs/benchmarks --page docs/benchmarks.md` measures, records and writes
this page.
"""

#: A chapter of so many figures shows all its tables.
_OPEN = 20

#: Measurement -> the title of its chapter.
_TITLE = {
    "rules": "Large tensors", "reductions": "Rows and columns", "matrices": "Matrices",
    "orthogonal": "Orthogonal matrices", "many": "Many tensors", "watch": "Statistics of steps",
    "offload": "Steps on the host", "start": "First steps", "memory": "Memory of training",
    "mesh": "Many GPUs, counted", "states": "States of few bits", "es": "Evolution strategies, measured",
    "race": "Races in a batch", "jax": "Steps in JAX", "gpu": "A GPU",
}  # fmt: skip

#: Measurement -> the text at the beginning of its chapter.
_TEXT = {
    "rules": "The tensor is far larger than the caches. *Of the limit's speed* is the time of the limit divided by the "
    "time of the kernel. *Times as fast* is the time of torch's step divided by the time of the kernel. AdamW in "
    "float16 takes three divisions and a root for 14 bytes, so one core computes for about as long as it waits for "
    "memory.",
    "reductions": "The matrix is far larger than the caches. The time of a step includes the work around the kernels. "
    "The limit of a step has one kernel for each stage, and moves the same bytes. The steps of other libraries run on "
    "tensors of the same size, with the same number of threads. A row names the fastest installed implementation. "
    "Fused kernels, which use no Python, have rows of their own. The second pass over the gradient takes two divisions "
    "and a root for 4 bytes in Adafactor, and a division and a root in CAME. So one core computes for longer than it "
    "waits for memory.",
    "matrices": "Weights are in float32, and products in bfloat16. The products are the matrix products of Muon's "
    "iteration, without norm and casts. A time of SOAP or Shampoo is the mean of ten steps, and one of the ten "
    "decomposes its matrices. SOAP and the other implementation take the same number of products of the same size. "
    "These products are nearly nine tenths of the time of the other implementation.",
    "orthogonal": "The measurement runs Muon's iteration on square matrices, on matrices with one side two, four and "
    "eight times as long as the other, and on the gradients of a small transformer. The matrices have four kinds of "
    "spectra and condition numbers from 1 to a million. The exact result comes from the singular value decomposition "
    "in float64. Each figure is the largest error over all matrices. Rows without a target have other restarts and "
    "dtypes than the library. The page on [GPUs](../gpu.md) explains the iteration.",
    "many": "One optimizer, AdamW in float32, updates many tensors. The time is the whole time of "
    "`rulec.torch.AdamW(...).step()`. The step checks every parameter and gradient through functions that torch "
    "exports, with about fourteen calls for each tensor. These calls take most of the time outside the kernel.",
    "watch": "Steps with the set `norms`, eight statistics of every tensor, alternate with the same steps without "
    "statistics. For comparison, torch computes the same statistics after a step, from a copy of the parameters before "
    "the step. The page on [statistics](../watch.md) describes the statistics.",
    "offload": "The step runs on the host, with float32 weights and states in the host's memory. Buffers of 64 MiB "
    "hold bfloat16 gradients and new bfloat16 weights, and the copies from and to a device use them again and again. "
    "No step reads a parameter of the model. torchao runs torch's fused AdamW, once for each tensor. Its weights "
    "on the host have the dtype of the model. So in the rows from and to 16 bits, the times of torchao and DeepSpeed "
    "include the conversion of gradients to float32 and of new weights to bfloat16. There all contenders do the same "
    "work. With everything in bfloat16, torchao computes other numbers.",
    "start": "Each figure is a time in seconds, measured in new processes.",
    "memory": "Bytes for each parameter follow from the difference between a small and a large tensor. The benchmark "
    "counts the memory of training tensor by tensor, and XLA counts it for JAX. The figures are the peak of the "
    "memory, divided by the size of the weights. *Deferred* keeps gradients until the step. *Eager* uses each "
    "gradient as soon as it is computed, and *epilogue* never stores a whole gradient.",
    "mesh": "The benchmark calculates these figures for a Llama of 70 billion weights, without a GPU. The page on "
    "[several GPUs](../several-gpus.md) has the same figures as a table.",
    "states": "A network of 26,000 weights learns the handwritten digits. The distance between the last weights of two "
    "runs is divided by the distance that the weights moved, and the largest of three seeds counts. The runs with "
    "bfloat16 weights are compared with a run with a master copy. For a transformer of characters, the target comes "
    "from a run whose first weights differ by 0.1 %. The timed steps are `rulec.torch.AdamW(...).step()` on one large "
    "tensor. On a processor without AVX-512 the target for the speed of `dynamic8` is 0.3. The page on [small "
    "states](../small_states.md) describes the formats of states and weights, and which parts of a step take the time.",
    "es": "The page on [evolution strategies](../es.md) has the same figures as tables, and explains their words.",
    "race": "The page on [races](../race.md) explains a batch of runs.",
    "jax": "A step of rulec is `rulec.jax.step`. A step of optax is `update` and `apply_updates` in one jit. Both may "
    "reuse the memory of their parameters and state. A first call includes tracing and compilation, in a new process. "
    "For 1000 leaves, the call of a compiled program with 2000 arrays takes most of the time.",
    "gpu": "Events on the device measure the times; if a row says so, the host measures. The page on [GPUs](../gpu.md) "
    "explains the method.",
}


def results_pages(folder: Path, chapters: str = "benchmarks") -> dict[str, str]:
    """The pages, as Markdown, of the results in a folder: `""` for the first, and a name in the folder `chapters` each.

    RulecError for a quick result or another kind of file.
    """
    files = [folder / f"{name}.json" for name in MEASUREMENTS]
    results = {path.stem: read(path) for path in files if path.is_file()}
    if not results:
        return {"": f"{_HEAD}\n{_NONE}"}
    figures = {id(row): figure(row) for result in results.values() for row in result.rows}
    contents = ["## All measurements", "", "| chapter | figures | targets met |", "|---|---:|---:|"]
    contents += [f"| [{_TITLE[name]}]({chapters}/{name}.md) | {_counts(result)} |" for name, result in results.items()]
    missed = f"\n[Missed targets]({chapters}/missed.md) lists the figures that fall short of their targets.\n"
    first = "\n".join([_HEAD, charts(results, figures, chapters), *contents, missed])
    of_each = {name: _chapter(result) for name, result in results.items()}
    return {"": first, **of_each, "missed": _missed(list(results.values()))}


def write(page: Path, folder: Path) -> None:
    """Writes the pages of the results in a folder: the first to `page`, its chapters into the folder of its name."""
    for name, text in results_pages(folder, page.stem).items():
        write_text(page.with_suffix("") / f"{name}.md" if name else page, text)


def read(path: Path) -> Result:
    """The result in a file; RulecError where it was measured with --quick, so that its figures do not count."""
    result = read_result(path)
    if result.quick:
        raise RulecError(f"{path} was measured with --quick, which is no figure to publish: measure it again without")
    return result


def _missed(results: Sequence[Result]) -> str:
    """The rows of all measurements that miss their targets, together where measure and target are the same."""
    missed: dict[str, list[str]] = {}
    for result in results:
        for row in [row for row in result.rows if row.met is False]:
            what = f"{_TITLE[result.name]}, {row.measure.partition(';')[0]}, {target(row)}"
            missed.setdefault(what, []).append(f"{_subject(row)}: {figure(row)}")
    lines = [f"- **{what}**: {'; '.join(rows)}" for what, rows in missed.items()]
    head = ["# Missed targets", "", "The project set each target before it measured.", ""]
    return "\n".join([*head, *(lines or ["Every target is met."]), ""])


def _counts(result: Result) -> str:
    judged = [row for row in result.rows if row.met is not None]
    met = f"{sum(row.met is True for row in judged)} of {len(judged)}" if judged else ""
    return f"{len(result.rows)} | {met}"


def _chapter(result: Result) -> str:
    judged = [row for row in result.rows if row.met is not None]
    lines = [f"# {_TITLE[result.name]}", "", _TEXT[result.name], "", *_runs(result)]
    lines += [f"- {note}" for note in _notes(result.remarks)] + ([""] if result.remarks else [])
    lines += [f"{sum(row.met is True for row in judged)} of {len(judged)} targets are met.", ""] if judged else []
    groups: dict[str, list[Row]] = {}
    for row in result.rows:
        groups.setdefault(row.measure.partition(";")[0], []).append(row)
    folded = len(result.rows) > _OPEN
    for measure, rows in groups.items():
        lines += _folded(measure, rows) if folded else [f"## {measure}", "", *_table(rows, "of", _subject)]
    return "\n".join(lines)


def _folded(measure: str, rows: Sequence[Row]) -> list[str]:
    """The table of a measure, closed until a reader opens it; its line says what lies inside."""
    low, high = (figure(end(rows, key=lambda row: row.value)) for end in (min, max))
    judged = [row for row in rows if row.met is not None]
    span = low if low == high else f"{low} to {high}"
    met = f", {sum(row.met is True for row in judged)} of {len(judged)} targets met" if judged else ""
    count = f"{len(rows)} figures, " if len(rows) > 1 else ""
    head = f"<summary>{escape(measure)}: {count}{span}{met}</summary>"
    return ['<details markdown="1">', head, "", *_table(rows, "of", _subject), "</details>", ""]


def _subject(row: Row) -> str:
    """What a figure is of, with what its measure says of it alone."""
    return "; ".join([row.subject, *row.measure.split("; ")[1:]])


def _table(rows: Sequence[Row], head: str, name: Callable[[Row], str]) -> list[str]:
    """The rows of a table, and an empty line; without targets where no row has one."""
    if all(row.target is None for row in rows):
        return [f"| {head} | measured |", "|---|---:|", *(f"| {name(row)} | {figure(row)} |" for row in rows), ""]
    lines = [f"| {head} | measured | target | met |", "|---|---:|---:|---|"]
    return [*lines, *(f"| {name(row)} | {figure(row)} | {target(row)} | {_met(row)} |" for row in rows), ""]


def _notes(remarks: Sequence[str]) -> list[str]:
    """The notes of a measurement; what was not run for want of time is one of them."""
    late = [name for name, said, why in (note.partition(": not run: ") for note in remarks) if said and "left" in why]
    others = [note for note in remarks if note.partition(": not run: ")[0] not in late]
    return [*others, *([f"not run for want of time: {'; '.join(late)}"] if late else [])]


def _runs(result: Result) -> list[str]:
    """A paragraph about each run, with its machine, its date and its parts, and one about parts without a run."""
    command = f"rulec bench {result.name}"
    lines = []
    if not result.parts or any(not row.part for row in result.rows):
        where = _machine(result.name, result.measured, result.machine, result.threads)
        lines.append(f"Measured on {where}. Command: `{command}`.")
    runs: dict[str, list[str]] = {}
    for name, one in result.parts.items():
        if one.ran:
            where = _machine(result.name, one.measured, one.machine, result.threads)
            runs.setdefault(where, []).append(name)
    lines += [f"Parts {', '.join(names)}: measured on {w}. Command: `{command} --part`." for w, names in runs.items()]
    missing = _missing(result) if result.name == "gpu" else []
    if missing:
        lines.append(f"No run of these parts is recorded yet: {', '.join(missing)}.")
    return [line for text in lines for line in (text, "")]


def _missing(result: Result) -> list[str]:
    from benchmarks.gpu.merge import measured_parts
    from benchmarks.gpu.names import PARTS

    there = measured_parts(result)
    return [name for name in PARTS if name not in there]


def _machine(name: str, measured: str, machine: Mapping[str, Any], threads: int) -> str:
    """The date of a run, its machine and the versions that matter."""
    cache = machine["last_level_cache_bytes"]
    parts = [machine["cpu"], f"{machine['cores']} cores"]
    parts += [f"{cache / 2**20:.0f} MiB of cache"] if cache else []
    parts += [f"{threads} threads", machine["system"]]
    if "gpu" in machine:
        parts = [_device(machine["gpu"]), *parts]
    shown = (
        ("python", "numpy", "torch", "triton", "cupy") if "gpu" in machine else ("python", "numpy", "numba", "torch")
    )
    shown = ("python", "numba", "jax", "optax") if name == "jax" else shown
    versions = [f"{name} {machine['versions'][name]}" for name in shown if machine["versions"].get(name)]
    return f"{measured}: {', '.join(parts)}; {', '.join(versions)}"


def _device(gpu: Mapping[str, Any]) -> str:
    cache = gpu["last_level_cache_bytes"]
    of_cache = f" and {cache / 2**20:.0f} MiB of L2" if cache else ""
    return f"{gpu['name']} with {gpu['memory_bytes'] / 2**30:.0f} GiB{of_cache}, {gpu['platform']}"


def figure(row: Row) -> str:
    """A row's value, rounded for reading, with its unit."""
    size = abs(row.value)
    digits = 0 if size >= 100 else 1 if size >= 10 else 2 if size >= 0.1 or size == 0 else 4
    return f"{row.value:.{digits}f}" + (f" {row.unit}" if row.unit else "")


def target(row: Row) -> str:
    """A row's target in words; empty where there is none."""
    if row.target is None:
        return ""
    return f"{row.sense} {row.target:g}" + (f" {row.unit}" if row.unit else "")


def _met(row: Row) -> str:
    return "" if row.met is None else "yes" if row.met else "**no**"
