"""The options of offload: what lies on the host, and the size of transfer buffers."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal, TypeAlias, get_args

from rulec.errors import HyperError
from rulec.language.source import did_you_mean

#: What lies on the host: states and the step, or states alone.
OffloadKind: TypeAlias = Literal["step", "states"]

#: The bytes of a transfer buffer where none are asked for.
DEFAULT_BUFFER = 64 << 20


@dataclass(frozen=True)
class OffloadOptions:
    """The options of offload. `buffer` is the size of a transfer buffer in bytes.

    Where `pinned`, host memory of transfers is pinned. `backward` is the order in which gradients come: that of the
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
