"""Ways of steps on the host."""

from __future__ import annotations

from collections.abc import Iterable
from functools import partial
from typing import Any

import pytest
import torch

from rulec.torch.eager import on_host
from rulec.torch.offload import host_step
from rulec.torch.offload.worker import ThreadWorker
from tests.torch.offload.late import LateLink


@pytest.fixture
def links(monkeypatch: pytest.MonkeyPatch) -> list[LateLink]:
    """The links that are made, with copies as late as may be, and work in a thread of its own."""
    made: list[LateLink] = []

    def link_of(device: torch.device, pinned: bool = True, takes_gradients: bool = False) -> LateLink:
        made.append(LateLink(device, pinned))
        made[-1].takes_gradients = takes_gradients
        return made[-1]

    monkeypatch.setattr(on_host, "link_of", partial(link_of, takes_gradients=True))
    monkeypatch.setattr(host_step, "link_of", link_of)
    monkeypatch.setattr(on_host, "worker_for", beside)
    return made


def beside(devices: Iterable[torch.device]) -> ThreadWorker:
    """A worker in a thread of its own."""
    return ThreadWorker(lambda: None)


@pytest.fixture(params=["at once", "beside"])
def way(request: Any) -> str:
    """Both ways of work: in the thread of the backward pass, and beside it with late copies."""
    if request.param == "beside":
        request.getfixturevalue("links")
    return str(request.param)
