"""Small models are trained by one thread: several would wait for each other most of the time."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

from rulec.torch.eager import epilogue_tiles
from rulec.torch.eager.epilogue import Epilogue


@pytest.fixture
def one_thread() -> Iterator[None]:
    """One thread for torch, and for our kernels with it."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


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
