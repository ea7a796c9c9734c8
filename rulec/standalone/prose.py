"""The files of `rulec build`, and the head of each: the rule, its mathematics and paper, and the licence of copies.

For Hugging Face's package `kernels` the files are a folder with a Triton kernel for every version of torch, and a card.
"""

from __future__ import annotations

import hashlib
import importlib
import json
import re
import textwrap
from collections.abc import Mapping, Sequence
from keyword import iskeyword
from typing import cast

from rulec.errors import RulecError
from rulec.language.evaluations import check_single
from rulec.language.rule import Rule
from rulec.language.source import did_you_mean
from rulec.runtime.storage.options import Storage

LICENCE = """\
MIT License

Copyright (c) 2026 The rulec authors

Permission is hereby granted, free of charge, to any person obtaining a copy of this software and associated
documentation files (the "Software"), to deal in the Software without restriction, including without
limitation the rights to use, copy, modify, merge, publish, distribute, sublicense, and/or sell copies of the
Software, and to permit persons to whom the Software is furnished to do so, subject to the following
conditions:

The above copyright notice and this permission notice shall be included in all copies or substantial portions
of the Software.

THE SOFTWARE IS PROVIDED "AS IS", WITHOUT WARRANTY OF ANY KIND, EXPRESS OR IMPLIED, INCLUDING BUT NOT LIMITED
TO THE WARRANTIES OF MERCHANTABILITY, FITNESS FOR A PARTICULAR PURPOSE AND NONINFRINGEMENT. IN NO EVENT SHALL
THE AUTHORS OR COPYRIGHT HOLDERS BE LIABLE FOR ANY CLAIM, DAMAGES OR OTHER LIABILITY, WHETHER IN AN ACTION OF
CONTRACT, TORT OR OTHERWISE, ARISING FROM, OUT OF OR IN CONNECTION WITH THE SOFTWARE OR THE USE OR OTHER
DEALINGS IN THE SOFTWARE.
"""


def title(rule: Rule) -> str:
    """The name and summary of a rule, on one line."""
    summary = " ".join(rule.summary.split())
    return f"{rule.name}. {summary}" if summary else f"{rule.name}."


def introduction(rule: Rule) -> list[str]:
    """The rule's name and summary, its paper, and its step in the rule language."""
    paper = rule.paper
    cited = [str(paper[key]) for key in ("authors", "title", "year", "url") if paper.get(key)]
    lines = [title(rule), *(["", f"Paper: {', '.join(cited)}."] if cited else [])]
    lines = [line for text in lines for line in (textwrap.wrap(text, 110, break_on_hyphens=False) or [""])]
    whole = rule.standalone()
    states = [f"    {key} = {text}" for key, text in _initial(whole)]
    before = ["", "Before the first step:", "", *states] if states else []
    step = whole.step_text().splitlines()
    return [*lines, *before, "", "Each step, for the gradient g of the parameter p:", "", *(f"    {x}" for x in step)]


def _initial(rule: Rule) -> list[tuple[str, str]]:
    from rulec.language.expr.text import expression_text

    initial = []
    for key, state in rule.state.items():
        kept = "" if state.per == "element" else f"  (one per {state.per})"
        where = "" if state.condition is None else f"  (if {expression_text(state.condition)})"
        initial.append((key, f"{expression_text(state.init)}{kept}{where}"))
    return initial


def vendored() -> list[str]:
    """The permission to copy a file, and the licence."""
    return [
        "Printed by rulec; it needs nothing of rulec, and may be copied into any project as long as this notice stays.",
        "", *LICENCE.splitlines(),
    ]  # fmt: skip


def file_name(rule: Rule, chosen: str) -> str:
    """The name of a rule's files and functions: `chosen`, or the rule's own; RulecError for no identifier."""
    if not chosen:
        return rule.called if rule.called.isidentifier() else rule.key
    if not re.fullmatch(r"[A-Za-z][A-Za-z0-9_]{0,39}", chosen) or iskeyword(chosen):
        raise RulecError(
            f"--name {chosen!r} is no name of a function: use letters, digits and _, at most 40, a letter first"
        )
    return chosen


def margin(lines: Sequence[str], mark: str) -> list[str]:
    """Lines as a comment, each behind the mark."""
    return [f"{mark} {line}".rstrip() for line in lines]


#: What has files of its own, and the module of a backend that writes them.
WRITTEN = {
    "c": "c.standalone", "triton": "triton.standalone", "cuda": "cupy.cuda_files", "cupy": "cupy.standalone",
    "jax": "jax.standalone", "numpy": "numpy.standalone",
}  # fmt: skip


def written(
    rule: Rule, backend: str, *, name: str = "", dtype: str = "float32", storage: Storage | None = None,
    bindings: Sequence[str] = (),
) -> Mapping[str, str]:  # fmt: skip
    """Name -> text of the files of a rule for a backend, always the same for the same rule.

    `name` is the name of files and functions, by default the rule's own; `storage` says how states and parameters lie
    in memory, by default in `dtype`. `bindings` are the languages of the modules beside a C file, by default
    ("fortran", "julia"). Raises RulecError for a backend without files of its own, and for bindings that it does not
    have; TensorError or HyperError for an unknown or unsafe storage; and CannotBuild, with the reason, for a rule
    without such a form.
    """
    if backend not in WRITTEN:
        known = ", ".join(WRITTEN)
        raise RulecError(f"rulec build writes nothing for {backend!r}{did_you_mean(backend, WRITTEN)}: choose {known}")
    if bindings and backend != "c":
        chosen = ",".join(bindings)
        raise RulecError(f"--bindings {chosen} calls functions of C: choose --backend c, not {backend}")
    check_single(rule, "what rulec build writes")
    writer = importlib.import_module(f"rulec_backends.{WRITTEN[backend]}")
    more = {"bindings": tuple(bindings)} if bindings else {}
    return cast(Mapping[str, str], writer.files(rule, file_name(rule, name), dtype, storage or Storage(), **more))


#: The folder of a variant without compiled code, in the repository of a kernel.
VARIANT = "build/torch-universal"

_CARD = """\
---
library_name: kernels
license: mit
tags: [optimizer, triton]
---

# {title}

{introduction}

```python
from pathlib import Path

from kernels import get_local_kernel   # after an upload: get_kernel("user/{name}", version=1)

kernel = get_local_kernel(Path("folder/of/this/file"))
optimizer = kernel.{class_name}(model.parameters(), lr=1e-3)
```
"""


def hub_files(rule: Rule, backend: str, files: Mapping[str, str]) -> dict[str, str]:
    """Path -> text of a kernel's repository, of the one file that `--backend triton` writes; RulecError for others.

    The identifier in the metadata is the kernel's name and a digest of its source, so that two versions of a kernel
    can be in one process.
    """
    if backend != "triton":
        raise RulecError(f"--layout hub is for Triton kernels: choose --backend triton, not {backend}")
    ((file, source),) = files.items()
    name = file.removesuffix(".py")
    metadata = {
        "id": f"{name}_{hashlib.sha256(source.encode()).hexdigest()[:12]}", "name": name.replace("_", "-"),
        "version": 1, "license": "MIT", "python-depends": [], "backend": {"type": "cuda"},
    }  # fmt: skip
    (class_name,) = re.findall(r"^class (\w+)\(torch\.optim\.Optimizer\)", source, re.MULTILINE)
    about = "\n".join(introduction(rule))
    card = _CARD.format(title=rule.name, introduction=about, name=metadata["name"], class_name=class_name)
    return {
        f"{VARIANT}/__init__.py": source,
        f"{VARIANT}/metadata.json": json.dumps(metadata, indent=2) + "\n",
        "README.md": card,
    }
