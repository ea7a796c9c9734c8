"""The account of an offload: the memory of the device, the memory of the host, and the bytes moved between both."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any

import pytest

import rulec
from rulec.memory.live import Account
from rulec.memory.shape import Shape
from rulec.torch.memory_profile.meter import Training, Way, account, rows, tokens
from rulec.torch.memory_profile.models import Linears, Transformer

#: Llama 3.2 of 1B, Llama 3.1 of 8B, and one of a few layers.
LLAMA_1B = Shape("llama", 128256, 2048, 8192, 16, 32, 8, 64, 131072, tied=True)
LLAMA_8B = Shape("llama", 128256, 4096, 14336, 32, 32, 8, 128, 131072, tied=False)
FEW = Shape("llama", 3000, 128, 448, 3, 4, 2, 32, 256, tied=False)

MIB = 2**20

#: Larger than the groups of small tensors, and smaller than the largest tensors.
BUFFER = 70_000


def llama(shape: Shape, buffer: int | None = None, **keywords: Any) -> Training:
    make = partial(Transformer, shape, True)
    return Training(
        make, tokens(1, 64), keywords.pop("rule", "adamw"), dtype="bfloat16", offload="step", offload_buffer=buffer,
        **keywords,
    )  # fmt: skip


def numel(shape: Shape) -> tuple[int, int, int]:
    """The elements of all weights, of those of a layer, and of the embedding."""
    attention = 2 * shape.width * shape.head * (shape.heads + shape.groups)
    layer = attention + 3 * shape.width * shape.inner + 2 * shape.width
    embedding = shape.vocabulary * shape.width
    return (1 if shape.tied else 2) * embedding + shape.layers * layer + shape.width, layer, embedding


def check(found: Account, shape: Shape, buffer: int, states: int) -> None:
    """Weights and one gradient on the device; `states` bytes for each weight and six buffers on the host.

    Two have gradients of the backward pass, two those of the embedding, which is moved in pieces, and two new weights.
    """
    every, layer, embedding = numel(shape)
    largest = 2 * max(layer, 3 * embedding if shape.tied else embedding)
    assert found.beside["weights"] == 2 * every
    assert found.beside["transfers"] == found.most["transfers"] == 0
    assert found.most["temporaries"] < 1024
    assert found.most["state"] < 1024
    assert 2 * every < found.without_activations < 2 * every + 1.05 * largest
    assert found.host["state"] == pytest.approx(states * every, abs=2048)  # and a step count for each parameter
    assert found.host["transfers"] == 6 * buffer
    assert found.host["weights"] == found.host["gradients"] == 0
    assert found.host["temporaries"] + found.host["activations"] < 1024
    assert found.up == 2 * every
    assert found.down == 2 * every


@pytest.mark.parametrize(("rule", "states"), [("adamw", 12), ("lion", 8)])
def test_an_eager_step_on_the_host_leaves_weights_and_one_gradient_on_the_device(rule: str, states: int) -> None:
    training = llama(FEW, BUFFER, rule=rule)
    found = account(training, "eager")
    check(found, FEW, BUFFER, states)
    here = account(replace(training, offload=None, offload_buffer=None, weights="master"), "eager")
    assert found.most["gradients"] <= here.most["gradients"]
    assert here.host_total == here.down == here.up == 0


@pytest.mark.slow
def test_llama_of_one_billion() -> None:
    check(account(llama(LLAMA_1B), "eager", before=1), LLAMA_1B, 64 * MIB, 12)


@pytest.mark.slow
@pytest.mark.whole
def test_llama_of_eight_billion() -> None:
    check(account(llama(LLAMA_8B), "eager", before=1), LLAMA_8B, 64 * MIB, 12)


def test_a_deferred_step_keeps_all_gradients_and_no_state() -> None:
    found = account(llama(FEW, BUFFER), "deferred")
    every, _, _ = numel(FEW)
    assert (found.beside["weights"], found.beside["gradients"]) == (2 * every, 2 * every)
    assert found.without_activations == pytest.approx(4 * every, abs=2048)
    assert found.down == 2 * every
    assert found.host["state"] == pytest.approx(12 * every, abs=1024)


def test_a_clip_moves_each_gradient_once_where_its_norm_is_taken_as_it_arrives() -> None:
    every, _, _ = numel(FEW)
    training = llama(FEW, BUFFER, rule=rulec.load("clip_by_global_norm") >> rulec.load("adamw"))
    deferred, found = account(training, "deferred"), account(training, "eager")
    for each, times in ((deferred, 2), (found, 1)):
        assert each.down == pytest.approx(times * 2 * every, rel=0.01)
        assert each.up == 2 * every
    assert found.host["temporaries"] == pytest.approx(2 * every, abs=8192), "the host keeps the gradients"
    assert found.most["gradients"] < 2 * every / 3


def test_a_rule_of_several_stages_has_its_numbers_between_stages_on_the_host() -> None:
    found = account(llama(FEW, BUFFER, rule="lamb"), "deferred", before=1)
    every, _, embedding = numel(FEW)
    assert found.without_activations == pytest.approx(4 * every, abs=2048)
    assert found.host["state"] == pytest.approx(12 * every, abs=1024)
    assert found.host["transfers"] == 4 * 2 * embedding  # its tensors are not moved in pieces
    assert found.up == 2 * every


def test_float32_moves_its_weights_both_ways() -> None:
    training = Training(partial(Linears, 6, 128), rows(64, 128), "adamw", offload="step", offload_buffer=1 << 20)
    found = account(training, "deferred")
    weights = 6 * 128 * 128 * 4
    assert (found.down, found.up) == (2 * weights, weights)
    assert found.host_total == pytest.approx(2 * weights + found.host["transfers"], abs=256)


@pytest.mark.parametrize("way", ["deferred", "eager"])
def test_real_tensors_count_as_fake_ones(way: Way) -> None:
    """Of real tensors on the CPU both places are one."""
    training = llama(FEW, BUFFER)
    ours, real = account(training, way), account(training, way, fake=False)
    assert (real.host_total, real.down, real.up) == (0, 0, 0)
    assert real.most["state"] == pytest.approx(ours.host["state"], abs=1024)
    assert real.most["transfers"] == ours.host["transfers"]
    assert real.most["gradients"] == pytest.approx(ours.most["gradients"], abs=1024)
    assert real.without_activations == pytest.approx(ours.without_activations + ours.host_total, abs=2048)
