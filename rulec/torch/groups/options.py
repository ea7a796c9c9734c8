"""The options of a whole optimizer, rather than of one of its groups."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from torch import Tensor

from rulec.backend import registry
from rulec.backend.protocol import Backend
from rulec.compiler.layout import PLAIN_STORAGE
from rulec.errors import HyperError, TensorError
from rulec.formats import NAMES
from rulec.language.hyper import checked_seed
from rulec.language.source import did_you_mean
from rulec.runtime.storage.options import Storage
from rulec.torch.distributed.consensus import Agreement
from rulec.torch.distributed.cross_process import Across
from rulec.torch.groups.interface import UNSAVED, Interface, StateDtype
from rulec.torch.tensors.fake import ShapesBackend, is_fake

#: torch's names of formats -> ours.
_TORCH_NAMES = {"float8_e4m3fn": "float8_e4m3"}


@dataclass(frozen=True)
class Options:
    """What belongs to the whole optimizer: dtypes and formats of states by name (`""`: all), and the backend asked for.

    `capturable` asks for step counts and scalars on the device, where groups do not say it; `across` are the processes
    over which values of groups and the model are taken, and `meeting` is for processes with parts of the same tensors,
    None where none are reduced. `order` has the places of parameters as the first of them orders them, or is empty.
    `weights` is the kind of parameters of 16 bits in memory, of `rulec.compiler.weights`, and `seed` that
    of its random numbers where no rule draws any.
    """

    state_dtypes: Mapping[str, str] = field(default_factory=dict)
    backend: str | Backend | None = None
    capturable: bool = False
    across: Across | None = None
    meeting: Agreement | None = None
    order: tuple[int, ...] = ()
    weights: str = ""
    seed: int = 0

    @property
    def processes(self) -> list[Across | Agreement]:
        """The sets of processes that a step is taken with."""
        return [processes for processes in (self.across, self.meeting) if processes is not None]


def fitting(options: Options, params: Sequence[Tensor]) -> Options:
    """The options, with a backend that computes nothing where parameters are fake; TensorError where only some are."""
    fake = [*map(is_fake, params)]
    if not any(fake):
        return options
    if not all(fake):
        raise TensorError("some parameters are fake tensors and others are not: give an optimizer those of one kind")
    return replace(options, backend=ShapesBackend())


def plain_options(groups: Sequence[dict[str, Any]]) -> None:
    """Puts names in the place of objects of this process in groups.

    ZeroRedundancyOptimizer copies all keywords into its groups, and saves them. The options count, not the groups.
    """
    for group in groups:
        for key in UNSAVED:
            if group.get(key) is not None and not isinstance(group[key], str):
                group[key] = getattr(group[key], "name", None) if key == "backend" else None


def options_of(interface: Interface, values: dict[str, Any]) -> Options:
    """Takes the options out of an optimizer's keywords.

    TensorError for an unknown state or dtype; HyperError for a seed without random numbers.
    """
    backend, weights = values.pop("backend"), values.pop("weights") or ""
    state_dtypes = _state_dtypes(interface, values.pop("state_dtype"))
    if backend is not None:
        registry.usable(backend)
    capturable, across = bool(interface.asks_once and values.pop("capturable")), values.pop("reduce_over", None)
    seed = 0 if interface.draws else checked_seed(values.pop("seed"))
    if seed and not Storage(state_dtypes, weights).random:
        raise HyperError(f"{interface.name} draws no random numbers for seed={seed}: leave it out")
    return Options(
        state_dtypes, backend, capturable, None if across is None else Across(across), weights=weights, seed=seed
    )


def _state_dtypes(interface: Interface, state_dtype: StateDtype) -> dict[str, str]:
    requested = state_dtype if isinstance(state_dtype, Mapping) else {} if state_dtype is None else {"": state_dtype}
    known = interface.state_names()
    dtypes = {}
    for state, dtype in requested.items():
        if state and state not in known:
            raise TensorError(f"{interface.name} has no state {state!r}{did_you_mean(state, known)}")
        name = dtype if isinstance(dtype, str) else str(dtype).removeprefix("torch.")
        name = _TORCH_NAMES.get(name, name)
        if name not in PLAIN_STORAGE and name.partition("/")[0] not in NAMES:
            raise TensorError(f"state dtype {dtype!r} is none of {', '.join([*PLAIN_STORAGE, *NAMES])}")
        dtypes[state] = name
    return dtypes
