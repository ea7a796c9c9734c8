"""The measured step on the host: it is a step, its limit changes nothing, and peers do what they are said to do."""

from __future__ import annotations

from collections.abc import Mapping
from math import prod
from typing import Any

import numpy as np
import pytest

from benchmarks import offload
from benchmarks.offload import HostStep
from benchmarks.peers import host_makers
from rulec.compiler.layout import reads_parameter

torch = pytest.importorskip("torch")

SHAPES = [(40, 30), (7, 5), (30,)]


def bits(host: HostStep) -> list[Mapping[str, Any]]:
    """Copies of all arrays of a step."""
    engine = host.engine
    arrays = [{"p": t.array, **engine.state(i)} for i, t in enumerate(engine.tensors)]
    return [{name: torch.as_tensor(x).float().numpy().copy() for name, x in each.items()} for each in arrays]


@pytest.mark.parametrize("rule", offload.RULES)
def test_the_limit_leaves_every_array_that_a_step_reads(rule: str) -> None:
    """It writes the parameter, which no step reads."""
    host = HostStep(rule, SHAPES)
    before = bits(host)
    host.limit()()
    for mine, other in zip(before, bits(host), strict=True):
        assert [name for name in mine if not np.array_equal(mine[name], other[name])] in ([], ["p"])


@pytest.mark.parametrize("rule", offload.RULES)
def test_a_step_is_one_that_moves_these_bytes_and_reads_no_parameter(rule: str) -> None:
    host = HostStep(rule, [(40, 30)])
    (bucket,) = host.engine.buckets.values()
    assert not reads_parameter(bucket.compiled().program)
    assert host.bytes_moved() == 40 * 30 * {"adamw": 28, "lion": 20, "adafactor": 20}[rule]
    before = bits(host)[0]["param::master"]
    host.step()
    after = bits(host)[0]
    assert (after["param::master"] != before).mean() > 0.9
    np.testing.assert_array_equal(torch.tensor(after["param::master"]).bfloat16().float().numpy(), after["p"])


def test_a_tensor_larger_than_a_buffer_is_a_load_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(offload, "BUFFER", 100)
    host = HostStep("adamw", SHAPES)
    assert [len(ids) for ids, _ in host.loads] == [1, 2]
    assert [grad.shape for _, grads in host.loads for grad in grads] == SHAPES


@pytest.mark.parametrize("size", [40, 100, 10**6])
def test_loads_have_all_tensors_in_order_and_fit_a_buffer(size: int) -> None:
    shapes = [(5, 8), (10,), (30,), (4, 5), (40,), (1,)]
    loads = [*offload._loads(shapes, size)]
    assert [shape for those in loads for shape in those] == shapes
    assert all(sum(map(prod, those)) <= size for those in loads)
    assert len(loads) == {40: 5, 100: 2, 10**6: 1}[size]


def test_a_peer_takes_the_steps_of_adamw_with_16_bit_gradients_and_weights() -> None:
    """Against torch's own AdamW over the gradients in float32."""
    params = offload._parameters([(6, 7), (5,)], "float32")
    twins = [p.detach().clone().requires_grad_() for p in params]
    step = offload._converted(host_makers()["torchao"](params), params)
    theirs = torch.optim.AdamW(twins, lr=1e-3, weight_decay=0.01, fused=True)
    for twin in twins:
        twin.grad = torch.zeros_like(twin).fill_(0.02).bfloat16().float()
    for _ in range(3):
        step()
        theirs.step()
    assert all(torch.equal(p, twin) for p, twin in zip(params, twins, strict=True))


def test_rows_name_every_rule_and_size() -> None:
    result = offload.measure(quick=True)
    subjects = {row.subject for row in result.rows if row.measure == offload.LIMIT}
    assert subjects == {f"{rule}, {label}" for rule in offload.RULES for label in offload.QUICK}
    judged = {row.measure for row in result.rows if row.target is not None}
    assert f"host step, times as fast as torchao's {offload.WAYS['16 bits']}" in judged
    assert all(row.value > 0 for row in result.rows)
