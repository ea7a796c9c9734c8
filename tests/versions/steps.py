"""One small program for each extra, run as `python steps.py EXTRA` by an interpreter outside the checkout.

Each adapter takes three steps of AdamW beside the reference. Fails with an AssertionError or ImportError.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from importlib.util import find_spec
from pathlib import Path

import numpy as np

import rulec
import rulec.array

LR, STEPS = 0.1, 3


def gradients() -> Iterator[np.ndarray]:
    """A gradient for each step, of shape (3, 5) in float32."""
    for step in range(STEPS):
        yield np.cos(np.arange(15, dtype=np.float32).reshape(3, 5) + step)


def start() -> np.ndarray:
    """Parameters of shape (3, 5) in float32."""
    return np.linspace(-1.0, 1.0, 15, dtype=np.float32).reshape(3, 5)


def assert_stepped(parameters: object) -> None:
    """Compares parameters after the steps with the reference's, in units of their last digit."""
    expected = start()
    optimizer = rulec.array.Optimizer("adamw", [expected], backend="numpy", lr=LR)
    for gradient in gradients():
        optimizer.step([gradient])
    np.testing.assert_array_max_ulp(np.asarray(parameters), expected, maxulp=8)


def command(*words: str) -> str:
    """What `rulec` prints; AssertionError with its message where it fails."""
    program = Path(sys.executable).parent / "rulec"
    done = subprocess.run([program, *words], stdin=subprocess.DEVNULL, capture_output=True, text=True, check=False)
    assert done.returncode == 0, f"rulec {' '.join(words)}: {done.stderr}"
    return done.stdout


def core() -> None:
    """The help of every command, and a rule measured beside 50 digits."""
    from typer.main import get_command
    from typer.testing import CliRunner

    from rulec.cli.app import app

    for name in set(get_command(app).commands) - {"bench"}:  # which is a checkout's
        shown = CliRunner().invoke(app, [name, "--help"])
        assert shown.exit_code == 0, f"rulec {name} --help: {shown.exception!r}"
    assert "is a valid rule" in command("check", "adamw")


def torch(backend: str = "cpu") -> None:
    """A class of torch's name, and the class of sharding that the manual uses."""
    import torch
    from torch.distributed.fsdp import fully_shard

    import rulec.torch

    assert callable(fully_shard)
    parameter = torch.nn.Parameter(torch.from_numpy(start()))
    optimizer = rulec.torch.AdamW([parameter], lr=LR, backend=backend)
    for gradient in gradients():
        parameter.grad = torch.from_numpy(gradient)
        optimizer.step()
    assert_stepped(parameter.detach())


def triton() -> None:
    """The steps of torch, by kernels in Triton's interpreter."""
    torch("triton")


def jax() -> None:
    """A transformation, beside optax's own on the same tree."""
    import jax
    import optax

    import rulec.jax
    import rulec.jax.contrib
    import rulec.jax.eager
    import rulec.jax.es

    parameters = {"w": jax.numpy.asarray(start())}
    transform = optax.chain(optax.identity(), rulec.jax.transform("adamw", lr=LR))
    state = transform.init(parameters)
    for gradient in gradients():
        updates, state = transform.update({"w": jax.numpy.asarray(gradient)}, state, parameters)
        parameters = optax.apply_updates(parameters, updates)
    assert_stepped(parameters["w"])


def mlx() -> None:
    """An optimizer of MLX."""
    import mlx.core as mx

    import rulec.mlx

    parameters = {"w": mx.array(start())}
    optimizer = rulec.mlx.optimizer("adamw")(learning_rate=LR)
    for gradient in gradients():
        parameters = optimizer.apply_gradients({"w": mx.array(gradient)}, parameters)
    assert_stepped(parameters["w"])


def keras() -> None:
    """An optimizer of Keras, on torch where it is installed, and else on JAX."""
    os.environ["KERAS_BACKEND"] = "torch" if find_spec("torch") else "jax"
    import keras

    import rulec.keras

    variable = keras.Variable(start())
    optimizer = rulec.keras.optimizer("adamw", learning_rate=LR)
    for gradient in gradients():
        optimizer.apply([keras.ops.convert_to_tensor(gradient)], [variable])
    assert_stepped(keras.ops.convert_to_numpy(variable.value))
    model = keras.Sequential([keras.Input((5,)), keras.layers.Dense(4)])
    model.compile(rulec.keras.optimizer("muon", learning_rate=LR, model=model), loss="mse")
    model.fit(start(), start()[:, :4], epochs=2, verbose=0)


def cupy() -> None:
    """The kernels' source; a step needs a GPU."""
    assert "__global__" in command("show", "adamw", "--backend", "cupy")


def race() -> None:
    """A small race, with its page of plots."""
    with tempfile.TemporaryDirectory() as folder:
        page = Path(folder) / "race.html"
        words = ("--rates", "2", "--seeds", "2", "--steps", "5", "--html", str(page))
        assert "adamw" in command("race", "adamw", "sgd", *words)
        assert "plotly" in page.read_text().lower()


def demo() -> None:
    """A rule from its text to a picture of its losses."""
    with tempfile.TemporaryDirectory() as folder:
        command("demo", "--epochs", "1", "--out", folder)
        assert list(Path(folder).glob("*.png"))


def lsp() -> None:
    """The language server, without a connection."""
    from rulec.tools.language_server.server import make_server

    assert make_server().name == "rulec"


def play() -> None:
    """The page of the playground, over HTTP."""
    from urllib.request import urlopen

    program = Path(sys.executable).parent / "rulec"
    words = [program, "play", "adamw", "--no-browser", "--port", "0"]
    with subprocess.Popen(words, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, text=True) as server:
        try:
            assert server.stdout is not None
            line = next(line for line in server.stdout if "http://" in line)
            address = line[line.index("http://") :].split()[0]
            assert "rulec" in urlopen(address, timeout=30).read().decode()
        finally:
            server.terminate()


def sympy() -> None:
    """The direction of a rule, as an expression of sympy."""
    assert rulec.load("adam").sympy()


PROGRAMS: dict[str, Callable[[], None]] = {
    each.__name__: each for each in (core, torch, triton, jax, mlx, keras, cupy, race, demo, lsp, play, sympy)
}

if __name__ == "__main__":
    PROGRAMS[sys.argv[1]]()
    print(f"{sys.argv[1]} works")
