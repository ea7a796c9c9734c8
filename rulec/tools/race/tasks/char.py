"""The task `char`: the next character in the sources of Python's standard library."""

from __future__ import annotations

import functools
import sysconfig
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from rulec.errors import RulecError
from rulec.tools.race.task import Stack
from rulec.tools.race.tasks.frameworks import back, cross_entropy, dense, dense_gradients, weights

Array = np.ndarray[Any, Any]

#: Modules of the text, from the standard library: some 400,000 characters.
MODULES = ("argparse", "ast", "difflib", "inspect", "pickle", "tarfile", "typing")

#: Printable ASCII, and one class for everything else: line feeds, mostly.
CLASSES = 96

#: The model: characters before the next one, numbers of a character, hidden units.
CONTEXT, EMBEDDING, HIDDEN = 8, 16, 64
BATCH, VALIDATION = 64, 2048


@functools.cache
def text() -> Array:
    """The text as classes from 0 to 95; RulecError where the sources are not installed."""
    folder = Path(sysconfig.get_paths()["stdlib"])
    try:
        characters = b"\n".join((folder / f"{name}.py").read_bytes() for name in MODULES)
    except OSError as error:
        raise RulecError(
            f"the task char reads the sources of Python's standard library, and {error.filename} cannot be read: use "
            f"the task digits"
        ) from None
    codes = np.frombuffer(characters, np.uint8).astype(np.int64) - 32
    return np.where((codes >= 0) & (codes < CLASSES - 1), codes, CLASSES - 1)


class Characters:
    """An embedding of the last 8 characters, one hidden layer (tanh), and a softmax over 96 classes.

    Batches are 64 places in the first nine tenths of the text, drawn anew for each step. The validation loss is of
    2,048 places in the last tenth.
    """

    name, steps = "char", 500
    tags = {  # noqa: RUF012
        "embedding": frozenset({"embedding"}),
        "hidden/weight": frozenset({"depth=0"}),
        "hidden/bias": frozenset({"depth=0"}),
        "head/weight": frozenset({"head"}),
    }

    def __init__(self, batch: int = BATCH) -> None:
        self._text, self._batch = text(), batch
        self._cut = len(self._text) * 9 // 10
        self._held_out = np.linspace(self._cut + CONTEXT, len(self._text) - 1, VALIDATION).astype(np.int64)

    def initial(self, seed: int) -> dict[str, Array]:
        """Normal weights, and biases of zero."""
        rng = np.random.default_rng(seed)
        return {
            "embedding": rng.normal(size=(CLASSES, EMBEDDING)).astype(np.float32),
            "hidden/weight": weights(rng, CONTEXT * EMBEDDING, HIDDEN, 1),
            "hidden/bias": np.zeros(HIDDEN, np.float32),
            "head/weight": weights(rng, HIDDEN, CLASSES, 1),
            "head/bias": np.zeros(CLASSES, np.float32),
        }

    def gradients(self, params: Stack, step: int, seeds: Sequence[int]) -> tuple[Array, Stack]:
        """The mean cross entropy of the next character in nats, and its gradients."""
        places = np.stack([self._places(seed, step) for seed in seeds])
        context = self._context(places)
        rows, hidden, logits = self._forward(params, context)
        losses, error = cross_entropy(logits, self._text[places])
        grads: Stack = {}
        grads["head/weight"], grads["head/bias"] = dense_gradients(hidden, error)
        error = back(error, params["head/weight"]) * (1 - hidden * hidden)
        grads["hidden/weight"], grads["hidden/bias"] = dense_gradients(rows, error)
        error = back(error, params["hidden/weight"])
        each = error.reshape(*error.shape[:-2], context.shape[-1], EMBEDDING)
        chosen = context[:, None, :] == np.arange(CLASSES)[:, None]
        grads["embedding"] = chosen.astype(error.dtype) @ each
        return losses, grads

    def measures(self, params: Stack, seeds: Sequence[int]) -> dict[str, Array]:
        """The mean cross entropy of the places held out, in nats."""
        logits = self._forward(params, self._context(self._held_out[None]))[-1]
        return {"validation loss": cross_entropy(logits, self._text[self._held_out][None])[0]}

    def _forward(self, params: Stack, context: Array) -> tuple[Array, Array, Array]:
        """The embedded rows, the hidden rows, the logits, for contexts of shape (seeds, places * CONTEXT)."""
        embedded = np.take_along_axis(params["embedding"], context[None, ..., None], axis=-2)
        rows = embedded.reshape(*embedded.shape[:-2], -1, CONTEXT * EMBEDDING)
        hidden = np.tanh(dense(rows, params["hidden/weight"], params["hidden/bias"]))
        return rows, hidden, dense(hidden, params["head/weight"], params["head/bias"])

    def _context(self, places: Array) -> Array:
        """The characters before places of shape (seeds, places), one place after the other."""
        return self._text[places[..., None] - np.arange(CONTEXT, 0, -1)].reshape(len(places), -1)

    def _places(self, seed: int, step: int) -> Array:
        return np.random.default_rng((seed, step)).integers(CONTEXT, self._cut, self._batch)
