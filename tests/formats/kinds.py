"""Every format with every trait, by its key."""

from __future__ import annotations

from rulec.formats import NAMES, Format, parse

FORMATS: dict[str, Format] = {
    format.key: format
    for name in NAMES
    for signed in (True, False)
    for floor in (False, True)
    for format in [parse(name).for_state(signed=signed, floor=floor)]
}

#: Those that count thresholds.
DYNAMIC = {key: format for key, format in FORMATS.items() if format.name.startswith("dynamic") and not format.floor}
