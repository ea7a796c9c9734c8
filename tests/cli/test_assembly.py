"""`rulec show --assembly`: the machine code of a kernel, without what is for the assembler alone."""

from __future__ import annotations

import re

import pytest

from rulec.tools.display.assembly import plain_name, readable
from tests.cli.running import error, run, run_json

#: As LLVM and GCC write it, with what both add for linkers, debuggers and readers of the compiler.
TEXT = """\
\t.file\t"<string>"
\t.section\t.rodata.cst4,"aM",@progbits,4
.LCPI0_0:
\t.long\t0x3f800000                      # float 1
.LCPI0_1:
\t.long\t0x40000000
\t.section\t.ltext,"axl",@progbits
\t.globl\t_ZN15_rulec_kernel_x6kernelB2v1B58cEx
\t.p2align\t4
\t.type\t_ZN15_rulec_kernel_x6kernelB2v1B58cEx,@function
_ZN15_rulec_kernel_x6kernelB2v1B58cEx:
\t.cfi_startproc
# %bb.0:
\tlock\t\tincq\t64(%rdx)
.LBB0_1:                                # =>This Inner Loop Header: Depth=1
\tvmulss\t.LCPI0_0(%rip), %xmm0, %xmm1
\tsubs\tw0, w0, #16
#APP
\tjne\t.LBB0_1
.LBB0_2:
\tretq
.Lfunc_end0:
\t.size\tkernel, .Lfunc_end0-kernel
\t.section\t.note.GNU-stack,"",@progbits
"""

READABLE = """\
kernel:
    lock incq    64(%rdx)
.LBB0_1:
    vmulss       .LCPI0_0(%rip), %xmm0, %xmm1
    subs         w0, w0, #16
    jne          .LBB0_1
    retq

.LCPI0_0:
    .long        0x3f800000
"""


def test_an_assembly_text_is_its_functions_and_their_constants() -> None:
    assert readable(TEXT) == READABLE
    assert (plain_name("step"), plain_name("_ZN3abc")) == ("step", "abc")


def check_code(text: str) -> None:
    """The lines of functions: names, labels, instructions and constants; one of them returns."""
    lines = text.splitlines()
    assert [line for line in lines if not re.fullmatch(r"|[.\w$]+:|    \.?[a-z]\S*( .*)?", line)] == []
    assert not re.search(r"\.(cfi|loc|globl|type|p2align|section)", text)
    assert re.search(r"^    retq?$|^    ret\s", text, re.MULTILINE)


def test_the_kernel_in_c_as_machine_code() -> None:
    shown = run_json("show", "sgd", "--backend", "c", "--assembly")
    assert (shown["kind"], shown["backend"]) == ("assembly", "c")
    check_code(shown["text"])
    assert re.search(r"^step", shown["text"], re.MULTILINE)


@pytest.mark.slow
@pytest.mark.parametrize("options", [(), ("--dtype", "bfloat16"), ("--state-dtype", "int8")])
def test_the_kernel_of_the_processor_as_machine_code(options: tuple[str, ...]) -> None:
    shown = run("show", "adam", "--assembly", *options)
    check_code(shown)
    assert shown.startswith("kernel:\n")
    assert "_ZN" not in shown


def test_what_shows_no_machine_code_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = ("show", "sgd", "--assembly", "--backend")
    assert error(*asked, "triton") == "error: triton shows no machine code: choose --backend c or cpu\n"
    monkeypatch.setenv("CC", "no-such-compiler")
    assert "the C compiler CC=no-such-compiler is not on the path" in error(*asked, "c")
