"""The parts of the measurement on a GPU, run on the processor at sizes that take no time: rows, targets, what is left.

What only a GPU has (events, graphs, CuPy) is in tests/gpu.
"""

from __future__ import annotations

import itertools
import sys
from collections.abc import Iterator
from math import prod
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch

from benchmarks.gpu import check as gpu_check
from benchmarks.gpu import host as gpu_host
from benchmarks.gpu import large as gpu_large
from benchmarks.gpu import layers as gpu_layers
from benchmarks.gpu import measure as gpu
from benchmarks.gpu import muon as gpu_muon
from benchmarks.gpu import peers as gpu_peers
from benchmarks.gpu import rules as gpu_rules
from benchmarks.gpu import seed as gpu_seed
from benchmarks.gpu import sizes as gpu_sizes
from benchmarks.gpu import states as gpu_states
from benchmarks.gpu import tensors as gpu_tensors
from benchmarks.gpu import watch as gpu_watch
from benchmarks.gpu import weights as gpu_weights
from benchmarks.gpu.asked import Asked
from benchmarks.gpu.device import Bench
from benchmarks.gpu.names import PARTS
from benchmarks.gpu.part import Finding, Note
from benchmarks.gpu.tensors import Size, fitting_llama, gpt2_xl, llama_1b, llama_7b
from benchmarks.gpu.time import StepTimes
from benchmarks.result import Row
from rulec.compiler.layout import FLOATS
from rulec.errors import RulecError
from rulec.formats import NAMES
from rulec.tools.compare.measure import Times
from tests.benchmarks.gpu_fakes import HostDevice

FUSED = "torch's fused step"


@pytest.fixture
def bench() -> Bench:
    return Bench(True, HostDevice())


def rows(found: Iterator[Finding]) -> dict[str, Row]:
    """The rows by what they say; nothing else may be found."""
    listed = list(found)
    assert [one for one in listed if not isinstance(one, Row)] == []
    return {one.what: one for one in listed if isinstance(one, Row)}


def test_an_elementwise_rule_is_held_against_a_copy_and_torch(bench: Bench) -> None:
    found = rows(gpu_rules.rule(bench, "adam", True))
    share = found[f"adam, float32: {gpu_rules.SHARE}"]
    assert share.target == 0.95
    assert share.detail["bytes"] == 7 * 4 * gpu_tensors.QUICK
    both = share.detail["bytes_per_second"] / share.detail["copy_bytes_per_second"]
    assert both == pytest.approx(share.detail["copy"] / share.detail["step"] * 7 / 2)
    # torch has a fused kernel for Adam: there is no target against foreach.
    assert found["adam, float32: step, times as fast as torch.optim.Adam(fused=True)"].target is None
    assert found["adam, float32: step, times as fast as torch.optim.Adam(foreach=True)"].target is None


def test_a_rule_that_torch_has_not_fused_has_a_target_against_foreach(bench: Bench) -> None:
    found = rows(gpu_rules.rule(bench, "nadam", True))
    assert found["nadam, float32: step, times as fast as torch.optim.NAdam(foreach=True)"].target == 3.0


def test_a_fused_step_that_does_not_run_is_said_and_foreach_is_judged(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuses(params: list[Any]) -> Any:
        raise RuntimeError("fused is not supported on this device\nand more")

    def steps(name: str) -> list[gpu_peers.TorchStep]:
        return [gpu_peers.TorchStep("fused", "fused", refuses), gpu_peers.torch_steps("adagrad")[-1]]

    monkeypatch.setattr(gpu_rules, "torch_steps", steps)
    first, *rest = gpu_rules.rule(bench, "adagrad", True)
    assert first == Note(
        "adagrad in float32: fused does not run here: RuntimeError: fused is not supported on this device"
    )
    assert [row.target for row in rest if isinstance(row, Row)] == [0.95, 3.0]


def test_a_reducing_rule_is_held_against_what_its_stages_move(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    seconds = {"copy": 1.0, "step": 4.0}
    monkeypatch.setattr(gpu_rules, "timed", lambda *_: Times({name: [seconds.get(name, 2.0)] for name in _[1]}))
    found = rows(gpu_rules.rule(bench, "lamb", False))
    row = found[f"lamb, float32: {gpu_rules.STAGES}"]
    assert row.target is None
    assert row.detail["bytes"] == 10 * 4 * gpu_tensors.QUICK
    assert row.value == pytest.approx(5 / 4)


@pytest.mark.parametrize("name", gpu_rules.LINES)
def test_rules_of_rows_and_columns_have_a_target(bench: Bench, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpu_rules, "timed", lambda *_: Times({name: [1.0] for name in _[1]}))
    found = rows(gpu_rules.rule(bench, name, False))
    assert found[f"{name}, float32: {gpu_rules.STAGES}"].target == 0.9
    if name == "adafactor":
        assert found["adafactor, float32: step, times as fast as torch.optim.Adafactor(foreach=True)"].target == 3.0


def test_rules_with_targets_are_the_first_that_reduce() -> None:
    ordered = [part.arguments[0] for part in gpu_rules.reducing_parts(())]
    assert {*ordered[: len(gpu_rules.LINES)]} == {*gpu_rules.LINES}


def test_rules_over_a_llama_are_timed_from_idle_to_idle(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    """The figure is of the host's clock; the device's own time and the host's are in the detail."""
    wall = {"step": 2.0, "torch's foreach Adafactor": 3.0, "torch's fused AdamW": 1.0}

    def idle(device: Any, contenders: dict[str, Any], *_: Any) -> StepTimes:
        for step in contenders.values():
            step()
        return StepTimes({name: [wall[name]] for name in contenders}, dict.fromkeys(contenders, 0.5))

    monkeypatch.setattr(gpu_layers, "idle_times", idle)
    monkeypatch.setattr(gpu_layers, "timed", lambda *_: Times({name: [0.25] for name in _[1]}))
    foreach, fused = rows(gpu_layers.layers(bench, "adafactor")).values()
    assert foreach.subject == "adafactor, 146 tensors as of a tiny Llama"
    assert foreach.measure == "step from idle to idle, times as fast as torch's foreach Adafactor"
    assert (foreach.value, foreach.target, foreach.met) == (1.5, 2.0, False)
    assert (fused.value, fused.target) == (0.5, None)
    for row in (foreach, fused):
        assert (row.detail["host"]["step"], row.detail["device"]["step"]) == (0.5, 0.25)
    assert [row.target for row in rows(gpu_layers.layers(bench, "sm3")).values()] == [None, None]


def test_the_tensors_of_a_llama_are_those_of_its_layers() -> None:
    size = gpu_layers.tensors(Bench(False, HostDevice()))
    assert (size.name, len(size.shapes)) == ("146 tensors as of Llama 3.2 1B", 146)
    # The model's own elements but for its embeddings, and one more vector.
    assert size.elements == 1_235_814_400 - 128_256 * 2048 + 2048 == Size("", llama_1b()).elements
    assert [part.arguments[0] for part in gpu_layers.parts(())] == list(gpu_layers.RULES)
    assert [part.arguments[0] for part in gpu_layers.parts(("lamb",))] == ["lamb"]


def test_half_width_storage_moves_half_and_is_not_judged(bench: Bench) -> None:
    found = rows(gpu_rules.rule(bench, "lion", True, "bfloat16"))
    row = found[f"lion, bfloat16: {gpu_rules.SHARE}"]
    assert row.target is None
    assert row.detail["bytes"] == 5 * 2 * gpu_tensors.QUICK
    assert gpu_rules.bytes_moved("lion", (10, 10), "float32") == 5 * 4 * 100


def test_another_backend_is_named_and_not_judged(bench: Bench) -> None:
    row, *_ = gpu_rules.rule(bench, "lion", True, "float32", "cpu")
    assert isinstance(row, Row)
    assert (row.subject, row.target) == ("lion, float32, cpu", None)


def test_states_in_codes_are_held_against_states_in_float32(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    seconds = {"float32": 4.0, "dynamic8": 3.0, "copy": 1.0}
    monkeypatch.setattr(gpu_states, "timed", lambda *_: Times({name: [seconds[name]] for name in _[1]}))
    found = rows(gpu_states.coded(bench, "dynamic8"))
    step = found[f"adamw, states in dynamic8: {gpu_states.TIMES}"]
    # The parameter read and written, the gradient, and of two states codes and scales read and written.
    each = 12 + 4 * (1 + 4 / 256)
    assert step.detail["bytes"] == round(each * gpu_tensors.QUICK)
    assert (step.value, step.target, step.sense, step.met) == (0.75, 1.0, "at most", True)
    share = found[f"adamw, states in dynamic8: {gpu_rules.SHARE}"]
    assert share.value == pytest.approx(each / 8 / 3)
    ordered = [part.arguments[0] for part in gpu_states.parts(["adamw"])]
    assert ordered[:4] == ["dynamic8", "int8", "float8_e4m3", "softsign8"]
    assert {*ordered} >= {*NAMES}
    assert gpu_states.parts(["lion"]) == []


def test_a_step_with_states_in_codes_is_timed(bench: Bench) -> None:
    assert all(row.value > 0 for row in rows(gpu_states.coded(bench, "int8")).values())


def test_only_dynamic8_on_the_devices_own_backend_is_judged(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpu_states, "timed", lambda *_: Times({name: [1.0] for name in _[1]}))
    for name, backend in (("int8", None), ("dynamic8", "cpu")):
        step, _ = rows(gpu_states.coded(bench, name, backend)).values()
        assert step.target is None


@pytest.mark.parametrize(("name", "target"), [("bitsandbytes", 1.5), ("torchao", None)])
def test_codes_are_held_against_those_of_other_libraries(
    name: str, target: float | None, bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    module = ModuleType(f"{name}.optim")
    module.AdamW8bit = torch.optim.AdamW  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, f"{name}.optim", module)
    monkeypatch.setattr(gpu_muon, "timed", lambda *_: Times({"step": [1.0], "peer": [1.4]}))
    (row,) = rows(
        gpu_states.against(bench, f"{name}' AdamW8bit" if name[-1] == "s" else f"{name}'s AdamW8bit")
    ).values()
    assert row.what.startswith(f"adamw, states in dynamic8: step, times as fast as {name}'")
    assert (row.value, row.target) == (1.4, target)


def test_other_libraries_codes_are_named_where_they_are_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpu_peers.importlib.util, "find_spec", lambda name: None)
    assert [note.partition(",")[0] for note in gpu_states.missing(())] == ["bitsandbytes", "torchao"]
    assert gpu_states.missing(["lion"]) == []
    monkeypatch.setattr(gpu_peers.importlib.util, "find_spec", lambda name: object())
    least = {part.arguments[0]: part.least for part in gpu_states.parts(()) if part.work is gpu_states.against}
    assert least == {"bitsandbytes' AdamW8bit": 5.0, "torchao's AdamW8bit": 20.0}  # the latter compiles its step


@pytest.mark.parametrize(("kind", "each"), [("split", 26), ("kahan", 26), ("stochastic", 22)])
def test_weights_of_16_bits_are_held_against_a_copy_by_their_bytes(
    kind: str, each: int, bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of bfloat16: parameter and gradient 6, what lies beside 4 or none; states in float32 16."""
    seen: list[Any] = []

    def timed(device: Any, contenders: Any, *_: Any) -> Times:
        for step, *_others in contenders.values():
            step()
        return Times({"step": [2.0], "copy": [1.0]})

    plain = gpu_weights.step_of
    monkeypatch.setattr(gpu_weights, "step_of", lambda *a, **k: (seen.append(k), plain(*a, **k))[1])
    monkeypatch.setattr(gpu_weights, "timed", timed)
    (row,) = rows(gpu_weights.kept(bench, kind)).values()
    assert row.what == f"adamw, bfloat16 weights, {kind}: step, of the copy bandwidth"
    assert row.detail["bytes"] == each * gpu_tensors.QUICK
    assert row.value == pytest.approx(each / 8 / 2)
    assert seen == [{"weights": kind}]


@pytest.mark.parametrize("dtype", gpu_weights.SHIFTED)
def test_a_gradient_off_alignment_is_held_against_an_aligned_one(
    dtype: str, bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    params: list[Any] = []
    monkeypatch.setattr(gpu_weights, "step_of", lambda rule, given: params.extend(given))
    monkeypatch.setattr(gpu_weights, "timed", lambda *_: Times({"step": [1.2], "aligned": [1.0]}))
    (row,) = rows(gpu_weights.unaligned(bench, dtype)).values()
    assert (row.value, row.target, row.sense) == (1.2, None, "at most")
    off, aligned = (param.grad.data_ptr() % 16 for param in params)
    assert (off, aligned) == (params[0].element_size(), 0)
    assert {str(param.dtype) for param in params} == {f"torch.{dtype}"}
    assert {str(param.grad.dtype) for param in params} == {f"torch.{dtype}"}


def test_weights_are_held_against_another_library_where_it_is_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpu_peers.importlib.util, "find_spec", lambda name: None)
    assert [part.work for part in gpu_weights.parts(())] == [gpu_weights.kept] * 3 + [gpu_weights.unaligned] * 2
    monkeypatch.setattr(gpu_peers.importlib.util, "find_spec", lambda name: object())
    assert gpu_weights.parts(())[-1].work is gpu_weights.against
    assert gpu_weights.parts(("lion",)) == []


def test_composed_rules_run_too(bench: Bench) -> None:
    name = "clip_by_global_norm >> adamw"
    assert f"{name}, float32: {gpu_rules.STAGES}" in rows(gpu_rules.rule(bench, name, False))
    assert list(gpu_rules.warm(bench, name)) == []


def test_adamw_at_a_size_has_a_target_against_torch_fused(bench: Bench) -> None:
    found = rows(gpu_sizes.against(bench, "1000 tensors", "adamw", FUSED))
    assert {what: row.target for what, row in found.items()} == {
        "adamw, 10 tensors of 1000 elements: step, times as fast as torch's fused step": 1.0,
        "adamw, 10 tensors of 1000 elements: step, of the copy bandwidth": None,
    }
    share = found["adamw, 10 tensors of 1000 elements: step, of the copy bandwidth"]
    assert share.detail["bytes"] == 28 * 10_000


def test_one_large_tensor_has_a_target_against_other_single_kernels() -> None:
    wanted = {(rule, peer.name): peer for rule, peers in gpu_peers.PEERS.items() for peer in peers if peer.target}
    assert {*wanted} == {
        ("adamw", FUSED), ("adamw", "optimi"), ("adamw", "torch's compiled step"), ("lion", "optimi"),
    }  # fmt: skip
    for (_, name), peer in wanted.items():
        assert peer.target_at("100 Mi") == 1.0
        assert peer.target_at("GPT-2 XL") == (1.0 if name == FUSED else None)


def test_small_tensors_are_had_in_sets_that_no_cache_holds(bench: Bench) -> None:
    device = HostDevice(cache=400_000)
    found = rows(gpu_sizes.against(Bench(True, device), "1000 tensors", "adamw", "torch's foreach step"))
    (row,) = found.values()
    assert row.detail["sets"] == 10  # four caches of 400 kB, of 160 kB each


def test_what_memory_does_not_hold_is_not_run() -> None:
    (note,) = gpu_sizes.against(Bench(True, HostDevice(free=1000)), "100 Mi", "adamw", FUSED)
    assert isinstance(note, Note)
    assert note.text.startswith("adamw, one tensor of 64 Ki elements, against torch's fused step: not run: it needs")


def test_the_hosts_time_has_its_target_with_new_gradients_and_new_rates_too(bench: Bench) -> None:
    found = rows(gpu_host.host(bench))
    assert [(row.target, row.sense, row.unit) for row in found.values()] == [(200.0, "at most", "us")] * 3
    subject = "adamw, 10 tensors of 1000"
    assert [row.subject for row in found.values()] == [
        subject, f"{subject}, new gradients each step", f"{subject}, a new rate each step",
    ]  # fmt: skip
    for row in found.values():
        assert row.value == pytest.approx(1e6 * row.detail["step"])


@pytest.mark.parametrize(("count", "named"), [(1, "1 tensor of 1000"), (300, "10 tensors of 1000")])
def test_the_hosts_time_for_few_tensors_has_no_target(count: int, named: str, bench: Bench) -> None:
    (row,) = rows(gpu_host.few(bench, count)).values()
    assert (row.what, row.target, row.unit) == (f"adamw, {named}: host time of a step", None, "us")
    assert row.value == pytest.approx(1e6 * row.detail["step"])
    assert set(row.detail) == {"step", "torch"}
    assert [part.arguments for part in gpu_host.parts(())] == [(), (1,), (300,), (), ()]
    assert gpu_host._tensors(Bench(False, HostDevice()), 300).name == "300 tensors of 1000"


def test_a_new_rate_is_that_of_all_optimizers() -> None:
    one, other = (SimpleNamespace(param_groups=[{"lr": 1.0}]) for _ in range(2))
    change = gpu_host._new_rates([one, other])
    seen = []
    for _ in range(3):
        change()
        assert one.param_groups == other.param_groups
        seen.append(one.param_groups[0]["lr"])
    assert seen == [*gpu_host.RATES[:3]]


def test_new_gradients_come_by_turns_from_two_sets(bench: Bench) -> None:
    size = Size("", [(3,), (2, 2)])
    params = gpu_tensors.parameters(bench, size)
    change = gpu_host._new_gradients(bench, size, params)
    seen = []
    for _ in range(3):
        change()
        seen.append([p.grad.data_ptr() for p in params])
    assert seen[0] == seen[2]
    assert not set(seen[0]) & set(seen[1])


class Replay:
    """Steps taken again where a device would replay their graph."""

    def __init__(self, step: Any) -> None:
        for _ in range(gpu_host.WARM_UP):
            step()
        self.replay = step


def test_a_captured_step_is_compared_with_the_same_steps_uncaptured(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gpu_host, "capture", Replay)
    same, host, device = rows(gpu_host.captured(bench)).values()
    assert (same.target, same.sense, same.met) == (1e-6, "at most", True)
    assert (host.target, host.sense, host.unit) == (30.0, "at most", "us")
    assert set(host.detail) == {"step", "with a new rate", "torch"}
    assert device.target is None


def test_a_graph_that_keeps_its_first_learning_rate_is_found_out(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    plain = gpu_host._ours

    def with_its_first_rate(params: list[Any], **keywords: Any) -> Any:
        return plain(params, **{k: float(v) if k == "lr" else v for k, v in keywords.items()})

    monkeypatch.setattr(gpu_host, "_ours", with_its_first_rate)
    monkeypatch.setattr(gpu_host, "capture", Replay)
    same, *_ = rows(gpu_host.captured(bench)).values()
    assert same.met is False


def test_steps_with_statistics_run_beside_steps_without(bench: Bench) -> None:
    parts = gpu_watch.parts(())
    assert [part.arguments for part in parts if "cupy" not in part.name] == [("adamw",), ("lamb",), ("adamw",)]
    one, other = (next(gpu_watch.large(bench, name)) for name in ("adamw", "lamb"))
    on_device, on_host = gpu_watch.many(bench, "adamw")
    assert [(row.subject, row.target, row.sense) for row in (one, other, on_device, on_host)] == [
        ("adamw, 65,536 elements", 1.1, "at most"), ("lamb, 65,536 elements", 1.1, "at most"),
        ("adamw, 10 tensors of 1000", 1.25, "at most"), ("adamw, 10 tensors of 1000", None, "at most"),
    ]  # fmt: skip
    assert {"measuring", "plain"} <= set(on_host.detail)
    assert next(gpu_watch.large(bench, "adamw", "cpu")).target is None


def test_groups(bench: Bench) -> None:
    assert list(rows(gpu_host.groups(bench))) == [
        "10 groups of one tensor of 1000: device time, times that of one group",
        "10 groups of one tensor of 1000: host time, times that of one group",
    ]


def test_twins_are_compared_by_the_largest_number(bench: Bench) -> None:
    a, b = torch.tensor([8.0, 1.0]), torch.tensor([8.0, 1.5])
    assert gpu_host._difference([a, a], [a, b]) == 0.5 / 8
    with pytest.raises(Exception, match="no numbers"):
        gpu_host._difference([torch.tensor([float("nan")])], [torch.tensor([1.0])])


def test_sizes_are_those_of_the_models() -> None:
    assert Size("", gpt2_xl()).elements == 1_557_611_200
    assert Size("", llama_7b()).elements == 6_738_415_616
    assert len(gpt2_xl()) == 2 + 48 * 12 + 2
    whole = fitting_llama(2**40)
    assert (whole.name, whole.elements) == ("the tensors of Llama 7B", 6_738_415_616)
    small = fitting_llama(80 * 2**30)
    assert small.elements * gpu_tensors.BYTES_EACH < 80 * 2**30
    assert f", {(len(small.shapes) - 3) // 9} of its 32 layers" in small.name
    assert fitting_llama(0).elements > 0


def test_every_size_is_made_as_it_is_called() -> None:
    made = {name: make() for name, make in gpu_tensors.sizes(Bench(False, HostDevice(free=140 * 2**30))).items()}
    assert tuple(made) == gpu_tensors.SIZES
    assert made["100 Mi"].elements == 104_857_600
    assert made["2**31 + 17"].elements == 2**31 + 17
    assert made["1000 tensors"].elements == 1_000_000
    largest = max(size.elements for size in made.values())
    assert largest * gpu_tensors.BYTES_EACH < 140 * 2**30


def test_targets_come_first_and_compiled_peers_last() -> None:
    judged = gpu_sizes.judged_parts(())
    fused, others = judged[: len(gpu_tensors.SIZES)], judged[len(gpu_tensors.SIZES) :]
    assert [part.arguments[0] for part in fused] == list(gpu_tensors.SIZES)
    assert {part.arguments[2] for part in fused} == {FUSED}
    assert others[-1].name == "adamw at 100 Mi against torch's compiled step"
    assert {part.arguments[0] for part in others} == {"100 Mi"}
    slow = [part.least > 5 for part in gpu_sizes.peer_parts(())]
    assert slow == sorted(slow)
    assert sum("compiled" in part.name for part in gpu_sizes.peer_parts(())) == len(gpu_tensors.SIZES) - 1


def test_sections_are_of_the_named_parts_and_in_their_order() -> None:
    planned = [section.name for section in gpu.sections((), ("triton",))]
    assert list(dict.fromkeys(planned)) == list(PARTS)
    assert planned == sorted(planned, key=list(PARTS).index)
    assert all(section.parts for section in gpu.sections((), ("triton",)) if section.name not in ("seed", "peers"))


def test_chosen_parts_share_all_the_time() -> None:
    rules = gpu.sections((), ("triton",), ["rules"])
    assert [(section.name, section.together, section.seconds) for section in rules] == [
        ("rules", True, gpu.BUDGET), ("rules", False, gpu.BUDGET),
    ]  # fmt: skip
    both = gpu.sections((), ("triton",), ["muon", "host"])  # in the order of all parts, and none below its own limit
    assert [(section.name, section.seconds) for section in both] == [("host", 250.0), ("muon", 250.0)]
    assert gpu.parts((), Asked(["host"])) == len(gpu_host.parts(()))


@pytest.mark.parametrize("asked", [Asked(["offload"]), Asked(first="speed"), Asked(first="correctness")])
def test_a_plan_lists_all_rules_only_where_it_times_them(asked: Asked, monkeypatch: pytest.MonkeyPatch) -> None:
    """To list them compiles every rule of the library, for seconds in which a lent device waits."""

    def listed(only: Any) -> list[str]:
        assert only
        return [*only]

    monkeypatch.setattr(gpu_rules, "elementwise", listed)
    monkeypatch.setattr(gpu_rules, "reducing", listed)
    assert gpu.parts((), asked) > 0


def test_sections_share_the_time_that_there_is() -> None:
    whole, half = (gpu.sections((), ("triton",), budget=seconds) for seconds in (gpu.BUDGET, gpu.BUDGET / 2))
    assert [section.seconds for section in half] == [section.seconds / 2 for section in whole]
    both = gpu.sections((), ("triton",), ["muon", "host"], budget=200.0)
    assert [(section.name, section.seconds) for section in both] == [("host", 100.0), ("muon", 100.0)]


def test_every_rule_is_planned_on_every_backend() -> None:
    import rulec

    checks = gpu_check.parts(("triton", "cupy"), ())
    looked = [part.arguments for part in checks if part.work is gpu_check.rule]
    assert {arguments[:2] for arguments in looked} == {
        (backend, name) for backend in ("triton", "cupy") for name in rulec.rules()
    }
    of_one_dtype = [arguments for arguments in looked if len(arguments) > 2]
    assert {name for _, name, _ in of_one_dtype} == {*gpu_check.SLOW}
    assert len(of_one_dtype) == 2 * len(FLOATS) * len(gpu_check.SLOW)
    assert len(looked) == 2 * (len(rulec.rules()) + (len(FLOATS) - 1) * len(gpu_check.SLOW))
    timed = {part.arguments[0] for part in (*gpu_rules.parts(()), *gpu_rules.reducing_parts(())) if part.arguments}
    warmed = {part.arguments[0] for part in (*gpu_rules.warm_parts(()), *gpu_rules.reducing_warm_parts(()))}
    assert timed == warmed
    assert {"adamw", "nadam", "lamb", "adafactor"} <= timed


def test_rules_can_be_chosen() -> None:
    names = {part.name for section in gpu.sections(("lion",), ("triton",)) for part in section.parts}
    assert "correctness of lion, triton" in names
    assert "lion at 100 Mi" in names
    assert not any("adamw" in name or "nadam" in name for name in names)


def test_peers_that_are_not_installed_are_named_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpu_peers.importlib.util, "find_spec", lambda name: None if name != "torch" else object())
    notes = gpu_sizes.not_installed(())
    assert notes == [
        f"{name}, to compare with, is not installed" for name in ("apex", "bitsandbytes", "optimi", "heavyball")
    ]
    assert not any(part.arguments[2] in ("apex", "optimi") for part in gpu_sizes.peer_parts(()))
    assert gpu_seed.missing() == "cupy, to compare its broadcasts with, is not installed"
    assert gpu_seed.parts(()) == []


def test_a_peer_is_made_with_the_keywords_of_the_same_rule(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: dict[str, Any] = {}

    class FusedAdam:
        def __init__(self, params: list[Any], **keywords: Any) -> None:
            seen.update(keywords, params=params)

        def step(self) -> str:
            return "stepped"

    module = ModuleType("apex.optimizers")
    module.FusedAdam = FusedAdam  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "apex", ModuleType("apex"))
    monkeypatch.setitem(sys.modules, "apex.optimizers", module)
    assert gpu_peers.peer_of("adamw", "apex").step([1])() == "stepped"
    assert seen == {"params": [1], "lr": 1e-3, "betas": (0.9, 0.999), "weight_decay": 0.01, "adam_w_mode": True}


def test_a_peer_that_takes_gradients_away_is_not_compared_with(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    class Consumes:
        def step(self, params: list[Any]) -> Any:
            return lambda: [setattr(p, "grad", None) for p in params]

    monkeypatch.setattr(Consumes, "slow", False, raising=False)
    monkeypatch.setattr(gpu_sizes, "peer_of", lambda rule, name: Consumes())
    with pytest.raises(RulecError, match="took gradients away"):
        list(gpu_sizes.against(bench, "100 Mi", "adamw", "HeavyBall"))


def test_plain_operators_are_adam(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    """With NumPy's arrays in CuPy's place."""
    import contextlib

    import numpy as np

    cupy = ModuleType("cupy")
    cupy.from_dlpack, cupy.zeros_like, cupy.sqrt = np.from_dlpack, np.zeros_like, np.sqrt  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "cupy", cupy)
    monkeypatch.setattr(gpu_seed, "_stream", contextlib.nullcontext)
    param = gpu_rules.parameter(bench, (1000,))
    twin = param.detach().clone().requires_grad_()
    twin.grad = param.grad
    step, other = gpu_seed.plain_operators(param), torch.optim.Adam([twin], lr=1e-3)
    for _ in range(5):
        step()
        other.step()
    torch.testing.assert_close(param, twin, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(
    ("name", "peer"),
    [(name, peer) for name, peers in gpu_peers.PEERS.items() for peer in peers if not (peer.missing or peer.slow)],
    ids=lambda given: given if isinstance(given, str) else given.name,
)
def test_a_peer_takes_the_same_steps(bench: Bench, name: str, peer: gpu_peers.Peer) -> None:
    param = gpu_rules.parameter(bench, (1000,))
    twin = param.detach().clone().requires_grad_()
    ours, theirs = gpu_rules.step_of(name, [param]), peer.step([twin])
    for _ in range(5):
        param.grad = torch.randn(1000)
        twin.grad = param.grad.clone()
        ours()
        theirs()
    torch.testing.assert_close(param, twin, rtol=5 * 2.0**-23, atol=5 * 2.0**-23)


def test_torch_has_these_ways() -> None:
    assert [(one.way, one.name) for one in gpu_peers.torch_steps("adamw")] == [
        ("fused", "torch.optim.AdamW(fused=True)"), ("foreach", "torch.optim.AdamW(foreach=True)"),
    ]  # fmt: skip
    assert [one.way for one in gpu_peers.torch_steps("radam")] == ["foreach"]
    assert gpu_peers.torch_steps("lion") == []
    assert gpu_peers.torch_steps("clip_by_global_norm >> adamw") == []


@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize("test", ["large", "many"])
def test_a_large_tensor_is_compared_with_small_ones_bit_for_bit(
    test: str, dtype: str, bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gpu_large, "PIECE", 1000)
    work = getattr(gpu_large, test)
    (row,) = rows(work(bench, dtype)).values()
    assert (row.value, row.target, row.sense, row.met) == (0, 0, "at most", True)
    assert row.detail["finite"]
    assert row.subject.endswith(", float64") == (dtype == "float64")

    class Lazy:
        """Does nothing with the large tensor."""

        def __init__(self, name: str, params: list[Any]) -> None:
            self.step = gpu_rules.step_of(name, params) if len(params) > 1 else lambda: None

        def __call__(self) -> None:
            self.step()

    monkeypatch.setattr(gpu_large, "step_of", Lazy)
    (row,) = rows(work(bench, dtype)).values()
    assert row.value > 0.95 * row.detail["elements"]
    assert row.met is False


def test_pieces_cover_a_tensor_and_are_of_all_sizes() -> None:
    pieces = gpu_large.consecutive(gpu_large.COUNT)
    assert len(pieces) == 20_000
    assert all(one.stop == other.start for one, other in itertools.pairwise(pieces))
    assert {piece.stop - piece.start for piece in pieces} == {*range(1, gpu_large.LARGEST + 1)}


def test_a_tensor_in_float64_needs_twice_the_memory() -> None:
    device = HostDevice(free=5 * 4 * (gpu_tensors.QUICK + 17))
    assert isinstance(next(gpu_large.large(Bench(True, device))), Row)
    assert isinstance(next(gpu_large.large(Bench(True, device), "float64")), Note)


def test_pieces_lie_around_what_32_bits_count() -> None:
    begins = gpu_large.places(2**31 + 17)
    ends = [begin + gpu_large.PIECE for begin in begins]
    assert begins[0] == 0
    assert ends[-1] == 2**31 + 17
    assert all(any(b < edge <= e for b, e in zip(begins, ends, strict=True)) for edge in (2**29, 2**30, 2**31))


def test_a_tensor_is_normal_and_of_its_dtype(bench: Bench) -> None:
    tensor = gpu_tensors.make(bench, (100, 200), "bfloat16")
    assert str(tensor.dtype) == "torch.bfloat16"
    assert prod(tensor.shape) == 20_000
    assert 0.9 < float(tensor.float().std()) < 1.1
