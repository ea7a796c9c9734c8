"""`rulec memory`."""

from __future__ import annotations

import json
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

import rulec
from rulec.memory.live import KINDS, Account
from rulec.memory.shape import shape_of
from rulec.runtime.distributed.owners import Schedule
from rulec.torch.memory_profile.mesh import _matrix, _owners, _schedules, mesh_of, on_mesh
from rulec.torch.memory_profile.meter import Training
from rulec.torch.memory_profile.models import Transformer
from tests.cli.running import error, run, run_json

GPT2 = {"model_type": "gpt2", "vocab_size": 512, "n_embd": 64, "n_layer": 2, "n_head": 4, "n_positions": 64}
LLAMA = {
    "model_type": "llama", "vocab_size": 512, "hidden_size": 64, "intermediate_size": 160, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 128,
}  # fmt: skip


def config(folder: Path, values: Any) -> str:
    file = folder / "config.json"
    file.write_text(json.dumps(values))
    return str(file)


def weights(folder: Path) -> str:
    file = folder / "model.safetensors"
    made = {"a": torch.zeros(300, 40), "b": torch.zeros(7, dtype=torch.bfloat16), "mask": torch.ones(9).bool()}
    save_file(made, file)
    return str(file)


def test_bytes_by_kind(tmp_path: Path) -> None:
    found = run_json("memory", "--model", config(tmp_path, LLAMA), "--rule", "lion", "--dtype", "bfloat16")
    own = 64 * 64 + 2 * 64 * 32 + 64 * 64 + 3 * 64 * 160 + 2 * 64
    parameters = 2 * own + 2 * 512 * 64 + 64
    assert (found["rule"], found["way"], found["parameters"]) == ("Lion", "deferred", parameters)
    kept = found["beside_activations"]
    assert (kept["weights"], kept["gradients"]) == (2 * parameters, 2 * parameters)
    assert kept["state"] == pytest.approx(2 * parameters, abs=4 * 21)
    assert found["peak"] == sum(found["at_peak"].values())


def test_eager_keeps_one_gradient_and_the_epilogue_a_tile(tmp_path: Path) -> None:
    file = config(tmp_path, LLAMA)
    deferred = run_json("memory", "--model", file)
    eager = run_json("memory", "--model", file, "--eager")
    epilogue = run_json("memory", "--model", file, "--epilogue")
    assert (eager["way"], epilogue["way"]) == ("eager", "epilogue")
    assert deferred["most"]["gradients"] == deferred["most"]["weights"]
    assert eager["most"]["gradients"] < 1.1 * 4 * 512 * 64
    assert epilogue["without_activations"] <= eager["without_activations"] < deferred["without_activations"]


def test_states_may_be_of_another_dtype(tmp_path: Path) -> None:
    found = run_json("memory", "--model", weights(tmp_path), "--dtype", "bfloat16", "--state-dtype", "float32")
    assert found["most"]["weights"] == 2 * 12_007
    assert found["most"]["state"] == pytest.approx(8 * 12_007, abs=16)


def test_states_rounded_at_random_are_of_two_bytes(tmp_path: Path) -> None:
    found = run_json("memory", "--model", weights(tmp_path), "--state-dtype", "bfloat16_sr")
    assert found["most"]["state"] == pytest.approx(4 * 12_007, abs=16)


def test_an_offload_has_the_device_and_the_host_apart(tmp_path: Path) -> None:
    file = weights(tmp_path)
    arguments = ("memory", "--model", file, "--dtype", "bfloat16", "--eager", "--offload", "step")
    found = run_json(*arguments, "--offload-buffer", "4096")
    assert found["offload"] == "step"
    assert found["beside_activations"]["weights"] == found["up"] == 2 * 12_007
    assert found["most"]["state"] == found["most"]["transfers"] == 0
    assert found["host"]["state"] == pytest.approx(12 * 12_007, abs=64)
    assert 4 * 4096 <= found["host"]["transfers"] <= 6 * 4096
    assert found["host_peak"] == sum(found["host"].values())
    shown = run(*arguments)
    assert "bfloat16 (master), AdamW with states in float32, eager, offload=step; MiB" in shown
    assert "on the host" in shown
    assert "0.023 MiB from the host to the device" in shown
    assert "transfers" not in run("memory", "--model", file)


def test_wrong_offloads(tmp_path: Path) -> None:
    file = weights(tmp_path)
    assert "none of step, states" in error("memory", "--model", file, "--offload", "steps")
    assert "give --offload step" in error("memory", "--model", file, "--offload-buffer", "5")
    both = ("--offload", "step", "--epilogue")
    assert "leave one out" in error("memory", "--model", config(tmp_path, LLAMA), *both)


@pytest.mark.slow
def test_batch_length_and_recomputing_matter_to_activations(tmp_path: Path) -> None:
    file = config(tmp_path, {**GPT2, "n_layer": 6, "vocab_size": 64})
    most = [
        run_json("memory", "--model", file, "--rule", "sgd", *more)["most"]["activations"]
        for more in ((), ("--batch", "2"), ("--length", "32"), ("--recompute",))
    ]
    assert most[1] == pytest.approx(2 * most[0], rel=0.01)
    assert most[2] < 0.6 * most[0]
    assert most[3] < 0.6 * most[0]


def test_the_header_of_a_file_of_weights_is_enough(tmp_path: Path) -> None:
    whole = Path(weights(tmp_path))
    data = whole.read_bytes()
    part = tmp_path / "part.safetensors"
    part.write_bytes(data[: 8 + int.from_bytes(data[:8], "little")])
    reports = [run_json("memory", "--model", str(file), "--rule", "apollo", "--eager") for file in (whole, part)]
    assert reports[0] == reports[1]
    assert reports[0]["parameters"] == 300 * 40 + 7
    # Apollo's states of the matrix, four rows of its longer side, and Adam's of the vector.
    assert reports[0]["most"]["state"] == pytest.approx(4 * (2 * 4 * 300 + 2 * 7), abs=64)


def test_hyper_parameters_are_the_rule_s(tmp_path: Path) -> None:
    file = weights(tmp_path)
    more = run_json("memory", "--model", file, "--rule", "apollo", "--hyper", "rank=8")
    assert more["most"]["state"] == pytest.approx(4 * (2 * 8 * 300 + 2 * 7), abs=64)


LARGE = {
    "model_type": "llama", "vocab_size": 128256, "hidden_size": 8192, "intermediate_size": 28672,
    "num_hidden_layers": 80, "num_attention_heads": 64, "num_key_value_heads": 8, "max_position_embeddings": 8192,
}  # fmt: skip
NOTHING = dict.fromkeys(KINDS, 0)


@pytest.mark.parametrize(("text", "most"), [("1", 33059), ("64", 523), ("8x64", 97), ("300", 124), ("1024", 49)])
def test_matrices_on_a_mesh_are_shared_even_the_largest(text: str, most: float) -> None:
    """Llama of 70 billion weights: 33 s of products at 400 TFLOP/s on one device; the largest matrix takes 110 ms."""
    make = partial(Transformer, shape_of(LARGE, "config.json"), False)
    training = Training(make, lambda _: (), rulec.load("muon"))
    spread, mesh = on_mesh(training, Account(NOTHING, NOTHING, NOTHING, 0), mesh_of(text)), mesh_of(text)
    assert spread.matrices == 560
    assert spread.mean_work / 400e9 == pytest.approx(33058 / mesh.devices, rel=1e-3)
    assert most - 10 < spread.work / 400e9 < most
    assert spread.least <= spread.exchanged
    assert (spread.exchanged == 0) == (mesh.shards == 1)
    # A matrix has several owners where one would work for longer than the mean.
    assert (spread.shared > 0) == (spread.between > 0) == (spread.mean_work / 400e9 < 110)


def on_paper(shapes: Sequence[tuple[int, int]], text: str, rule: str = "muon") -> tuple[Schedule, int]:
    """The exchange of a usual step, and the devices that share the work."""
    training = Training(Transformer, lambda _: (), rulec.load(rule))
    known = {shape: _matrix(training.rule, shape, training) for shape in shapes}
    matrices = [known[shape] for shape in shapes]
    spreads, chosen, devices = _owners(matrices, mesh_of(text))
    (schedule,) = (s for s in _schedules(matrices, spreads, chosen.owners, devices) if s.least)
    return schedule, devices


def test_a_mesh_on_paper_sends_what_processes_send() -> None:
    schedule, _ = on_paper([(7, 5), (12, 4), (1, 3)], "2")
    assert schedule.owners == (0, 1, 1)  # the longest work first
    # Cut in 20 and 15 elements, 24 and 24, 3 and 0: the parts for others, and results for their parts, in bfloat16.
    assert schedule.sent(2) == [2 * (24 + 3 + 15), 2 * (15 + 24 + 3)]
    # The first matrix has half of the work: replicas would win nothing by sharing it.
    alone, devices = on_paper([(7, 5), (12, 4), (1, 3)], "2x2")
    assert (alone.sent(2), devices) == (schedule.sent(2), 2)
    # Of four equal ones each process has one: one replica sends a part, and both get the result for theirs.
    equal, devices = on_paper([(8, 4)] * 4, "2x2")
    assert (sorted(equal.owners), devices) == ([0, 1, 2, 3], 4)
    assert sum(equal.sent(4)) == 2 * 4 * (16 + 48)


def test_a_mesh_is_written_as_shards_or_replicas_and_shards(tmp_path: Path) -> None:
    shown = run("memory", "--model", config(tmp_path, GPT2), "--rule", "muon", "--mesh", "2x4")
    assert "8 devices, 2 replicas of 4; GiB of the one with most" in shown
    assert "matrices are worked on for" in shown
    data = run_json("memory", "--model", config(tmp_path, GPT2), "--rule", "adamw", "--mesh", "4")["mesh"]
    assert (data["devices"], data["matrices"], data["sent"]["matrices"]) == (4, 0, 0)
    for text in ("0", "4x", "4x0", "two"):
        assert "must be a number of shards" in error("memory", "--model", config(tmp_path, GPT2), "--mesh", text)


def test_the_text(tmp_path: Path) -> None:
    shown = run("memory", "--model", config(tmp_path, GPT2), "--rule", "sgd").splitlines()
    layer = 4 * 64 * 65 + 64 * 256 + 256 + 256 * 64 + 64 + 4 * 64
    assert shown[0].startswith(f"{512 * 64 + 64 * 64 + 2 * layer + 2 * 64:,} ")
    assert shown[0].endswith("parameters in float32, SGD with states in float32, deferred; MiB")
    assert shown[1].split() == ["weights", "gradients", "state", "activations", "temporaries", "all"]
    names = ["at the peak", "most without activations", "most of each"]
    assert [line[:24].strip() for line in shown[2:]] == names
    shown = run("memory", "--model", weights(tmp_path), "--eager").splitlines()
    assert "activations are not known from weights alone" in shown[-1]
    assert not any(line.startswith("most without") for line in shown)


def test_a_folder_is_that_of_its_configuration_or_of_its_weights(tmp_path: Path) -> None:
    weights(tmp_path)
    assert run_json("memory", "--model", str(tmp_path), "--rule", "sgd")["parameters"] == 12_007
    config(tmp_path, GPT2)
    assert run_json("memory", "--model", str(tmp_path), "--rule", "sgd")["parameters"] > 100_000


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"model_type": "bert"}, "has model_type 'bert', and known are gpt2, llama"),
        ({**LLAMA, "hidden_size": None}, "has no hidden_size, which the shape of llama needs"),
        ({**LLAMA, "hidden_size": "64"}, "has hidden_size '64', which must be a whole number above 0"),
        ({**LLAMA, "num_key_value_heads": 3}, "has 3 heads of keys, which do not divide its 4 heads"),
        ({**GPT2, "n_head": 5}, "has 5 heads, which do not divide its width of 64"),
        ([1], "is no model's configuration"),
    ],
)
def test_configurations_that_are_none(tmp_path: Path, values: Any, message: str) -> None:
    assert message in error("memory", "--model", config(tmp_path, values))


def test_mistakes(tmp_path: Path) -> None:
    assert "there is no file or folder" in error("memory", "--model", str(tmp_path / "none"))
    assert "has neither a config.json nor .safetensors files" in error("memory", "--model", str(tmp_path))
    broken = tmp_path / "broken.safetensors"
    broken.write_bytes(b"\x05\0\0\0\0\0\0\0{]")
    assert "is no safetensors file" in error("memory", "--model", str(broken))
    file = config(tmp_path, GPT2)
    assert "give a --length of at most that, not 100" in error("memory", "--model", file, "--length", "100")
    assert "there is no rule 'adamm'" in error("memory", "--model", file, "--rule", "adamm")
    assert "there is no dtype 'float31'" in error("memory", "--model", file, "--dtype", "float31")
    assert "inside the backward pass" in error("memory", "--model", file, "--rule", "prodigy", "--eager")
    assert "--epilogue needs a config.json" in error("memory", "--model", weights(tmp_path), "--epilogue")
    (tmp_path / "config.json").write_text("{")
    assert "is no JSON" in error("memory", "--model", file)
