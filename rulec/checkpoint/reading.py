"""A checkpoint from its file: every part is of its kind, and they fit together, before anyone sees one of them."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeGuard

from rulec.checkpoint.content import FORMAT, VERSION, Checkpoint, Parameter
from rulec.checkpoint.convert import faults, in_dtypes
from rulec.checkpoint.tensors import Stored, checksum, read_file
from rulec.errors import StateMismatch


def read(file: str | Path) -> Checkpoint:
    """A checkpoint with its arrays mapped into memory, everything in it checked.

    StateMismatch for a file that is none, is damaged, or was written by a newer version.
    """
    file = Path(file)
    tensors, metadata = read_file(file)
    _check(file, tensors, metadata)
    try:
        return _content(tensors, {key: _plain(key, metadata.get(key, "null")) for key in _JSON})
    except _Unfit as error:
        raise StateMismatch(f"{file} is damaged: its parts do not fit together ({error})") from error


_JSON = ("rules", "parameters", "hyper", "seed")

#: What tensors are called that belong to no parameter, by the beginning of their names.
_LEVELS = ("group", "model")


class _Unfit(Exception):
    """A part of a checkpoint that is no such part."""


def _expect(right: bool, wrong: str) -> None:
    if not right:
        raise _Unfit(wrong)


def _check(file: Path, tensors: Mapping[str, Stored], metadata: Mapping[str, str]) -> None:
    if metadata.get("format") != FORMAT:
        raise StateMismatch(
            f"{file} is a safetensors file, but no checkpoint of rulec: give one that rulec.torch.save, rulec.jax.save "
            f"or rulec.array.save has written"
        )
    version = metadata.get("version", "unknown")
    if version != str(VERSION):
        raise StateMismatch(
            f"{file} is in version {version:.20} of the format, written by rulec {metadata.get('rulec', 'unknown'):.20}"
            f", and this is one that reads version {VERSION}: install a newer rulec"
        )
    if "checksum" not in metadata:
        raise StateMismatch(f"{file} has no checksum, so nothing says that it is whole: save it again")
    if metadata["checksum"] != checksum(tensors, metadata):
        raise StateMismatch(f"{file} is damaged: its bytes are not those that were written, as its checksum says")


def _plain(key: str, text: str) -> Any:
    """A part of the metadata; one that is no JSON, or is nested more deeply than Python follows, is unfit."""
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        raise _Unfit(f"{key} is no JSON") from error


def _content(tensors: dict[str, Stored], said: Mapping[str, Any]) -> Checkpoint:
    rules, hyper, seed = _rules(said["rules"]), _hyper(said["hyper"]), said["seed"]
    _expect(seed is None or _is_whole(seed), "the seed is no whole number")
    states, values = _by_parameter(tensors)
    described = said["parameters"]
    _expect(_is_list(described, dict), "parameters is no list of them")
    steps = _counts(tensors, "step", (len(described),))
    parameters = [_parameter(p, rules, n, states, values) for p, n in zip(described, steps, strict=True)]
    _expect(not (states or values), "arrays of parameters that it does not name")
    _expect(len({p.name for p in parameters}) == len(parameters), "two parameters of one name")
    numbers = {level: _numbers(level, tensors) for level in _LEVELS}
    groups = 1 + max((p.group for p in parameters), default=-1)
    _expect(not hyper or len(hyper) >= groups, "a parameter of a group that it does not name")
    group_steps = _counts(tensors, "group_step", None) if numbers["group"] else []
    for values_of_groups in numbers["group"].values():
        fits = values_of_groups.shape == (len(group_steps),) and len(group_steps) >= groups
        _expect(fits, "numbers of other groups")
    for number in numbers["model"].values():
        _expect(number.shape == (), "several numbers of one model")
    model_steps = _counts(tensors, "model_step", ())[0] if numbers["model"] else 0
    return Checkpoint(
        parameters, hyper, {name: value.wide.tolist() for name, value in numbers["group"].items()}, group_steps,
        {name: value.number for name, value in numbers["model"].items()}, model_steps, seed,
    )  # fmt: skip


def _rules(said: Any) -> Sequence[Mapping[str, str]]:
    _expect(_is_list(said, dict), "rules is no list of them")
    for rule in said:
        _expect(all(isinstance(rule.get(key), str) for key in ("name", "meaning")), "a rule without name or meaning")
    return said  # type: ignore[no-any-return]


def _hyper(said: Any) -> Sequence[Mapping[str, Any]]:
    _expect(_is_list(said, dict), "hyper is no list of groups")
    for group in said:
        _expect(all(type(value) in (int, float) for value in group.values()), "a hyper-parameter is no number")
    return said  # type: ignore[no-any-return]


def _by_parameter(tensors: Mapping[str, Stored]) -> tuple[dict[str, dict[str, Stored]], dict[str, Stored]]:
    """The states and the values of the parameters, by the parameters' names."""
    states: dict[str, dict[str, Stored]] = {}
    values: dict[str, Stored] = {}
    for key, value in tensors.items():
        kind, _, rest = key.partition("/")
        if kind == "state":
            owner, _, state = rest.rpartition("/")
            states.setdefault(owner, {})[state] = value
        elif kind == "parameter":
            values[rest] = value
        else:
            known = kind in _LEVELS if rest else key in ("step", "group_step", "model_step")
            _expect(known, f"{key!r:.80} is no part of a checkpoint")
    return states, values


def _parameter(
    said: Mapping[str, Any], rules: Sequence[Mapping[str, str]], steps: int,
    states: dict[str, dict[str, Stored]], values: dict[str, Stored],
) -> Parameter:  # fmt: skip
    """One parameter; its states and value are taken out of `states` and `values`."""
    name, shape, dtype = (said.get(key) for key in ("name", "shape", "dtype"))
    rule, number, group = (said.get(key) for key in ("rule", "number", "group"))
    if not (isinstance(name, str) and isinstance(dtype, str)):
        raise _Unfit("a parameter without name or dtype")
    if not (isinstance(shape, list) and all(map(_is_whole, shape))):
        raise _Unfit(f"{name:.80} has no shape")
    if not (_is_whole(rule) and _is_whole(number) and _is_whole(group) and rule < len(rules)):
        raise _Unfit(f"the rule, number or group of {name:.80} is none")
    value = values.pop(name, None)
    if value is not None:
        alike = (value.shape, value.dtype) == (tuple(shape), dtype)
        _expect(alike, f"the value of {name:.80} is {value.dtype} {[*value.shape]}, described as {dtype} {shape}")
    made_by, formats = rules[rule], said.get("formats", {})
    _expect(isinstance(formats, dict) and all(isinstance(x, str) for x in formats.values()), "formats that are none")
    coded = {k: replace(v, format=formats.get(k, "")) for k, v in states.pop(name, {}).items()}
    parameter = Parameter(
        name, tuple(shape), dtype, made_by["name"], made_by["meaning"], number, group, steps, coded, value,
        tuple(said.get("roles", ())), name,
    )  # fmt: skip
    for fault in faults(parameter):
        raise _Unfit(fault)
    return in_dtypes(parameter)


def _numbers(level: str, tensors: Mapping[str, Stored]) -> dict[str, Stored]:
    return {name.partition("/")[2]: value for name, value in tensors.items() if name.startswith(f"{level}/")}


def _counts(tensors: Mapping[str, Stored], name: str, shape: tuple[int, ...] | None) -> list[int]:
    """Numbers of steps; `shape` is None where any number of them may be there."""
    array = tensors.get(name)
    fits = array is not None and (len(array.shape) == 1 if shape is None else array.shape == shape)
    if array is None or array.dtype != "int64" or not fits:
        raise _Unfit(f"{name} has no counts of these")
    counts: list[int] = array.bits.reshape(-1).tolist()
    _expect(all(count >= 0 for count in counts), f"{name} has a count below zero")
    return counts


def _is_list(value: Any, kind: type) -> bool:
    return isinstance(value, list) and all(isinstance(item, kind) for item in value)


def _is_whole(value: Any) -> TypeGuard[int]:
    """Whether it is a whole number from 0 that 64 bits hold."""
    return type(value) is int and 0 <= value < 1 << 63
