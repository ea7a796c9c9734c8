"""A rule as one Python file for PyTorch: an optimizer with one launch of a Triton kernel for each stage of a step."""

from __future__ import annotations

import re
import textwrap
from collections.abc import Sequence

from rulec.backend.printer import bare
from rulec.compiler.ir import PLAIN
from rulec.compiler.layout import scale_name
from rulec.language.expr.text import expression_text

from ...common.python_standalone import Parts, call_lines, filled, number, words_in
from ..format_words import format_functions, words
from ..segments import LANES as RUN
from ..segments import SEGMENTS, WARPS
from ..words import words_used
from . import host
from .batch import BatchText
from .optimizer import CLASS
from .saved import foreign_parts
from .states import WORDS, FormsFile


class TritonFile(FormsFile):
    """The text of the file."""

    def text(self) -> str:
        """The whole file."""
        if "step" in self.states:
            self.cannot("it has a state called step, as torch calls the count of steps")
        batches = [BatchText(self, form) for form in self.forms]
        kernels = self._kernels(batches)
        classes = [text.lines for text in batches]
        self.viewed = any(f.viewed for f in self.forms)
        parts = self.parts() | self._class()
        parts["summary"] = "\n    ".join(textwrap.wrap(str(parts["summary"]), 110))
        class_lines = filled(CLASS, parts)
        host_parts = self._host([*classes, class_lines])
        tables = self._words()
        lines = [line for part in (*classes, *host_parts, class_lines) for line in part]
        floats = self.floats([*tables, *lines])
        math = ["import math", ""] * (any("math." in line for line in lines) and not floats)
        math = (
            ["import math", *floats, ""]
            if floats and any("math." in line for line in lines)
            else math or [*floats, *[""] * len(floats)]
        )
        imports = [*math, "import torch", "import triton", "import triton.language as tl"]
        return self.file(
            imports, words_in([line for part in (*classes, class_lines) for line in part], WORDS),
            *(part.strip("\n").split("\n") for part in (*kernels, *tables)), *host_parts, *classes, class_lines,
        )  # fmt: skip

    # Kernels

    def _kernels(self, batches: Sequence[BatchText]) -> list[str]:
        """The functions of kernels, each after the functions that it calls."""
        kernels = []
        for text in batches:
            for k in filter(None, text.kernels):
                named = re.compile(r"\bstage_(\d+)(?=(_blocks|_tiles|_chunk)?\()")
                kernels += [named.sub(rf"{text.form.prefix}stage_\1", "\n".join(x)) for x in k.source.functions()]
        self._launches = [k.launch_lines() for text in batches for k in text.kernels if k]
        self._first_kernel = next(k.name for text in batches for k in text.kernels if k)
        self.reduces = any(k.stage.reduces for text in batches for k in text.kernels if k)
        self.joins_runs = any("self.within(" in line for text in batches for line in text.lines)
        whole = "\n".join([*kernels, *["finish("] * self.reduces, *[SEGMENTS] * self.joins_runs])
        codes = format_functions([form for _, form in self.layout.formats], "\n".join(kernels))
        return [*words_used(whole), *codes, *kernels, *[SEGMENTS] * self.joins_runs]

    # The host's parts

    def _host(self, classes: Sequence[Sequence[str]]) -> list[list[str]]:
        """The parts of the host that are the same for all rules, as far as this one needs them."""
        body = "\n".join(line for part in classes for line in part)
        stacks = "self.stacks(" in body
        fields = [f'"{x}"' for x in self.fields.values()]
        names = call_lines("HYPER = ", fields + [""] * (len(fields) == 1), "")
        runs = f"SEGMENTS = [Launch(segments, KIND=k, LANES={RUN}, num_warps={WARPS}) for k in range(3)]"
        launches = [*(line for lines in self._launches for line in lines), *[runs] * self.joins_runs]
        parts = [filled(host.LAUNCH, {"kernel": self._first_kernel}), [*names, "", *launches]]
        texts = [host.FLAT] * ("blocks(" in body) + [host.SHAPED] * ("tiles(" in body)
        texts += [host.REDUCING_STAGE if self.reduces else host.PLAIN_STAGE, host.UPLOADS]
        parts += [text.rstrip("\n").split("\n") for text in texts]
        if "matrices(" in body or self.viewed:
            flat = self.family.rule.view.get("flatten") == "rest"
            ways: Parts = {"flat": "y" * flat, "last": "y" * (not flat), "turns": "y" * self.turns}
            parts.append(filled(host.MATRICES, ways))
        texts = [host.KEPT] * ("kept(" in body) + [host.STACKS] * stacks + [host.TOGETHER] * self.yields
        parts += [text.rstrip("\n").split("\n") for text in texts]
        parts.append(filled(host.BATCH, {"dtype": self.dtype, "seeded": "y" * self.seeded}))
        if self.viewed:
            vectors = host.VECTORS + ("\n" + host.WITHIN) * self.joins_runs + ("\n" + host.STACKED) * stacks
            parts.append(filled(vectors, {"stacks": "y" * stacks}))
        return parts

    def _words(self) -> list[str]:
        """The tables of codes, by state, as a text."""
        rows = []
        for name, form in self.layout.formats:
            numbers, margin = ", ".join(number(float(x)) for x in words(form)) or "0.0", " " * 8
            lines = textwrap.wrap(numbers, 110, initial_indent=margin, subsequent_indent=margin)
            rows += [f'    "{name}": [', *lines, "    ],"]
        return ["\n".join(["#: The tables of codes, by state.", "WORDS = {", *rows, "}"])] * bool(rows)

    # The class

    def _class(self) -> Parts:
        named = [*self.fields.values(), *["seed"] * self.seeded]
        moves = [f for f in self.forms if f.word]
        shared = dict.fromkeys(f'"{b.name}"' for f in self.steps for b in f.numbers if "n" not in b.axes.letters)
        model = dict.fromkeys(f'"{b.name}"' for f in self.steps for b in f.numbers if not b.axes.letters)
        others = [f'"{name}": torch.{dtype}' for name, dtype in self._dtypes().items() if dtype != self.dtype]
        matrices = any(f.has_matrix_function for f in self.forms)
        parts: Parts = {
            "defaults": call_lines("defaults = dict", [f"{x}={x}" for x in named], ""), "others": ", ".join(others),
            "shared": ", ".join(shared) + "," * (len(shared) == 1),
            "model": ", ".join(model) + "," * (len(model) == 1), "kinds": self._kinds(),
            "derived": "y" * bool(self.derived),
            "derivations": self._derivations(), "moves": "y" * bool(moves), "to": moves[0].class_name if moves else "",
            "back": moves[-1].class_name if moves else "", "applies": self._applies(), "together": "y" * self.yields,
            "apart": "y" * (not self.yields), "steps": "y" * matrices, "plain": "y" * (not matrices),
        }  # fmt: skip
        foreign = foreign_parts(self.rule if self._is_plain else None, self.fields)
        return parts | foreign | {"derives": "y" * (bool(foreign["reads"]) and bool(self.derived))}

    def _derivations(self) -> list[str]:
        lines = []
        for key, text in self.derived.items():
            lines += [f'if group["{self.fields[key]}"] is None:', f'    group["{self.fields[key]}"] = {text}']
        return lines

    @property
    def _is_plain(self) -> bool:
        """Whether states and parameters are stored as torch stores them."""
        return not self.layout.formats and self.program.memory == PLAIN

    def _dtypes(self) -> dict[str, str]:
        """The dtypes of states by their names, with those of codes and scales."""
        dtypes: dict[str, str] = {}
        for form in self.steps:
            dtypes |= {b.name: form.layout.dtype(b.name) for b in (*form.arrays, *form.vectors)}
            dtypes |= {b.name: "float64" for b in form.numbers}
        for name, coded in self.layout.formats:
            dtypes |= {name: coded.code_dtype, scale_name(name): "float32"}
        return dtypes

    def _applies(self) -> list[str]:
        whole, lines = self.family, []
        if whole.applies is not None:
            text = self.condition(whole.applies)
            lines = [
                f"if not ({text}):",
                f'    one = f"{self.rule.name} is for tensors with {expression_text(whole.applies)}"',
                '    raise ValueError(f"{one}, and one has the shape {tuple(p.shape)}: give it to another optimizer")',
            ]
        return self.viewing(lines) + lines

    def _kinds(self) -> list[str]:
        """The statements that choose the class of a parameter."""
        lines: list[str] = []
        terms = [self.condition(c) for c in self.family.conditions]
        for form in self.steps[:-1]:
            ways = [
                " and ".join(f"({t})" if truth else f"not ({t})" for t, truth in zip(terms, truths, strict=True))
                for truths in form.case.truths
            ]
            test = " or ".join(f"({w})" for w in ways if w) or "True"
            if self.turns and len([f for f in self.steps if f.case is form.case]) > 1:
                turned = "matrices(p.shape)[3]"
                test = f"({test}) and {turned if form.version.turned else f'not {turned}'}"
            lines += [f"if {bare(test)}:", f"    return {form.class_name}"]
        lines.append(f"return {self.steps[-1].class_name}")
        return self.viewing(lines) + lines
