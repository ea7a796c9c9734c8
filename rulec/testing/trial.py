"""A backend running the stages of one program over some tensors, step by step, beside their definition.

Each stage is judged alone. Its inputs are the backend's own arrays, and drawn numbers in place of the values that the
runtime computes between stages. So the differences are the rounding of one stage, bounded in `bounds`, and errors do
not add up.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from rulec.array.arrays import numpy_dtype
from rulec.backend.protocol import Backend, Kernel
from rulec.compiler.ir import Program
from rulec.compiler.layout import Layout, is_shaped, kernel_buffers
from rulec.compiler.scalars import evaluate_once, resolve_hyper
from rulec.compiler.view import view_of
from rulec.errors import InternalError
from rulec.language.expr.node import NUMBERS
from rulec.language.rule import Rule
from rulec.testing.drawn import Drawn, Draws, OnDevice, ScalarRows
from rulec.testing.interval import Array
from rulec.testing.judge import Judge, Values
from rulec.testing.kinds import EPS, ArrayKind, Numerics


@dataclass(frozen=True)
class Subject:
    """The subject of the tests: a backend, the kind of its arrays, and the exactness of its machine."""

    backend: Backend
    kind: ArrayKind
    numerics: Numerics

    def kernel(self, program: Program, layout: Layout) -> Kernel:
        """The kernel of a program, built as in the runtime."""
        return self.backend.build(program, layout, self.backend.emit(program, layout))


class Trial:
    """Tensors of one bucket under a backend, each with hyper-parameters of its own.

    `reductions` are those of the last step: (stage, name) -> an array for each tensor fired.
    """

    def __init__(
        self, subject: Subject, rule: Rule, program: Program, layout: Layout, params: Sequence[Array],
        hyper: Sequence[Mapping[str, float]], kernel: Kernel | None = None, judge: type[Judge] = Judge,
    ) -> None:  # fmt: skip
        """`params` are in float64 and become the nearest numbers of their dtype; `hyper` has one dict for each."""
        self.subject, self.program, self.layout = subject, program, layout
        self.name = rule.name
        self.shapes = [p.shape for p in params]
        views = [view_of(rule, shape) for shape in self.shapes]
        eps = EPS[layout.dtype("p")]
        alone = dict(zip(NUMBERS, (0, 1, 0, 1), strict=True))  # every tensor is a group and a layer
        facts = [{**view.facts, "machine_eps": eps, **alone} for view in views]
        resolved = [resolve_hyper(program.hyper, h, eps, rule.name) for h in hyper]
        self.buffers = [b.name for b in kernel_buffers(program) if b.role in ("param", "state")]
        scalars = ScalarRows(program, resolved, facts)
        self.draws = Draws(subject.kind, program, layout, views, scalars)
        self.judge = judge(self.title(), program, layout, subject.numerics, views, scalars.counts)
        start = [p.astype(numpy_dtype(layout.dtype("p"))) for p in params]
        # Every second array lies off the alignment of its kind: kernels must take any contiguous array.
        self.params = [subject.kind.make(p, i % 2) for i, p in enumerate(start)]
        self.states = [self._initial_states(i, p, resolved[i], facts[i]) for i, p in enumerate(start)]
        self.reductions: dict[tuple[int, str], list[Array]] = {}
        self.kernel = kernel or subject.kernel(program, layout)
        self.call = self.kernel.bind(self.params, self.states, *([views] if is_shaped(program) else []))

    def title(self) -> str:
        """The backend, rule and dtype at the head of messages."""
        dtypes = {d for _, d in self.layout.dtypes}
        layout = dtypes.pop() if len(dtypes) == 1 else self.layout.text()
        return f"backend {self.subject.backend.name!r}, {self.name} in {layout}:"

    def _initial_states(
        self, index: int, param: Array, hyper: Mapping[str, float], facts: Mapping[str, float]
    ) -> dict[str, Any]:
        arrays = {}
        for name in self.buffers:
            buffer = self.program.buffer(name)
            if buffer.role != "state":
                continue
            if buffer.init is None:
                raise InternalError(f"state {name} of {self.name} has no initial value")
            value = evaluate_once(buffer.init, hyper, facts, {"p": param.astype(np.float64)})
            full = np.broadcast_to(np.asarray(value, np.float64), param.shape)
            arrays[name] = self.subject.kind.make(full.astype(numpy_dtype(self.layout.dtype(name))), index % 2)
        return arrays

    def values(self, index: int) -> dict[str, Array]:
        """The parameter and states of one tensor, in their storage dtypes."""
        arrays = {"p": self.params[index], **self.states[index]}
        return {name: self.subject.kind.read(arrays[name]) for name in self.buffers}

    def step(
        self, grads: Mapping[int, Array], skipped: Sequence[int] = (), on_device: OnDevice | None = None,
        judged: bool = True,
    ) -> None:  # fmt: skip
        """One step of the tensors in `grads`, in their order, with these gradients (float64, rounded as stored).

        The last stage leaves out the tensors in `skipped`. AssertionError, in one sentence, where a result differs from
        the language or the protocol; unless `judged`, numbers may be any.
        """
        with np.errstate(all="ignore"):
            fired = list(grads)
            drawn = self.draws.step(fired, grads)
            self.reductions = {}
            for index in range(len(self.program.stages)):
                if index and index == len(self.program.stages) - 1:
                    fired = [i for i in fired if i not in skipped]
                self._stage(index, fired, drawn, on_device, judged)

    def _stage(
        self, index: int, fired: Sequence[int], drawn: Drawn, on_device: OnDevice | None, judged: bool
    ) -> None:  # fmt: skip
        before = [self.values(i) for i in range(len(self.params))]
        inputs = self.draws.inputs(index, fired, before, drawn, on_device)
        written = self._run(index, fired, drawn, on_device)
        after = self._after(index, fired, drawn)
        reductions = {
            r.name: self._read(r.name, written[r.name], len(fired), str(r.value.arg))
            for r in self.program.stages[index].reduces
        }
        self.reductions |= {(index, name): arrays for name, arrays in reductions.items()}
        stays = [] if on_device is None else list(on_device.stays or ())
        if judged:
            self.judge.check(index, fired, inputs, after, reductions, stays)
        stored = {s.buffer for s in self.program.stages[index].stores}
        self._compare_untouched([i for i in fired if i not in stays], stored, before, after)

    def _run(self, index: int, fired: Sequence[int], drawn: Drawn, on_device: OnDevice | None) -> Mapping[str, Any]:
        """Calls the stage. Returns its reductions by name."""
        kind, stage, passed = self.subject.kind, self.program.stages[index], self.draws.passed
        moving = [kind.make(drawn.grads[i], i % 2) for i in fired]
        tensors = None if list(fired) == list(range(len(self.params))) else fired
        scratch = {name: [drawn.arrays[name][i] for i in fired] for name in [*passed, *stage.reads]}
        rows = self.draws.rows(index, fired, drawn, on_device)
        try:
            written = self.call(index, moving, rows, scratch, tensors=tensors)
        except Exception as error:
            raise AssertionError(f"{self.title()} a step raises {type(error).__name__}: {error}") from error
        params, states, *rest = written
        if kind.mutable:
            if any(kind.read(m).tobytes() != drawn.grads[i].tobytes() for m, i in zip(moving, fired, strict=True)):
                raise AssertionError(f"{self.title()} writes into a gradient, which a step only reads")
            if [*map(id, params)] != [*map(id, self.params)]:
                raise AssertionError(f"{self.title()} returns other arrays than the mutable ones it was bound to")
        self.params, self.states = list(params), [dict(s) for s in states]
        if not kind.mutable:
            for name in passed:
                drawn.arrays[name].update(zip(fired, scratch[name], strict=True))
        reductions: Mapping[str, Any] = rest[0] if rest else {}
        names = [r.name for r in stage.reduces]
        if sorted(reductions) != sorted(names):
            fault = f"stage {index} returns the reductions {sorted(reductions)}, not {names}"
            raise AssertionError(f"{self.title()} {fault}")
        return reductions

    def _after(self, index: int, fired: Sequence[int], drawn: Drawn) -> list[dict[str, Array]]:
        """The buffers of all tensors after a stage, with its scratch, inputs and vectors.

        AssertionError where the stage writes one of these without a store to it.
        """
        after = [self.values(i) for i in range(len(self.params))]
        stored = {s.buffer for s in self.program.stages[index].stores}
        for name, arrays in drawn.arrays.items():
            for i in fired:
                value = self.subject.kind.read(arrays[i])
                if name not in stored and value.tobytes() != drawn.values[name][i].tobytes():
                    raise AssertionError(f"{self.title()} stage {index} writes into {name}, which it only reads")
                drawn.values[name][i] = after[i][name] = value
        return after

    def _read(self, name: str, reduction: Any, count: int, level: str) -> list[Array]:
        """A reduction as float64 arrays, one for each tensor fired."""
        arrays = [x if isinstance(x, np.ndarray | np.generic) else self.subject.kind.read(x) for x in reduction]
        if len(arrays) != count or any(np.asarray(x).dtype != np.float64 for x in arrays):
            raise AssertionError(f"{self.title()} the reduction {name} is not one of float64 for each tensor")
        return [np.asarray(x) if level != "tensor" else np.asarray(x).reshape(1, 1, 1) for x in arrays]

    def _compare_untouched(self, fired: Sequence[int], stored: set[str], before: Values, after: Values) -> None:
        """AssertionError for a change in a buffer without a store, or in a tensor that did not fire."""
        for i in range(len(self.params)):
            for name in self.buffers:
                value, old = after[i][name], before[i][name]
                if (i in fired and name in stored) or value.tobytes() == old.tobytes():
                    continue
                change = np.max(np.abs(value.astype(np.float64) - old.astype(np.float64)))
                left_out = "stays or was not among `tensors`"
                reason = "is not stored by this stage" if i in fired else left_out
                owner = "" if i in fired else f"a tensor of shape {self.shapes[i]} {left_out}, yet its "
                raise AssertionError(
                    f"{self.title()} {owner}{name} {'' if owner else reason + ', yet it '}changed "
                    f"(largest difference {change:.3g})"
                )
