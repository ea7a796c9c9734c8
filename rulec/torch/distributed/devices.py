"""The devices that messages of a process group travel by.

A process group has a backend for each type of its devices, as in `cpu:gloo,cuda:nccl`; vendors register more of them.
Values on a device travel by that device where the group serves it. Words of the host, such as counts and digests,
travel by the CPU where the group serves the CPU. All ranks choose alike: a choice depends on the group and the kind of
message, and not on the data of one rank, such as placeholder data after an error.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from rulec.errors import HyperError

#: Backends that copy tensors of a device through the host, and have not every collective for them.
_THROUGH_HOST = frozenset({"gloo", "mpi"})


def backends_of(group: Any) -> Mapping[str, str]:
    """Type of device -> the name of its backend, of a process group."""
    pairs = [pair.partition(":") for pair in torch.distributed.get_backend_config(group).split(",")]
    return {kind: backend for kind, _, backend in pairs if backend}


def device_of(group: Any, label: str, wanted: str = "cpu") -> torch.device:
    """The device for messages of values on devices of a type; HyperError where the group and this process share none.

    `label` is the group's name in the message.
    """
    backends = backends_of(group)
    directly = wanted in backends and backends[wanted] not in _THROUGH_HOST
    for kind in dict.fromkeys(((wanted,) if directly else ()) + ("cpu", wanted, *sorted(backends))):
        if kind in backends and _is_here(kind):
            return _current(group, kind)
    served = " and ".join(sorted(backends)) or "no device"
    raise HyperError(
        f"the process group of {label} serves {served}, and this process has tensors on {wanted} and no such device: "
        f"give init_process_group() or new_group() a backend for {wanted}, as backend='cpu:gloo,cuda:nccl'"
    )


def _is_here(kind: str) -> bool:
    """Whether this process has devices of a type."""
    available = getattr(getattr(torch, kind, None), "is_available", None)
    return kind == "cpu" or bool(available is not None and available())


def _current(group: Any, kind: str) -> torch.device:
    """The device of a type in use by this process; the device of the group, where a group is bound to one."""
    if kind == "cpu":
        return torch.device("cpu")
    bound = getattr(group, "bound_device_id", None)
    if bound is not None and bound.type == kind:
        return bound  # type: ignore[no-any-return]
    return torch.device(kind, getattr(torch, kind).current_device())
