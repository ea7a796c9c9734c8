"""Machine code of CUDA C without a GPU: compiled by NVRTC, taken apart by the tools that come with Triton."""

from __future__ import annotations

import functools
import importlib.util
import re
import subprocess
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rulec_backends.cupy.nvrtc import OPTIONS
from tests.ledger import KERNEL

ROOT = Path(__file__).parent.parent.parent

ARCHITECTURES = ("sm_80", "sm_90", "sm_100")

#: The files that say what a kernel should move, that read its machine code, and the compiler's options.
CHECKERS = (
    Path(__file__), *(ROOT / name for name in (*KERNEL, "backends/cupy/plan.py", "backends/cupy/nvrtc.py"))
)  # fmt: skip

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
    log = _written_by(nvrtc.nvrtcGetProgramLog, program, _checked(nvrtc.nvrtcGetProgramLogSize(program)))
    if result != nvrtc.nvrtcResult.NVRTC_SUCCESS:
        raise CompileError(log.decode())
    code = _written_by(nvrtc.nvrtcGetCUBIN, program, _checked(nvrtc.nvrtcGetCUBINSize(program)))
    _checked(nvrtc.nvrtcDestroyProgram(program))
    return code


def _written_by(function: Any, program: Any, size: int) -> bytes:
    """What the library writes, which it does into the bytes it is given.

    Python has one object for each string of a single byte: an empty log, which is one zero, would change it for all.
    """
    found = bytes(size + 1)
    _checked(function(program, found))
    return found[:size]


def _checked(result: Any) -> Any:
    status, *values = result
    if int(status) != 0:
        raise CompileError(str(status))
    return values[0] if values else None


@dataclass(frozen=True)
class Code:
    """A kernel's instructions, as (address, name, target of a jump), and the bytes of each thread's stack."""

    instructions: tuple[tuple[int, str, int], ...]
    stack: int

    def wide_accesses(self) -> set[tuple[int, int]]:
        """The bytes that one pass of a loop over packs loads and stores by 128 bits, for each such loop.

        Compilers make two of one whose condition does not change: then they move the same.
        """
        loops = [(target, at) for at, name, target in self.instructions if name.startswith("BRA") and target < at]
        found = {loop: self._moved(*loop) for loop in loops}
        moving = [loop for loop, moved in found.items() if any(moved)]
        return {found[a] for a in moving if not any(a[0] <= b[0] and b[1] <= a[1] and a != b for b in moving)}

    def _moved(self, first: int, last: int) -> tuple[int, int]:
        wide = [n for at, n, _ in self.instructions if first <= at <= last and re.match(r"(LDG|STG)\.E\.128", n)]
        loads = sum(n.startswith("LDG") for n in wide)
        return 16 * loads, 16 * (len(wide) - loads)

    def local(self) -> list[str]:
        """The instructions that touch local memory, memory of a kind they do not know, or memory that others change."""
        names = {name for _, name, _ in self.instructions}
        return sorted(n for n in names if re.match(r"(LDL|STL|LD|ST|ATOM|ATOMG|RED)(\.|$)", n))


@functools.cache
def _tools() -> Path:
    import triton

    return Path(triton.__file__).parent / "backends" / "nvidia" / "bin"


def kernels(source: str, architecture: str, names: Sequence[str]) -> dict[str, Code]:
    """The kernels of these names."""
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(compiled(source, architecture))
        file.flush()
        text = _run("-sass", "-fun", ",".join(names), file.name)
        usage = _run("-res-usage", file.name)
    stacks = dict(re.findall(r"Function (\w+):\s+REG:\d+ STACK:(\d+)", usage))
    found = {}
    for part in text.split("Function : ")[1:]:
        name, rest = part.split("\n", 1)
        lines = (_LINE.search(line) for line in rest.splitlines())
        code = tuple((int(m[1], 16), m[2], int(m[3] or "0", 16)) for m in lines if m)
        found[name.strip()] = Code(code, int(stacks[name.strip()]))
    return found


def _run(*arguments: str) -> str:
    command = [str(_tools() / "cuobjdump"), *arguments]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout
