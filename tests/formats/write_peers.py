"""Writes peers.npz: tables, codes, scales and decoded values of other libraries' small states.

    pip install torch==2.13.0 bitsandbytes==0.50.2 torchao==0.18.0 flashoptim==0.1.4 triton==3.7.1 scipy
    TRITON_INTERPRET=1 python -m tests.formats.write_peers

The libraries are in an environment of their own, and the tests read the file. Nothing here imports rulec. flashoptim
keeps its states by Triton's kernels, which TRITON_INTERPRET=1 runs on a CPU. The arrays are `values.SIGN`, and
PEER.STATE.WHAT with the `table`, `codes`, `scales` and `decoded` that the peer has for these values.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import numpy as np

FILE = Path(__file__).with_name("peers.npz")

#: Elements of each state: whole blocks, as torchao asks.
COUNT = 2048


def values(signed: bool) -> np.ndarray:
    """float32: blocks of magnitudes from 1e-3 to 1e4, for float16 scales, the later ones sparse; their squares."""
    rng = np.random.default_rng(7)
    x = rng.standard_normal((COUNT // 128, 128)) * np.exp(2 * rng.standard_normal((COUNT // 128, 128)))
    x *= (rng.random(x.shape) > np.linspace(0, 0.9, len(x))[:, None]) * 10.0 ** rng.uniform(-3, 1, (len(x), 1))
    return (x if signed else x * x).astype(np.float32).reshape(-1)


def bitsandbytes(signed: bool) -> dict[str, object]:
    from bitsandbytes.functional import create_dynamic_map, dequantize_blockwise, quantize_blockwise

    x, table = _tensor(signed), create_dynamic_map(signed=signed)
    codes, state = quantize_blockwise(x, code=table, blocksize=256)
    decoded = dequantize_blockwise(codes, state)
    return {"table": table, "codes": codes, "scales": state.absmax, "decoded": decoded}


def torchao(signed: bool, bits: int) -> dict[str, object]:
    from torchao.optim.subclass_4bit import OptimState4bit
    from torchao.optim.subclass_8bit import OptimState8bit

    kind, block = (OptimState8bit, 256) if bits == 8 else (OptimState4bit, 128)
    x, state = _tensor(signed), kind.zeros(COUNT, signed, block)
    state.copy_(x)
    return {
        "table": state.qmap, "codes": state.codes, "scales": state.scale, "decoded": state.dequantize(),
    }  # fmt: skip


def torchao_float8() -> dict[str, object]:
    import torch
    from torchao.optim.subclass_fp8 import OptimStateFp8

    x, state = _tensor(True), OptimStateFp8.zeros(COUNT, 256)
    state.copy_(x)
    codes = state.codes.view(torch.uint8)
    return {"codes": codes, "scales": state.scale, "decoded": state.dequantize()}


def flashoptim(signed: bool) -> dict[str, object]:
    import torch
    import triton.language as tl
    from flashoptim import optimizers

    # The first configuration of each kernel: on a CPU there is nothing to time them by.
    write, read = (getattr(optimizers, f"_triton_{way}_kernel").fn for way in ("quantize", "dequantize"))
    x, grid, largest = _tensor(signed), (COUNT // 1024,), 127.0 if signed else 255.0
    codes = torch.zeros(COUNT, dtype=torch.int8 if signed else torch.uint8)
    scales, decoded = torch.zeros(COUNT // 32, dtype=torch.float16), torch.zeros(COUNT)
    transforms = {"SQRT": not signed, "SOFTSIGN": signed, "GROUP_SIZE": 32, "BLOCK_SIZE_N": 1024}
    write[grid](x, codes, scales, COUNT, OUT_MAX=largest, OUT_DTYPE=tl.int8 if signed else tl.uint8, **transforms)
    read[grid](codes, scales, decoded, COUNT, IN_MAX=largest, **transforms)
    return {"codes": codes, "scales": scales, "decoded": decoded}


def flashoptim_weights(bits: int) -> dict[str, object]:
    """Parameters of bfloat16, parts of this many bits beside them, and the weights that both make."""
    import torch
    from flashoptim import optimizers

    kind, largest = (torch.int8, 127) if bits == 8 else (torch.int16, 32767)
    narrow, whole = _tensor(True).bfloat16(), torch.zeros(COUNT)
    narrow[:4] = torch.tensor([0.0, -1.0, 2.0**-126, 1e30])
    error = torch.from_numpy(np.random.default_rng(bits).integers(-largest, largest + 1, COUNT)).to(kind)
    options = {"BLOCK_SIZE": 1024, "NUM_MANTISSA_BITS": 7, "SIGNED_MAX_VAL": largest}
    optimizers._reconstruct_fp32_kernel[(COUNT // 1024,)](narrow, error, whole, COUNT, **options)
    return {"parameter": narrow.view(torch.int16), "error": error, "weight": whole}


def _tensor(signed: bool) -> Any:
    import torch

    return torch.from_numpy(values(signed))


def main() -> None:
    """Writes the file."""
    if os.environ.get("TRITON_INTERPRET") != "1":
        raise SystemExit("set TRITON_INTERPRET=1: flashoptim's kernels run on a CPU with it alone")
    states = {"torchao.float8_e4m3": torchao_float8()}
    for signed, side in ((True, "signed"), (False, "unsigned")):
        states[f"bitsandbytes.dynamic8-{side}"] = bitsandbytes(signed)
        states[f"torchao.dynamic8-{side}"] = torchao(signed, 8)
        states[f"torchao.dynamic4-{side}"] = torchao(signed, 4)
        states[f"flashoptim.softsign8-{side}"] = flashoptim(signed)
    states |= {f"flashoptim.weights{bits}": flashoptim_weights(bits) for bits in (8, 16)}
    arrays = {f"{name}.{what}": np.asarray(array) for name, state in states.items() for what, array in state.items()}
    arrays |= {f"values.{side}": values(side == "signed") for side in ("signed", "unsigned")}
    np.savez_compressed(FILE, **arrays)  # type: ignore[arg-type]
    print(f"{FILE.name}: {len(arrays)} arrays, {FILE.stat().st_size} bytes")


if __name__ == "__main__":
    main()
