"""Matrices in small tiles, and which of them were updated tile by tile."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from torch import Tensor

from rulec.torch.eager import epilogue_tiles
from rulec.torch.eager.epilogue import Epilogue


@pytest.fixture
def small_tiles(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every matrix here has several tiles, the last of them smaller."""
    monkeypatch.setitem(epilogue_tiles.TILE, "cpu", 1)


@pytest.fixture
def updated(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[tuple[int, ...]]]:
    """The shapes of the weights that were updated by factors, in order."""
    found: list[tuple[int, ...]] = []
    plain = Epilogue._update

    def update(self: Any, assembly: Any, launch: Any, param: Tensor, product: Any) -> int:
        found.append(tuple(param.shape))
        return plain(self, assembly, launch, param, product)

    monkeypatch.setattr(Epilogue, "_update", update)
    return found
