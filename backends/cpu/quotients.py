"""Quotients by a number that divides many elements: a multiplication and two fused multiply-adds, rounded as IEEE's.

The bounds are those of `common.quotients`. Vectors with a number outside of them divide, by a branch that is rarely
taken. LLVM makes no vectors of a loop with a branch, so a loop first calls functions without text, one for a number and
one for each width of vectors; their texts take the place of the calls after LLVM has made the vectors.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Callable
from typing import Any

from ..common.constants import DOUBLE, SINGLE, Format
from ..common.quotients import LEAST_DIVISOR, MOST_DIVISOR, bounds, window
from .lanes import Real, Unit, where
from .target import is_small

#: The widths of vectors, in numbers.
_LANES = (2, 4, 8, 16, 32, 64)

_NAME = "rulec_quotient"

#: The beginnings of LLVM's names of AMD's processors, which divide quickly.
_QUICK_DIVISION = ("znver", "bdver", "btver", "amdfam")

#: The facts by which LLVM may move a call.
_PURE = ("nounwind", "willreturn", "memory(none)")

#: The list that keeps functions that nothing calls yet.
_KEPT = "llvm.compiler.used"

_DEFINITION = """
declare <real> @llvm.fma.<suffix>(<real>, <real>, <real>)
declare <real> @llvm.fabs.<suffix>(<real>)
define linkonce_odr <real> @<name>(<real> %x, <real> %divisor, <real> %inverse) alwaysinline {
  %near = fmul <real> %x, %inverse
  %opposite = fneg <real> %x
  %over = call <real> @llvm.fma.<suffix>(<real> %near, <real> %divisor, <real> %opposite)
  %rest = fneg <real> %over
  %exact = call <real> @llvm.fma.<suffix>(<real> %rest, <real> %inverse, <real> %near)
  %bits = bitcast <real> %near to <whole>
  %shifted = add <whole> %bits, <added>
  %bit = and <whole> %shifted, <tested>
  %inside = icmp ne <whole> %bit, zeroinitializer
  %all_inside = bitcast <truth> %inside to <mask>
  %any_outside = icmp ne <mask> %all_inside, -1
  br i1 %any_outside, label %rare, label %end, !prof !0
rare:
  %size = call <real> @llvm.fabs.<suffix>(<real> %near)
  %is_small = fcmp ult <real> %size, <least>
  %is_large = fcmp uge <real> %size, <most>
  %is_outside = or <truth> %is_small, %is_large
  %is_number = fcmp une <real> %x, zeroinitializer
  %is_unsafe = fcmp uno <real> %inverse, %inverse
  %is_other = or <truth> %is_number, %is_unsafe
  %is_left = and <truth> %is_outside, %is_other
  %all_left = bitcast <truth> %is_left to <mask>
  %any_left = icmp ne <mask> %all_left, 0
  br i1 %any_left, label %divided, label %end, !prof !0
divided:
  %quotient = fdiv <real> %x, %divisor
  br label %end
end:
  %result = phi <real> [%exact, %0], [%exact, %rare], [%quotient, %divided]
  ret <real> %result
}
"""


def reciprocal(divisor: Real) -> Real:
    """1/divisor where the divisor's quotients are products; else NaN, by which it divides."""
    form = divisor.unit.form
    is_safe = (divisor >= LEAST_DIVISOR[form]) & (divisor <= MOST_DIVISOR[form])
    return where(is_safe, divisor.unit.real(1.0) / divisor, float("nan"))


@functools.cache
def is_fused() -> bool:
    """Whether the processor has fused multiply-adds. Without them one is a call, slower than a division."""
    import llvmlite.binding as llvm

    return not llvm.get_process_triple().startswith(("x86", "i686")) or bool(llvm.get_host_cpu_features().get("fma"))


@functools.cache
def is_quicker() -> bool:
    """Whether a product with its test is taken for a division: not on AMD's processors, where no gain was measured."""
    import llvmlite.binding as llvm

    return is_fused() and not llvm.get_host_cpu_name().startswith(_QUICK_DIVISION)


def quotient(x: Real, divisor: Real, inverse: Real) -> Real:
    """x/divisor, with `inverse` from `reciprocal(divisor)`."""
    if not (is_small() and is_quicker()):
        return x / divisor
    builder, form = x.unit.builder, x.unit.form
    call = builder.call(_declared(x.unit), [x.value, divisor.value, inverse.value])
    variants = ",".join(f"_ZGV_LLVM_N{n}vvv_{_name(form)}({_name(form, n)})" for n in _LANES)
    # LLVM's texts know more attributes than llvmlite does.
    set.update(call.attributes, [*_PURE, f'"vector-function-abi-variant"="{variants}"'])
    return Real(x.unit, call)


def _name(form: Format, lanes: int = 1) -> str:
    return f"{_NAME}_{form.bits}" + f"_{lanes}" * (lanes > 1)


def _declared(unit: Unit) -> Any:
    """The function for one number, declared in the module of a loop with those for vectors."""
    from llvmlite import ir

    module, form = unit.builder.module, unit.form
    known = module.globals.get(_name(form))
    if known is not None:
        return known

    def function(lanes: int) -> Any:
        kind = ir.VectorType(unit.real_type, lanes) if lanes > 1 else unit.real_type
        declared = ir.Function(module, ir.FunctionType(kind, [kind] * 3), _name(form, lanes))
        set.update(declared.attributes, _PURE)
        return declared

    scalar, *vectors = map(function, (1, *_LANES))
    _keep(module, vectors)
    return scalar


def _keep(module: Any, functions: list[Any]) -> None:
    """Has LLVM keep functions that are declared, though nothing calls them yet."""
    from llvmlite import ir

    byte = ir.IntType(8).as_pointer()
    kept = module.globals.get(_KEPT)
    if kept is None:
        kept = ir.GlobalVariable(module, ir.ArrayType(byte, 0), _KEPT)
        kept.linkage, kept.section = "appending", "llvm.metadata"
        kept.initializer = ir.Constant(kept.value_type, [])
    listed = [*kept.initializer.constant, *(f.bitcast(byte) for f in functions)]
    kept.value_type = ir.ArrayType(byte, len(listed))
    kept.initializer = ir.Constant(kept.value_type, listed)


def inlined(text: str, target_machine: Callable[[Any], Any]) -> str:
    """Optimised LLVM assembly with the texts of quotients in place of their calls."""
    forms = [form for form in (SINGLE, DOUBLE) if f"@{_name(form)}(" in text]
    if not forms:
        return text
    import llvmlite.binding as llvm

    module = llvm.parse_assembly(re.sub(rf"^@{re.escape(_KEPT)} = .*\n", "", text, flags=re.MULTILINE))
    module.link_in(llvm.parse_assembly(_definitions(forms)))
    passes = llvm.create_new_module_pass_manager()
    passes.add_always_inliner_pass()
    passes.add_global_dead_code_eliminate_pass()
    passes.run(module, llvm.create_pass_builder(target_machine(llvm), llvm.create_pipeline_tuning_options(3)))
    return str(module)


def _definitions(forms: list[Format]) -> str:
    """The functions of these formats, as LLVM assembly."""
    texts = [_definition(form, lanes) for form in forms for lanes in (1, *_LANES)]
    return "".join([*texts, '!0 = !{!"branch_weights", i32 1, i32 2000}\n'])


def _definition(form: Format, lanes: int) -> str:
    added, tested = window(form)
    real, suffix = ("float", "f32") if form is SINGLE else ("double", "f64")

    def vector(kind: str) -> str:
        return f"<{lanes} x {kind}>" if lanes > 1 else kind

    def number(value: float, kind: str = real) -> str:
        text = f"0x{DOUBLE.pattern(value):016x}" if kind == real else str(value)
        return f"splat ({kind} {text})" if lanes > 1 else text

    whole = f"i{form.bits}"
    least, most = bounds(form)
    words = {
        "name": _name(form, lanes), "real": vector(real), "whole": vector(whole), "truth": vector("i1"),
        "mask": f"i{lanes}", "suffix": f"v{lanes}{suffix}" if lanes > 1 else suffix,
        "added": number(added, whole), "tested": number(tested, whole), "least": number(least), "most": number(most),
    }  # fmt: skip
    return re.sub(r"<(\w+)>", lambda word: words[word[1]], _DEFINITION)
