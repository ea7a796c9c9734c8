"""The options of a whole optimizer, from its keywords: dtypes of states, backend, ranks, statistics, and offload.

`Options` are for all groups of an optimizer, a group's rule is for its tensors. `OffloadOptions` say what lies on the
host, and how it is transferred.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal, TypeAlias, get_args

from torch import Tensor

from rulec.backend import registry
from rulec.backend.protocol import Backend
from rulec.compiler.layout import PLAIN_STORAGE
from rulec.compiler.weights import DTYPES
from rulec.errors import HyperError, TensorError
from rulec.formats import NAMES
from rulec.language.hyper import checked_seed
from rulec.language.inputs import per_tensor
from rulec.language.source import did_you_mean
from rulec.language.statistics import Watch
from rulec.runtime.statistics import Statistics, WatchSchedule
from rulec.runtime.storage.options import Storage
from rulec.torch.distributed.consensus import Consensus
from rulec.torch.distributed.cross_process import Across
from rulec.torch.distributed.statistics_reducer import StatisticsReducer
from rulec.torch.groups.interface import ASKING, Interface, StateDtype
from rulec.torch.tensors.fake import ShapesBackend, is_fake

#: Keywords of every class whose values belong to this process and cannot be saved.
_UNSAVED = ("backend", "reduce_over")

#: torch's names of formats -> ours.
_TORCH_NAMES = {"float8_e4m3fn": "float8_e4m3"}

#: What lies on the host: states and the step, or states alone.
OffloadKind: TypeAlias = Literal["step", "states"]

#: The bytes of a transfer buffer where none are asked for.
DEFAULT_BUFFER = 64 << 20


@dataclass(frozen=True)
class OffloadOptions:
    """The options of offload. `buffer` is the size of a transfer buffer in bytes.

    If `pinned`, host memory of transfers is pinned. `backward` is the order in which gradients come: that of the
    parameters, or from the last to the first.
    """

    kind: OffloadKind
    buffer: int = DEFAULT_BUFFER
    pinned: bool = True
    backward: bool = False


def offload_options(title: str, kind: Any, buffer: Any, pinned: Any) -> OffloadOptions | None:
    """The options from the keywords of an optimizer; None where nothing is offloaded. HyperError for wrong ones."""
    if kind is None:
        for keyword, value, default in (("offload_buffer", buffer, DEFAULT_BUFFER), ("offload_pinned", pinned, True)):
            if value != default:
                raise HyperError(
                    f"{keyword}={value!r} of {title} is for an offload: give offload='states' or 'step', or leave it "
                    f"out"
                )
        return None
    kinds = get_args(OffloadKind)
    if kind not in kinds:
        raise HyperError(f"offload={kind!r} of {title} is none of {', '.join(kinds)}{did_you_mean(str(kind), kinds)}")
    if type(buffer) is not int or buffer < 1:
        raise HyperError(f"offload_buffer={buffer!r} of {title} must be a whole number of bytes from 1")
    return OffloadOptions(kind, buffer, bool(pinned))


@dataclass(frozen=True)
class Options:
    """The options of a whole optimizer: dtypes and formats of states by name (`""`: all), and the backend asked for.

    `capturable` asks for step counts and scalars on the device, where groups do not say it; `across` has the ranks
    over which values of groups and the model are reduced, `coordinator` is the consensus of ranks with the same
    tensors, None where none are reduced, and `reducer` completes statistics of shards. `order` has the indices of
    parameters in the first rank's order, or is empty.
    `weights` is the kind of parameters of 16 bits in memory, of `rulec.compiler.weights`, and `seed` that
    of its random numbers where no rule draws any. `watch` are statistics to measure, in the steps of `schedule`.
    `offload` says what lies on the host; None where nothing is offloaded. If `plain_weights`, an offload leaves
    weights of 16 bits as they are.
    """

    state_dtypes: Mapping[str, str] = field(default_factory=dict)
    backend: str | Backend | None = None
    capturable: bool = False
    across: Across | None = None
    coordinator: Consensus | None = None
    reducer: StatisticsReducer | None = None
    order: tuple[int, ...] = ()
    weights: str = ""
    seed: int = 0
    watch: Watch | None = None
    schedule: WatchSchedule | None = None
    offload: OffloadOptions | None = None
    plain_weights: bool = False

    @property
    def processes(self) -> list[Across | Consensus]:
        """The rank groups that take a step together."""
        return [processes for processes in (self.across, self.coordinator) if processes is not None]

    @property
    def everyone(self) -> list[Across | Consensus | StatisticsReducer]:
        """The same rank groups, and the reducer of statistics."""
        return [*self.processes, *([] if self.reducer is None else [self.reducer])]

    @property
    def due(self) -> bool:
        """Whether the next step measures statistics."""
        return self.schedule is not None and self.schedule.due


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
        for key in _UNSAVED:
            if group.get(key) is not None and not isinstance(group[key], str):
                group[key] = getattr(group[key], "name", None) if key == "backend" else None


def options_of(interface: Interface, values: dict[str, Any]) -> Options:
    """Takes the options out of an optimizer's keywords.

    TensorError for an unknown state or dtype; HyperError for a seed without random numbers.
    """
    backend, weights = values.pop("backend"), values.pop("weights")
    state_dtypes = _state_dtypes(interface, values.pop("state_dtype"))
    if backend is not None:
        registry.usable(backend)
    capturable, across = bool(interface.asks_once and values.pop("capturable")), values.pop("reduce_over", None)
    seed = 0 if interface.draws else checked_seed(values.pop("seed"))
    if seed and not Storage(state_dtypes, weights or "").random:
        raise HyperError(f"{interface.name} draws no random numbers for seed={seed}: leave it out")
    watch = values.pop("watch")
    schedule = WatchSchedule.of(interface.name, watch, values.pop("watch_every"))
    Statistics(interface.rules, watch)
    taken = (values.pop(keyword) for keyword in ("offload", "offload_buffer", "offload_pinned"))
    offload = offload_options(interface.name, *taken)
    return Options(
        state_dtypes, backend, capturable, None if across is None else Across(across), weights=weights or "", seed=seed,
        watch=watch, schedule=schedule, offload=offload, plain_weights=weights == "",
    )  # fmt: skip


def with_offload(options: Options, interface: Interface, groups: Sequence[Mapping[str, Any]]) -> Options:
    """The options for the parameters of these groups, where the step is offloaded.

    Weights of 16 bits have a master copy on the host, unless another kind of weights was asked for, or none by `""`.
    HyperError for a rule that needs more of the device than gradients, and for groups with numbers on the device.
    """
    offload = options.offload
    if offload is None:
        return options
    if options.capturable or any(group.get(keyword) for group in groups for keyword in ASKING):
        raise HyperError(
            f"offload={offload.kind!r} of {interface.name} works by the host, and a group has capturable=True or "
            f"fused=True, for steps without it: leave one out"
        )
    like = [name for name, kind in interface.inputs.items() if per_tensor(kind)]
    if like or interface.passes.count:
        what = f"takes the input {like[0]!r} for each parameter" if like else "evaluates the model again in a step"
        raise HyperError(f"{interface.name} {what}, which offload={offload.kind!r} does not move: leave offload out")
    if offload.kind == "step" and not (options.weights or options.plain_weights):
        dtypes = {str(p.dtype).removeprefix("torch.") for group in groups for p in group["params"]}
        kinds = dtypes.intersection(DTYPES["master"])
        return replace(options, weights="master" if kinds else "")
    return options


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
