"""Steps on a mesh over two processes of jax.distributed: the numbers of one process."""

from __future__ import annotations

import json
import socket
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.mark.slow
def test_adamw_and_muon_over_two_processes_are_those_of_one() -> None:
    """Each of two processes has two devices; the steps are JAX's own calls, over gloo."""
    port = free_port()
    commands = [[sys.executable, "-m", "tests.jax.processes", str(number), str(port)] for number in range(2)]
    both = [subprocess.Popen(c, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, cwd=ROOT) for c in commands]
    done = [process.communicate() for process in both]
    for process, (out, err) in zip(both, done, strict=True):
        assert process.returncode == 0, err[-3000:]
        found = json.loads(out.splitlines()[-1])
        assert found.pop("devices") == [2, 4]
        assert {*found} == {"adamw on Auto", "muon on Auto", "adamw on Explicit", "muon on Explicit"}
        for what, report in found.items():
            assert report["distance"] <= (1e-6 if what.startswith("muon") else 0), what
            assert report["rows"] == [4, 8], what  # of 16 and of 32 rows, on four devices


def free_port() -> int:
    with socket.socket() as listening:
        listening.bind(("127.0.0.1", 0))
        return int(listening.getsockname()[1])
