"""Launches whose gradients are not arrays: what makes them is given to a kernel that takes it, bound as any other."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from rulec.backend.noise import Noise
from rulec.compiler.ir import Program
from rulec.errors import BackendUnsupported
from rulec.runtime.bucket import Version
from rulec.runtime.launch import Launch

#: Versions of programs whose calls are remembered.
_REMEMBERED = 64


def takes_parts(program: Program) -> bool:
    """Whether a program's update can be made part by part: of one elementwise stage of gradient, parameter, states."""
    return program.elementwise and program.skip is None and not program.rule.inputs


class OtherCalls:
    """Calls that take the places of buckets' own, bound to the same tensors."""

    def __init__(self) -> None:
        self._found: dict[Any, tuple[Version, Any, Version]] = {}

    def give(self, launch: Launch, kind: str, bind: Callable[[], Any]) -> Any:
        """Has a launch run the call of this kind, which `bind` makes where it is new, and gives it."""
        version = launch.version
        key = id(version), kind
        found = self._found.get(key)
        # Bound again where the bucket's own call was: tensors have moved, or there are more of them.
        if found is None or found[1] is not version.call:
            if len(self._found) >= _REMEMBERED:
                self._found.clear()
            made = replace(version, call=bind())
            found = self._found[key] = (version, version.call, made)
        launch.version = found[2]
        return found[2].call


class EstimateCalls:
    """The calls of kernels for gradients that are noise, bound to the tensors of buckets."""

    def __init__(self) -> None:
        self._calls = OtherCalls()

    def give(self, launch: Launch, noises: Sequence[Noise]) -> bool:
        """Has a launch make its gradients itself, of noise for each tensor fired, in order. Nothing is run yet.

        False, and the launch is as it was, where the rule or its backend has no kernel for that.
        """
        kinds = {noise.values for noise in noises}
        backend: Any = launch.part.bucket.backend
        if len(kinds) != 1 or not takes_parts(launch.version.program) or not hasattr(backend, "build_estimate"):
            return False
        (values,) = kinds
        try:
            self._calls.give(launch, values, lambda: self._bound(launch, values))
        except BackendUnsupported:
            return False
        launch.grads = [*noises]
        return True

    def _bound(self, launch: Launch, values: str) -> Any:
        version, bucket = launch.version, launch.part.bucket
        backend: Any = bucket.backend
        source = backend.emit_estimate(version.program, version.layout, values)
        kernel = backend.build_estimate(version.program, version.layout, values, source)
        return kernel.bind(bucket.params, bucket.states)
