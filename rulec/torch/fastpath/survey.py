"""The survey of a step in machine code: one check that all parameters, states and gradients are as they were.

Asking torch from Python for each gradient, its dtype, shape and address, and for the address of each parameter and
state, costs more than a small kernel. A survey asks the functions that torch exports, and compares the words of tensors
in memory (both in `torch_abi`), in one call. It can only confirm that nothing changed. Otherwise the step asks tensor
by tensor. The text of the function that surveys a step is in this module, too.
"""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict
from itertools import chain
from operator import is_
from typing import Any

import numpy as np
from torch import Tensor
from torch.nn import Parameter

from rulec.backend import registry
from rulec.kernel.multi_tensor.address import Located, array_address
from rulec.torch.fastpath.torch_abi import (
    MOST_DIMS,
    NAMES,
    Handles,
    Numbers,
    TensorLayout,
    exports,
    impl_words_of,
    is_locked,
    layout,
    number,
    reads_of,
    words_of,
)

#: The words of a job: what is asked for, tables with their lengths, the functions, a handle of no tensor, memory for
#: answers, and whether everything is as it was.
JOB = (
    "asked", "lists", "lists_at", "dicts", "dicts_at", "tensors", "tensors_at", "records", "records_at", "counts",
    "counts_at", "functions", "nothing", "answers", "same",
)  # fmt: skip

#: The words of a list or a dict: the object, its length, and its entries (keys and values in turn).
CONTENTS = ("object", "length", "entries")

#: The first words of a tensor that must be as it was; the words of its storage follow. `kind` is the address of the
#: words of its implementation, of which tensors alike have the same.
TENSOR = ("object", "impl", "storage", "kind")

#: The words of a record, for a parameter's gradient. `impl` is the parameter's implementation, `kind` the address of
#: what the gradient is, and `grad` a handle for it. `out` and `row` take the gradient's address. What follows are only
#: hints of memory that is read: `exports.reads_of` the parameter, and the last gradient.
RECORD = ("impl", "kind", "grad", "out", "row", "place", "version", "behind", "last")

#: The words of what a gradient is. The words of its implementation, as `torch_abi` has them, follow, and then its
#: sizes and strides. Of no gradient `dim` is -1.
KIND = ("dtype", "dim", "device", "index")

#: The words of a bucket's step counts, for steps that repeat each other: see `Repeat`.
COUNTS = ("at", "length", "t", "table", "stride", "next")

#: The bytes of a line of a processor's cache.
_LINE = 64

#: The records ahead of the one looked at whose memory is fetched.
_AHEAD = 8


def survey_source(where: TensorLayout) -> str:
    """The text, for the cpu backend's compiler, where tensors have their words at these places."""
    tables = {"job": JOB, "contents": CONTENTS, "tensor": TENSOR, "record": RECORD, "kind": KIND, "count": COUNTS}
    words = {f"{of}_{name}": f"word({of}, {i})" for of, names in tables.items() for i, name in enumerate(names)}
    functions = {f"f_{name}": f"word(functions, {i})" for i, name in enumerate(NAMES)}
    sizes = {f"{of}_bytes": 8 * len(names) for of, names in tables.items()}
    sizes["tensor_bytes"] += 8 * where.data_words
    of_impl = _fetched("impl", min(where.impl_storage, where.impl_first), where.impl_first + where.impl_words)
    storage = words["tensor_storage"]
    of_storage = _fetched(storage, where.storage_data, where.storage_data + where.data_words)
    return _TEXT.format(
        fetch_impl=of_impl, fetch_storage=of_storage, object_at=8 * where.object_impl,
        **words, **functions, **sizes, **asdict(where), ahead=_AHEAD, t_at=COUNTS.index("t"), same=JOB.index("same"),
        implemented=8 * len(KIND), first=len(KIND) + where.impl_words, known=len(TENSOR), dim=KIND.index("dim"),
        last_at=RECORD.index("last"), impl_at=8 * RECORD.index("impl"),
    )  # fmt: skip


def _fetched(what: str, first: int, end: int) -> str:
    """The statements that fetch every line of the words from `first` to `end`, wherever a line begins."""
    offsets = [*range(8 * first, 8 * end - 8, _LINE), 8 * end - 8]
    return "\n    ".join(f"fetch_line({what}, {offset})" for offset in offsets)


_TEXT = '''"""A survey of tensors and gradients, by functions that torch and CPython export. Printed by rulec."""

from rulec_backends.cpu.ffi_words import code_2, code_4, invoke, invoke_2, put, tell, truth, truth_3
from rulec_backends.cpu.words import (
    compiled, fetch_add, fetch_line, float32, load_float32, number, store_bits_float64, store_float32, store_float64,
    word,
)


@compiled
def same_list(functions, contents):
    """Whether a list has the same entries."""
    if invoke({f_list_size}, {contents_object}) != {contents_length}:
        return False
    for i in range({contents_length}):
        if invoke_2({f_list_item}, {contents_object}, i) != word({contents_entries}, i):
            return False
    return True


@compiled
def same_dict(functions, contents, answers):
    """Whether a dict has the same keys and values, in the same order."""
    if invoke({f_dict_size}, {contents_object}) != {contents_length}:
        return False
    put(answers, 0, 0)
    for i in range({contents_length}):
        if code_4({f_dict_next}, {contents_object}, answers, answers + 8, answers + 16) == 0:
            return False
        pair = {contents_entries} + 16 * i
        if word(answers, 1) != word(pair, 0) or word(answers, 2) != word(pair, 1):
            return False
    return True


@compiled
def answer(function, handle, answers):
    """What a function has to say of a tensor; -1 where it refuses."""
    put(answers, 0, 0)
    return word(answers, 0) if code_2(function, handle, answers) == 0 else -1


@compiled
def same_words(impl, kind):
    """Whether an implementation has the words at `kind`: then torch need not be asked."""
    changed = 0
    for i in range({impl_words}):
        changed |= word(impl, {impl_first} + i) ^ word(kind, i)
    return changed == 0


@compiled
def alike(functions, kind, tensor, answers):
    """Whether a tensor is what another was."""
    if {kind_dim} >= 0 and same_words(word(tensor, 0), kind + {implemented}):
        return True
    if answer({f_dtype}, tensor, answers) != {kind_dtype}:
        return False
    if {kind_dim} < 0:
        return True
    if answer({f_device}, tensor, answers) != {kind_device} or answer({f_index}, tensor, answers) != {kind_index}:
        return False
    if answer({f_dim}, tensor, answers) != {kind_dim}:
        return False
    if truth({f_is_neg}, tensor):
        return False
    sizes = answer({f_sizes}, tensor, answers)
    if sizes == -1:
        return False
    for i in range({kind_dim}):
        if word(sizes, i) != word(kind, {first} + i):
            return False
    strides = answer({f_strides}, tensor, answers)
    if strides == -1:
        return False
    for i in range({kind_dim}):
        if word(strides, i) != word(kind, {first} + {kind_dim} + i):
            return False
    return True


@compiled
def unmoved(tensor):
    """Whether a tensor is the same, in the same memory: all its words are as they were."""
    impl, storage = {tensor_impl}, {tensor_storage}
    if word({tensor_object}, {object_impl}) != impl or word(impl, {impl_storage}) != storage:
        return False
    changed = 0
    for i in range({data_words}):
        changed |= word(storage, {storage_data} + i) ^ word(tensor, {known} + i)
    return changed == 0 and same_words(impl, {tensor_kind})


@compiled
def read(functions, record, answers):
    """Whether the gradient is as it was; its handle is taken, and its address kept."""
    grad, kind = invoke({f_grad}, {record_impl}), {record_kind}
    if not alike(functions, kind, grad, answers):
        return False
    if {kind_dim} < 0:
        return True
    data = answer({f_data_ptr}, grad, answers)
    if data == 0 or data == -1:
        return False
    put({record_out}, 0, data)
    put({record_row}, 0, data)
    if code_2({f_assign}, grad, {record_grad}) != 0:
        return False
    put(record, {last_at}, word({record_grad}, 0))
    return True


@compiled
def fetch_impl(impl):
    """Has the memory fetched of an implementation's words."""
    {fetch_impl}


@compiled
def fetch_tensor(tensor):
    """Has the memory fetched that a look at a tensor reads."""
    fetch_line({tensor_object}, {object_at})
    fetch_impl({tensor_impl})
    {fetch_storage}


@compiled
def fetch_held(record):
    """Has the memory fetched in which a release counts references."""
    fetch_line({record_grad}, 0)
    fetch_line({record_last}, 0)


@compiled
def fetch_version(record):
    """Has the memory fetched in which a write is noted."""
    fetch_line({record_impl}, 0)
    fetch_line({record_version}, 0)


@compiled
def fetch(record):
    """Has the memory fetched that a look at a gradient reads first."""
    fetch_held(record)
    fetch_line({record_place}, 0)
    fetch_line({record_behind}, 0)
    fetch_impl({record_last})


@compiled
def looked(job):
    """Whether everything is as it was; the addresses of gradients are kept."""
    functions, answers = {job_functions}, {job_answers}
    for i in range({job_lists}):
        if not same_list(functions, {job_lists_at} + {contents_bytes} * i):
            return False
    for i in range({job_dicts}):
        if not same_dict(functions, {job_dicts_at} + {contents_bytes} * i, answers):
            return False
    for i in range({job_tensors}):
        tensor = {job_tensors_at} + {tensor_bytes} * i
        if i + {ahead} < {job_tensors}:
            fetch_tensor(tensor + {ahead} * {tensor_bytes})
        if not unmoved(tensor):
            return False
    for i in range({job_records}):
        record = {job_records_at} + {record_bytes} * i
        if i + {ahead} < {job_records}:
            fetch(record + {ahead} * {record_bytes})
        if not read(functions, record, answers):
            return False
    for b in range({job_counts}):
        count = {job_counts_at} + {count_bytes} * b
        for i in range({count_length}):
            if load_float32({count_at}, i, 0) != float32(number(count, {t_at})):
                return False
    return True


@compiled
def released(job):
    """Has the handles stand for no tensors."""
    functions = {job_functions}
    for i in range({job_records}):
        record = {job_records_at} + {record_bytes} * i
        if i + {ahead} < {job_records}:
            fetch_held(record + {ahead} * {record_bytes})
        code_2({f_assign}, {job_nothing}, {record_grad})


@compiled
def kernel(job):
    """Looks, where 1 or 2 is asked for; after that, for a 2, notes the writes of a step. 3 ends what handles hold."""
    if {job_asked} == 3 or not looked(job):
        released(job)
        return
    put(job, {same}, 1)
    if {job_asked} == 1:
        return
    functions = {job_functions}
    for i in range({job_records}):
        record = {job_records_at} + {record_bytes} * i
        if i + {ahead} < {job_records}:
            fetch_version(record + {ahead} * {record_bytes})
        if word({record_kind}, {dim}) >= 0:
            tell({f_bump_version}, record + {impl_at})  # a word with an implementation is a tensor of torch's
    for b in range({job_counts}):
        count = {job_counts_at} + {count_bytes} * b
        t = number(count, {t_at}) + 1.0
        for i in range({count_length}):
            store_float32({count_at}, i, 0, float32(t))
        store_float64(count, {t_at}, 1, t)
        fetch_add({count_table}, {count_stride})
        store_bits_float64({count_next}, 0, 1, 0)
'''


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
        self.grads = Located(np.zeros(len(written), np.int64), lambda i: written[i].grad)
        self._handles = Handles(functions, 1 + len(params))
        self._kinds: dict[Any, Numbers] = {}
        self._numbers: dict[Any, list[int]] = {}
        self._ignored = np.zeros(1, np.int64)
        first = array_address(self.grads.addresses)
        outs = {place: first + 8 * i for i, place in enumerate(chosen)}
        self.records = np.array([self._record(i, p, outs.get(i)) for i, p in enumerate(params)], np.int64)
        self._job, self._release = job_of(self, LOOK, Contents(self.lists)), job_of(self, RELEASE, Contents())

    def look(self, lists: Sequence[list[Any]]) -> bool:
        """Whether the parameters in the groups' lists, and their gradients, are as they were but for new addresses."""
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
        kind = self._kind(None if out is None else param.grad)
        out = nowhere if out is None else out
        return param._cdata, kind, handle, out, nowhere, *reads_of(self.functions, param), 0

    def _kind(self, tensor: Tensor | None) -> int:
        """The address of what a tensor is, from `survey_source.KIND` on. Tensors of one kind share it."""
        like = tensor if tensor is None else (tensor.dtype, tensor.device)
        if like not in self._numbers:
            self._numbers[like] = self._numbers_of(tensor)
        dtype, *device = self._numbers[like]
        rest = () if tensor is None else (*_implementation(tensor), *tensor.shape, *tensor.stride())
        words = (dtype, -1 if tensor is None else tensor.dim(), *device, *rest)
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
    """Plain tensors as they are at the time of this object, which keeps them; of at most `MOST_DIMS` dimensions."""

    def __init__(self, tensors: Iterable[Tensor] = ()) -> None:
        self._kept, where = [*tensors], layout()
        assert where is not None
        self._kinds: dict[tuple[int, ...], Numbers] = {}
        rows = [self._row(words_of(where, tensor), where.impl_words) for tensor in self._kept]
        self.table = np.array(rows, np.int64).reshape(-1, len(TENSOR) + where.data_words)

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
        self._tables = [*contents.tables(), tensors.table, records, counts]
        pairs = [number for table in self._tables for number in (len(table), array_address(table))]
        self.words = (ctypes.c_int64 * len(JOB))(
            asked, *pairs, array_address(functions), nothing, array_address(self._kept[3]), 0
        )
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
    """Whether machine code can look at these plain tensors."""
    if not is_locked() or layout() is None or any(t.dim() > MOST_DIMS for t in tensors):
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
    if not {Tensor, Parameter}.issuperset(map(type, params)) or not all(p.is_cpu or p.is_cuda for p in params):
        return None
    grads = [p.grad for p in written]
    if any(g is None or not g.numel() for g in grads):
        return None
    functions = exports() if _can_look([*params, *states]) else None
    if functions is None:
        return None
    survey = Survey(params, chosen, written, lists, states, functions)
    right = survey.look(lists) and survey.grads.addresses.tolist() == [g.data_ptr() for g in grads if g is not None]
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
