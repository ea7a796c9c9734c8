"""Every script of examples/trainers runs with the trainer's own package, and its loss falls."""

from __future__ import annotations

import importlib.util
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
FOLDER = ROOT / "examples" / "trainers"

#: Script -> the modules that it needs.
SCRIPTS = {
    "accelerate_fsdp2": "accelerate", "accelerate_loop": "accelerate", "fastai_learner": "fastai",
    "hf_trainer": "transformers", "hydra_config": "hydra", "ignite_engine": "ignite", "lightning_cli": "jsonargparse",
    "lightning_module": "lightning", "peft_loraplus": "peft", "schedulefree_modes": "torch", "skorch_net": "skorch",
    "timm_vit": "timm", "torchtitan_container": "torchtitan", "trl_sft": "trl",
}  # fmt: skip


def test_every_script_is_known_and_short() -> None:
    scripts = {path.stem: len(path.read_text().splitlines()) for path in FOLDER.glob("*.py") if path.stem != "__init__"}
    assert scripts.keys() == SCRIPTS.keys()
    assert {name: lines for name, lines in scripts.items() if lines > 25} == {}


@pytest.mark.slow
@pytest.mark.parametrize("script", SCRIPTS)
def test_a_script_trains(script: str, tmp_path: Path) -> None:
    if importlib.util.find_spec(SCRIPTS[script]) is None:
        pytest.skip(f"{SCRIPTS[script]} is not installed: make trainers")
    program = ["-m", "tests.trainers.launch", str(FOLDER / f"{script}.py")]
    if script == "accelerate_fsdp2":
        program = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", *program]
    environment = {"PYTHONPATH": str(ROOT), "HF_HUB_OFFLINE": "1", "ACCELERATE_USE_CPU": "true", "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, *program], cwd=tmp_path, env={**os.environ, **environment},
        stdin=subprocess.DEVNULL, capture_output=True, text=True, check=False, timeout=300,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    printed = re.findall(r"^loss (\S+) (\S+)$", done.stdout, re.M)
    assert len(printed) == 1, done.stdout[-3000:]
    first, last = map(float, printed[0])
    assert last < 0.96 * first
