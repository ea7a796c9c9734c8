"""Muon and the other rules for matrices on a GPU, on the processor: what is counted, judged and compared."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch

from benchmarks.gpu import matrices as gpu_matrices
from benchmarks.gpu import muon as gpu_muon
from benchmarks.gpu.device import Bench
from benchmarks.gpu.part import Finding
from benchmarks.gpu.peers import Peer
from benchmarks.gpu.time import StepTimes
from benchmarks.result import Row
from rulec.errors import RulecError
from rulec.torch.tensors import library
from rulec.torch.tensors.newton_schulz import newton_schulz
from rulec_backends.triton.quintic_call import QuinticProducts
from tests.backends.test_triton_stacks import Dividing, Made, hopper, stack
from tests.benchmarks.gpu_fakes import HostDevice


@pytest.fixture
def bench() -> Bench:
    return Bench(True, HostDevice())


def row_of(found: Iterator[Finding]) -> Row:
    (row,) = found
    assert isinstance(row, Row)
    return row


def scripted(monkeypatch: pytest.MonkeyPatch, **seconds: float) -> None:
    """Has contenders take these seconds, a second where none is said; each is called once."""

    def timed(device: Any, contenders: dict[str, Any], *_: Any) -> StepTimes:
        for step, *_others in contenders.values():
            step()
        return StepTimes({name: [seconds.get(name, 1.0)] * 3 for name in contenders}, dict.fromkeys(contenders, 0.25))

    monkeypatch.setattr(gpu_muon, "timed", timed)


def test_symmetric_products_count_half(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    scripted(monkeypatch, gram=2.0, polynomial=4.0, last=3.0, step=33.0)
    row = row_of(gpu_muon.products(bench))
    assert row.detail["products"] == 5 * (1.0 + 2.0 + 3.0)
    assert (row.detail["gram"], row.detail["host"]["step"]) == (2.0, 0.25)
    assert (row.value, row.target, row.sense, row.met) == (1.1, 1.15, "at most", True)
    scripted(monkeypatch, gram=2.0, polynomial=4.0, last=3.0, step=36.0)
    assert row_of(gpu_muon.products(bench)).met is False


def test_the_products_are_those_of_an_iteration(bench: Bench) -> None:
    """Three products of a batch are one step of Newton and Schulz, as torch has it."""
    alone = gpu_muon.Products(bench, [(16, 48), (48, 16), (16, 16)])
    assert [tuple(one["x"].shape) for one in alone._sets] == [(2, 16, 48), (1, 16, 16)]
    assert alone.flops == 5 * (2 * (16**2 * 48 * 3 + 16**3) + 16**3 * 4)
    for name in gpu_muon.COUNTED:
        alone.contenders()[name][0]()
    for one in alone._sets:
        x = one["x"].float()
        a = x @ x.mT
        want = 3.4445 * x + (-4.775 * a + 2.0315 * a @ a) @ x
        torch.testing.assert_close(one["y"].float(), want, rtol=0.05, atol=0.05)


def test_the_matrices_are_those_of_the_layers() -> None:
    size = gpu_muon.matrices(Bench(False, HostDevice()))
    assert len(size.shapes) == 4 * 48
    assert {*size.shapes} == {(1600, 4800), (1600, 1600), (1600, 6400), (6400, 1600)}


def test_each_library_is_to_be_beaten_by_half(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    scripted(monkeypatch, step=1.0, peer=1.4)
    row = row_of(gpu_muon.against(bench, "torch.optim.Muon"))
    assert row.what == "muon, 8 matrices: step, times as fast as torch.optim.Muon"
    assert (row.value, row.target, row.met) == (1.4, 1.5, False)
    assert row.detail["host"] == {"step": 0.25, "peer": 0.25}
    names = [part.name for part in gpu_muon.parts(())]
    assert names[:2] == ["muon on GPT-2 XL against its products", "muon on GPT-2 XL against torch.optim.Muon"]
    assert gpu_muon.parts(("adamw",)) == []


def test_larger_stacks_are_tried_beside_those_of_the_adapter(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[int] = []
    monkeypatch.setattr(gpu_muon, "step_of", lambda *_: lambda: seen.append(library._STACKED))
    scripted(monkeypatch, step=3.0, larger=2.0)
    row = row_of(gpu_muon.stacks(bench))
    assert row.what == "muon, 8 matrices: step, times as fast with stacks of 128 Mi elements"
    assert (row.value, row.target) == (1.5, None)
    assert seen[0] == gpu_muon.LARGER != library._STACKED  # the first step decides; later ones see the adapter's own
    assert set(seen[1:]) == {library._STACKED}


def test_both_forms_have_rows(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    """Time, multiplications and launches; a stub compiles the kernels, for a GPU of 132 processors."""
    kernels: list[Made] = []

    def step_of(rule: str, params: list[Any], ns_form: str | None) -> Any:
        kernels.append(Made())
        by = QuinticProducts(kernels[-1], dividing=Dividing())
        form = ns_form or "direct"
        return lambda: [
            newton_schulz(stack(2, *p.shape), 5, "bfloat16", form=form, products=lambda y: by) for p in params
        ]

    monkeypatch.setattr(gpu_muon, "step_of", step_of)
    scripted(monkeypatch, direct=4.0, gram=3.0)
    with hopper():
        rows = [row for row in gpu_muon.forms(bench) if isinstance(row, Row)]
    assert [(row.subject, row.measure, row.unit) for row in rows] == [
        *((subject, measure, unit) for subject in ("muon, 8 matrices", "muon by Gram matrices, 8 matrices")
          for measure, unit in (("step", "ms"), (gpu_muon.MULTIPLICATIONS, "10^12"), (gpu_muon.LAUNCHES, ""))),
        ("muon by Gram matrices, 8 matrices", "step, times as fast as the direct form", ""),
    ]  # fmt: skip
    values = [row.value for row in rows]
    side, wide, other = 16**3, 2 * 16 * 16 * 48, 4 * 16 * 16 * 64
    direct = 5 * (8 * side + 2 * side + wide + other) / 2 + 5 * (2 * side + wide + other)
    gram = (2 * 5 * 2 + 6 * 11) * side / 2 + 3 * (wide + other) / 2 + 2 * 5 * side + 3 * (wide + other)
    assert values == [
        4000.0,
        pytest.approx(1e-12 * direct),
        8 * 15,
        3000.0,
        pytest.approx(1e-12 * gram),
        6 * 17 + 2 * 15,
        4 / 3,
    ]
    assert rows[0].detail["multiplications a second"] == pytest.approx(direct / 4.0)
    assert [len(kernel.first + kernel.again) for kernel in kernels] == [2 * 8 * 15, 2 * (6 * 17 + 2 * 15)]


def test_a_form_is_a_keyword_of_the_step(bench: Bench) -> None:
    """The steps of both forms, on the processor: they differ, and have no launches."""
    results = []
    for form in gpu_muon.FORMS:
        param = torch.zeros(12, 16, requires_grad=True)
        param.grad = torch.randn(12, 16, generator=torch.Generator().manual_seed(0))
        assert gpu_muon.launches_of(gpu_muon.step_in(form, [param])) == 0
        results.append(param.detach())
    direct, gram = results
    assert 0 < (direct - gram).abs().max() < 1e-4


def test_libraries_that_are_missing_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Peer, "missing", property(lambda self: f"{self.package} is missing"))
    assert [part.name for part in gpu_muon.parts(())] == [
        "muon on GPT-2 XL against its products", "muon on GPT-2 XL by Gram matrices",
        "muon on GPT-2 XL with larger stacks",
    ]  # fmt: skip
    assert gpu_muon.missing(("muon",))[0] == "torch is missing"
    assert gpu_matrices.parts(()) == []
    assert gpu_matrices.missing(("kron",)) == [
        "kron_torch is missing", "pytorch_optimizer is missing", "heavyball is missing",
    ]  # fmt: skip
    assert gpu_matrices.missing(("adamw",)) == []


def test_a_library_that_takes_gradients_away_is_not_compared_with(bench: Bench) -> None:
    class Consumes(Peer):
        def step(self, params: list[Any]) -> Any:
            return lambda: [setattr(p, "grad", None) for p in params]

    params = [torch.ones(4, 4, requires_grad=True)]
    params[0].grad = torch.ones(4, 4)
    with pytest.raises(RulecError, match="HeavyBall took gradients away"):
        gpu_muon.versus(bench, "", Consumes("HeavyBall", "heavyball", "Muon"), "muon", params, 2)


def test_every_rule_that_was_asked_for_has_a_case() -> None:
    assert {case.rule for case in gpu_matrices.CASES} == {"soap", "shampoo", "apollo", "galore", "kron"}
    assert {part.arguments[0].partition(",")[0] for part in gpu_matrices.parts(("soap",))} == {"soap"}
    slow = [part.least for part in gpu_matrices.parts(())]
    assert slow == sorted(slow)


INSTALLED = [(c, p) for c in gpu_matrices.CASES for p in c.peers if p.package == "pytorch_optimizer"]


@pytest.mark.parametrize(("case", "peer"), INSTALLED, ids=[case.name for case, _ in INSTALLED])
def test_a_case_is_stepped_beside_a_library(
    case: gpu_matrices.Case, peer: Peer, bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    scripted(monkeypatch, step=10.0, peer=20.0)
    row = row_of(gpu_matrices.against(bench, case.name, peer.name))
    rank = " of rank 8" if case.ranked else ""
    assert row.subject == f"{case.rule}{rank} on 1 of 32 by 48, {case.what}"
    assert (row.value, row.target, row.met) == (2.0, 1.5, True)
    assert (row.detail["step"], row.detail["steps"]) == (10.0 / case.steps, case.steps)


def test_steps_are_timed_together_where_one_of_them_decomposes() -> None:
    calls: list[int] = []
    gpu_muon.repeated(lambda: calls.append(1), 10)()
    assert len(calls) == 10
    assert {case.steps for case in gpu_matrices.CASES if "one of which" in case.what} == {10}


def test_a_peer_has_keywords_in_its_group(monkeypatch: pytest.MonkeyPatch) -> None:
    params = [torch.ones(16, 16, requires_grad=True)]
    params[0].grad = torch.ones(16, 16)
    step: Any = Peer(
        "GaLore",
        "pytorch_optimizer",
        "GaLore",
        group={"rank": 2, "update_proj_gap": 7, "scale": 0.5, "projection_type": "std"},
    ).step(params)
    (group,) = step.__self__.param_groups
    assert (group["rank"], group["update_proj_gap"], group["params"]) == (2, 7, params)
