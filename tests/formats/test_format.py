"""Names, blocks and traits: what users write, what files keep, and how many bytes there are."""

from __future__ import annotations

import numpy as np
import pytest

from rulec.errors import HyperError
from rulec.formats import NAMES, Format, encode, of_key, parse
from tests.formats.kinds import FORMATS


def test_each_name_has_its_blocks() -> None:
    signed = {name: parse(name).block for name in NAMES}
    unsigned = {name: parse(name).for_state(signed=False, floor=False).block for name in NAMES}
    assert signed == {
        "int8": 32, "softsign8": 32, "dynamic8": 256, "float8_e4m3": 256, "float8_e5m2": 256, "dynamic4": 128,
    }  # fmt: skip
    assert unsigned == {**signed, "int8": 256}


def test_a_named_block_stays() -> None:
    assert parse("int8/32") == parse("int8") == Format("int8", 32)
    assert parse("int8/32").for_state(signed=False, floor=True) == Format("int8", 32, signed=False, floor=True)
    assert Format("int8", 64).for_state(signed=False, floor=False).block == 64
    assert parse("int8").for_state(signed=False, floor=False).for_state(signed=True, floor=False).block == 32


def test_texts_and_keys_are_read_as_they_are_written() -> None:
    assert parse("dynamic8").text == "dynamic8/256"
    assert Format("dynamic8", 256, signed=False, floor=True).key == "dynamic8/256-unsigned-floor"
    assert len(FORMATS) == 4 * len(NAMES)
    for key, format in FORMATS.items():
        assert of_key(key) == format
        assert parse(format.text).for_state(signed=format.signed, floor=format.floor) == format


@pytest.mark.parametrize("block", ["0", "-64", "4", "48", "8192", "1" * 5000, "", "06", " 64", "6e1", "6/2", "٦٤"])
def test_blocks_that_no_format_has(block: str) -> None:
    with pytest.raises(HyperError, match=r"of format int8 is no power of two from 8 to 4096: write 'int8/32'") as error:
        parse(f"int8/{block}")
    assert len(str(error.value)) < 200


@pytest.mark.parametrize("block", [0, -8, 12, 8192])
def test_formats_without_a_text_are_checked_too(block: int) -> None:
    with pytest.raises(HyperError, match=f"the block '{block}' of format dynamic8"):
        Format("dynamic8", block)


def test_names_that_no_format_has() -> None:
    with pytest.raises(HyperError) as error:
        parse("int-8/64")
    assert str(error.value) == (
        "there is no format 'int-8/64'; did you mean 'int8'?: "
        "formats are int8, softsign8, dynamic8, float8_e4m3, float8_e5m2, dynamic4"
    )
    for text in ("", "INT8", " int8", "float8", "/64", "int8 /64", "x" * 5000):
        with pytest.raises(HyperError, match=r"there is no format .*formats are int8, softsign8") as error:
            parse(text)
        assert len(str(error.value)) < 200
    for other in (8, None, b"int8", np.int8):
        with pytest.raises(HyperError, match="is no format: a format is a text like 'int8' or 'int8/64'"):
            parse(other)  # type: ignore[arg-type]


@pytest.mark.parametrize("key", ["dynamic8/256", "dynamic8-signed", "int8/32-floor", "int8/32-signed-floor-x", ""])
def test_keys_that_no_format_has(key: str) -> None:
    with pytest.raises(HyperError, match="is no key of a format: a key is a text like"):
        of_key(key)


@pytest.mark.parametrize("shape", [(), (1,), (7, 37), (0, 3), (128,), (2, 3, 43)])
@pytest.mark.parametrize("key", FORMATS)
def test_sizes_are_those_of_what_is_encoded(key: str, shape: tuple[int, ...]) -> None:
    format, numel = FORMATS[key], int(np.prod(shape))
    codes, scales = encode(format, np.ones(shape, np.float32))
    assert (codes.shape, str(codes.dtype)) == (format.codes_shape(shape), format.code_dtype)
    assert (scales.shape, scales.dtype) == ((format.scales(numel),), np.float32)
    assert codes.nbytes + scales.nbytes == format.nbytes(numel)
    assert codes.size == (numel if format.bits == 8 else (numel + 1) // 2)
