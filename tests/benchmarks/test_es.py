"""`rulec bench es`: what its rows are made of, with times that are scripted, and that it runs."""

from __future__ import annotations

import json
from collections.abc import Mapping
from itertools import pairwise

import pytest
import torch

from benchmarks.es import binary as es_binary
from benchmarks.es import cosine as es_cosine
from benchmarks.es import fused as es_fused
from benchmarks.es import layers as es_layers
from benchmarks.es import measure as es
from benchmarks.es import spsa as es_spsa
from benchmarks.es.cosine import EQUAL_MEMBERS, EQUAL_TIME
from benchmarks.es.layers import ALONE, BASE, DRAWN, JUDGED, KEPT, UPDATE, Layer, kept_bytes, one_at_a_time
from benchmarks.es.turns import Turn
from benchmarks.result import Row
from benchmarks.suite import measurement
from rulec.es import Perturbation
from rulec.tools.compare.measure import Times
from tests.cli.running import run

SECONDS = {
    "base": 2.0, "forward": 3.0, "alone": 0.5, "drawn": 5.0, "update": 1.0, "reference": 8.0, "ours": 1.0, "mezo": 4.0
}  # fmt: skip


@pytest.fixture
def scripted(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every contender runs once, and has then taken the seconds written above."""

    def by_turns(contenders: Mapping[str, Turn], rounds: int, seconds: float) -> Times:
        for turn in contenders.values():
            turn.before()
            turn.call()
        return Times({name: [SECONDS[name]] for name in contenders})

    for module in (es_layers, es_cosine, es_spsa):
        monkeypatch.setattr(module, "by_turns", by_turns)


def by_measure(rows: list[Row]) -> dict[str, Row]:
    return {row.measure: row for row in rows}


def test_rows_of_a_layer(scripted: None) -> None:
    rows = by_measure(list(es_layers.rows(es_layers.QUICK_LAYERS[0], "lowrank, rank 1", True)))
    members = es_layers.QUICK_MEMBERS
    assert list(rows) == [BASE, ALONE, DRAWN, UPDATE, KEPT]
    assert {row.subject for row in rows.values()} == {"linear 64 x 64, lowrank, rank 1"}
    assert rows[BASE].value == 1.5
    assert rows[ALONE].value == pytest.approx(0.5 / 3.0 * members / es_layers.SAMPLE)
    assert (rows[DRAWN].value, rows[UPDATE].value) == (2.5, 0.5)
    factors = members // 2 * (64 + 64) * 4
    assert rows[KEPT].value == factors
    assert rows[KEPT].met
    assert rows[BASE].target is None


def test_only_the_judged_layer_has_targets_and_the_others_two_rows(
    scripted: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(es_layers, "MEMBERS", 16)
    monkeypatch.setattr(es_layers, "JUDGED", Layer(8, 8))
    found = [by_measure(list(es_layers.rows(layer, "signflip", False))) for layer in (Layer(8, 8), Layer(8, 4, 3, 5))]
    judged, other = found
    assert (judged[BASE].target, judged[UPDATE].target) == (2.1, 0.1)
    assert judged[UPDATE].met is False
    assert list(other) == [BASE, ALONE]
    assert other[BASE].subject == "conv 8 to 4, 3x3, on 5x5, signflip"
    assert other[BASE].target is None


def test_noise_of_its_own_for_each_element_is_not_kept(scripted: None) -> None:
    rows = by_measure(list(es_layers.rows(es_layers.QUICK_LAYERS[0], "independent", True)))
    assert DRAWN not in rows
    assert (rows[KEPT].value, rows[KEPT].target, rows[KEPT].met) == (0.0, 0.0, True)


def test_the_table_is_that_of_the_layers_asked_for() -> None:
    names = [str(layer) for layer in es_layers.LAYERS]
    assert names[:3] == ["linear 256 x 256", "linear 512 x 512", "linear 1024 x 1024"]
    assert names[3:5] == ["conv 16 to 16, 3x3, on 64x64", "conv 32 to 32, 3x3, on 64x64"]
    assert set(es_layers.BARS) <= set(es_layers.families(JUDGED))
    assert {"sparse, k=1", "sparse, k=2", "permuted, in_sparsity 0.1"} <= set(es_layers.families(JUDGED))
    assert not any("sparse," in name for name in es_layers.families(Layer(1, 1, 1)))
    for layer in es_layers.QUICK_LAYERS:
        with torch.no_grad():
            assert layer.module()(layer.batch(3)).shape[:2] == (3, layer.outputs)


def test_members_one_at_a_time_differ() -> None:
    model, batch = Layer(4, 3).module(), torch.ones(5, 4)
    seen: list[torch.Tensor] = []
    hook = model[0].register_forward_hook(lambda _, given, out: seen.append(out))  # type: ignore[index]
    before = model[0].weight.clone()  # type: ignore[index, union-attr]
    one_at_a_time(model, batch, 0.1, 4)
    hook.remove()
    assert [out.shape for out in seen] == [(1, 3)] * 4
    assert all(not torch.equal(a, b) for a, b in pairwise(seen))
    assert torch.equal(model[0].weight, before)  # type: ignore[index, arg-type]


def test_bytes_that_are_kept_are_those_of_torch_and_numpy() -> None:
    held: list[object] = []

    def work() -> torch.Tensor:
        torch.ones(10_000).sum()
        held.extend([torch.ones(1000), torch.ones(250).numpy().copy()])
        return torch.ones(50)

    assert kept_bytes(work) == 5000


def test_cosines_are_those_of_the_estimates(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(es_cosine, "WIDTHS", (64, 4, 10))
    at_hand = es_cosine.task(8)
    perturbation = Perturbation("independent", 32, 0.01, seed=0)
    plain = es_cosine.cosines(at_hand, perturbation, 2)
    assert all(0.1 < c < 1 for c in plain)
    turned = es_cosine.Task(at_hand.model, at_hand.inputs, at_hand.labels, -at_hand.gradient)
    assert es_cosine.cosines(turned, perturbation, 2) == pytest.approx([-c for c in plain])
    loss = torch.nn.functional.cross_entropy(at_hand.model(at_hand.inputs), at_hand.labels)
    grads = torch.autograd.grad(loss, list(at_hand.model.parameters()))
    assert torch.allclose(torch.cat([g.flatten() for g in grads]), at_hand.gradient)


def test_more_members_come_nearer(monkeypatch: pytest.MonkeyPatch) -> None:
    """The expected cosine of D independent directions in N dimensions is near the root of D/(D + N)."""
    monkeypatch.setattr(es_cosine, "WIDTHS", (64, 4, 10))
    at_hand = es_cosine.task(8)
    size = at_hand.gradient.numel()
    for directions in (16, 256):
        (found,) = es_cosine.cosines(at_hand, Perturbation("independent", directions, 0.01, seed=0), 1)
        assert found == pytest.approx((directions / (directions + size)) ** 0.5, rel=0.35)


def test_rows_of_cosines(scripted: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(es_cosine, "WIDTHS", (64, 4, 10))
    monkeypatch.setattr(es_cosine, "FAMILIES", {n: es_cosine.FAMILIES[n] for n in ("signflip", es_cosine.REFERENCE)})
    rows = list(es_cosine.rows(True))
    assert [(row.subject, row.measure) for row in rows] == [
        (name, measure) for name in es_cosine.FAMILIES for measure in (EQUAL_MEMBERS, EQUAL_TIME)
    ]
    # The reference takes 8 s where the family takes 3.
    assert [row.detail["members"] for row in rows] == [16, 42, 16, 42]
    assert all(row.detail["steps"] == es_cosine.QUICK_STEPS and row.detail["spread"] > 0 for row in rows)


def test_rows_of_training_by_two_forwards(scripted: None) -> None:
    rows = {row.what: row for row in es_spsa.rows(True)}
    assert rows[f"MeZO in torch: {es_spsa.WRITTEN}"].value == 4.0
    ours = rows[f"spsa, normal: {es_spsa.WRITTEN}"]
    assert (ours.value, ours.target, ours.met) == (1.0, 2.0, True)
    assert rows[f"spsa, normal: {es_spsa.KEPT}"].value == 0.0
    timed = rows[f"spsa, rademacher: {es_spsa.TIME}"]
    assert (timed.value, timed.target) == (0.25, 1.0)
    assert len(rows) == 5 + len(es_spsa.VALUES)


def test_a_step_of_ours_descends() -> None:
    of = es_spsa.trained(True)
    before = of.loss().item()
    step = es_spsa.our_step(of, "rademacher")
    for _ in range(5):
        step()
    assert 0 < of.loss().item() < before


def test_parts_are_those_that_are_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (es_layers, es_fused, es_binary):
        monkeypatch.setattr(module, "rows", lambda *_: iter([Row("a", "b", 1.0)]))
    for module in (es_spsa, es_cosine):
        monkeypatch.setattr(module, "rows", lambda quick, advance, m=module: [advance() for _ in range(m.parts())])
    for only in ([], ["lion"]):
        ticks: list[None] = []
        list(es._rows(True, only, lambda t=ticks: t.append(None)))
        assert len(ticks) == measurement("es", True, only).parts == es.parts(True, only)


@pytest.mark.slow
def test_the_command() -> None:
    (result,) = json.loads(run("bench", "es", "--quick", "--rule", "sgd", "--json", "-"))
    assert result["name"] == "es"
    assert len(result["rows"]) == 9 * 2 + 1
