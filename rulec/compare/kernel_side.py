"""A rule through the kernels of any backend, whatever arrays it works on."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from rulec.backend import registry
from rulec.backend.layout import Layout, layout_for
from rulec.backend.protocol import Kernel, Rows
from rulec.compare.ulps import EPS
from rulec.compiler.ir import Program
from rulec.compiler.pipeline import compile
from rulec.compiler.routing import Router
from rulec.compiler.scalars import ScalarTable, evaluate_once, resolve_hyper
from rulec.compiler.view import matrix_view
from rulec.errors import BackendUnsupported
from rulec.language.rule import Rule
from rulec.runtime.state import state_specs
from rulec.testing.kinds import ArrayKind, kind_named

Array = np.ndarray[Any, Any]

#: The library of the arrays that a backend works on, where it is not NumPy.
ARRAYS: Mapping[str, str] = {"triton": "torch"}


@dataclass
class _Tensor:
    """One parameter: the kernel for it, its arrays, and what its scalars are computed from."""

    program: Program
    kernel: Kernel
    facts: Mapping[str, float]
    hyper: Mapping[str, float]
    param: Any
    states: dict[str, Any]
    scalar_states: dict[str, float] = field(default_factory=dict)
    t: int = 0

    def step(self, grad: Any) -> None:
        self.t += 1
        table = ScalarTable(self.program.scalars)
        hyper = {k: np.float64(v) for k, v in self.hyper.items()}
        row, stored = table.evaluate((1,), hyper, np.float64(self.t), self.facts, self.scalar_states)
        call = self.kernel.bind([self.param], [self.states])
        params, states, _ = call(0, [grad], Rows(row, np.zeros(1, np.int64)))
        self.param, self.states = params[0], dict(states[0])
        self.scalar_states |= {k: float(np.asarray(v).reshape(-1)[0]) for k, v in stored.items()}


class KernelSide:
    """An elementwise rule of ours, tensor by tensor, through kernels of a backend that rulec.array does not drive.

    `params` are NumPy arrays; the backend gets copies in arrays of its own library.
    """

    def __init__(self, rule: Rule, params: Sequence[Array], hyper: Mapping[str, float], backend: str) -> None:
        self.name = backend
        self.kind = kind_named(ARRAYS.get(backend, "numpy"))
        router = Router(rule)
        self.tensors = [_tensor(router.choose(p.shape, ()), p, hyper, backend, self.kind) for p in params]

    def step(self, grads: Sequence[Array]) -> None:
        for tensor, grad in zip(self.tensors, grads, strict=True):
            tensor.step(self.kind.make(grad))

    def values(self) -> list[dict[str, Array]]:
        read = self.kind.read
        return [
            {"p": read(t.param), **{k: read(v) for k, v in t.states.items()}, **_as_arrays(t.scalar_states)}
            for t in self.tensors
        ]


def _as_arrays(numbers: Mapping[str, float]) -> dict[str, Array]:
    return {k: np.asarray(v) for k, v in numbers.items()}


def _tensor(rule: Rule, param: Array, hyper: Mapping[str, float], backend: str, kind: ArrayKind) -> _Tensor:
    """One parameter under the rule it is routed to; BackendUnsupported where that has more than one stage, or skips."""
    dtype = param.dtype.name
    facts = {**matrix_view(param.shape, rule.view).facts, "machine_eps": EPS[dtype]}
    own = {k: v for k, v in hyper.items() if k in rule.hyper}
    values = resolve_hyper(rule.hyper, own, EPS[dtype], rule.name)
    static = {k: v for k, v in values.items() if rule.hyper[k].static}
    program = compile(rule, facts, static)
    if program.skip is not None:
        raise BackendUnsupported(backend, "the skip", rule.name)
    layout = layout_for(program, dtype)
    chosen = registry.usable(backend)
    kernel = chosen.build(program, layout, chosen.emit(program, layout))
    states = {k: kind.make(v) for k, v in _first_states(program, layout, param, values, facts).items()}
    scalar = {s.buffer: program.buffer(s.buffer).init for s in program.scalars.stores}
    first = {k: float(evaluate_once(v, values, facts, {})) for k, v in scalar.items() if v is not None}
    return _Tensor(program, kernel, facts, values, kind.make(param), states, first)


def _first_states(
    program: Program, layout: Layout, param: Array, hyper: Mapping[str, float], facts: Mapping[str, float]
) -> dict[str, Array]:
    found = {}
    for spec in state_specs(program, layout):
        values = spec.values(hyper, facts, param.astype(np.float64))
        found[spec.name] = np.ascontiguousarray(np.broadcast_to(values, param.shape).astype(param.dtype))
    return found
