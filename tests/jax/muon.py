"""Muon whose rounding does not hide what parts two ways to compute it."""

from __future__ import annotations

from typing import Any

import rulec
from rulec.language.library.folder import library_folder


def in_float32() -> Any:
    """Muon without bfloat16 on its way."""
    text = (library_folder() / "muon.yaml").read_text(encoding="utf-8")
    return rulec.parse(text.replace('dtype="bfloat16"', 'dtype="float32"'))
