"""The machine code of a rule's kernel, to read: the bodies of its functions, without what is for the assembler.

Kept are the functions' names, instructions, the labels that an instruction names, and the constants there. Left out
are other directives, comments, and labels that nothing names, as on Compiler Explorer.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence

from rulec.backend import registry
from rulec.backend.capabilities import capabilities_of
from rulec.errors import RulecError
from rulec.language.rule import Rule
from rulec.language.statistics import Watch
from rulec.runtime.storage.options import Storage
from rulec.tools.display.kernels import PLAIN, kernel_source

#: Backend -> the title of its tab, for the backends that show machine code.
MACHINES = {"c": "C", "cpu": "CPU"}

#: A comment behind an instruction or on a line of its own, of x86 and of ARM, whose numbers may begin with #.
_COMMENT = re.compile(r"\s*(?:##? |//|@ ).*$|^#.*$")
_LABEL = re.compile(r"([.\w$]+):")
_SECTION = re.compile(r"\.(?:section\s+)?([\w.,]+)")
_CONSTANT = re.compile(r"\.(?:byte|2byte|4byte|8byte|short|value|hword|word|long|int|quad|xword|zero|float|double)\s")


def kernel_assembly(
    rule: Rule, backend: str, dtype: str = "float32", storage: Storage = PLAIN, watch: Watch = ()
) -> str:
    """The machine code of a rule's kernel for this processor.

    RulecError where the backend refuses the rule or shows no machine code, BackendUnavailable without its compiler.
    """
    assembly = capabilities_of(registry.get(backend)).assembly
    if assembly is None:
        raise RulecError(f"{backend} shows no machine code: choose --backend {' or '.join(MACHINES)}")
    source = kernel_source(rule, backend, dtype, storage, watch)
    return readable(assembly(rule.key, source))


def readable(text: str) -> str:
    """The functions of an assembly text, each with its instructions and the labels that it names, and the constants."""
    lines, constants = [*_instructions(text.splitlines())], _constants(text.splitlines())
    code = "\n".join(line for line in lines if not _LABEL.fullmatch(line))
    named = {*re.findall(r"[.\w$]+", code)}
    functions = {*re.findall(r"^\s*\.globl\s+(\S+)|^\s*\.type\s+(\S+?),\s*[@%]function", text, re.MULTILINE)}
    starts = {name for pair in functions for name in pair}
    kept = []
    for line in lines:
        label = _LABEL.fullmatch(line)
        if label and label[1] in starts:
            kept += ["", line]
        elif not label or label[1] in named:
            kept.append(line)
    for label in sorted(named & constants.keys() - starts):
        kept += ["", f"{label}:", *constants[label]]
    whole = "\n".join(kept).strip()
    for name in sorted(starts, key=len, reverse=True):
        whole = whole.replace(name, plain_name(name)) if name else whole
    return f"{whole}\n"


def _instructions(lines: Sequence[str]) -> Iterator[str]:
    """The labels and the indented instructions of the sections with code."""
    in_code = True
    for line in lines:
        text = _COMMENT.sub("", line).strip()
        if text.startswith((".section", ".text", ".data", ".bss")):
            section = _SECTION.match(text)
            in_code = section is not None and "text" in section[1].split(",")[-1 if "__TEXT" in text else 0]
        elif not text or not in_code:
            continue
        elif _LABEL.fullmatch(text):
            yield text
        elif not text.startswith("."):
            *words, operands = filter(None, text.split("\t"))
            yield f"    {' '.join(words):<12} {operands}" if words else f"    {operands}"


def _constants(lines: Sequence[str]) -> dict[str, list[str]]:
    """The numbers behind each label, as directives."""
    constants: dict[str, list[str]] = {}
    label = ""
    for text in (_COMMENT.sub("", line).strip() for line in lines):
        if match := _LABEL.fullmatch(text):
            label = match[1]
        elif label and _CONSTANT.match(text):
            directive, _, numbers = text.partition("\t")
            constants.setdefault(label, []).append(f"    {directive:<12} {numbers}".rstrip())
        elif text and not text.startswith("."):
            label = ""
    return constants


def plain_name(symbol: str) -> str:
    """The last name of a symbol that Numba mangled, `_ZN7_module6kernelB2v1...`; any other symbol as it is."""
    rest, name = symbol.removeprefix("_ZN"), symbol
    while rest != symbol and (length := re.match(r"\d+", rest)):
        end = length.end() + int(length[0])
        name, rest = rest[length.end() : end], rest[end:]
    return name
