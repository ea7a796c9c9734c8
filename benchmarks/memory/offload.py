"""What training keeps on the device and on the host, with an offload and without, as a table of fake steps.

    python -m benchmarks.memory.offload [--models 1B 8B] [--rules adamw lion adafactor] [--tokens 2048]

Layers are recomputed, weights are bfloat16 with a master copy. Bytes are of one step after two others.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from functools import partial

from rulec.memory.live import Account, amount
from rulec.memory.shape import Shape
from rulec.torch.memory_profile.meter import Training, Way, account, tokens
from rulec.torch.memory_profile.models import Transformer

#: Llama 3.2 of 1B and Llama 3.1 of 8B.
MODELS = {
    "1B": Shape("llama", 128256, 2048, 8192, 16, 32, 8, 64, 131072, tied=True),
    "8B": Shape("llama", 128256, 4096, 14336, 32, 32, 8, 128, 131072, tied=False),
}

#: What lies on the host, and how weights are updated.
ROWS: tuple[tuple[str | None, Way], ...] = (
    (None, "deferred"), (None, "eager"), ("step", "deferred"), ("step", "eager"),
)  # fmt: skip

HEADINGS = ("Llama", "rule", "offload", "way", "weights", "gradients", "state", "buffers", "temporaries",
            "device", "device with activations", "host", "down", "up")  # fmt: skip


def training(model: str, rule: str, offload: str | None, length: int) -> Training:
    """A training of a Llama in bfloat16 with master weights."""
    make = partial(Transformer, MODELS[model], True)
    return Training(make, tokens(1, length), rule, dtype="bfloat16", weights="master", offload=offload)


def cells(peaks: Account) -> Iterator[str]:
    """The figures of a row in GiB, where activations are not counted but in one column."""
    kinds = ("weights", "gradients", "state", "transfers", "temporaries")
    counts = [peaks.beside[kind] for kind in kinds]
    counts += [peaks.without_activations, peaks.total, peaks.host_total, peaks.down, peaks.up]
    return (amount(count, 2**30) for count in counts)


def main() -> None:
    """Prints the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", choices=MODELS, default=[*MODELS])
    parser.add_argument("--rules", nargs="+", default=["adamw", "lion", "adafactor"])
    parser.add_argument("--tokens", type=int, default=2048)
    arguments = parser.parse_args()
    print(f"| {' | '.join(HEADINGS)} |\n|{' --- |' * 4}{' ---: |' * (len(HEADINGS) - 4)}")
    for model in arguments.models:
        for rule in arguments.rules:
            for offload, way in ROWS:
                peaks = account(training(model, rule, offload, arguments.tokens), way)
                print("|", " | ".join((model, rule, offload or "", way, *cells(peaks))), "|", flush=True)


if __name__ == "__main__":
    main()
