"""`rulec.torch.account`: the memory of training steps of any model and optimizer."""

from __future__ import annotations

from contextlib import suppress
from typing import Any

import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode

import rulec
import rulec.torch
from rulec.errors import RulecError
from rulec.memory.live import KINDS
from rulec.torch.memory_profile.models import Linears

WEIGHTS = 3 * 128 * 128 * 4


def step(model: nn.Module, optimizer: Any) -> None:
    loss = model(torch.ones(8, 128))
    if isinstance(optimizer, rulec.torch.EagerUpdate):
        with optimizer.backward():
            loss.backward()
    else:
        loss.backward()
    optimizer.step()
    optimizer.zero_grad()


def test_what_is_there_before_the_block_counts_from_its_beginning() -> None:
    model = Linears(3, 128)
    optimizer = torch.optim.AdamW(model.parameters(), foreach=False)
    step(model, optimizer)
    model(torch.ones(8, 128)).backward()
    with rulec.torch.account(model, optimizer) as found:
        pass
    peak = found.peaks.peak
    assert (peak["weights"], peak["gradients"], peak["state"]) == (WEIGHTS, WEIGHTS, 2 * WEIGHTS + 12)
    assert found.peaks.total == 4 * WEIGHTS + 12


def test_a_step_of_torch_and_ours_keep_as_much() -> None:
    totals = []
    for made in (torch.optim.AdamW, rulec.torch.AdamW):
        model = Linears(3, 128)
        optimizer: Any = made(model.parameters(), foreach=False)
        step(model, optimizer)
        with rulec.torch.account(model, optimizer) as found:
            step(model, optimizer)
        totals.append(found.peaks.beside["state"] + found.peaks.beside["gradients"])
    assert totals[0] == totals[1] == 3 * WEIGHTS + 12


@pytest.mark.parametrize("eager", [False, True])
def test_places_of_fake_tensors(eager: bool) -> None:
    with FakeTensorMode(allow_non_fake_inputs=True):
        model = Linears(3, 128)
        keywords: dict[str, Any] = {"offload": "step", "offload_buffer": 1 << 18}
        made = rulec.torch.EagerUpdate(model, "lion", **keywords) if eager else None
        optimizer = made or rulec.torch.Lion(model.parameters(), **keywords)
        for _ in range(2):
            step(model, optimizer)
        with rulec.torch.account(model, optimizer) as found:
            step(model, optimizer)
        peaks = found.peaks
    assert peaks.beside["gradients"] == (WEIGHTS // 3 if eager else WEIGHTS)
    assert peaks.host["state"] == pytest.approx(WEIGHTS, abs=64)
    assert peaks.host["transfers"] > 0
    assert (peaks.down, peaks.up) == (2 * WEIGHTS, WEIGHTS)
    lines = str(found).splitlines()
    assert lines[0].split() == ["MiB", *KINDS, "all"]
    assert [line.partition("  ")[0] for line in lines[1:5]] == [
        "at the peak", "most without activations", "most of each", "on the host",
    ]  # fmt: skip
    assert lines[5] == "copied: 0.375 MiB from the device to the host, 0.188 MiB from the host to the device"


def test_partitions_and_their_transfer_buffers_count() -> None:
    model = Linears(3, 128)
    partition = rulec.partition({"layers/0/*": "lion", "...": "adamw"})
    made = rulec.torch.Partitioned(partition, model.named_parameters(), offload="step")
    step(model, made)
    with rulec.torch.account(model, made) as found:
        step(model, made)
    assert found.peaks.peak["transfers"] > 0
    assert found.peaks.peak["state"] == pytest.approx(5 * WEIGHTS // 3, abs=64)


def test_peaks_are_known_after_the_block_even_one_that_raises() -> None:
    model = Linears(3, 128)
    optimizer = torch.optim.SGD(model.parameters())
    with suppress(KeyError), rulec.torch.account(model, optimizer) as found:
        with pytest.raises(RulecError, match="has not ended: ask for its peaks after it"):
            _ = found.peaks
        assert str(found) == "<memory of a block that has not ended>"
        raise KeyError
    assert found.peaks.peak["weights"] == WEIGHTS


def test_a_model_without_parameters_is_refused() -> None:
    with pytest.raises(RulecError, match="no parameters"), rulec.torch.account(nn.Tanh(), None):
        pass


def test_storages_that_change_their_size_count_as_they_are() -> None:
    """As fully sharded models do with gathered weights."""
    model = Linears(1, 128)
    with rulec.torch.account(model, torch.optim.SGD(model.parameters())) as found:
        other = torch.zeros(1000)
        other.untyped_storage().resize_(0)
        other.untyped_storage().resize_(8000)
        other.view(1000).add_(1)
    assert found.peaks.most["activations"] == 8000
