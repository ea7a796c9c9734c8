"""CUDA C compiled by NVRTC for the current GPU, kept in the kernel cache, and loaded.

CuPy's RawModule makes NVRTC replace subnormal numbers with zero (`-ftz=true`, last of all options), as no other backend
does. So `loaded` calls NVRTC with `OPTIONS` alone.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from rulec.backend import cache
from rulec.backend.cache import Source

#: NVRTC's options: without contraction, the results are equal to other backends'.
OPTIONS = ("--fmad=false", "-std=c++17")


def loaded(source: str) -> Any:
    """The kernels of a source text on the current device: a module of CuPy, with `get_function(name)`.

    CuPy's own exception where NVRTC or the driver fails.
    """
    import cupy

    made: list[bytes] = []

    def compiled(_: Path) -> bytes:
        image, _ = cupy.cuda.compiler.compile_using_nvrtc(source, OPTIONS)
        made.append(bytes(image))
        return made[0]

    facts = (cupy.cuda.Device().compute_capability, str(cupy.cuda.nvrtc.getVersion()), *OPTIONS)
    key, text = cache.cache_key(source, *facts), Source("kernels.cu", source)
    found = cupy.cuda.function.Module()
    try:
        cache.kernel("cupy", key, "kernels.cubin", text, compiled, lambda image, _: found.load(image))
    except Exception:
        if made:
            raise
        found.load(compiled(Path(text.name)))  # the driver refused the cached file, with an exception of any kind
    return found
