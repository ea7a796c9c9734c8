"""The buckets of an engine: its tensors, grouped by program, device and layout, and the states of new tensors.

A tensor joins its bucket at its first gradient. A warning is given where a state moves by less than its storage can
represent: such a state stagnates, and nothing else reports it.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np

from rulec.analysis import analyse
from rulec.analysis.flow import flow_of
from rulec.analysis.linear import pace
from rulec.backend import registry
from rulec.backend.capabilities import capabilities_of
from rulec.backend.protocol import Backend
from rulec.compiler.axes import AxisInference
from rulec.compiler.foreseen import check_counts
from rulec.compiler.indices import is_of_elements
from rulec.compiler.ir import Memory, Program
from rulec.compiler.layout import ITEM_SIZE, Layout, is_shaped, is_viewed, layout_for
from rulec.compiler.memory import ringed, stored_alike
from rulec.compiler.pipeline import compile
from rulec.compiler.routing import Router
from rulec.compiler.scalars import evaluate_once
from rulec.compiler.view import matrix_view, view_of
from rulec.errors import RuleError, TensorError
from rulec.formats import UNBIASED
from rulec.language.expr.node import RANGE, ROWS, Kind, Node, Op, walk
from rulec.language.expr.static import inside, statics
from rulec.language.rule import Rule
from rulec.language.rule_data import RuleData, placed_level
from rulec.runtime.arrays import Vector
from rulec.runtime.buckets.bucket import Bucket, Tensor
from rulec.runtime.buckets.context import EngineContext
from rulec.runtime.buckets.hyper import EPS
from rulec.runtime.buckets.plan import needs_matrix
from rulec.runtime.buckets.scalar_table import Counts, Numbers
from rulec.runtime.distributed.shards import GlobalTensor
from rulec.runtime.layers import Layer, layer_for
from rulec.runtime.storage.allocator import StateSpec, state_specs
from rulec.runtime.storage.options import Storage, check_single


@dataclass(frozen=True)
class Extension:
    """Tensors that will join a bucket, with the hyper-parameters and the shape facts of each."""

    common: EngineContext
    bucket: Bucket
    tensors: Sequence[Tensor]
    hyper: Sequence[dict[str, float]]
    facts: Sequence[dict[str, float]]

    def states(self) -> list[dict[str, Any]]:
        """The initialised array states of each tensor, by name."""
        specs = state_specs(self.bucket.program, self.bucket.layout)
        each = zip(self.tensors, self.hyper, self.facts, strict=True)
        shapes = [[_state_shape(s, t, h, f) for s in specs] for t, h, f in each]
        params = [t.array for t in self.tensors]
        return self.common.arrays.allocate(params, specs, shapes, self.hyper, self.facts)

    def join(self, states: list[dict[str, Any]]) -> None:
        """Adds the tensors with these states to the bucket. Nothing in it can fail."""
        bucket, tensors = self.bucket, self.tensors
        self._join_numbers()
        for position, tensor in enumerate(tensors, len(bucket.tensors)):
            tensor.bucket, tensor.position = bucket, position
        bucket.tensors += tensors
        bucket.params += [t.array for t in tensors]
        bucket.states += states
        bucket.facts += self.facts
        bucket.groups = np.array([t.group for t in bucket.tensors], np.int64)
        bucket.turns = np.concatenate([bucket.turns, np.zeros(len(tensors), np.int64)])
        before = self.common.host.numbers(bucket.counts.numbers)
        counts = np.concatenate([before, np.zeros(len(tensors))]).astype(np.int64)
        if bucket.resident:
            bucket.counts = Counts(self.common.arrays.vector(counts, bucket.device), bucket.library)
            self.common.shared.count_by(bucket.library)
        else:
            bucket.counts = Counts(self.common.arrays.vector(counts))
        bucket.rebind()

    def _join_numbers(self) -> None:
        """The first values of scalar states of tensors, groups and the model."""
        bucket = self.bucket
        for buffer in bucket.program.states:
            letters = buffer.axes.letters
            if buffer.init is None or not buffer.axes.number:
                continue
            each = zip(self.hyper, self.facts, strict=True)
            initial = np.array([float(evaluate_once(buffer.init, h, f, {})) for h, f in each])
            on_device = bucket.is_on_device_only(buffer.name)
            if "n" in letters:
                old = self._numbers_of(buffer.name)
                device = bucket.device if on_device else None
                bucket.scalar_states[buffer.name] = self.common.arrays.vector(np.concatenate([old, initial]), device)
                continue
            of_group = "k" in letters
            places = [t.group if of_group else 0 for t in self.tensors]
            library = bucket.library if on_device else self.common.host
            self.common.shared.start(buffer.name, of_group, places, initial, library)

    def _numbers_of(self, state: str) -> Any:
        """A scalar state of the tensors already in the bucket, in float64."""
        have = self.bucket.scalar_states.get(state)
        return np.zeros(0) if have is None else self.common.host.numbers(have.numbers)


def _state_shape(
    spec: StateSpec, tensor: Tensor, hyper: Mapping[str, float], facts: Mapping[str, float]
) -> tuple[int, ...]:  # fmt: skip
    """The local shape of a state. Shapes of their own are noted, and cut where matrices are."""
    view = tensor.view
    if spec.axes.elementwise or not {"i", "j"} <= set(spec.axes.letters):
        return spec.shape(view, hyper, facts)
    shape = tensor.shapes[spec.name] = spec.shape(view.whole or view, hyper, facts)
    if tensor.shard_layout is not None:
        part = tensor.shard_layout.part(tensor.shard_layout.state(spec.name))
        return tuple(side.stop - side.start for side in part)
    return (*view.shape[:-2], *shape[-2:]) if len(shape) == len(view.shape) else shape


class Buckets:
    """The tensors, and their buckets: one for each program, device and layout.

    A tensor joins its bucket at its first gradient. `extensions` counts the times that tensors joined.
    """

    def __init__(
        self, router: Router[Rule], common: EngineContext, backend: str | Backend | None, storage: Storage,
        resident: bool, begins: bool = False,
    ) -> None:  # fmt: skip
        self.common, self._router = common, router
        self._backend, self.storage, self._resident, self._begins = backend, storage, resident, begins
        self.tensors: list[Tensor] = []
        self.by_key: dict[Any, Bucket] = {}
        self.extensions = 0

    def add(
        self, array: Any, group: int, name: str, tags: frozenset[str], number: int | None, maximize: bool,
        whole: GlobalTensor | None, in_group: tuple[int, int] | None = None, layer: Layer | None = None,
    ) -> int:  # fmt: skip
        """Adds a parameter and returns its id. RuleError where the rule does not apply to it and names no other."""
        common = self.common
        dtype, shape = common.arrays.dtype(array), common.arrays.shape(array)
        of_whole = None if whole is None else whole.shape
        rule = self._router.choose(of_whole or shape, tags, name)
        number = len(self.tensors) if number is None else number
        common.largest = max(common.largest, math.prod(shape) * ITEM_SIZE[dtype])
        view = matrix_view(shape, rule.view, of_whole)
        tensor = Tensor(array, group, name, rule, view, number, maximize, whole)
        tensor.layer = layer_for(rule, name, layer)
        before = [other for other in self.tensors if other.group == group] if in_group is None else []
        for place, other in enumerate([*before, tensor]):
            other.in_group = in_group or (place, len(before) + 1)
        self.tensors.append(tensor)
        common.shared.make_room(group + 1)
        return len(self.tensors) - 1

    def replace(self, tensor_id: int, array: Any) -> None:
        """Another array in the place of a parameter."""
        tensor = self.tensors[tensor_id]
        tensor.array = array
        if tensor.bucket is not None:
            tensor.bucket.params[tensor.position] = array
            tensor.bucket.rebind()

    def relocate(self, arrays: Mapping[int, Mapping[str, Any]]) -> bool:
        """Takes over states whose memory moved: see `Engine.relocate`."""
        vectors: list[dict[str, Vector]] = []
        for bucket in self.by_key.values():
            before = {"": bucket.counts.vector, **bucket.scalar_states}
            now = {name: self.common.arrays.vector_now(vector) for name, vector in before.items()}
            vectors.append({name: vector for name, vector in now.items() if vector is not None})
            if len(vectors[-1]) < len(before):
                return False
        for bucket, numbers in zip(self.by_key.values(), vectors, strict=True):
            bucket.counts = bucket.counts.over(numbers.pop(""))
            bucket.scalar_states |= numbers
            bucket.rebind()
        for i, states in arrays.items():
            tensor = self.tensors[i]
            assert tensor.bucket is not None
            held = tensor.bucket.states[tensor.position]
            held |= {name: array for name, array in states.items() if name in held}
        return True

    def needs_copy(self, tensor_id: int, table: Numbers) -> bool:
        """Whether a parameter lies in memory in another order than its shape's, and its rule looks at its matrices."""
        tensor = self.tensors[tensor_id]
        return not self.common.arrays.plain(tensor.array) and is_viewed(self._program(tensor, table)[0])

    @property
    def joins(self) -> bool:
        """Whether a tensor's update needs other tensors'."""
        return any(compile(t.rule, self.facts(t)).joins for t in self.tensors)

    def facts(self, tensor: Tensor) -> dict[str, float]:
        """The facts of a tensor, and the machine epsilon of its dtype."""
        return {**tensor.facts, "machine_eps": EPS[self.common.arrays.dtype(tensor.array)]}

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
        for bucket, hyper in [(e.bucket, e.hyper[0]) for key, e in extensions.items() if key not in self.by_key]:
            warn_of_lost_changes(bucket.program, bucket.layout, self.storage.words, hyper)
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
        self, program: Program, layout: Layout, device: str, static: tuple[tuple[str, float], ...], parted: bool,
        halved: bool,
    ) -> Bucket:  # fmt: skip
        backend = registry.usable(self._backend or self.common.arrays.backend(device))
        capabilities = capabilities_of(backend)
        on_device = capabilities.on_device
        # Whether a step is skipped is known on the device alone, and so is then how often there was one.
        resident = on_device and (self._resident or program.skip is not None)
        library = self.common.arrays.library(device, on_device)
        library.adopt(capabilities)
        decoded = partial(self.common.decoded, device)
        seed = self.common.seed
        bucket = Bucket(
            program,
            layout,
            device,
            backend,
            capabilities,
            dict(static),
            library,
            decoded,
            parted,
            halved,
            resident,
            seed,
            self.common.processes.across is not None,
            self._begins,
        )
        if not (resident or parted or program.predicates or program.skip):
            bucket.rings = ringed(program)[1]
            bucket.turning = bool(bucket.rings) and all(stored_alike(ring, layout) for ring in bucket.rings)
        if not bucket.turning and (resident or not program.predicates):
            bucket.compiled()
        return bucket

    def _program(self, tensor: Tensor, table: Numbers) -> tuple[Program, dict[str, float]]:
        """The program of a tensor's rule for its shape and static hyper-parameters, and these hyper-parameters."""
        named = self.common.hyper.of_group(table, tensor.group)
        static = {k: named[k] for k, h in tensor.rule.hyper.items() if h.static}
        if tensor.bucket is None and placed_level(tensor.rule):  # static hyper-parameters may be sizes of blocks
            of_whole = None if tensor.whole is None else tensor.whole.shape
            tensor.view = view_of(tensor.rule, tensor.view.shape, static, of_whole)
        return compile(tensor.rule, self.facts(tensor), static, memory=self.memory(tensor)), static

    def memory(self, tensor: Tensor) -> Memory:
        """How a tensor and its states are stored, beyond their dtypes."""
        dtype, whole = self.common.arrays.dtype(tensor.array), tensor.whole
        memory = self.storage.memory_of(tensor.rule, dtype, whole is None)
        if whole is None or not memory.random:
            return memory
        return replace(memory, places=ROWS if whole.piece.gap else RANGE)

    def _key(self, tensor: Tensor, grad_dtype: str | None, table: Numbers) -> Any:
        dtype = self.common.arrays.dtype(tensor.array)
        program, static = self._program(tensor, table)
        check_counts(program, {**self.facts(tensor), **static})
        self._check_fits(program, tensor, static)
        # Blocks are of neighbours in the order of the shape, for kernels and for files.
        coded = tensor.numel if self.common.arrays.plain(tensor.array) else 0
        states, formats = self.storage.of(program, dtype, coded)
        turned = tensor.view.transposed and is_shaped(program)
        layout = layout_for(program, dtype, grad_dtype, states, tensor.maximize, turned, formats)
        check_single(program, layout, tensor.name)
        device = self.common.arrays.device(tensor.array)
        return (
            program,
            layout,
            device,
            tuple(sorted(static.items())),
            bool(tensor.cuts),
            tensor.shard_layout is not None,
        )

    def _check_fits(self, program: Program, tensor: Tensor, static: Mapping[str, float]) -> None:
        function = needs_matrix(program)
        if function and len(tensor.view.shape) < 2:
            raise RuleError(
                f"{function} needs a matrix, and {tensor.name} has {len(tensor.view.shape)} dimensions: give "
                f"{tensor.rule.name} applies_to: ndim >= 2 and a rule for the others under otherwise"
            )
        if tensor.halved:
            _check_halved(program, tensor, static)
        elif tensor.cuts:
            _check_cut(program, tensor)
        if is_viewed(program) and not self.common.arrays.plain(tensor.array):
            raise TensorError(
                f"{tensor.name} does not lie in memory in the order of its shape, as the rows and columns of "
                f"{tensor.rule.name} need: pass it contiguous"
            )


def _check_halved(program: Program, tensor: Tensor, static: Mapping[str, float]) -> None:
    """TensorError where the owner of a matrix could not compute for all ranks, or its results fit no local array."""
    inference = AxisInference(program)
    values = [*walk(program.between)]
    if tensor.shard_layout is None:
        if any(_is_of_wholes(value, inference) for value in values):
            raise TensorError(
                f"{tensor.name} is a part of a tensor that is no rectangle of it, and {program.name} needs its "
                f"matrices whole: cut it in one piece for each process"
            )
        return
    for value in values:
        if inside(value).op is Op.QR:  # an error of one rank, in the middle of a step, would be known to no other
            axes = inference.axes(value.args[0])
            height = statics(value)[0] if value.op is Op.IN_BLOCKS else axes.rows
            rows, cols = (evaluate_once(x, static, tensor.view.facts, {}) for x in (height, axes.cols) if x)
            if rows < cols:
                raise TensorError(
                    f"qr needs at least as many rows as columns, and {program.name} gives it {rows:g} by {cols:g} for "
                    f"{tensor.name}: transpose the matrix"
                )
    for store in program.finish:
        letters = {*inference.axes(store.value).letters} & {"i", "j"}
        kept = program.buffer(store.buffer).axes
        if len(letters) == 1 and {"i", "j"} <= {*kept.letters} and not kept.elementwise:
            raise TensorError(
                f"{store.buffer} of {program.name} has a shape of its own and is assigned one number for each row or "
                f"column, where {tensor.name} is a part of a tensor: keep it whole on every process"
            )


def _check_cut(program: Program, tensor: Tensor) -> None:
    """TensorError for a reduction of one matrix for all, as ranks with other matrices would count it again."""
    inference, alike = AxisInference(program), set[Node]()
    for value in walk(program.between):
        arrays = [a for a in value.args if {"i", "j"} & {*inference.axes(a).letters}]
        drawn = value.op.kind is Kind.RANDOM and not inference.axes(value).elementwise
        if drawn or (arrays and alike.issuperset(arrays)):
            alike.add(value)
            if value.op.kind is Kind.REDUCE:
                raise TensorError(
                    f"{tensor.name} is cut between its matrices, and {program.name} reduces a random matrix for all of "
                    f"them: cut another dimension"
                )


def _is_of_wholes(value: Node, inference: AxisInference) -> bool:
    """Whether a value can be computed of whole matrices alone."""
    drawn = value.op.kind is Kind.RANDOM and not inference.axes(value).elementwise
    return (value.op.kind is Kind.MATRIX and not is_of_elements(value)) or drawn


def warn_of_lost_changes(
    program: Program, layout: Layout, words: Mapping[str, str], hyper: Mapping[str, float]
) -> None:  # fmt: skip
    """Warns of states with a word for a storage that loses their changes.

    `words` are the words of the storage, `hyper` the hyper-parameters. Sums without decay are looked at in every
    storage. Means are looked at in bfloat16 and float16: codes follow the largest of a block, and lose less.
    """
    stored = {state: (form.name if (form := layout.format(state)) else dtype) for state, dtype in layout.dtypes}
    asked = {state: words.get(state, words.get("")) for state in program.rule.state if state in stored}
    named = {state: stored[state] for state, word in asked.items() if word and word != UNBIASED}
    for state, storage, what in _lost(program.rule, named, hyper):
        warnings.warn(
            f"{state} of {program.name} {what}, and a change below half of the spacing of {storage} is lost: give "
            f"state_dtype={{{state!r}: {UNBIASED!r}}}, which rounds at random, or float32",
            RuntimeWarning, stacklevel=2,
        )  # fmt: skip


def _lost(rule: RuleData, storages: Mapping[str, str], hyper: Mapping[str, float]) -> Iterator[tuple[str, str, str]]:
    """The states that lose changes, each with its storage and a clause on how it moves."""
    if not storages:
        return
    flow, proofs = flow_of(rule), analyse(rule).storage
    for state, storage in storages.items():
        moves = None if proofs[state].exact else pace(state, flow.taken[state], hyper)
        if moves is None or storage not in moves.too_slow(proofs[state].unsigned):
            continue
        if moves.kept == 1:
            yield state, storage, "adds without decay"
        elif storage in ("bfloat16", "float16"):
            yield state, storage, f"moves by {1 - moves.kept:.2g} of the way at a step"
