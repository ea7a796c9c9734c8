"""The survey of a step in machine code: one check that all parameters, states and gradients are as they were.

Asking torch from Python for each gradient, its dtype, shape and address, and for the address of each parameter and
state, costs more than a small kernel. A survey asks the functions that torch exports, and compares the words of tensors
in memory (both in `torch_abi`), in one call. It can only confirm that nothing changed. Otherwise the step asks tensor
by tensor. `survey_source` has the text of the function that surveys a step.
"""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Callable, Iterable, Sequence
from itertools import chain
from operator import is_
from typing import Any

import numpy as np
from torch import Tensor
from torch.nn import Parameter

from rulec.backend import registry
from rulec.kernel.multi_tensor.address import Located, array_address
from rulec.torch.fastpath.survey_source import DTENSOR, JOB, RECORD, TENSOR, survey_source
from rulec.torch.fastpath.torch_abi import (
    MOST_DIMS,
    Handles,
    Numbers,
    exports,
    impl_words_of,
    is_locked,
    layout,
    number,
    reads_of,
    words_of,
    words_of_dtensors,
)
from rulec.torch.tensors.dtensor import is_dtensor, local_tensor, placement_of, spec_of
from rulec.torch.tensors.memory import span_of

#: What a job asks for: a look; a look and the note that parameters are written, for a step that repeats the last one;
#: the end of what handles hold.
LOOK, REPEAT, RELEASE = 1, 2, 3

#: The word of a job that is not 0 once it was done.
ANSWER = len(JOB) - 1


class Survey:
    """The parameters of a step in the lists of their groups, with their gradients and `states`, as they are now.

    `written` are the parameters with gradients, at the places `chosen` among all. After a `look` that finds everything
    as it was, `grads` has the addresses of now, and `fresh` is True. Until `release`, gradients are then held as by a
    reference, as parameters and states always are: no other thread can free the memory that kernels read.
    """

    def __init__(
        self, params: Sequence[Tensor], chosen: Sequence[int], written: Sequence[Tensor], lists: Sequence[list[Any]],
        states: Sequence[Tensor], functions: Numbers,
    ) -> None:  # fmt: skip
        self.fresh, self.lists, self.functions = False, [*lists], functions
        self._chosen, self._params = [*chosen], [*params]
        self.tensors = Tensors([*params, *states])
        self._owners: Sequence[Any] = ()
        read = (lambda i: local_tensor(written[i].grad)) if self.tensors.has_dtensors else (lambda i: written[i].grad)
        self.grads = Located(np.zeros(len(written), np.int64), read)
        self._handles = Handles(functions, 1 + len(params))
        self._kinds: dict[Any, Numbers] = {}
        self._numbers: dict[Any, list[int]] = {}
        self._ignored = np.zeros(1, np.int64)
        self._specs: list[Any] = []
        first = array_address(self.grads.addresses)
        outs = {place: first + 8 * i for i, place in enumerate(chosen)}
        self.records = np.array([self._record(i, p, outs.get(i)) for i, p in enumerate(params)], np.int64)
        self._job, self._release = job_of(self, LOOK, Contents(self.lists)), job_of(self, RELEASE, Contents())

    def look(self, lists: Sequence[list[Any]]) -> bool:
        """Whether the parameters in the groups' lists, and their gradients, are as they were except new addresses."""
        alike = len(lists) == len(self.lists) and all(map(is_, lists, self.lists))
        self.fresh = alike and self._job.done()
        return self.fresh

    def release(self) -> None:
        """Ends what the last look holds."""
        self.fresh = False
        self._release.done()

    def point(self, rows: Sequence[int], owners: Sequence[Any]) -> None:
        """Has looks write the address of each gradient in a second place, too: in memory of these owners."""
        self._owners = owners
        self.records[self._chosen, RECORD.index("row")] = rows

    @property
    def nothing(self) -> int:
        """A handle of no tensor."""
        return int(self._handles.all[0])

    def _record(self, place: int, param: Tensor, out: int | None) -> tuple[int, ...]:
        """The words of `RECORD`; what no kernel reads has its addresses written nowhere."""
        handle, nowhere = int(self._handles.all[1 + place]), array_address(self._ignored)
        grad = None if out is None else param.grad
        kind, spec = self._kind(local_tensor(grad)), spec_of(grad)
        self._specs.append(spec)
        out = nowhere if out is None else out
        return param._cdata, kind, handle, 0 if spec is None else id(spec), out, nowhere, *self._hints(param), 0

    def _hints(self, param: Tensor) -> tuple[int, int, int]:
        """Addresses that a look at a parameter's gradient reads besides the tensors themselves."""
        return reads_of(self.functions, param, local_tensor(param.grad))

    def _kind(self, tensor: Tensor | None) -> int:
        """The address of what a tensor is, from `survey_source.KIND` on. Tensors of one kind share it."""
        like = tensor if tensor is None else (tensor.dtype, tensor.device)
        if like not in self._numbers:
            self._numbers[like] = self._numbers_of(tensor)
        dtype, *device = self._numbers[like]
        rest = () if tensor is None else (*_implementation(tensor), *tensor.shape, *tensor.stride())
        span = 0 if tensor is None else span_of(tensor) * tensor.element_size()
        words = (dtype, -1 if tensor is None else tensor.dim(), *device, span, *rest)
        if words not in self._kinds:
            self._kinds[words] = np.array(words, np.int64)
        return array_address(self._kinds[words])

    def _numbers_of(self, tensor: Tensor | None) -> list[int]:
        """torch's numbers for a tensor's dtype and device."""
        if tensor is None:
            return [number(self.functions, "dtype", self.nothing), 0, 0]
        handles = Handles(self.functions, 1)
        handle = handles.take(0, tensor)
        return [number(self.functions, name, handle) for name in ("dtype", "device", "index")]


def _implementation(tensor: Tensor) -> list[int]:
    """The words of a gradient's implementation; all are -1 where sizes of more than `MOST_DIMS` lie elsewhere."""
    where = layout()
    assert where is not None
    return [-1] * where.impl_words if tensor.dim() > MOST_DIMS else impl_words_of(where, tensor)


class Contents:
    """The entries of lists, and the keys and values of dicts, at the time of this object, which keeps them."""

    def __init__(self, lists: Iterable[list[Any]] = (), dicts: Iterable[dict[Any, Any]] = ()) -> None:
        self.lists = [(each, [*each]) for each in lists]
        self.dicts = [(each, [*chain.from_iterable(each.items())]) for each in dicts]
        self._ids = [np.array([*map(id, kept)], np.int64) for _, kept in (*self.lists, *self.dicts)]

    def take_dicts(self) -> bool:
        """Takes over new keys and values of the dicts, in jobs too; False where there are none, or another number."""
        now = [(each, [*chain.from_iterable(each.items())]) for each, _ in self.dicts]
        ids = [[*map(id, entries)] for _, entries in now]
        before = [[*map(id, entries)] for _, entries in self.dicts]
        if ids == before or [*map(len, ids)] != [*map(len, before)]:
            return False
        for words, new in zip(self._ids[len(self.lists) :], ids, strict=True):
            words[:] = new
        self.dicts = now
        return True

    def tables(self) -> list[Numbers]:
        """The tables of lists and of dicts in a job."""
        ids = iter(self._ids)
        return [
            np.array([(id(each), len(each), array_address(next(ids))) for each, _ in group], np.int64).reshape(-1, 3)
            for group in (self.lists, self.dicts)
        ]


class Tensors:
    """Tensors as they are at the time of this object, which keeps them; of at most `MOST_DIMS` dimensions.

    Of a DTensor it has the local tensor and the spec.
    """

    def __init__(self, tensors: Iterable[Tensor] = ()) -> None:
        self._kept, where = [*tensors], layout()
        assert where is not None
        self._kinds: dict[tuple[int, ...], Numbers] = {}
        local = {id(tensor): tensor for tensor in map(local_tensor, self._kept)}
        rows = [self._row(words_of(where, tensor), where.impl_words) for tensor in local.values()]
        self.table = np.array(rows, np.int64).reshape(-1, len(TENSOR) + where.data_words + 1)
        dtensors = [tensor for tensor in self._kept if is_dtensor(tensor)]
        self._places = [(local_tensor(tensor), spec_of(tensor)) for tensor in dtensors]
        held = [(id(t), t._cdata, *map(id, place)) for t, place in zip(dtensors, self._places, strict=True)]
        self.dtensors = np.array(held, np.int64).reshape(-1, len(DTENSOR))
        self.placed, self.has_dtensors = np.array(words_of_dtensors(dtensors), np.int64), bool(dtensors)

    def _row(self, words: Sequence[int], of_impl: int) -> list[int]:
        """The words of `TENSOR`, and those of the storage; `of_impl` words of the implementation lie elsewhere."""
        first, rest = words[:3], words[3 + of_impl :]
        kind = tuple(words[3 : 3 + of_impl])
        if kind not in self._kinds:
            self._kinds[kind] = np.array(kind, np.int64)
        return [*first, array_address(self._kinds[kind]), *rest]


class Job:
    """One call of the machine code, for what is `asked`.

    `records` are those of gradients, and `counts` has rows of step counts, for a repeat.
    """

    def __init__(
        self, functions: Numbers, nothing: int, asked: int, contents: Contents, tensors: Tensors, records: Numbers,
        counts: Numbers,
    ) -> None:  # fmt: skip
        self._kept = functions, contents, tensors, np.zeros(3, np.int64)
        self._tables = [*contents.tables(), tensors.table, tensors.dtensors, records, counts]
        pairs = [number for table in self._tables for number in (len(table), array_address(table))]
        self.words = (ctypes.c_int64 * len(JOB))(
            asked, *pairs, array_address(functions), array_address(tensors.placed), nothing,
            array_address(self._kept[3]), 0,
        )  # fmt: skip
        self._at, self._run = ctypes.addressof(self.words), _machine()

    def done(self) -> bool:
        """Does it. False, and nothing written or held, where something is not as it was."""
        words = self.words
        words[ANSWER] = 0
        self._run(self._at)
        return words[ANSWER] != 0

    @property
    def answered(self) -> bool:
        """Whether it was done since `forget`, whatever interrupted the call."""
        return self.words[ANSWER] != 0

    def forget(self) -> None:
        """Forgets that it was done."""
        self.words[ANSWER] = 0


_NONE = np.zeros((0, 1))


def job_of(survey: Survey, asked: int, contents: Contents, counts: Numbers = _NONE) -> Job:
    """The job of a survey; `counts` has rows of step counts, for a repeat."""
    return Job(survey.functions, survey.nothing, asked, contents, survey.tensors, survey.records, counts)


def look_of(tensors: Sequence[Tensor]) -> Callable[[], bool] | None:
    """A function: whether tensors are still as they are now. None where machine code cannot look at them."""
    if not _can_look(tensors):
        return None
    return Job(_NONE, 0, LOOK, Contents(), Tensors(tensors), _NONE, _NONE).done


def _can_look(tensors: Iterable[Tensor]) -> bool:
    """Whether machine code can look at these tensors: plain ones, and DTensors with plain local tensors."""
    where = layout() if is_locked() else None
    if where is None or any(t.dim() > MOST_DIMS for t in tensors):
        return False
    dtensors = [tensor for tensor in tensors if is_dtensor(tensor)]
    if dtensors and (where.impl_object < 0 or words_of_dtensors(dtensors) is None):
        return False
    return registry.get("cpu").unavailable_reason() is None


def survey_of(
    params: Sequence[Tensor], chosen: Sequence[int], written: Sequence[Tensor], lists: Sequence[list[Any]],
    states: Sequence[Tensor],
) -> Survey | None:  # fmt: skip
    """The survey of a step's parameters, whose gradients kernels can read, and their states; None where there is none.

    There is none of other classes than torch's own, none of tensors on other devices than processors and GPUs of NVIDIA
    and AMD, and none where torch does not export what a look asks.
    """
    here = [*map(local_tensor, params)]
    if not {Tensor, Parameter}.issuperset(map(type, here)) or not all(p.is_cpu or p.is_cuda for p in here):
        return None
    grads = [local_tensor(p.grad) for p in written]
    if any(g is None for g in grads) or any(is_dtensor(p) and placement_of(p.grad) != placement_of(p) for p in written):
        return None
    functions = exports() if _can_look([*params, *states]) else None
    if functions is None:
        return None
    survey = Survey(params, chosen, written, lists, states, functions)
    right = survey.look(lists) and survey.grads.addresses.tolist() == [g.data_ptr() for g in grads]
    survey.release()
    return survey if right else None


@functools.cache
def _machine() -> Any:
    """The compiled function, which keeps the global lock; it takes the address of a job."""
    cpu: Any = registry.get("cpu")
    where = layout()
    assert where is not None
    machine = cpu.machine("survey", survey_source(where))
    run = ctypes.PYFUNCTYPE(None, ctypes.c_size_t)(machine.address)
    run.machine = machine  # type: ignore[attr-defined]
    return run
