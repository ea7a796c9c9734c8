"""CUDA C compiled by NVRTC for the GPU at hand, kept in the kernel cache and loaded there.

CuPy's own RawModule tells NVRTC to take subnormal numbers for zero (`-ftz=true`, last of all options), which no other
backend does: here NVRTC is given `OPTIONS` alone.
"""

from __future__ import annotations

from typing import Any

from rulec.backend import cache

#: What NVRTC is told: nothing is contracted, so that results are those of the other backends.
OPTIONS = ("--fmad=false", "-std=c++17")


def loaded(source: str) -> Any:
    """The kernels of a source text on the current device: CuPy's module, with `get_function(name)`.

    Raises what CuPy raises where NVRTC or the driver fails.
    """
    import cupy

    facts = (cupy.cuda.Device().compute_capability, str(cupy.cuda.nvrtc.getVersion()), *OPTIONS)
    kept = cache.entry("cupy", cache.cache_key(source, *facts)) / "kernels.cubin"
    found = cupy.cuda.function.Module()
    try:
        found.load(kept.read_bytes())
        return found
    except Exception:  # noqa: BLE001 - not there, or damaged: whatever the driver says of it
        image, _ = cupy.cuda.compiler.compile_using_nvrtc(source, OPTIONS)
        found.load(image)
    cache.write_atomically(kept, image)
    return found
