"""Launches of compiled kernels: Triton looks for one once for each kind of arguments."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from rulec_backends.triton import memory as module
from rulec_backends.triton.memory import Launcher


class Compiled:
    """A compiled kernel that notes its launches."""

    def __init__(self) -> None:
        self.launches: list[tuple[Any, ...]] = []

    def __getitem__(self, grid: tuple[int, int, int]) -> Any:
        return lambda *arguments: self.launches.append((grid, *arguments))


class Kernel:
    """A kernel of Triton's that notes each search for a compiled one."""

    arg_names = ("chunks", "moving", "stays", "BLOCK", "EMULATED")

    def __init__(self) -> None:
        self.searches: list[tuple[Any, ...]] = []
        self.made: list[Compiled] = []

    def __getitem__(self, grid: tuple[int]) -> Any:
        def search(*arguments: Any, **constants: Any) -> Compiled:
            self.searches.append((grid, constants))
            self.made.append(Compiled())
            return self.made[-1]

        return search


def test_before_triton_3_3_each_launch_is_a_search(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its compiled kernels take no constants."""
    triton = pytest.importorskip("triton")
    monkeypatch.setattr(triton, "__version__", "3.2.0")
    module._takes_constants.cache_clear()
    kernel, words = Kernel(), torch.zeros(4, dtype=torch.int64)
    launcher = Launcher(kernel, {"EMULATED": False, "BLOCK": 1024})
    for _ in range(2):
        launcher.run_on(7, [words, words, None])
    module._takes_constants.cache_clear()
    assert len(kernel.searches) == 2


def test_a_compiled_kernel_is_looked_for_once_for_each_kind_of_arguments() -> None:
    words = torch.zeros(64, dtype=torch.int64)
    aligned, odd = words[words.data_ptr() // 8 % 2 :], words[1 + words.data_ptr() // 8 % 2 :]
    kernel = Kernel()
    launcher = Launcher(kernel, {"EMULATED": False, "num_warps": 4, "BLOCK": 1024})
    for stays in (None, aligned):
        for moving in (aligned, odd, aligned[2:]):
            launcher.run_on(7, [words, moving, stays])
    assert [grid for grid, _ in kernel.searches] == [(7,)] * 4
    assert all(constants == launcher.constants for _, constants in kernel.searches)
    again = [launch for compiled in kernel.made for launch in compiled.launches]
    first, here = words.data_ptr(), aligned[2:].data_ptr()
    assert again == [
        ((7, 1, 1), first, here, None, 1024, False), ((7, 1, 1), first, here, aligned.data_ptr(), 1024, False),
    ]  # fmt: skip
