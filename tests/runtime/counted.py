"""A step's calls of torch's operations, counted: of a backend whose kernels do nothing, on tensors in main memory."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from rulec import Rule
from rulec.array_api.slices import Cuts, Pieces
from rulec.backend.protocol import Rows, Scalars, Written
from rulec.compiler.ir import Program, Result
from rulec.compiler.layout import Layout
from rulec.runtime.engine import Engine, default_hyper, run
from rulec.torch.tensors.tensors import TorchArrays


class Still:
    """A backend whose kernels leave everything as it is: their reductions are ones, in the memory of a device's."""

    name = "still"
    on_device = True

    def unavailable_reason(self) -> None:
        return None

    def emit(self, program: Program, layout: Layout) -> str:
        return ""

    def build(self, program: Program, layout: Layout, source: str) -> StillKernel:
        return StillKernel(program)

    def emit_draws(self) -> str:
        return ""

    def build_draws(self, source: str) -> Callable[..., None]:
        """Draws are ones, and one call of torch's, as they are one launch of a kernel."""
        return lambda op, out, *arguments, **position: out.fill_(1.0)


class StillKernel:
    def __init__(self, program: Program) -> None:
        self.program = program

    def bind(self, params: Sequence[Tensor], states: Sequence[dict[str, Tensor]], views: Any = ()) -> StillCall:
        return StillCall(self.program, params, states, views)


class StillCall:
    def __init__(self, program: Program, params: Any, states: Any, views: Sequence[Any]) -> None:
        self.program, self.params, self.states, self.views = program, params, states, views
        self.reduced = [{r.name: self._reduced(r) for r in stage.reduces} for stage in program.stages]

    def __call__(
        self, stage: int, moving: Sequence[Tensor], rows: Rows, scratch: Mapping[str, Sequence[Tensor]] | None = None,
        *, tensors: Sequence[int] | None = None, stream: Any = None,
    ) -> Written:  # fmt: skip
        reduced: Mapping[str, Any] = self.reduced[stage]
        if tensors is not None:
            reduced = {
                n: x.chosen([*tensors]) if isinstance(x, Pieces) else x[: len(tensors)] for n, x in reduced.items()
            }
        return Written(self.params, self.states, reduced)

    def scalars(self, known: Scalars) -> tuple[Tensor, dict[str, Tensor]]:
        count = len(self.params)
        new = {s.buffer: torch.ones(count, dtype=torch.float64) for s in self.program.scalars.stores}
        return torch.ones((count, len(self.program.columns)), dtype=torch.float64), new

    def _reduced(self, result: Result) -> Any:
        if result.axes.number:
            return torch.ones(len(self.params), dtype=torch.float64)
        rows = "i" in result.axes.letters
        cuts = Cuts.of([(v.batch, v.rows, 1) if rows else (v.batch, 1, v.cols) for v in self.views])
        return Pieces(torch.ones(int(cuts.sizes.sum()), dtype=torch.float64), cuts)


class Calls(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Notes the name of every operation of torch's while it is entered."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.names: list[str] = []

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.names.append(str(function))
        return function(*args, **(kwargs or {}))


@contextmanager
def counted() -> Iterator[list[str]]:
    """The names of torch's operations meanwhile."""
    with Calls() as calls:
        yield calls.names


class Steps:
    """A rule on tensors of these shapes, in float32."""

    def __init__(self, rule: Rule, shapes: Sequence[tuple[int, ...]], resident: bool = False) -> None:
        self.params = [torch.ones(shape) for shape in shapes]
        self.engine = Engine(rule, TorchArrays(), Still(), resident=resident)
        self.ids = tuple(self.engine.add(p, 0, f"tensor {i}") for i, p in enumerate(self.params))
        self.grads = [torch.ones(shape) for shape in shapes]
        self.table = self.engine.hyper_table([default_hyper(self.engine.rule, {}, "float32")])

    def step(self, fired: Sequence[int] | None = None) -> None:
        """One step of all tensors, or of some."""
        chosen = self.ids if fired is None else tuple(self.ids[i] for i in fired)
        self.engine.begin()
        run(self.engine.ready(chosen, [self.grads[i] for i in chosen], self.table, {}))
        self.engine.end()
