"""The file itself: one that the safetensors library reads and writes, whole or not there, and refused where damaged."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file

import rulec
from rulec.checkpoint import Checkpoint, Parameter, Stored, read, write
from rulec.checkpoint.tensors import checksum, read_file, write_file
from rulec.errors import RulecError, StateMismatch

DTYPES = {
    "float64": torch.float64, "float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16,
    "int64": torch.int64,
}  # fmt: skip

SHAPES = ((), (3,), (0, 4), (2, 1, 5))


def tensors() -> dict[str, torch.Tensor]:
    """One of each dtype and shape."""
    made = torch.Generator().manual_seed(3)
    return {
        f"{dtype} {shape}": (8 * torch.randn(shape, generator=made, dtype=torch.float64)).to(kind)
        for dtype, kind in DTYPES.items()
        for shape in SHAPES
    }


def stored(tensor: torch.Tensor) -> Stored:
    dtype = str(tensor.dtype).removeprefix("torch.")
    return Stored.of((tensor.view(torch.uint16) if dtype == "bfloat16" else tensor).numpy(), dtype)


def checkpoint() -> Checkpoint:
    """One of two parameters in two groups, by one rule."""
    parameters = [
        Parameter(
            name, (n,), "float32", "AdamW", "digest", n, n - 2, 7,
            {"m": Stored.of(np.arange(n, dtype=np.float32), "float32"), "k": Stored.of(np.float64(n), "float64")},
        )
        for n, name in ((2, "a/b"), (3, "c"))
    ]  # fmt: skip
    return Checkpoint(parameters, [{"lr": 0.1}, {"lr": float("inf")}], {"s": [1.5, 2.5]}, [7, 8], {"d": 1e-6}, 9, 11)


def test_the_library_reads_what_we_write(tmp_path: Path) -> None:
    file, given = tmp_path / "some.safetensors", tensors()
    write_file(file, {name: stored(tensor) for name, tensor in given.items()}, {"word": "gruß"})
    found = load_file(file)
    assert found.keys() == given.keys()
    for name, tensor in given.items():
        assert found[name].dtype == tensor.dtype
        assert torch.equal(found[name], tensor)
    with safe_open(file, "pt") as opened:
        assert opened.metadata()["word"] == "gruß"


def test_we_read_what_the_library_writes(tmp_path: Path) -> None:
    file, given = tmp_path / "some.safetensors", tensors()
    save_file(given, file, {"word": "gruß"})
    found, metadata = read_file(file)
    assert metadata == {"word": "gruß"}
    assert found.keys() == given.keys()
    for name, tensor in given.items():
        assert (found[name].dtype, found[name].shape) == (stored(tensor).dtype, tuple(tensor.shape))
        assert np.array_equal(found[name].bits, stored(tensor).bits)
        assert np.array_equal(found[name].wide, tensor.double().numpy())


def test_arrays_begin_where_their_dtype_may(tmp_path: Path) -> None:
    file, odd = tmp_path / "some.safetensors", torch.zeros(3, dtype=torch.bfloat16)
    write_file(file, {name: stored(tensor) for name, tensor in {"a": odd, **tensors()}.items()}, {})
    found, _ = read_file(file)
    assert all(each.bits.ctypes.data % each.bits.itemsize == 0 for each in found.values() if each.data.size)


def test_everything_comes_back(tmp_path: Path) -> None:
    file, given = tmp_path / "some.safetensors", checkpoint()
    write(file, given)
    found = read(file)
    assert replace(found, parameters=()) == replace(given, parameters=())
    for ours, theirs in zip(found.parameters, given.parameters, strict=True):
        assert replace(ours, states={}) == replace(theirs, states={})
        assert {k: v.wide.tolist() for k, v in ours.states.items()} == {
            k: v.wide.tolist() for k, v in theirs.states.items()
        }


def test_what_is_read_may_be_written_to_and_leaves_the_file_alone(tmp_path: Path) -> None:
    file = tmp_path / "some.safetensors"
    write(file, checkpoint())
    before = file.read_bytes()
    read(file).parameters[0].states["m"].bits[:] = 99
    assert file.read_bytes() == before
    assert read(file).parameters[0].states["m"].bits.tolist() == [0, 1]


def test_the_metadata_is_json_for_people(tmp_path: Path) -> None:
    file = tmp_path / "some.safetensors"
    write(file, checkpoint())
    with safe_open(file, "np") as opened:
        said = opened.metadata()
        assert sorted(opened.keys()) == [
            "group/s", "group_step", "model/d", "model_step", "state/a/b/k", "state/a/b/m", "state/c/k", "state/c/m",
            "step",
        ]  # fmt: skip
        assert opened.get_tensor("step").tolist() == [7, 7]
    assert (said["format"], said["version"], said["rulec"]) == ("rulec checkpoint", "1", rulec.__version__)
    assert json.loads(said["rules"]) == [{"name": "AdamW", "meaning": "digest"}]
    assert json.loads(said["parameters"])[0] == {
        "name": "a/b", "shape": [2], "dtype": "float32", "rule": 0, "number": 2, "group": 0,
    }  # fmt: skip


# Written as a whole or not at all


def test_a_failed_write_leaves_the_file_before_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "some.safetensors"
    write(file, checkpoint())
    before = file.read_bytes()

    def full(_: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("os.fsync", full)
    with pytest.raises(OSError, match="No space left"):
        write(file, replace(checkpoint(), seed=12))
    assert file.read_bytes() == before
    assert [found.name for found in tmp_path.iterdir()] == [file.name]


def test_a_file_has_the_mode_of_any_other(tmp_path: Path) -> None:
    write(tmp_path / "some.safetensors", checkpoint())
    (tmp_path / "other").touch()
    assert (tmp_path / "some.safetensors").stat().st_mode == (tmp_path / "other").stat().st_mode


def test_links_are_written_through(tmp_path: Path) -> None:
    """To a file, to one that is not there yet, and over another link."""
    (tmp_path / "folder").mkdir()
    (tmp_path / "latest").symlink_to(Path("folder") / "step7")
    (tmp_path / "again").symlink_to("latest")
    for link, seed in (("latest", 1), ("latest", 2), ("again", 3)):
        write(tmp_path / link, replace(checkpoint(), seed=seed))
        assert read(tmp_path / "folder" / "step7").seed == seed
    assert (tmp_path / "latest").is_symlink()
    assert (tmp_path / "again").is_symlink()


def test_what_is_no_file_is_neither_replaced_nor_read(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "folder").mkdir()
    (tmp_path / "loop").symlink_to("loop")
    (tmp_path / "null").symlink_to("/dev/null")
    kinds = {"pipe": "a pipe", "folder": "a folder", "loop": "a link to itself", "null": "a device"}
    for name, kind in kinds.items():
        with pytest.raises(
            RulecError, match=f"{name} is no file that could be written anew, but {kind}: give the path"
        ):
            write(tmp_path / name, checkpoint())
        if name != "loop":
            with pytest.raises(StateMismatch, match=f"{name} is no file, but {kind}: give one that was saved"):
                read(tmp_path / name)
    assert {path.name for path in tmp_path.iterdir()} == set(kinds)
    assert Path("/dev/null").is_char_device()


def test_two_parameters_of_one_name_are_refused(tmp_path: Path) -> None:
    twice = [replace(p, name="w") for p in checkpoint().parameters]
    with pytest.raises(StateMismatch, match="two parameters are called w: give each a name of its own"):
        write(tmp_path / "some.safetensors", replace(checkpoint(), parameters=twice))
    assert not [*tmp_path.iterdir()]


# Damage

#: Every so many bytes.
STRIDES = pytest.mark.parametrize("stride", [11, pytest.param(1, marks=pytest.mark.slow)])


@STRIDES
def test_no_byte_may_be_another(stride: int, tmp_path: Path) -> None:
    """But the spaces that fill up the header: they say nothing."""
    file = tmp_path / "some.safetensors"
    write(file, checkpoint())
    before = file.read_bytes()
    start = 8 + int.from_bytes(before[:8], "little")
    padding = range(len(before[:start].rstrip(b" ")), start)
    made = np.random.default_rng(0)
    for place in set(range(0, len(before), stride)) - set(padding):
        broken = bytearray(before)
        broken[place] ^= int(made.integers(1, 256))
        file.write_bytes(broken)
        with pytest.raises(StateMismatch, match=re.escape(str(file))):
            read(file)


@STRIDES
def test_no_byte_may_be_missing_or_left_over(stride: int, tmp_path: Path) -> None:
    file = tmp_path / "some.safetensors"
    write(file, checkpoint())
    before = file.read_bytes()
    for length in (*range(0, len(before), stride), len(before) - 1):
        file.write_bytes(before[:length])
        with pytest.raises(StateMismatch, match=re.escape(str(file))):
            read(file)
    file.write_bytes(before + b"\0")
    with pytest.raises(StateMismatch, match="has 1 bytes more than its header describes: it is damaged"):
        read(file)


def rewritten(file: Path, change: Callable[[dict[str, Any]], object], *, sealed: bool = False) -> None:
    """A file with another header; `sealed` with the checksum that goes with it."""
    whole = file.read_bytes()
    start = 8 + int.from_bytes(whole[:8], "little")
    header = json.loads(whole[8:start])
    change(header)
    text = json.dumps(header).encode()
    file.write_bytes(len(text).to_bytes(8, "little") + text + whole[start:])
    if sealed:
        found, metadata = read_file(file)
        metadata["checksum"] = checksum(found, metadata)
        write_file(file, found, {k: v for k, v in metadata.items() if k != "checksum"})


HEADERS: tuple[tuple[str, Callable[[dict[str, Any]], object], str], ...] = (
    ("dtype", lambda h: h["step"].update(dtype="F8_E4M3"), "'step' of .* is of F8_E4M3, which is none of F64, F32"),
    ("no dtype", lambda h: h["step"].pop("dtype"), "the header of .* is damaged where it describes 'step'"),
    ("unhashable dtype", lambda h: h["step"].update(dtype=[1]), "damaged where it describes 'step'"),
    ("negative", lambda h: h["step"].update(shape=[-2]), "damaged where it describes 'step'"),
    ("fraction", lambda h: h["step"].update(shape=[2.0]), "damaged where it describes 'step'"),
    ("entry", lambda h: h.update(step=3), "damaged where it describes 'step'"),
    ("shape", lambda h: h["step"].update(shape=[3]), r"is damaged: it has 16 bytes for shape \(3,\) of int64"),
    ("metadata", lambda h: h.update(__metadata__=[]), "is no safetensors file: it does not begin with a header"),
    ("number", lambda h: h["__metadata__"].update(seed=1), "the metadata of .* is damaged: every value must be a text"),
    ("overlap", lambda h: h["step"].update(data_offsets=[0, 16]), "arrays overlap, or leave bytes out"),
    ("beyond", lambda h: h["step"].update(data_offsets=[10**6, 10**6 + 16]), "cut short: 'step' ends 99.* bytes after"),
    ("no format", lambda h: h["__metadata__"].pop("format"), "is a safetensors file, but no checkpoint of rulec: "),
    ("newer", lambda h: h["__metadata__"].update(version="2", rulec="3.1"),
     r"is in version 2 of the format, written by rulec 3\.1, .* reads version 1: install a newer rulec"),
    ("no version", lambda h: h["__metadata__"].pop("version"), "is in version unknown of the format"),
    ("no checksum", lambda h: h["__metadata__"].pop("checksum"), "has no checksum, so nothing says that it is"),
    ("endless", lambda h: h["step"].update(shape=[0, 1 << 60], data_offsets=[0, 0]), "where it describes 'step'"),
    ("many", lambda h: h["step"].update(shape=[0] * 99, data_offsets=[0, 0]), "damaged where it describes 'step'"),
    ("half", lambda h: h.update({"\ud800": h.pop("step")}), "its bytes are not those that were written"),
    ("long version", lambda h: h["__metadata__"].update(version="9" * 5000), "is in version 9{20} of the format"),
    ("odd version", lambda h: h["__metadata__"].update(version="\u0661"), "is in version \u0661 of the format"),
)  # fmt: skip


@pytest.mark.parametrize(("change", "message"), [row[1:] for row in HEADERS], ids=[row[0] for row in HEADERS])
def test_a_header_that_is_wrong_is_refused(
    change: Callable[[dict[str, Any]], object], message: str, tmp_path: Path
) -> None:
    file = tmp_path / "some.safetensors"
    write(file, checkpoint())
    rewritten(file, change)
    with pytest.raises(StateMismatch, match=message) as found:
        read(file)
    assert "\n" not in str(found.value)


@pytest.mark.parametrize("key", ["rules", "parameters", "hyper"])
@pytest.mark.parametrize("value", ["{", "[{}]", "7", None])
def test_a_checkpoint_whose_parts_do_not_fit_is_refused(key: str, value: str | None, tmp_path: Path) -> None:
    """Even where its checksum was made to agree."""
    file = tmp_path / "some.safetensors"
    write(file, checkpoint())

    def change(header: dict[str, Any]) -> None:
        if value is None:
            del header["__metadata__"][key]
        else:
            header["__metadata__"][key] = value

    rewritten(file, change, sealed=True)
    with pytest.raises(StateMismatch, match="is damaged: its parts do not fit together"):
        read(file)


@pytest.mark.parametrize("text", [b"", b"PK\x03\x04" + bytes(60), b"\xff" * 9, (2).to_bytes(8, "little") + b"[]"])
def test_a_file_of_another_kind_is_refused(text: bytes, tmp_path: Path) -> None:
    file = tmp_path / "some.pt"
    file.write_bytes(text)
    with pytest.raises(StateMismatch, match=r"some\.pt is no safetensors file"):
        read(file)


def test_a_file_that_is_not_there_is_pythons_own_error(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match="nothing"):
        read(tmp_path / "nothing.safetensors")
