"""Launches without gradient arrays: the kernel gets a description of the noise and computes the gradients itself."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from rulec.backend.capabilities import Noise, Values
from rulec.compiler.layout import has_chance
from rulec.errors import BackendUnsupported
from rulec.runtime.buckets.bucket import Bucket, Version
from rulec.runtime.buckets.launch import Launch

#: The number of remembered calls.
_REMEMBERED = 64


def takes_blocks(version: Version | Bucket) -> bool:
    """Whether a tensor can be updated block by block: one elementwise stage, without `skip`, inputs and places."""
    program = version.program
    plain = program.elementwise and program.skip is None
    return plain and not (program.rule.inputs or program.rule.moves) and not has_chance(program)


def takes_parts(version: Version | Bucket) -> bool:
    """Whether a tensor can be updated piece by piece, wherever pieces begin: its states are in no codes, too."""
    return takes_blocks(version) and not version.layout.formats


class OtherCalls:
    """Replacements for the calls of buckets, bound to the same tensors."""

    def __init__(self) -> None:
        self._bound: dict[Any, tuple[Version, Any, Version]] = {}

    def give(self, launch: Launch, kind: str, bind: Callable[[], Any]) -> Any:
        """Gives a launch the call of this kind, bound by `bind` at first, and returns the call."""
        launch.stop_turning()
        version = launch.version
        key = id(version), kind
        entry = self._bound.get(key)
        # Bound again after the bucket's call was: tensors moved, or joined.
        if entry is None or entry[1] is not version.call:
            if len(self._bound) >= _REMEMBERED:
                self._bound.clear()
            other = replace(version, call=bind())
            entry = self._bound[key] = (version, version.call, other)
        launch.version = entry[2]
        return entry[2].call


class EstimateCalls:
    """The calls of kernels that compute gradients from noise, bound to the tensors of buckets."""

    def __init__(self) -> None:
        self._calls = OtherCalls()

    def give(self, launch: Launch, noises: Sequence[Noise]) -> bool:
        """Gives a launch the noise of each fired tensor, in order, in place of gradients. Nothing is run yet.

        False, and the launch is unchanged, where the rule or its backend has no such kernel.
        """
        kinds = {noise.values for noise in noises}
        if len(kinds) != 1 or not takes_parts(launch.version) or launch.part.bucket.capabilities.estimate is None:
            return False
        (values,) = kinds
        try:
            self._calls.give(launch, values, lambda: self._bound(launch, values))
        except BackendUnsupported:
            return False
        launch.grads = [*noises]
        return True

    def _bound(self, launch: Launch, values: Values) -> Any:
        version, bucket = launch.version, launch.part.bucket
        kernels = bucket.capabilities.estimate
        assert kernels is not None
        source = kernels.emit_estimate(version.program, version.layout, values)
        kernel = kernels.build_estimate(version.program, version.layout, values, source)
        return kernel.bind(bucket.params, bucket.states)
