"""The kernels of a rule on display: their source on each backend, and the costs of a step, as data and in words.

The memory traffic of a step is in bytes per parameter, read and written by a program, and by the same program unfused.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from textwrap import wrap
from typing import Any

from rulec.backend import registry
from rulec.backend.capabilities import capabilities_of
from rulec.compiler.axes import AxisInference
from rulec.compiler.ir import Program
from rulec.compiler.layout import ITEM_SIZE, Layout, kernel_for, layout_for, scheduled
from rulec.compiler.memory import ringed
from rulec.compiler.pipeline import compile
from rulec.compiler.routing import Router, route
from rulec.compiler.view import view_of
from rulec.errors import RulecError
from rulec.language.expr.node import Kind, Node, Op, walk
from rulec.language.expr.text import expression_text, short_text
from rulec.language.rule import Rule
from rulec.language.rule_data import State
from rulec.language.statistics import Watch, Watched, watched
from rulec.runtime.statistics import Statistics, known_of
from rulec.runtime.storage.options import FEWEST_CODED, Storage
from rulec.tools.compare.difference import shapes_for

#: Backend -> language of its source, where this is not Python.
LANGUAGES = {"c": "c", "cupy": "cuda"}
#: Language of a source -> the beginning of a comment there.
COMMENTS = {"python": "#", "c": "//", "cuda": "//"}
#: Backend -> the title of its tab, for the backends with kernels of their own.
TABS = {"c": "C", "triton": "Triton", "cupy": "CUDA (CuPy)", "cpu": "CPU", "jax": "JAX"}

PLAIN = Storage()


def kernel_source(rule: Rule, backend: str, dtype: str = "float32", storage: Storage = PLAIN, watch: Watch = ()) -> str:
    """The source of a rule's kernel, which measures statistics; RulecError where the backend refuses the rule."""
    program = program_of(rule, dtype, storage, watch)
    printer, kernel = registry.get(backend), scheduled(program, layout_of(program, dtype, storage))
    if kernel.layout.formats and not capabilities_of(printer).decodes(*kernel):
        raise RulecError(f"{backend} has no kernel of {rule.name} with states in codes: they are decoded before it")
    return printer.emit(*kernel)


def program_of(rule: Rule, dtype: str, storage: Storage = PLAIN, watch: Watch = ()) -> Program:
    """The program of a rule whose states are stored so, with statistics to measure."""
    storage.check_weights([dtype])
    rule = rule.standalone() if watch else rule
    return compile(rule, memory=storage.memory_of(rule, dtype), watch=watched(rule, watch))


def layout_of(program: Program, dtype: str, storage: Storage = PLAIN) -> Layout:
    """The layout of a program; RulecError for a state that cannot be stored so."""
    storage.check([program.rule])
    states, formats = storage.of(program, dtype, FEWEST_CODED)
    return layout_for(program, dtype, states=states, formats=formats)


#: The most nodes of a value that is shown whole; shared parts count as often as they are written.
_LARGEST = 200


def costs_of(rule: Rule, dtype: str = "float32", watch: Watch = ()) -> list[dict[str, Any]]:
    """The costs of the different programs of a rule, each with its shapes; RuleError for a rule without a program.

    With `watch`, `statistics` has the names of the statistics of a program, and costs with and without them.
    """
    distinct: list[dict[str, Any]] = []
    if watch:
        rule = rule.standalone()
        Statistics(Router(rule).rules, watch)
    for shape in shapes_for(rule):
        facts = _program_facts(rule, shape, dtype)
        if watch:
            facts["statistics"] = _statistics_facts(rule, shape, dtype, watch)
        same = next((f for f in distinct if {**f, "shapes": 0} == {**facts, "shapes": 0}), None)
        if same is None:
            distinct.append({**facts, "shapes": [str(shape)]})
        else:
            same["shapes"].append(str(shape))
    return distinct


def cost_lines(facts: Mapping[str, Any], dtype: str = "float32") -> list[tuple[str, str]]:
    """The costs of a program in words, each with its head; a line without a head goes on with the one before."""
    stages = f"{facts['stages']} stage{'s' if facts['stages'] > 1 else ''}"
    narrow = "".join(f", {name} {kept}" for name, kept in facts["narrow_states"].items())
    scalars = {**facts["hoisted"], **{f"store {k}": v for k, v in facts["scalar_states"].items()}}
    saved = f"{facts['bytes_moved']} bytes moved; one at a time they would move {facts['bytes_unfused']}"
    return [
        ("scope", f"{facts['scope']}, {stages}"),
        ("reads", f"{_bytes(facts['bytes_read'])} for each {dtype} parameter"),
        ("writes", _bytes(facts["bytes_written"])),
        ("state", _bytes(facts["state_bytes"]) + narrow),
        ("hoisted", f"{len(scalars)} scalars, in float64 once for each group and t" if scalars else "nothing"),
        *(("", name if name == text else f"{name} = {text}") for name, text in scalars.items()),
        ("fused", f"{facts['operations']} operations and {facts['stores']} stores, {saved}"),
        *(_statistics_lines(facts["statistics"]) if "statistics" in facts else []),
    ]


def _statistics_lines(facts: Mapping[str, Any]) -> list[tuple[str, str]]:
    return [("statistics", statistics_line(facts)), *(("", part) for part in wrap(", ".join(facts["names"]), 100))]


def statistics_line(facts: Mapping[str, Any]) -> str:
    """The costs of statistics in words, beside those of the step without them."""
    without = facts["without"]
    stages = f"{facts['stages']} stage{'s' if facts['stages'] > 1 else ''}, {without['stages']} without"
    moved = f"{facts['bytes_moved']} bytes moved, {without['bytes_moved']} without"
    return f"{moved}; {stages}; {facts['reductions']} reductions, {without['reductions']} without"


def _statistics_facts(rule: Rule, shape: Sequence[int], dtype: str, watch: Watch) -> dict[str, Any]:
    routed = route(rule, shape, set())
    asked = watched(routed, known_of([routed], watch))
    plain, measuring = ({
        "bytes_moved": traffic(program, layout).total,
        "stages": len(program.stages),
        "reductions": sum(len(stage.reduces) for stage in program.stages),
    } for program, layout in (_kernel(routed, shape, dtype, each) for each in ((), asked)))  # fmt: skip
    return {"names": [name for name, _ in asked], **measuring, "without": plain}


def _kernel(routed: Rule, shape: Sequence[int], dtype: str, watch: Watched = ()) -> tuple[Program, Layout]:
    program = compile(routed, view_of(routed, shape).facts, watch=watch)
    return kernel_for(ringed(program)[0] if program.skip is None else program, dtype)


def _program_facts(rule: Rule, shape: Sequence[int], dtype: str) -> dict[str, Any]:
    routed = route(rule, shape, set())
    program, layout = _kernel(routed, shape, dtype)
    moved = traffic(program, layout)
    narrow = {b.name: _kept(routed.state[b.name]) for b in program.states if b.name not in moved.state}
    return {
        "rule": routed.name,
        "scope": scope(program),
        "stages": len(program.stages),
        "bytes_read": moved.read,
        "bytes_written": moved.written,
        "state_bytes": moved.state,
        "narrow_states": narrow,
        "hoisted": {c.name: _shown(c.value) for c in program.scalars.columns},
        "scalar_states": {s.buffer: _shown(s.value) for s in program.scalars.stores},
        "operations": moved.values,
        "stores": moved.stores,
        "bytes_moved": moved.total,
        "bytes_unfused": moved.unfused,
    }


def _shown(value: Node) -> str:
    """A value in the rule language; the beginning of one that would fill a page."""
    return expression_text(value) if value.size <= _LARGEST else short_text(value)


def _kept(state: State) -> str:
    """The level of a state in words, or its own shape."""
    if state.shape is None:
        return f"per {state.per}"
    return f"a matrix of {' by '.join(map(expression_text, state.shape))}"


def scope(program: Program) -> str:
    """The extent of one element's update: `elementwise`, or over its `tensor`, its `group`, the whole `model`."""
    levels = {str(join.arg) for join in program.joins}
    if levels:
        return "model" if "model" in levels else "group"
    return "elementwise" if program.elementwise else "tensor"


def _bytes(buffers: Mapping[str, int]) -> str:
    return f"{sum(buffers.values())} bytes" + (f" ({', '.join(buffers)})" if buffers else "")


@dataclass(frozen=True)
class Traffic:
    """Bytes per parameter of one step. Values per row, tensor or group do not count.

    `read` and `written` have the bytes of each buffer, once for every stage that reads or writes it; `read` also has
    each matrix computed between the stages. `values` is the number of operations for each element. `unfused` is their
    bytes if each operation read its operands from memory and wrote its result there.
    """

    read: dict[str, int]
    written: dict[str, int]
    state: dict[str, int]
    values: int
    stores: int
    unfused: int

    @property
    def total(self) -> int:
        """Bytes read and written."""
        return sum(self.read.values()) + sum(self.written.values())


def traffic(program: Program, layout: Layout) -> Traffic:
    """The traffic of a program in a layout."""
    inference = AxisInference(program)
    wide = {b.name for b in program.buffers if b.axes.elementwise}
    size = {b: ITEM_SIZE[d] for b, d in layout.dtypes}
    read: dict[str, int] = {}
    written: dict[str, int] = {}
    operations: list[Node] = []
    for stage in program.stages:
        order = list(walk(stage.roots))
        loaded = {str(n.arg) for n in order if n.op is Op.LOAD}
        for buffer in (b.name for b in program.buffers if b.name in loaded & wide):
            read[buffer] = read.get(buffer, 0) + size[buffer]
        for name in (n for n in stage.reads if program.result(n).axes.elementwise):
            read[name] = read.get(name, 0) + ITEM_SIZE[layout.compute]
        for buffer in (s.buffer for s in stage.stores if s.buffer in wide):
            written[buffer] = written.get(buffer, 0) + size[buffer]
        operations += [n for n in order if n.op.kind is not Kind.LEAF and _is_wide(n, inference)]
    item = ITEM_SIZE[layout.compute]
    unfused = sum(item * (1 + sum(_is_wide(a, inference) for a in n.args)) for n in operations)
    state = {b.name: size[b.name] for b in program.states if b.name in wide}
    stores = sum(len(stage.stores) for stage in program.stages)
    return Traffic(read, written, state, len(operations), stores, unfused)


def _is_wide(value: Node, inference: AxisInference) -> bool:
    return {"i", "j"} <= set(inference.axes(value).letters)
