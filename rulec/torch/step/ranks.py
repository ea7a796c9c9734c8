"""The ranks that take part in an optimizer's steps: they agree on each, and complete its statistics."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from torch import Tensor

from rulec.language.rule import Rule
from rulec.runtime.statistics import checked_words, waits_for_shards
from rulec.torch.distributed.mesh import consensus_of
from rulec.torch.distributed.statistics_reducer import reducer_of
from rulec.torch.groups.capture import is_asked
from rulec.torch.groups.options import Options
from rulec.torch.tensors.dtensor import sees_more


def with_ranks(
    options: Options, routed: Sequence[tuple[Tensor, Rule]], groups: Sequence[Mapping[str, Any]], title: str
) -> Options:
    """The options with the ranks that parameters with these rules need.

    HyperError where ranks of `reduce_over` have the same tensors, or a process group serves no device.
    """
    words = () if options.schedule is None else checked_words(title, options.watch)
    params = [param for param, _ in routed]
    resident = is_asked(groups, options) and any(param.device.type != "cpu" for param in params)

    def meets(rule: Rule) -> bool:
        if sees_more(rule):
            return True
        return bool(words) and waits_for_shards(rule, words, options.across is not None, resident)

    coordinator = consensus_of(routed, options.coordinator, options.across, meets)
    reducer = reducer_of(params, options.reducer) if words else None
    return replace(options, coordinator=coordinator, reducer=reducer)
