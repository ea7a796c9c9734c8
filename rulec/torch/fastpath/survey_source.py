"""The text of the function for surveys of steps, and the words of its tables.

`survey` fills the tables. The cpu backend's compiler takes the text; it asks the functions of `torch_abi`.
"""

from __future__ import annotations

from dataclasses import asdict

from rulec.torch.fastpath.torch_abi import EQUAL, NAMES, OBJECT_CLASS, TensorLayout

#: The words of a job: what is asked for, tables with their lengths, the functions, the words of DTensors, a handle of
#: no tensor, memory for answers, and whether everything is as it was.
JOB = (
    "asked", "lists", "lists_at", "dicts", "dicts_at", "tensors", "tensors_at", "dtensors", "dtensors_at", "records",
    "records_at", "counts", "counts_at", "functions", "placed", "nothing", "answers", "same",
)  # fmt: skip

#: The words of a list or a dict: the object, its length, and its entries (keys and values in turn).
CONTENTS = ("object", "length", "entries")

#: The first words of a tensor that must be as it was; the words of its storage follow, with its number of bytes last.
#: `kind` is the address of the words of its implementation, of which tensors alike have the same.
TENSOR = ("object", "impl", "storage", "kind")

#: The words of a DTensor that must be as it was: the object, its implementation, its local tensor and its spec, which
#: has the mesh and the placements. The local tensor has words of `TENSOR`.
DTENSOR = ("object", "impl", "local", "spec")

#: The words about all DTensors: their class, the class of local tensors, the places of a local tensor and a spec among
#: the words of an object, and the names of a spec's mesh and placements.
PLACED = ("class", "local_class", "local", "spec", "mesh", "placements")

#: The words of a record, for a parameter's gradient. `impl` is the parameter's implementation, `kind` the address of
#: what the gradient is, and `grad` a handle for it. `spec` is that of a gradient that is a DTensor, with the mesh and
#: the placements that the next ones must have; `kind`, `grad` and the address are then those of the local gradient. It
#: is 0 of other gradients. `out` and `row` take the gradient's address. What follows are only hints of memory that is
#: read: `exports.reads_of` the parameter, and the last gradient.
RECORD = ("impl", "kind", "grad", "spec", "out", "row", "place", "version", "behind", "last")

#: The words of what a gradient is. The words of its implementation, as `torch_abi` has them, follow, and then its
#: sizes and strides. Of no gradient `dim` is -1. From its first element to the last are `span` bytes, of one without
#: elements 0; such a gradient has no address.
KIND = ("dtype", "dim", "device", "index", "span")

#: The words of a bucket's step counts, for steps that repeat each other: see `Repeat`.
COUNTS = ("at", "length", "t", "table", "stride", "next")

#: The bytes of a line of a processor's cache.
_LINE = 64

#: The records ahead of the one looked at whose memory is fetched.
_AHEAD = 8


def survey_source(where: TensorLayout) -> str:
    """The text, for the cpu backend's compiler, where tensors have their words at these places."""
    tables = {
        "job": JOB, "contents": CONTENTS, "tensor": TENSOR, "dtensor": DTENSOR, "placed": PLACED, "record": RECORD,
        "kind": KIND, "count": COUNTS,
    }  # fmt: skip
    words = {f"{of}_{name}": f"word({of}, {i})" for of, names in tables.items() for i, name in enumerate(names)}
    functions = {f"f_{name}": f"word(functions, {i})" for i, name in enumerate(NAMES)}
    sizes = {f"{of}_bytes": 8 * len(names) for of, names in tables.items()}
    sizes["tensor_bytes"] += 8 * (where.data_words + 1)
    of_impl = _fetched("impl", min(where.impl_storage, where.impl_first), where.impl_first + where.impl_words)
    storage = words["tensor_storage"]
    of_data = where.storage_data, where.storage_data + where.data_words
    of_storage = _fetched(storage, min(*of_data, where.storage_size), max(*of_data, where.storage_size + 1))
    return _TEXT.format(
        fetch_impl=of_impl, fetch_storage=of_storage, object_at=8 * where.object_impl,
        **words, **functions, **sizes, **asdict(where), ahead=_AHEAD, t_at=COUNTS.index("t"), same=JOB.index("same"),
        equal=EQUAL, object_class=OBJECT_CLASS, implemented=8 * len(KIND), first=len(KIND) + where.impl_words,
        known=len(TENSOR), dim=KIND.index("dim"), last_at=RECORD.index("last"), impl_at=8 * RECORD.index("impl"),
    )  # fmt: skip


def _fetched(what: str, first: int, end: int) -> str:
    """The statements that fetch every line of the words from `first` to `end`, wherever a line begins."""
    offsets = [*range(8 * first, 8 * end - 8, _LINE), 8 * end - 8]
    return "\n    ".join(f"fetch_line({what}, {offset})" for offset in offsets)


_TEXT = '''"""A survey of tensors and gradients, by functions that torch and CPython export. Printed by rulec."""

from rulec_backends.cpu.ffi_words import code_2, code_3, code_4, invoke, invoke_2, put, tell, truth
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
    changed = word(storage, {storage_size}) ^ word(tensor, {known} + {data_words})
    for i in range({data_words}):
        changed |= word(storage, {storage_data} + i) ^ word(tensor, {known} + i)
    return changed == 0 and same_words(impl, {tensor_kind})


@compiled
def same_dtensor(dtensor, placed):
    """Whether a DTensor has its implementation, its local tensor and its spec."""
    object = {dtensor_object}
    changed = word(object, {object_impl}) ^ {dtensor_impl}
    changed |= word(object, {placed_local}) ^ {dtensor_local}
    return (changed | word(object, {placed_spec}) ^ {dtensor_spec}) == 0


@compiled
def same_part(functions, name, spec, other):
    """Whether two specs have an equal mesh, or equal placements, by the attribute's name."""
    one, two, same = invoke_2({f_attribute}, spec, name), invoke_2({f_attribute}, other, name), -1
    if one != 0 and two != 0:
        same = code_3({f_compare}, one, two, {equal})
    if one != 0:
        tell({f_drop}, one)
    if two != 0:
        tell({f_drop}, two)
    if same == -1:
        tell({f_forgive}, 0)
    return same == 1


@compiled
def object_of(tensor):
    """The object of a tensor by its handle; 0 where it has none."""
    return word(word(tensor, 0), {impl_object}) & -2  # an older torch marks in the last bit whose the object is


@compiled
def local_of(placed, object):
    """The handle of a DTensor's local tensor; 0 where the object is none, or its local tensor of another class."""
    if object == 0 or word(object, {object_class}) != {placed_class}:
        return 0
    local = word(object, {placed_local})
    return local + {object_at} if local != 0 and word(local, {object_class}) == {placed_local_class} else 0


@compiled
def holds(tensor, first, span):
    """Whether a tensor's storage has memory, and that reaches over these bytes from the address of the first element.

    The storage may be another than before, in which the tensor has another place.
    """
    storage = word(word(tensor, 0), {impl_storage})
    begin = word(storage, {storage_data})
    return begin != 0 and first + span <= begin + word(storage, {storage_size})


@compiled
def read(functions, placed, record, answers):
    """Whether the gradient is as it was; its handle is taken, and its address kept."""
    grad, kind, spec = invoke({f_grad}, {record_impl}), {record_kind}, {record_spec}
    other = spec
    if spec != 0:
        object = object_of(grad)
        grad = local_of(placed, object)
        if grad == 0:
            return False
        other = word(object, {placed_spec})
    if not alike(functions, kind, grad, answers):
        return False
    if {kind_dim} < 0:
        return True
    data = answer({f_data_ptr}, grad, answers)
    if data == -1 or ({kind_span} != 0 and not holds(grad, data, {kind_span})):
        return False
    put({record_out}, 0, data)
    put({record_row}, 0, data)
    if code_2({f_assign}, grad, {record_grad}) != 0:
        return False
    put(record, {last_at}, word({record_grad}, 0))
    if other == spec:
        return True
    if other == 0 or not same_part(functions, {placed_mesh}, other, spec):
        return False
    return same_part(functions, {placed_placements}, other, spec)


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
    for i in range({job_dtensors}):
        if not same_dtensor({job_dtensors_at} + {dtensor_bytes} * i, {job_placed}):
            return False
    for i in range({job_records}):
        record = {job_records_at} + {record_bytes} * i
        if i + {ahead} < {job_records}:
            fetch(record + {ahead} * {record_bytes})
        if not read(functions, {job_placed}, record, answers):
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
