"""From a printed kernel to machine code and back: compiling with Numba, and loading an object file with LLVM alone.

The cache has plain object files, not pickles. Loading one needs llvmlite but not Numba, takes a few milliseconds, and
runs no other code than the kernel.
"""

from __future__ import annotations

import ctypes
import functools
import hashlib
import importlib.metadata
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from rulec import formats
from rulec.array_api import random
from rulec.backend import cache
from rulec.backend.cache import Source
from rulec.errors import InternalError

from ..common import constants
from ..common.processor import is_x86
from .target import small_target
from .words import INTERLEAVED

#: The entry of an object file: the kernel, or the handler for XLA.
ENTRY, FFI_ENTRY = "rulec_kernel", "rulec_ffi"

_NEWEST_LLVM = 22

#: The words of reductions: with one of them, a loop has numbers twice as wide as all others.
_DOUBLE_WORDS = {"accumulate", "lowest", "highest"}

#: The words of bfloat16 in memory. Twice as many lanes as float32 has fill a vector of it, and are packed into one.
_HALF_WORDS = {"load_bfloat16", "store_bfloat16"}

#: Options of LLVM, each with its default. With the first, a loop's lanes are counted by its narrowest numbers instead
#: of its widest: the sums of a kernel are float64, and all other values would have vectors of half the width.
_NARROWEST = {"vectorizer-maximize-bandwidth": ("true", "false")}

#: Four vectors side by side fill the 32 registers of AVX-512. The machine scheduler would order them one behind the
#: other again, to need fewer registers.
_INTERLEAVED, _IN_ORDER = {"force-vector-interleave": ("4", "0")}, {"enable-misched": ("false", "true")}


#: Intel's syntax of assembly, which names no register by a sign.
_INTEL = {"x86-asm-syntax": ("intel", "att")}


def architecture() -> str:
    """The processor and its features, in LLVM's names: machine code for one may not run on another."""
    import llvmlite.binding as llvm

    return f"{llvm.get_process_triple()} {llvm.get_host_cpu_name()} {llvm.get_host_cpu_features().flatten()}"


def compile_text(source: str, path: Path, entry: str = ENTRY) -> str:
    """Optimised LLVM assembly of a kernel printed to `path`.

    It has the C function `ENTRY(job)`, or, for a source with an entry for XLA, `FFI_ENTRY(frame)`.
    """
    from numba.core.errors import NumbaError

    with small_target() as small, suppress(Exception):  # whatever fails is tried with all of Numba
        if small:
            return _compiled(source, path, entry)
    try:
        return _compiled(source, path, entry)
    except NumbaError as error:
        raise InternalError(f"Numba does not compile the kernel that rulec printed to {path}: {error}") from error


def _compiled(source: str, path: Path, entry: str) -> str:
    from numba import int64

    # A name that no module has: Numba would look the kernel's globals up in that module.
    namespace: dict[str, Any] = {"__name__": f"_rulec_kernel_{path.stem}", "__file__": str(path)}
    exec(compile(source, str(path), "exec"), namespace)  # noqa: S102 - printed by rulec
    kernel = namespace["kernel" if entry == ENTRY else "enter"]
    with _options(_tuning(namespace)):
        kernel.compile((int64,) * (1 if entry == ENTRY else 3))
    (signature,) = kernel.signatures
    native = kernel.overloads[signature].fndesc.mangled_name
    return f"{kernel.inspect_llvm(signature)}\n{_entry(native) if entry == ENTRY else _ffi_entry(native)}"


def _tuning(words: Collection[str]) -> Mapping[str, tuple[str, str]]:
    """LLVM's options for the loops of a kernel with these words."""
    from . import format_words, noise_words

    halves = _HALF_WORDS.intersection(words) and not (format_words.NAMES | noise_words.NAMES).intersection(words)
    narrowest = _NARROWEST if halves or _DOUBLE_WORDS.intersection(words) else {}
    return {**narrowest, **(_INTERLEAVED if "interleaved" in words and _has_many_registers() else {})}


@functools.cache
def _has_many_registers() -> bool:
    """Whether the registers hold the vectors of interleaved loops."""
    import llvmlite.binding as llvm

    return bool(llvm.get_host_cpu_features().get("avx512f"))


@contextmanager
def _options(chosen: Mapping[str, tuple[str, str]]) -> Iterator[None]:
    """Inside, LLVM has the first value of each option, and afterwards the second, its default.

    Options are global to the process, so Numba's compilers wait; only Numba uses llvmlite's LLVM. An LLVM ends the
    process at an unknown option, so untested newer versions do not get them.
    """
    import llvmlite.binding as llvm
    from numba.core.compiler_lock import global_compiler_lock

    if not chosen or llvm.llvm_version_info[0] > _NEWEST_LLVM:
        yield
        return

    def choose(place: int) -> None:
        for name, values in chosen.items():
            llvm.set_option("rulec", f"-{name}={values[place]}")

    with global_compiler_lock:
        choose(0)
        try:
            yield
        finally:
            choose(1)


def _entry(native: str) -> str:
    """The C function of a kernel. Numba's function has two more parameters, both unused: a result and an exception."""
    return (
        f"define void @{ENTRY}(i64 %job) {{\n  %none = alloca ptr\n"
        f'  %status = call i32 @"{native}"(ptr %none, ptr null, i64 %job)\n  ret void\n}}\n'
    )


def _ffi_entry(native: str) -> str:
    """The handler for XLA: one function for a call frame, and one for a job on a helping thread. It returns success."""
    call = f'call i32 @"{native}"(ptr %none, ptr null, i64'
    return (
        f"define ptr @{FFI_ENTRY}(ptr %frame) {{\n  %none = alloca ptr\n  %at = ptrtoint ptr %frame to i64\n"
        f"  %status = {call} %at, i64 0, i64 ptrtoint (ptr @{FFI_ENTRY}_help to i64))\n  ret ptr null\n}}\n"
        f"define void @{FFI_ENTRY}_help(ptr %job) {{\n  %none = alloca ptr\n  %at = ptrtoint ptr %job to i64\n"
        f"  %status = {call} 0, i64 %at, i64 0)\n  ret void\n}}\n"
    )


def emit_object(text: str) -> bytes:
    """The object file of LLVM assembly for this processor."""
    import llvmlite.binding as llvm

    module = _checked(llvm, text)
    with _options(_order(text)):
        emitted: bytes = _target_machine(llvm).emit_object(module)
    return emitted


def emit_assembly(text: str, intel: bool = False) -> str:
    """The assembly of LLVM assembly for this processor, to read; in Intel's syntax, where the processor has one."""
    import llvmlite.binding as llvm

    module = _checked(llvm, text)
    with _options({**_order(text), **(_INTEL if intel and is_x86() else {})}):
        emitted: str = _target_machine(llvm).emit_assembly(module)
    return emitted


def _order(text: str) -> Mapping[str, tuple[str, str]]:
    """LLVM's options for machine code of LLVM assembly: functions with interleaved loops keep their order."""
    return _IN_ORDER if f'"{INTERLEAVED}"' in text and _has_many_registers() else {}


def _checked(llvm: Any, text: str) -> Any:
    """The parsed module. InternalError for a missing symbol, as LLVM would end the process."""
    module = llvm.parse_assembly(text)
    module.verify()
    for function in module.functions:
        known = not function.is_declaration or function.name.startswith("llvm.")
        if not known and not llvm.address_of_symbol(function.name):
            raise InternalError(f"the cpu kernel calls {function.name}, which this process does not have")
    return module


def _target_machine(llvm: Any) -> Any:
    llvm.initialize_native_target()
    llvm.initialize_native_asmprinter()
    target = llvm.Target.from_triple(llvm.get_process_triple())
    features = llvm.get_host_cpu_features().flatten()
    return target.create_target_machine(cpu=llvm.get_host_cpu_name(), features=features, opt=3, jit=True)


class ObjectCode:
    """The loaded object code of a kernel: `address` is of its C function, valid as long as this object lives.

    The function is `void (int64_t job)`, and `run(job)` calls it without Python's global lock; or it is XLA's handler.
    """

    def __init__(self, object_file: bytes, entry: str = ENTRY) -> None:
        import llvmlite.binding as llvm

        self._engine = llvm.create_mcjit_compiler(llvm.parse_assembly(""), _target_machine(llvm))
        self._engine.add_object_file(llvm.ObjectFileRef.from_data(object_file))
        self._engine.finalize_object()
        self.address: int = self._engine.get_function_address(entry)
        if not self.address:
            raise InternalError("the cpu kernel's object file has no entry")
        self.run = ctypes.CFUNCTYPE(None, ctypes.c_size_t)(self.address)
        # A late thread of a job may call this after all other references to the kernel are gone.
        self.run.engine = self._engine  # type: ignore[attr-defined]


@functools.lru_cache(maxsize=1024)
def loaded(name: str, source: str, entry: str = ENTRY) -> ObjectCode:
    """The loaded machine code of a source: from the cache where the file is whole, else compiled under its lock."""
    return cache.kernel(
        "cpu", cache.cache_key(source, *_facts()), "kernel.o", Source(f"{cache.file_name(name)}.py", source),
        lambda path: emit_object(compile_text(source, path, entry)), lambda content, _: ObjectCode(content, entry),
    )  # fmt: skip


#: The modules with the definitions of words and the calls of the compiler. Text of other modules is in the source.
_WORDS = (
    "words", "math", "lanes", "storage", "machine", "target", "ffi_words", "noise_words",
    "random", "format_words",
)  # fmt: skip


@functools.cache
def _facts() -> tuple[str, ...]:
    """The facts that machine code depends on beside the source: the compilers, definitions of words, the processor."""
    files = [
        *(Path(__file__).with_name(f"{name}.py") for name in _WORDS),
        Path(random.__file__),
        Path(constants.__file__),
    ]
    files += sorted(Path(formats.__file__).parent.glob("*.py"))
    words = hashlib.sha256(b"".join(file.read_bytes() for file in files))
    versions = [importlib.metadata.version(package) for package in ("numba", "llvmlite")]
    return (*versions, words.hexdigest(), architecture())
