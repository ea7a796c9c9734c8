"""The GPT of the examples has the same losses with offload and without."""

from __future__ import annotations

import random
from contextlib import nullcontext
from itertools import islice
from typing import Any
from unittest import mock

import pytest
import torch
from torch.nn.utils import clip_grad_norm_

import rulec.torch
from examples.gpt.model import SIZES, loss_of, model
from examples.gpt.text import batches, corpus
from rulec.torch.offload import host_step
from tests.torch.offload.scripted import Device, ScriptedLink

#: Contenders of the example: their rules, and whether torch clips the gradients.
CONTENDERS = {
    "AdamW": ("adamw", False),
    "torch clip, AdamW": ("adamw", True),
    "clip >> AdamW": ("clip_by_global_norm >> adamw", False),
}


def losses(rule: str, clips: bool, dtype: torch.dtype, device: Device | None = None, **words: Any) -> list[float]:
    """The losses of a few steps. Between steps the host waits for the scripted device, which lies on the CPU."""
    size = SIZES["tiny"]
    net = model(size).to(dtype)
    link = (
        nullcontext() if device is None else mock.patch.object(host_step, "link_of", return_value=ScriptedLink(device))
    )
    with link:
        optimizer: Any = rulec.torch.optimizer(rule)(net.parameters(), lr=1e-2, weight_decay=0.1, **words)
        values = []
        for tokens, following in islice(batches(corpus(), size.sequences, size.length, seed=1), 6):
            loss = loss_of(net, torch.from_numpy(tokens), torch.from_numpy(following))
            values.append(loss.item())
            torch.autograd.backward(loss)
            if clips:
                clip_grad_norm_(net.parameters(), 1.0)
            optimizer.step()
            if device is not None:
                device.drain()
            optimizer.zero_grad()
    return values


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", CONTENDERS)
def test_losses_are_those_without_offload(name: str, dtype: torch.dtype) -> None:
    """Here and on a scripted device: groups of several tensors, and matrices in pieces."""
    rule, clips = CONTENDERS[name]
    weights = "master" if dtype is torch.bfloat16 else None
    plain = losses(rule, clips, dtype, weights=weights)
    assert plain[-1] < plain[0]
    words: dict[str, Any] = {"offload": "step", "offload_buffer": 8192}
    assert losses(rule, clips, dtype, **words) == plain
    assert losses(rule, clips, dtype, Device(random.Random(0).randrange), **words) == plain
