"""The command: what it says without a GPU, what it writes and when, and the table of blocks; the parts are scripted."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from benchmarks import suite
from benchmarks.gpu import device as gpu_device
from benchmarks.gpu import measure as gpu
from benchmarks.gpu import tune as gpu_tune
from benchmarks.gpu.asked import Asked
from benchmarks.gpu.device import Bench
from benchmarks.gpu.names import PARTS
from benchmarks.gpu.part import Checked, Note
from benchmarks.gpu.run import Ended, Started
from benchmarks.page import results_pages
from benchmarks.result import Row, read_result
from rulec.errors import RulecError
from tests.backends.triton_process import require_interpreter
from tests.benchmarks.gpu_fakes import Clock, HostDevice, Script, ScriptedCrew
from tests.cli.running import error, invoke, run

DEVICE = {
    "name": "Some GPU", "memory_bytes": 80 * 2**30, "last_level_cache_bytes": 50 * 2**20, "processors": 100,
    "architecture": "sm_90", "platform": "CUDA 13.0",
}  # fmt: skip


class Crew(ScriptedCrew):
    """A scripted crew as the measurement makes it."""

    scripts_of_all: dict[str, Script]
    made: list[Crew]

    def __init__(self, size: int, bench: Bench) -> None:
        super().__init__(size, Clock(), self.scripts_of_all)
        self.closed: list[int] = []
        self.bench = bench
        self.made.append(self)

    def close(self, first: int = 0) -> None:
        self.closed.append(first)


@pytest.fixture
def crew(monkeypatch: pytest.MonkeyPatch) -> type[Crew]:
    """A machine with a GPU, and processes that are scripted; the class has those that were made."""

    class Made(Crew):
        scripts_of_all: dict[str, Script] = {}  # noqa: RUF012 - the test's own class
        made: list[Crew] = []  # noqa: RUF012

    monkeypatch.setattr(gpu, "missing", lambda: None)
    monkeypatch.setattr(gpu_device, "missing", lambda: None)
    monkeypatch.setattr(gpu, "gpu_facts", lambda: DEVICE)
    monkeypatch.setattr(gpu, "Processes", Made)
    monkeypatch.setattr(gpu.gpu_check, "usable_backends", lambda: (["triton"], ["correctness, cupy: not run: none"]))
    return Made


def test_without_a_gpu_the_command_says_so_and_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    import torch

    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    result = invoke("bench", "gpu")
    assert (result.exit_code, result.stdout) == (1, "")
    assert "rulec bench gpu needs a GPU of NVIDIA or AMD, and torch finds none" in result.stderr
    assert len(result.stderr.splitlines()) == 1


def test_without_torch_the_command_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpu_device.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(RulecError, match=r"needs torch, which is not installed: pip install .*\[torch,triton\]"):
        gpu.measure(True, ())


def test_it_is_not_among_the_usual_without_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpu_device, "missing", lambda: "no GPU")
    assert suite.usual() == [name for name in suite.MEASUREMENTS if name != "gpu"]
    monkeypatch.setattr(gpu_device, "missing", lambda: None)
    assert suite.usual() == list(suite.MEASUREMENTS)


def test_results_are_written_after_every_part(
    crew: type[Crew], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What a kill in the middle would leave."""
    file = tmp_path / "out.json"
    seen: list[Any] = []
    plain = Crew.give

    def give(self: Crew, worker: int, part: Any) -> None:
        seen.append(json.loads(file.read_text()) if file.exists() else None)
        plain(self, worker, part)

    monkeypatch.setattr(Crew, "give", give)
    monkeypatch.setattr(gpu, "workers", lambda: 1)
    crew.scripts_of_all["correctness of lion, triton"] = [
        (0.0, Started()), (1.0, Checked("triton", "lion", "float32", 1e-7)), (0.0, Ended()),
    ]  # fmt: skip
    row = Row("lion, float32", "step, of the copy bandwidth", 0.97, 0.95)
    crew.scripts_of_all["lion at 100 Mi"] = [(0.0, Started()), (1.0, row), (1.0, Ended("OutOfMemoryError: no memory"))]
    shown = run("bench", "gpu", "--rule", "lion", "--json", str(file))
    assert seen[0] is None
    assert [len(data["rows"]) for data in seen[1:]] == sorted(len(data["rows"]) for data in seen[1:])
    assert seen[1]["rows"][0]["measure"] == "rules that agree with the float64 reference"
    result = read_result(file)
    assert result.rows[-1] == replace(row, part="rules")
    assert result.machine["gpu"] == result.parts["rules"].machine["gpu"] == DEVICE
    assert "lion at 100 Mi: failed: OutOfMemoryError: no memory" in result.parts["rules"].notes
    assert result.parts["correctness"].notes == ["correctness, cupy: not run: none"]
    assert "lion at 100 Mi: failed: OutOfMemoryError: no memory" in shown
    assert "met" in shown


def test_what_is_timed_has_the_device_alone(crew: type[Crew]) -> None:
    result = gpu.measure(True, ("lion",))
    (made,) = crew.made
    assert list(result.parts) == list(PARTS)
    assert {name for name, one in result.parts.items() if one.ran} >= {"correctness", "rules", "jax", "ways"}
    assert not result.parts["muon"].ran  # nothing of it is about the rule
    together = sum(section.together for section in gpu.sections(("lion",), ("triton",)))
    sections = len(gpu.sections(("lion",), ("triton",)))
    assert made.closed == [1] * (sections - together) + [0]
    assert made.bench.quick
    assert made.clock.now <= gpu.BUDGET


@pytest.mark.slow
def test_processes_are_ended_where_results_cannot_be_written(crew: type[Crew], tmp_path: Path) -> None:
    file = tmp_path / "a file"
    file.write_text("")
    assert "cannot be written" in error("bench", "gpu", "--json", str(file / "out.json"))
    assert crew.made[0].closed[-1] == 0
    assert len(crew.made[0].given) <= crew.made[0].size


def test_the_page_names_the_device(crew: type[Crew], tmp_path: Path) -> None:
    crew.scripts_of_all["lion at 100 Mi"] = [
        (0.0, Started()), (1.0, Row("lion, float32", "speed", 0.97, 0.95)), (1.0, Note("a note")), (1.0, Ended()),
    ]  # fmt: skip
    run("bench", "gpu", "--rule", "lion", "--json", str(tmp_path))
    page = results_pages(tmp_path)["gpu"]
    assert "Some GPU with 80 GiB and 50 MiB of L2, CUDA 13.0" in page
    assert "| lion, float32 | 0.97 | at least 0.95 | yes |" in page
    assert "- a note" in page


@pytest.mark.slow
def test_real_parts_in_real_processes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """On the processor, where everything is as on a GPU but its kernels and its clock."""
    require_interpreter()
    monkeypatch.setattr(gpu, "missing", lambda: None)
    monkeypatch.setattr(gpu_device, "missing", lambda: None)
    monkeypatch.setattr(gpu, "gpu_facts", lambda: DEVICE)
    monkeypatch.setattr(gpu, "Bench", lambda quick: Bench(quick, HostDevice()))
    monkeypatch.setattr(gpu, "workers", lambda: 2)
    monkeypatch.setattr(gpu.gpu_check, "usable_backends", lambda: (["triton"], []))
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    monkeypatch.setattr(gpu.gpu_sizes, "peer_parts", lambda only: [])  # torch's compiler takes its time
    file = tmp_path / "out.json"
    run("bench", "gpu", "--quick", "--rule", "lion", "--rule", "adamw", "--json", str(file))
    result = read_result(file)
    said = {row.what: row for row in result.rows}
    agree = said["triton, float64: rules that agree with the float64 reference"]
    assert (agree.value, agree.target) == (2, 2)
    assert said["lion, float32: step, of the copy bandwidth"].value > 0
    assert said["adamw, 10 tensors of 1000 elements: step, times as fast as torch's fused step"].target == 1.0
    assert said["adamw, 10 tensors of 1000: host time of a step"].value > 0
    assert said["adamw, one tensor of 65,553 elements: elements that differ from those of small tensors"].met
    # Graphs are the GPU's alone: what cannot run is said, and all else goes on.
    assert [note.split(":")[0] for note in result.remarks if ": failed:" in note] == ["adamw in a graph"]


def test_workers_are_few_where_memory_is(monkeypatch: pytest.MonkeyPatch) -> None:
    for cores, memory, count in ((32, 2**37, 16), (4, 2**37, 3), (16, 20 * 2**30, 3), (1, 2**30, 1), (8, None, 1)):
        monkeypatch.setattr(gpu, "cores", lambda n=cores: n)
        monkeypatch.setattr(gpu, "memory", lambda n=memory: n)
        assert gpu.workers() == count


def test_versions_are_found_under_the_names_of_wheels(monkeypatch: pytest.MonkeyPatch) -> None:
    from importlib import metadata

    from rulec.tools.compare import measure

    def version(name: str) -> str:
        if name != "cupy-cuda12x":
            raise metadata.PackageNotFoundError(name)
        return "14.2.0"

    monkeypatch.setattr(measure.importlib.metadata, "version", version)
    assert measure.version("cupy") == "14.2.0"
    assert measure.version("apex") is None


def tuned(moved: int, block: Sequence[int]) -> Row:
    return Row(f"{moved}", gpu_tune.MEASURE, 1.1, detail={"bytes": moved, "block": list(block)})


def test_blocks_are_saved_for_the_device(crew: type[Crew], monkeypatch: pytest.MonkeyPatch) -> None:
    saved: list[Any] = []
    monkeypatch.setattr(gpu_tune, "save", lambda device, table: saved.append((device, table)))
    for part, row in zip(gpu_tune.parts(), (tuned(28, (1024, 128)), tuned(6, (4096, 256))), strict=False):
        crew.scripts_of_all[part.name] = [(0.0, Started()), (1.0, row), (1.0, Ended())]
    assert gpu.measure(True, (), asked=Asked(tune=True)).name == "gpu_blocks"
    assert saved == []  # of a quick run nothing is kept
    result = gpu.measure(False, (), asked=Asked(tune=True))
    assert saved == [("Some GPU", {6: (4096, 256), 1 << 30: (1024, 128)})]
    assert "the triton backend has these blocks on Some GPU from now on" in result.notes
    assert gpu.parts((), Asked(tune=True)) == len(gpu_tune.parts())


def test_the_table_is_read_by_the_triton_backend(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from rulec_backends.triton import blocks as triton_blocks

    monkeypatch.setenv("RULEC_CACHE_DIR", str(tmp_path))
    triton_blocks.saved.cache_clear()
    try:
        gpu_tune.save("Some GPU", gpu_tune.table([tuned(28, (1024, 128)), tuned(6, (4096, 256))]))
        found = [triton_blocks.block_for(moved, "Some GPU") for moved in (2, 6, 7, 28, 1000)]
    finally:
        triton_blocks.saved.cache_clear()
    assert [(b.elements, b.threads) for b in found] == [(4096, 256)] * 2 + [(1024, 128)] * 3
    assert gpu_tune.table([]) == {}


def test_every_block_tried_is_one_that_kernels_may_have() -> None:
    from rulec_backends.triton import blocks as triton_blocks

    for block in gpu_tune.BLOCKS:
        triton_blocks.check(triton_blocks.Block(*block))
    assert len(set(map(gpu_tune._name, gpu_tune.BLOCKS))) == len(gpu_tune.BLOCKS)


def test_tune_is_of_the_gpu_alone() -> None:
    assert "--tune is of the measurement on a GPU alone" in error("bench", "rules", "--tune")


# Parts by themselves, and their results in one file

SPEED = Row("adamw, 1000 tensors of 1000", "host time of a step", 150.0, 200.0, "at most", "us", part="host")


def scripted(crew: type[Crew], piece: str, value: float) -> None:
    """Has a piece of work find a row of this value, and have a remark."""
    row = replace(SPEED, value=value, part="")
    crew.scripts_of_all[piece] = [(0.0, Started()), (1.0, row), (0.0, Note(f"{piece} said")), (0.0, Ended())]


def test_parts_fill_one_file(crew: type[Crew], tmp_path: Path) -> None:
    scripted(crew, "host time of adamw", 150.0)
    run("bench", "gpu", "--part", "host", "--part", "large", "--json", str(tmp_path))
    assert [name for _, _, name in crew.made[0].given] == [
        part.name for section in gpu.sections((), (), ["large", "host"]) for part in section.parts
    ]
    first = read_result(tmp_path / "gpu.json")
    assert (first.rows, list(first.parts)) == ([SPEED], ["large", "host"])
    scripted(crew, "muon on GPT-2 XL against its products", 1.0)
    run("bench", "gpu", "--part", "muon", "--json", str(tmp_path))
    second = read_result(tmp_path / "gpu.json")
    assert [(row.part, row.value) for row in second.rows] == [("host", 150.0), ("muon", 1.0)]
    assert list(second.parts) == ["large", "host", "muon"]
    assert second.parts["host"] == first.parts["host"]
    scripted(crew, "host time of adamw", 140.0)
    shown = run("bench", "gpu", "--part", "host", "--json", str(tmp_path))
    third = read_result(tmp_path / "gpu.json")
    assert [(row.part, row.value) for row in third.rows] == [("host", 140.0), ("muon", 1.0)]
    assert third.remarks.count("host time of adamw said") == 1
    assert "muon" not in shown  # what is printed is this run's


def test_an_unknown_part_is_refused_with_the_list_of_them(crew: type[Crew]) -> None:
    said = error("bench", "gpu", "--part", "muons")
    assert "rulec bench gpu has no part 'muons'; did you mean 'muon'?: its parts are correctness, large, fused" in said
    assert crew.made == []


def test_the_help_lists_the_parts() -> None:
    said = " ".join(invoke("bench", "--help").stdout.split())
    assert f"There are {', '.join(PARTS)}." in said


def test_a_part_is_of_the_gpu_alone() -> None:
    assert "--part is of the measurement on a GPU alone: rulec bench gpu --part NAME" in error(
        "bench", "rules", "--part", "muon"
    )
    assert "leave out --tune or --part" in error("bench", "gpu", "--tune", "--part", "muon")


def test_results_of_another_kind_are_not_mixed(crew: type[Crew], tmp_path: Path) -> None:
    file = tmp_path / "gpu.json"
    run("bench", "gpu", "--quick", "--part", "host", "--json", str(file))
    assert "has results of a quick run, and a full run has no place in it" in error("bench", "gpu", "--json", str(file))
    assert "has results of all rules, and this run is of lion" in error(
        "bench", "gpu", "--quick", "--rule", "lion", "--json", str(file)
    )
    file.write_text("[]")
    assert "is no benchmark result" in error("bench", "gpu", "--json", str(file))
    assert len(crew.made) == 1  # nothing was measured before it was refused
