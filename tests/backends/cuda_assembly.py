"""Machine code of CUDA C without a GPU: compiled by NVRTC, taken apart by the tools that come with Triton."""

from __future__ import annotations

import functools
import importlib.util
import re
import subprocess
import tempfile
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rulec_backends.cupy import OPTIONS

ARCHITECTURES = ("sm_80", "sm_90", "sm_100")

#: An instruction of SASS with its address, and the one that it may jump to.
_LINE = re.compile(r"/\*([0-9a-f]{4,})\*/\s+(?:@!?U?P\w+\s+)?([A-Z][\w.]*)(?:.*?(0x[0-9a-f]+))?")


class CompileError(Exception):
    """What NVRTC says of a text that it refuses."""


def missing() -> str:
    """Why nothing can be compiled here; empty where it can."""
    if importlib.util.find_spec("triton") is None or importlib.util.find_spec("cuda") is None:
        return "triton's tools or cuda-bindings are not installed"
    try:
        from cuda.bindings import nvrtc

        nvrtc.nvrtcVersion()
    except Exception as error:  # noqa: BLE001 - whatever the bindings find wrong with the library
        return f"NVRTC does not load: {error}"
    return ""


def compiled(source: str, architecture: str) -> bytes:
    """The machine code of a source text for an architecture, with the backend's own options."""
    from cuda.bindings import nvrtc

    program = _checked(nvrtc.nvrtcCreateProgram(source.encode(), b"kernel.cu", 0, [], []))
    options = [option.encode() for option in (f"--gpu-architecture={architecture}", *OPTIONS)]
    (result,) = nvrtc.nvrtcCompileProgram(program, len(options), options)
    log = b" " * _checked(nvrtc.nvrtcGetProgramLogSize(program))
    _checked(nvrtc.nvrtcGetProgramLog(program, log))
    if result != nvrtc.nvrtcResult.NVRTC_SUCCESS:
        raise CompileError(log.decode())
    code = b" " * _checked(nvrtc.nvrtcGetCUBINSize(program))
    _checked(nvrtc.nvrtcGetCUBIN(program, code))
    _checked(nvrtc.nvrtcDestroyProgram(program))
    return code


def _checked(result: Any) -> Any:
    status, *values = result
    if int(status) != 0:
        raise CompileError(str(status))
    return values[0] if values else None


@dataclass(frozen=True)
class Code:
    """A kernel's instructions, as (address, name, target of a jump), and the bytes that each thread has on its stack."""

    instructions: tuple[tuple[int, str, int], ...]
    stack: int

    def names(self) -> Counter[str]:
        """How often each instruction stands in it."""
        return Counter(name for _, name, _ in self.instructions)

    def wide_accesses(self) -> tuple[int, int]:
        """The bytes of global memory that one pass of the loop over packs loads and stores by 128 bits.

        They stand between two jumps, or between labels of the same loop: there is one such loop in a kernel.
        """
        found = self.names()
        loads = sum(count for name, count in found.items() if name.startswith("LDG") and ".128" in name)
        stores = sum(count for name, count in found.items() if name.startswith("STG") and ".128" in name)
        return 16 * loads, 16 * stores

    def local(self) -> list[str]:
        """The instructions that touch local memory, and those that do not know which memory they touch."""
        return sorted(n for n in self.names() if re.match(r"(LDL|STL|LD|ST|ATOM|ATOMG|RED)(\.|$)", n))


@functools.cache
def _tools() -> Path:
    import triton

    return Path(triton.__file__).parent / "backends" / "nvidia" / "bin"


def kernels(source: str, architecture: str) -> dict[str, Code]:
    """The kernels of a source text, by name."""
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(compiled(source, architecture))
        file.flush()
        text = _run("-sass", file.name)
        usage = _run("-res-usage", file.name)
    stacks = dict(re.findall(r"Function (\w+):\s+REG:\d+ STACK:(\d+)", usage))
    found = {}
    for part in text.split("Function : ")[1:]:
        name, rest = part.split("\n", 1)
        lines = (_LINE.search(line) for line in rest.splitlines())
        code = tuple((int(m[1], 16), m[2], int(m[3] or "0", 16)) for m in lines if m)
        found[name.strip()] = Code(code, int(stacks[name.strip()]))
    return found


def _run(flag: str, file: str) -> str:
    done = subprocess.run([str(_tools() / "cuobjdump"), flag, file], capture_output=True, text=True, check=True)
    return done.stdout
