"""`rulec build`."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.backends.triton_process import require_interpreter
from tests.cli.running import error, run, run_json


def test_the_files_are_written_and_named(tmp_path: Path) -> None:
    folder = tmp_path / "new" / "folder"
    names = ["adamw.c", "adamw.h", "adamw.f90", "rulec_float32.f90", "adamw.jl"]
    assert run("build", "adamw", "-o", str(folder)).splitlines() == [str(folder / name) for name in names]
    assert sorted(x.name for x in folder.iterdir()) == sorted(names)
    assert run_json("build", "adamw", "-o", str(folder)) == {
        "rule": "AdamW", "backend": "c", "files": [str(folder / name) for name in names],
    }  # fmt: skip


def test_modules_for_chosen_languages(tmp_path: Path) -> None:
    printed = run("build", "adafactor", "-b", "c", "--bindings", "rust, fortran", "-o", str(tmp_path))
    names = [*(f"adafactor.{x}" for x in ("c", "h", "rs", "f90")), "rulec_float32.f90"]
    assert printed.splitlines() == [str(tmp_path / name) for name in names]
    assert "pub struct State {" in (tmp_path / "adafactor.rs").read_text()


@pytest.mark.parametrize("backend", ["triton", "jax", "numpy"])
def test_one_python_file(backend: str, tmp_path: Path) -> None:
    printed = run("build", "lion", "-b", backend, "-o", str(tmp_path))
    assert printed == f"{tmp_path / 'lion.py'}\n"
    compile((tmp_path / "lion.py").read_text(), "lion.py", "exec")


def test_a_composition_has_a_sane_name(tmp_path: Path) -> None:
    run("build", "clip_by_norm >> adamw", "-o", str(tmp_path))
    written = sorted(x.name for x in tmp_path.iterdir())
    assert written == [*(f"clip_by_norm_then_adamw.{x}" for x in ("c", "f90", "h", "jl")), "rulec_float32.f90"]
    run("build", "clip_by_norm >> adamw", "-o", str(tmp_path), "--name", "clipped")
    assert "int clipped_step(" in (tmp_path / "clipped.h").read_text()


def test_dtypes(tmp_path: Path) -> None:
    run("build", "momentum", "-o", str(tmp_path), "--dtype", "bfloat16", "--state-dtype", "float32")
    header, source = (tmp_path / "momentum.h").read_text(), (tmp_path / "momentum.c").read_text()
    assert "uint16_t *param" in header
    assert "float *restrict m_at" in source


def test_states_in_codes_and_weights_in_parts(tmp_path: Path) -> None:
    words = ("--dtype", "bfloat16", "--state-dtype", "v=dynamic8,m=int8/64", "--weights", "split")
    run("build", "adamw", "-o", str(tmp_path), *words)
    source = (tmp_path / "adamw.c").read_text()
    assert "decode_int8_64_signed(m" in source
    assert "encode_dynamic8_256_unsigned_floor(v" in source
    assert "int16_t *restrict param__low_at" in source


def test_writing_again_gives_the_same_bytes(tmp_path: Path) -> None:
    run("build", "adafactor", "-o", str(tmp_path))
    before = {x.name: x.read_bytes() for x in tmp_path.iterdir()}
    run("build", "adafactor", "-o", str(tmp_path))
    assert {x.name: x.read_bytes() for x in tmp_path.iterdir()} == before


def test_a_file_of_ones_own_is_written_over_with_force_alone(tmp_path: Path) -> None:
    (tmp_path / "adamw.h").write_text("mine")
    told = error("build", "adamw", "-o", str(tmp_path))
    assert "adamw.h is there already and is another file" in told
    assert "--force" in told
    assert [x.name for x in tmp_path.iterdir()] == ["adamw.h"], "nothing is written before"
    assert (tmp_path / "adamw.h").read_text() == "mine"
    run("build", "adamw", "-o", str(tmp_path), "--force")
    assert "int adamw_step(" in (tmp_path / "adamw.h").read_text()
    (tmp_path / "lion.py").mkdir()
    assert "lion.py is there already" in error("build", "lion", "-b", "numpy", "-o", str(tmp_path))


def test_the_layout_of_the_hub(tmp_path: Path) -> None:
    words = ("-b", "triton", "--layout", "hub", "--name", "clipped_adamw")
    run("build", "clip_by_value >> adamw", *words, "-o", str(tmp_path))
    variant = tmp_path / "build" / "torch-universal"
    metadata = json.loads((variant / "metadata.json").read_text())
    assert (metadata["name"], metadata["version"]) == ("clipped-adamw", 1)
    name = re.search(r"^optimizer = kernel\.(\w+)\(", (tmp_path / "README.md").read_text(), re.MULTILINE)
    assert name
    assert f"class {name[1]}(" in (variant / "__init__.py").read_text()
    at = ("-o", str(tmp_path / "nothing"))
    assert "--layout hub is for Triton kernels" in error("build", "adamw", "--layout", "hub", *at)
    assert "there is no --layout 'hug'" in error("build", "adamw", "--layout", "hug", *at)


_LOADED = """
import sys
from pathlib import Path
site, folder = sys.argv[1:]
sys.path.append(site)
import torch
from kernels import get_local_kernel

kernel = get_local_kernel(Path(folder))
weights = [torch.linspace(-1, 1, 40, requires_grad=True) for _ in range(2)]
optimizers = [kernel.AdamW([weights[0]], lr=0.1), torch.optim.AdamW([weights[1]], lr=0.1)]
for step in range(3):
    for weight, optimizer in zip(weights, optimizers):
        weight.grad = torch.cos(torch.arange(40.0) + step)
        optimizer.step()
torch.testing.assert_close(*weights)
print("equal")
"""


@pytest.mark.slow
def test_hugging_faces_kernels_loads_the_layout(tmp_path: Path) -> None:
    """As released: pip installs the package beside the environment, and the environment has its dependencies."""
    require_interpreter()
    site, folder = tmp_path / "site", tmp_path / "kernel"
    pip = [sys.executable, "-m", "pip", "install", "-qq", "--no-deps", "--target", str(site), "kernels==0.17.2"]
    subprocess.run(pip, check=True)
    run("build", "adamw", "-b", "triton", "--layout", "hub", "-o", str(folder))
    program = [sys.executable, "-c", _LOADED, str(site), str(folder)]
    environment = dict(os.environ, TRITON_INTERPRET="1", HF_HUB_OFFLINE="1")
    done = subprocess.run(program, env=environment, capture_output=True, text=True, check=False)
    assert done.stdout == "equal\n", done.stderr


def test_mistakes(tmp_path: Path) -> None:
    at = ("-o", str(tmp_path / "nothing"))
    assert "writes nothing for 'metal'" in error("build", "adamw", "--backend", "metal", *at)
    assert "there is no rule 'adamww'; did you mean 'adamw'?" in error("build", "adamww", *at)
    assert "there is no dtype 'float31'" in error("build", "adamw", "--dtype", "float31", *at)
    assert "there is no state dtype 'half'" in error("build", "adamw", "--state-dtype", "half", *at)
    assert "give each state once" in error("build", "adamw", "--state-dtype", "v=int8,v=int8", *at)
    assert "no state 'w'" in error("build", "adamw", "--state-dtype", "w=int8", *at)
    assert "weights='split' is for parameters of bfloat16" in error("build", "adamw", "--weights", "split", *at)
    assert "it draws random numbers" in error("build", "noise >> sgd", "--name", "noisy", *at)
    assert "--name 'a b' is no name of a function" in error("build", "adamw", "--name", "a b", *at)
    told = error("build", "adamw", "-b", "jax", "--bindings", "rust", *at)
    assert "--bindings rust calls functions of C: choose --backend c, not jax" in told
    told = error("build", "adamw", "--name", "Rulec_float32", *at)
    assert "--name Rulec_float32 is the name of the Fortran module that all rules share: choose another" in told
    assert "choose among fortran, julia, rust" in error("build", "adamw", "--bindings", "go", *at)
    assert "cannot write Prodigy as C: it takes a sum over all tensors" in error("build", "prodigy", *at)
    assert not (tmp_path / "nothing").exists()
    file = tmp_path / "file"
    file.write_text("kept")
    assert f"{file / 'below'} cannot be written to: Not a directory" in error("build", "sgd", "-o", str(file / "below"))
    assert file.read_text() == "kept"
