"""Loads states of other libraries in eight and four bits, under torch's names: the same codes where they can be kept.

Other states are dequantized to floats. flashoptim has codes with scales of float16, and residuals of 16-bit weights.
bitsandbytes has `state1` and `state2`, and the numbers of their groups.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from rulec.checkpoint.content import meaning
from rulec.compiler.layout import scale_name
from rulec.compiler.weights import PARTS
from rulec.errors import StateMismatch
from rulec.formats import Format, decode, table
from rulec.language.library.load import load
from rulec.runtime.buckets.scalar_table import is_count
from rulec.torch.groups.entries import Entry, GroupRule
from rulec.torch.groups.interface import Interface
from rulec.torch.states.interop.layouts import BETAS, NUMBERED, WARMUPS
from rulec.torch.states.quantized import CODES
from rulec.torch.tensors.dtensor import is_dtensor, local_tensor
from rulec.torch.tensors.fake import resolved

#: The names of bitsandbytes' tensors of a parameter.
_NUMBERED = re.compile("(state|qmap|absmax|max|new_max)[12]")


def is_coded(name: str) -> bool:
    """Whether a state of this name belongs to one storage of quantized states, ours or another library's."""
    if name in (NESTED, ERROR) or _NUMBERED.fullmatch(name):
        return True
    return name.endswith((scale_name(""), CODES, FLASH_CODES, FLASH_SCALES))


def taken(
    saved: Mapping[str, Any], outside: Callable[[str], str], rule: str, wanted: Mapping[str, Format], param: Tensor,
    group: Mapping[str, Any], owner: str,
) -> tuple[dict[str, Any], dict[str, Format]]:  # fmt: skip
    """The saved states of a parameter in this group under torch's names, and by name the formats of quantized states.

    States of bitsandbytes (`state1`, `qmap1`, `absmax1`), torchao and flashoptim (`exp_avg::quantized`,
    `exp_avg::scales`) keep their codes where these are of the `wanted` format, and are floats elsewhere. `rule` is the
    rule's key, and `outside` gives torch's name of a state of it. flashoptim's `error_bits` become a master copy.
    StateMismatch, naming the `owner`, for states that are damaged.
    """
    values = flattened(saved)
    if "state1" in values:
        if rule not in NUMBERED:
            raise StateMismatch(f"{owner} has states of bitsandbytes, which has no optimizer that computes its rule")
        members = [outside(state) for number in NUMBERED[rule] for state in number]
        values = states_here(values, rule, param, members, owner)
    values = {name: _of_torchao(value) for name, value in decoded(values, param, group, owner).items()}
    kept = {name: form for name, form in wanted.items() if _is(values.get(name), form)}
    scales = {scale_name(name): values[name].scales for name in kept}
    plain = {
        name: (value.codes if name in kept else value.values) if isinstance(value, DecodedState) else value
        for name, value in values.items()
    }
    return plain | scales, kept


def _is(coded: Any, form: Format) -> bool:
    """Whether a value is a quantized state of this format, by its table and block."""
    if not isinstance(coded, DecodedState) or coded.codes.dtype is not getattr(torch, form.code_dtype):
        return False
    if form.largest != 1 or form.block != coded.block:
        return False
    numbers = resolved(coded.table.detach().float().cpu()).numpy()
    fits = tuple(coded.codes.shape) == form.codes_shape(tuple(coded.values.shape))
    return fits and np.array_equal(numbers.view(np.uint32), table(form).view(np.uint32))


def _of_torchao(value: Any) -> Any:
    """A tensor of torchao as its arrays, or the numbers of a DTensor's shard; any other value as it is."""
    part = local_tensor(value)
    if is_dtensor(value) and hasattr(part, "codes") and hasattr(part, "scale"):
        shape, stride = value.shape, value.stride()
        numbers = part.dequantize()
        return type(value).from_local(numbers, value.device_mesh, value.placements, shape=shape, stride=stride)
    if not hasattr(value, "codes") or not hasattr(value, "scale"):
        return value
    codes, scales, values = value.codes, value.scale, value.dequantize()
    block = values.numel() // max(scales.numel(), 1)
    qmap = getattr(value, "qmap", None)
    return values if qmap is None else DecodedState(codes, scales, block, qmap, values)


class DecodedState(NamedTuple):
    """A peer's quantized state: `values` are its floats, and `table` has the number of each code with the scale 1."""

    codes: Tensor
    scales: Tensor
    block: int
    table: Tensor
    values: Tensor


#: The suffixes of the names of codes and of their scales, and the name of the residual of a weight.
FLASH_CODES, FLASH_SCALES, ERROR = "::quantized", "::scales", "error_bits"

#: The key of a group for the bytes of a weight, that is of a parameter and of its residual.
_WIDTH = "master_bytewidth"

#: The bits of a mantissa, and the least exponent of a normal number.
_DTYPES = {torch.bfloat16: (7, -126), torch.float16: (10, -14)}


def decoded(values: Mapping[str, Any], param: Tensor, group: Mapping[str, Any], owner: str) -> dict[str, Any]:
    """The saved states of a parameter with those of flashoptim dequantized, and the weight as a master copy.

    `group` has the bytes of a weight. StateMismatch, naming the `owner`, for codes without a scale for each 32, and for
    residuals of weights of another shape or of an unknown size.
    """
    states = {name: value for name, value in values.items() if not name.endswith((FLASH_CODES, FLASH_SCALES))}
    for name in (name for name in values if name.endswith(FLASH_CODES)):
        state = name.removesuffix(FLASH_CODES)
        states[state] = _flash_decoded(values[name], values.get(f"{state}{FLASH_SCALES}"), f"{state} of {owner}")
    error = states.pop(ERROR, None)
    if error is not None and param.dtype in _DTYPES and not is_dtensor(param):
        width = group.get(_WIDTH)
        if error.shape != param.shape or width not in (3, 4):
            raise StateMismatch(
                f"{ERROR} of {owner} has shape {tuple(error.shape)} with {_WIDTH}={width}, where {tuple(param.shape)} "
                f"and 3 or 4 are known"
            )
        states[PARTS["master"].name] = weight(param.detach(), error, width)
    return states


def _flash_decoded(codes: Tensor, scales: Any, state: str) -> DecodedState:
    """A state of `softsign8`. Its scales are of roots where codes have no sign."""
    form = Format("softsign8", 32, signed=codes.dtype is torch.int8)
    if scales is None or scales.numel() != form.scales(codes.numel()):
        raise StateMismatch(f"{state} has {codes.numel()} codes of flashoptim without a scale for each 32")
    factors = scales.float().reshape(-1)
    factors = factors if form.signed else factors * factors
    arrays = [resolved(tensor.detach().cpu()).numpy() for tensor in (codes, factors)]
    floats = torch.from_numpy(decode(form, arrays[0], arrays[1], tuple(codes.shape))).to(codes.device)
    return DecodedState(codes, factors, form.block, torch.from_numpy(table(form).copy()), floats)


def weight(param: Tensor, error: Tensor, width: int) -> Tensor:
    """The float32 weight of this many bytes: the parameter, and a signed share of half of its last place.

    A residual of 16 bits is saved in the parameter's dtype with the same bits; one of eight bits as its numbers.
    """
    if error.is_floating_point():
        error = error.to(torch.int8) if width == 3 else resolved(error).contiguous().view(torch.int16)
    mantissa, least = _DTYPES[param.dtype]
    p, share = param.float().cpu().numpy(), resolved(error.cpu()).numpy().astype(np.float32)
    share /= np.float32(127 if width == 3 else 32767)
    exponent = np.where(p == 0, least, np.maximum(np.frexp(p)[1] - 1, least))
    return torch.from_numpy(p + np.ldexp(share, exponent - mantissa - 1)).to(param.device)


#: The key under which bitsandbytes keeps its tensors apart from those that FSDP gathers.
NESTED = "__bnb_optimizer_quant_state__"

#: Tensors that go with a norm of the update, or of the gradient, that scales a step: in LAMB and LARS, and with
#: `max_unorm` or `percentile_clipping`.
_SCALING = ("unorm_vec", "gnorm_vec")

#: Elements of a block: now, and in versions before 0.39.
_BLOCKS = (256, 2048)

#: The library's keys of a group that rulec has under other names, or not at all.
_THEIRS = ("betas", "alpha", "t_alpha", "t_beta3")


def flattened(saved: Mapping[str, Any]) -> dict[str, Any]:
    """The saved states of a parameter, with the nested ones among the others."""
    nested = saved.get(NESTED, {})
    return {**{k: v for k, v in saved.items() if k != NESTED}, **(nested if isinstance(nested, Mapping) else {})}


def is_numbered(saved: Any) -> bool:
    """Whether the saved states of a parameter are those of bitsandbytes."""
    return isinstance(saved, Mapping) and "state1" in flattened(saved)


def group_here(
    group: Mapping[str, Any], states: Sequence[Any], interface: Interface, defaults: Mapping[str, Any]
) -> Mapping[str, Any]:  # fmt: skip
    """A saved group with the keywords of a class; the same group where the `states` are of another library.

    StateMismatch where no optimizer of bitsandbytes computes the same as the class with these numbers.
    """
    numbered = [flattened(saved) for saved in states if is_numbered(saved)]
    theirs = "t_alpha" in group and "t_beta3" in group
    if not numbered and not (theirs and not any(states)):
        return group
    for saved in numbered:
        scaling = [name for name in _SCALING if saved.get(name) is not None]
        if scaling:
            raise StateMismatch(
                f"the saved states of bitsandbytes have {scaling[0]}: its LAMB, its LARS and max_unorm scale a step by "
                f"norms in another way than {interface.name}, so a run cannot go on from them here"
            )
    entry = next((e for e in interface.entries if e.rule.key in NUMBERED and _is_of_library(e)), None)
    if entry is None:
        raise StateMismatch(
            f"the saved states are of bitsandbytes, which has no optimizer that computes {interface.name} as here: "
            f"load them into the class of their optimizer, which is one of {', '.join(NUMBERED)}"
        )
    here = _keywords(group, entry, interface)
    _check_same(interface.choose({**defaults, **here}), here, interface.name)
    return here


def _is_of_library(entry: Entry) -> bool:
    return entry.rule.key in NUMBERED and meaning(entry.rule) == meaning(load(entry.rule.key))


def _keywords(group: Mapping[str, Any], entry: Entry, interface: Interface) -> dict[str, Any]:
    """The keywords of a class for the numbers of a library's group, of the rule of this entry."""
    rule, betas = entry.rule.key, group.get("betas")
    wanted = BETAS[rule] if betas is not None else ()
    if wanted and (not isinstance(betas, list | tuple) or len(betas) < sum(name is not None for name in wanted)):
        raise StateMismatch(f"betas={betas!r:.80} of a saved group of bitsandbytes has not {len(wanted)} numbers")
    hyper: dict[str, Any] = {name: beta for name, beta in zip(wanted, betas or (), strict=False) if name is not None}
    for name, key in WARMUPS.items() if rule == "ademamix" else ():
        hyper[name] = group.get(key) or 0
    here = {key: value for key, value in group.items() if key not in _THEIRS}
    if rule == "ademamix":
        here["alpha"] = group.get("alpha", 0.0)
    tuples: dict[str, dict[int, Any]] = {}
    for name, value in hyper.items():
        keyword, position = entry.place(name)
        if position is None:
            here[keyword] = value
        else:
            tuples.setdefault(keyword, {})[position] = value
    here |= {keyword: tuple(parts[i] for i in sorted(parts)) for keyword, parts in tuples.items()}
    # An option that the library ignores, or has no key for, is 0 in it.
    unheeded = {entry.place(name)[0] for name in entry.rule.hyper if name in ("dampening", "lr_decay", "initial")}
    unheeded |= {key for key in ("momentum",) if key not in here}
    known = interface.signature.parameters
    return here | {key: 0 for key in unheeded if key in known} | {key: False for key in ("maximize",) if key in known}


def _check_same(group_rule: GroupRule, group: Mapping[str, Any], name: str) -> None:
    """StateMismatch where the class computes otherwise with these keywords than bitsandbytes does."""
    rule = group_rule.entry.rule
    if rule.key not in NUMBERED:
        raise StateMismatch(
            f"the saved states are of bitsandbytes, which has no optimizer that computes {rule.name}: make the "
            f"{name} without the flags that choose it"
        )
    if rule.key == "adam" and group_rule.decay == "l2" and group.get("weight_decay"):
        raise StateMismatch(
            f"bitsandbytes' Adam decays weights by weight_decay={group['weight_decay']:g} as AdamW does, and this "
            f"{name} adds the decay to its gradient: load the state into rulec.torch.AdamW"
        )


def states_here(
    values: Mapping[str, Any], rule: str, param: Tensor, outside: Sequence[str], owner: str
) -> dict[str, Any]:
    """The step, and the numbered states under torch's names `outside`, in the order of the rule's.

    StateMismatch for states that are missing, damaged, or of another optimizer.
    """
    numbers = range(1, len(NUMBERED[rule]) + 1)
    missing = [name for name in ("step", *(f"state{number}" for number in numbers)) if name not in values]
    if missing:
        raise StateMismatch(f"the saved state of {owner} has no {', '.join(missing)}: it is of another optimizer")
    if len(numbers) == 1 and "state2" in values:
        raise StateMismatch(f"the saved state of {owner} has state2, which {rule} has not: it is of another optimizer")
    if not is_count(values["step"]):
        raise StateMismatch(f"step of {owner} was saved as {values['step']!r:.80}, which is no count of updates")
    states = [
        state
        for number, members in zip(numbers, NUMBERED[rule], strict=True)
        for state in _states(values, number, len(members), param, owner)
    ]
    blocks = {state.block for state in states if isinstance(state, DecodedState)}
    if len(blocks) > 1:
        raise StateMismatch(
            f"the saved states of {owner} have blocks of {' and '.join(map(str, sorted(blocks)))} elements: scales are "
            f"missing; save it again"
        )
    return {"step": values["step"], **dict(zip(outside, states, strict=True))}


def _states(values: Mapping[str, Any], number: int, count: int, param: Tensor, owner: str) -> Iterator[Any]:
    """The states of a number; several are stacked."""
    state, name = values[f"state{number}"], f"state{number} of {owner}"
    if not isinstance(state, Tensor):
        raise StateMismatch(f"{name} was saved as {state!r:.80}, which is no tensor")
    wanted = (count, *param.shape) if count > 1 else tuple(param.shape)
    if tuple(state.shape) != wanted and not is_dtensor(param):
        raise StateMismatch(f"{name} was saved with shape {tuple(state.shape)}, where it has {wanted}")
    coded = [f"{word}{number}" for word in ("qmap", "absmax") if values.get(f"{word}{number}") is not None]
    parts = state.unbind() if count > 1 else [state]
    if state.is_floating_point():
        if coded:
            raise StateMismatch(
                f"{name} was saved in {state.dtype} beside {coded[0]}, which is for codes in torch.uint8: codes were "
                f"cast, and their values are lost"
            )
        yield from parts
        return
    if state.dtype is not torch.uint8:
        raise StateMismatch(f"{name} was saved in {state.dtype}, where codes are torch.uint8 and values are floats")
    if len(coded) < 2:
        raise StateMismatch(f"{name} is in codes, and its qmap{number} or absmax{number} is missing")
    table, scales = _table(values[f"qmap{number}"], number, owner), values[f"absmax{number}"]
    _check_scales(scales, number, owner)
    rows = scales.float().reshape(count, -1) if scales.numel() % count == 0 else scales.float().reshape(1, -1)
    for part, row in zip(parts, rows, strict=False):
        yield _decoded(part, table, row, name)


def _table(qmap: Any, number: int, owner: str) -> Tensor:
    """The number of each code; StateMismatch for anything but 256 finite numbers."""
    fits = isinstance(qmap, Tensor) and qmap.is_floating_point() and qmap.numel() == 256
    if not fits or not bool(torch.isfinite(qmap).all()):
        raise StateMismatch(f"qmap{number} of {owner} must have 256 finite numbers, one for each code: save it again")
    table: Tensor = qmap.reshape(-1)
    return table


def _check_scales(scales: Any, number: int, owner: str) -> None:
    if not isinstance(scales, Tensor) or not scales.is_floating_point():
        raise StateMismatch(f"absmax{number} of {owner} must be a tensor of floats, one for each block")
    wrong = scales[~(torch.isfinite(scales) & (scales >= 0))]
    if wrong.numel():
        raise StateMismatch(
            f"absmax{number} of {owner} has {float(wrong.reshape(-1)[0]):g} among its scales, which are finite numbers "
            f"from 0 on: the file is damaged, or the run had failed before"
        )


def _decoded(codes: Tensor, table: Tensor, scales: Tensor, state: str) -> DecodedState:
    """The floats of codes beside them."""
    count = codes.numel()
    block = next((size for size in _BLOCKS if -(-count // size) == scales.numel()), None)
    if block is None:
        raise StateMismatch(
            f"{state} has {count} codes and {scales.numel()} scales, where blocks of {_BLOCKS[0]} elements have "
            f"{math.ceil(count / _BLOCKS[0])}: save it again"
        )
    spread = scales.repeat_interleave(block)[:count]
    values = (table.float()[codes.reshape(-1).long()] * spread).reshape(codes.shape)
    return DecodedState(codes, scales, block, table, values)
