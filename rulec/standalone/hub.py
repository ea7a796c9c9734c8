"""The folder that Hugging Face's package `kernels` loads: a Triton kernel for every version of torch, with its card."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Mapping

from rulec.errors import RulecError
from rulec.language.rule import Rule
from rulec.standalone.prose import introduction

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
