"""The work of the kernel that joins slots to results."""

from __future__ import annotations

import numpy as np

from rulec.kernel.multi_tensor.cut import Whole, counted, parts
from rulec.kernel.multi_tensor.slots import Places

from .plan import FINISHED

#: The slots of a result that one lane joins, one after the other. With more slots, all lanes join some.
MOST_ROUNDS = 64


def jobs(places: Places, fired: Whole) -> Whole:
    """Lines of `jobs` (see the printed `finish`) for these tensors."""
    return np.concatenate([_jobs(places, number, fired) for number in range(len(places.regions))])


def _jobs(places: Places, number: int, fired: Whole) -> Whole:
    region, to = places.regions[number], places.targets(number, fired)
    sizes, counts, slots = region.sizes[fired], region.counts[fired], places.first[number][fired]
    one = (sizes == 1) | (counts > MOST_ROUNDS)
    width = np.where(one, 1, FINISHED)
    each, part = counted(parts(sizes, width))
    done, single, size, count = part * width[each], one[each], sizes[each], counts[each]
    columns = [
        np.full(len(each), region.code), single, slots[each] + done, to[each] + done,
        np.where(single, parts(count, FINISHED), count), np.where(single, FINISHED * size, size),
        np.where(single, size, 1), np.where(single, count, np.minimum(size - done, FINISHED)),
    ]  # fmt: skip
    return np.stack([np.asarray(c, np.int64) for c in columns], axis=1)
