"""The tensors of one engine, and their buckets."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from rulec.backend import registry
from rulec.backend.protocol import Backend
from rulec.compiler.ir import Program
from rulec.compiler.layout import ITEM_SIZE, Layout, is_shaped, is_viewed, layout_for
from rulec.compiler.lower import check_counts
from rulec.compiler.pipeline import compile
from rulec.compiler.routing import Router
from rulec.compiler.view import matrix_view
from rulec.errors import RuleError, TensorError
from rulec.runtime.bucket import Bucket, Tensor
from rulec.runtime.common import Common
from rulec.runtime.extending import Extension
from rulec.runtime.hyper import EPS
from rulec.runtime.plan import needs_matrix
from rulec.runtime.rows import Numbers


class Buckets:
    """The tensors, and their buckets: one for each program, device and layout.

    A tensor joins its bucket at its first gradient. `extensions` counts the times that tensors joined.
    """

    def __init__(
        self, router: Router, common: Common, backend: str | Backend | None, state_dtype: Mapping[str, str],
        resident: bool,
    ) -> None:  # fmt: skip
        self.common, self._router = common, router
        self._backend, self.state_dtype, self._resident = backend, state_dtype, resident
        self.tensors: list[Tensor] = []
        self.by_key: dict[Any, Bucket] = {}
        self.extensions = 0

    def add(
        self, array: Any, group: int, name: str, tags: frozenset[str], number: int | None, maximize: bool
    ) -> int:  # fmt: skip
        """Adds a parameter and returns its id. RuleError where the rule does not apply to it and names no other."""
        common = self.common
        dtype, shape = common.arrays.dtype(array), common.arrays.shape(array)
        rule = self._router.choose(shape, tags, name)
        number = len(self.tensors) if number is None else number
        common.largest = max(common.largest, math.prod(shape) * ITEM_SIZE[dtype])
        self.tensors.append(Tensor(array, group, name, rule, matrix_view(shape, rule.view), number, maximize))
        common.shared.make_room(group + 1)
        return len(self.tensors) - 1

    def replace(self, tensor_id: int, array: Any) -> None:
        """Another array in the place of a parameter."""
        tensor = self.tensors[tensor_id]
        tensor.array = array
        if tensor.bucket is not None:
            tensor.bucket.params[tensor.position] = array
            tensor.bucket.rebind()

    def needs_copy(self, tensor_id: int, table: Numbers) -> bool:
        """Whether a parameter lies in memory in another order than its shape's, and its rule looks at its matrices."""
        tensor = self.tensors[tensor_id]
        return not self.common.arrays.plain(tensor.array) and is_viewed(self._program(tensor, table)[0])

    @property
    def joins(self) -> bool:
        """Whether a tensor's update needs other tensors'."""
        return any(compile(t.rule, self.facts(t)).joins for t in self.tensors)

    def facts(self, tensor: Tensor) -> dict[str, float]:
        """The shape facts of a tensor, and the machine epsilon of its dtype."""
        return {**tensor.view.facts, "machine_eps": EPS[self.common.arrays.dtype(tensor.array)]}

    def prepare(self, ids: Sequence[int], grad_dtypes: Sequence[str] | None, table: Numbers) -> bool:
        """Puts new tensors in buckets and allocates their states. True where there was a new one.

        `grad_dtypes` are the dtypes of the gradients; None expects each parameter's dtype.
        """
        new: dict[Any, list[Tensor]] = {}
        for place, i in enumerate(ids):
            tensor = self.tensors[i]
            if tensor.bucket is None:
                key = self._key(tensor, grad_dtypes[place] if grad_dtypes else None, table)
                new.setdefault(key, []).append(tensor)
        if not new:
            return False
        self.common.hyper.add_programs([key[0] for key in new], table)
        extensions = {key: self._extension(key, tensors, table) for key, tensors in new.items()}
        # All that may fail is done before the first tensor joins.
        states = [extension.states() for extension in extensions.values()]
        for (key, extension), first_states in zip(extensions.items(), states, strict=True):
            extension.join(first_states)
            self.by_key[key] = extension.bucket
        self.extensions += 1
        return True

    def _extension(self, key: Any, tensors: list[Tensor], table: Numbers) -> Extension:
        hyper = [self.common.hyper.of_group(table, t.group) for t in tensors]
        bucket = self.by_key.get(key) or self._new_bucket(*key)
        return Extension(self.common, bucket, tensors, hyper, [self.facts(t) for t in tensors])

    def _new_bucket(
        self, program: Program, layout: Layout, device: str, static: tuple[tuple[str, float], ...]
    ) -> Bucket:  # fmt: skip
        backend = registry.usable(self._backend or self.common.arrays.backend(device))
        there = getattr(backend, "on_device", False)
        # Whether a step is skipped is known on the device alone, and so is then how often there was one.
        resident = there and (self._resident or program.skip is not None)
        library = self.common.arrays.library(device, there)
        bucket = Bucket(program, layout, device, backend, dict(static), library, resident)
        if resident or not program.predicates:
            bucket.compiled()
        return bucket

    def _program(self, tensor: Tensor, table: Numbers) -> tuple[Program, dict[str, float]]:
        """The program of a tensor's rule for its shape and static hyper-parameters, and these hyper-parameters."""
        named = self.common.hyper.of_group(table, tensor.group)
        static = {k: named[k] for k, h in tensor.rule.hyper.items() if h.static}
        return compile(tensor.rule, self.facts(tensor), static), static

    def _key(self, tensor: Tensor, grad_dtype: str | None, table: Numbers) -> Any:
        dtype = self.common.arrays.dtype(tensor.array)
        program, static = self._program(tensor, table)
        check_counts(program, {**self.facts(tensor), **static})
        self._check_fits(program, tensor)
        every = self.state_dtype.get("", dtype)
        states = {b.name: self.state_dtype.get(b.name, every) for b in program.states}
        turned = tensor.view.transposed and is_shaped(program)
        layout = layout_for(program, dtype, grad_dtype, states, tensor.maximize, turned)
        return program, layout, self.common.arrays.device(tensor.array), tuple(sorted(static.items()))

    def _check_fits(self, program: Program, tensor: Tensor) -> None:
        function = needs_matrix(program)
        if function and len(tensor.view.shape) < 2:
            raise RuleError(
                f"{function} needs a matrix, and {tensor.name} has {len(tensor.view.shape)} dimensions: give "
                f"{tensor.rule.name} applies_to: ndim >= 2 and a rule for the others under otherwise"
            )
        if is_viewed(program) and not self.common.arrays.plain(tensor.array):
            raise TensorError(
                f"{tensor.name} does not lie in memory in the order of its shape, as the rows and columns of "
                f"{tensor.rule.name} need: pass it contiguous"
            )
