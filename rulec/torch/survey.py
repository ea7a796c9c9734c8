"""One look at all parameters and gradients of a step, in machine code: whether they are as they were.

To ask torch for each gradient, its dtype, shape and address, and each parameter's address, costs more than a small
kernel. A survey compares words of memory instead, at the places of `anatomy`. It only says "as before": of anything
else the step is told nothing, and asks tensor by tensor.
"""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Sequence
from operator import is_
from typing import Any

import numpy as np
from torch import Tensor
from torch.nn import Parameter

from rulec.backend import registry
from rulec.kernel.bucket.address import Located, array_address
from rulec.torch.anatomy import DIMENSIONS, Anatomy, anatomy
from rulec.torch.survey_source import JOB, RECORD, survey_source

Numbers = np.ndarray[Any, np.dtype[Any]]

#: Below this many tensors there is nothing to win.
FEW = 16

#: What a job asks for: a look; the note that parameters are written; both, for a step that repeats the last one.
LOOK, NOTE, REPEAT = 1, 2, 3


_ALL = 2**64 - 1


class Survey:
    """The parameters of a step in the lists of their groups, with their gradients, as they are now.

    `written` are the parameters with gradients, at the places `chosen` among all. After a `look` that finds everything
    as it was, `grads` has the addresses of now, and `fresh` is True until a step takes them.
    """

    def __init__(
        self, params: Sequence[Tensor], chosen: Sequence[int], written: Sequence[Tensor], lists: Sequence[list[Any]],
        places: Anatomy,
    ) -> None:  # fmt: skip
        self.fresh, self.places, self.lists = False, places, [*lists]
        self._chosen = [*chosen]
        self._owners: Sequence[Any] = ()
        self.grads = Located(np.zeros(len(written), np.int64), lambda i: written[i].grad)
        self._looks: dict[tuple[int, ...], Numbers] = {}
        self._ignored = np.zeros(1, np.int64)
        self.spans = Spans()
        for each in lists:
            self.spans.add_list(each, places)
        starts = [words_at(id(each), places.items + 1)[places.items] for each in lists]
        entries = [start + 8 * i for each, start in zip(lists, starts, strict=True) for i in range(len(each))]
        first = array_address(self.grads.addresses)
        outs = {place: first + 8 * i for i, place in enumerate(chosen)}
        known = enumerate(zip(params, entries, strict=True))
        self.records = np.array([self._record(p, entry, outs.get(i)) for i, (p, entry) in known], np.uint64)
        at, count = places.version, 8 * places.count
        self._versions = np.array([words_at(p._cdata, at + 1)[at] + count for p in written], np.int64)
        self._job, self._note = Job(self, LOOK, self.spans), Job(self, NOTE, Spans())

    def look(self, lists: Sequence[list[Any]]) -> bool:
        """Whether the parameters in the groups' lists, and their gradients, are as they were but for new addresses."""
        alike = len(lists) == len(self.lists) and all(map(is_, lists, self.lists))
        self.fresh = alike and self._job.done()
        return self.fresh

    def increment(self, _: Sequence[Tensor]) -> None:
        """Tells autograd that the parameters are written."""
        self._note.done()

    def point(self, rows: Sequence[int], owners: Sequence[Any]) -> None:
        """Has looks write the address of each gradient in a second place, too: in memory of these owners."""
        self._owners = owners
        self.records[self._chosen, RECORD.index("row")] = rows

    def tables(self) -> list[Numbers]:
        """The tables of all jobs, in their order there."""
        return [self.records, self._versions]

    def _record(self, param: Tensor, entry: int, out: int | None) -> tuple[int, ...]:
        places, words = self.places, words_at(param._cdata, self.places.end)
        storage, meta = words[places.storage], words[places.meta]
        grad, offset = 0, words_at(meta, places.grad + 1)[places.grad] if meta else 0
        if out is not None:
            assert param.grad is not None
            grad, offset = self._look(param.grad), int(param.grad.storage_offset()) * param.grad.element_size()
        memory = words_at(storage, 1 + max(places.data, *places.shares, 0))
        nowhere = array_address(self._ignored)
        return (
            entry, id(param), id(type(param)), param._cdata, self._look(param), storage, meta, words[places.version],
            memory[places.data], grad, offset, nowhere if out is None else out, nowhere, 0, 0,
            *(memory[i] for i in places.shares),
        )  # fmt: skip

    def _look(self, tensor: Tensor) -> int:
        """The address of a tensor's kind: its dtype, shape and so on. Tensors of one kind share it."""
        places, words, rank = self.places, words_at(tensor._cdata, self.places.end), tensor.dim()
        shape = [words[start : start + rank] + [0] * (DIMENSIONS - rank) for start in (places.extents, places.strides)]
        counted = [_ALL] * rank + [0] * (DIMENSIONS - rank)
        kept = (*(words[i] for i, _ in places.steady), *shape[0], *shape[1], *counted)
        if kept not in self._looks:
            self._looks[kept] = np.array(kept, np.uint64)
        return array_address(self._looks[kept])


class Spans:
    """Pieces of memory, with their words at the time of `add`; a job compares them in this order."""

    def __init__(self, others: Sequence[tuple[int, Numbers]] = ()) -> None:
        self.all = [*others]

    def add(self, address: int, count: int) -> None:
        """Adds some words at an address."""
        if count:
            self.all.append((address, np.array(words_at(address, count), np.uint64)))

    def add_list(self, each: list[Any], places: Anatomy) -> None:
        """Adds the entries of a list."""
        for place in (places.size, places.items):
            self.add(id(each) + 8 * place, 1)
        self.add(words_at(id(each), places.items + 1)[places.items], len(each))

    def add_dict(self, each: dict[str, Any], places: Anatomy) -> None:
        """Adds the keys and values of a dict."""
        self.add(id(each) + 8 * places.keys, 1)
        self.add(words_at(id(each), places.keys + 1)[places.keys], Anatomy.dict_bytes(each) // 8)

    def table(self) -> Numbers:
        """The table in a job."""
        rows = [(at, len(like), array_address(like)) for at, like in self.all]
        return np.array(rows, np.uint64).reshape(-1, 3)


class Job:
    """One call of the machine code of a survey; `counts` has rows of step counts, for a repeat."""

    def __init__(self, survey: Survey, asked: int, spans: Spans, counts: Numbers | None = None) -> None:
        self._spans, self.counts = spans, np.zeros((0, 1)) if counts is None else counts
        self._tables = [spans.table(), *survey.tables(), self.counts]
        pairs = [number for table in self._tables for number in (len(table), array_address(table))]
        self._words = (ctypes.c_int64 * len(JOB))(asked, *pairs, 0)
        self._at, self._run, self._answer = ctypes.addressof(self._words), _machine(survey.places), len(JOB) - 1

    def done(self) -> bool:
        """Does it. False, and nothing written, where something is not as it was."""
        words, answer = self._words, self._answer
        words[answer] = 0
        self._run(self._at)
        return words[answer] != 0


def words_at(address: int, count: int) -> list[int]:
    """Words of memory."""
    return [*(ctypes.c_uint64 * count).from_address(address)]


def survey_of(
    params: Sequence[Tensor], chosen: Sequence[int], written: Sequence[Tensor], lists: Sequence[list[Any]]
) -> Survey | None:  # fmt: skip
    """The survey of a step's parameters, whose gradients kernels can read; None where there is none.

    There is none of other classes than torch's own, none of tensors on devices, and none where a look may not tell all.
    """
    if not {Tensor, Parameter}.issuperset(map(type, params)) or not all(p.is_cpu for p in params):
        return None
    grads = [p.grad for p in written]
    if any(g is None or not g.numel() for g in grads) or max(t.dim() for t in (*params, *grads)) > DIMENSIONS:  # type: ignore[union-attr]
        return None
    places = anatomy() if registry.get("cpu").unavailable_reason() is None else None
    if places is None:
        return None
    survey = Survey(params, chosen, written, lists, places)
    right = survey.look(lists) and survey.grads.addresses.tolist() == [g.data_ptr() for g in grads if g is not None]
    survey.fresh = False
    return survey if right else None


@functools.cache
def _machine(places: Anatomy) -> Any:
    """The compiled function, which keeps the global lock; it takes the address of a job."""
    cpu: Any = registry.get("cpu")
    machine = cpu.machine("survey", survey_source(places))
    run = ctypes.PYFUNCTYPE(None, ctypes.c_size_t)(machine.address)
    run.machine = machine  # type: ignore[attr-defined]
    return run
