"""`rulec build`: a rule as source files for projects that do not depend on rulec."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated

import typer

from rulec.cli.arguments import (
    AllowUrlFlag,
    DtypeOption,
    JsonFlag,
    RuleArgument,
    StateDtypeOption,
    WeightsOption,
    check_dtype,
    check_state_dtypes,
    find_rule,
)
from rulec.cli.console import print_json
from rulec.errors import RulecError


def build(
    rule: RuleArgument,
    backend: Annotated[
        str,
        typer.Option("--backend", "-b", help="What to write: c (see --bindings), triton, cuda, cupy, jax or numpy."),
    ] = "c",
    out: Annotated[Path, typer.Option("--out", "-o", metavar="DIR", help="The folder to write to.")] = Path("."),
    name: Annotated[str, typer.Option(help="What files and functions are called; the rule's name by default.")] = "",
    dtype: DtypeOption = "float32",
    state_dtype: StateDtypeOption = "",
    weights: WeightsOption = "",
    bindings: Annotated[
        str,
        typer.Option(
            metavar="WORD", help="Languages of modules that call the C file: fortran,julia by default, or rust."
        ),
    ] = "",
    layout: Annotated[
        str, typer.Option(metavar="WORD", help="hub: the folder that Hugging Face's kernels loads, for triton.")
    ] = "",
    force: Annotated[bool, typer.Option("--force", help="Write over files that are there and differ.")] = False,
    allow_url: AllowUrlFlag = False,
    json: JsonFlag = False,
) -> None:
    """Write a rule as source files that need nothing of rulec, to copy into a project.

    C99 with a header and modules for Fortran, Julia or Rust, CUDA C, or one Python file: an optimizer for torch (with
    Triton kernels), an optax-shaped one for JAX, or a plain class for CuPy or NumPy. Files may be copied under the MIT
    licence.
    """
    from rulec.runtime.storage.options import Storage
    from rulec.standalone.prose import hub_files, written

    loaded = find_rule(rule, allow_url)
    storage = Storage(check_state_dtypes(state_dtype), weights)
    languages = [word.strip() for word in bindings.split(",")] if bindings else []
    files = written(loaded, backend, name=name, dtype=check_dtype(dtype), storage=storage, bindings=languages)
    if layout not in ("", "hub"):
        raise RulecError(f"there is no --layout {layout!r}: use hub, or leave it out")
    files = hub_files(loaded, backend, files) if layout else files
    if not force:
        _check_free(out, files)
    paths = [_write(out, file, text) for file, text in files.items()]
    if json:
        print_json({"rule": loaded.name, "backend": backend, "files": [str(path) for path in paths]})
    else:
        for path in paths:
            print(path)


def _check_free(folder: Path, files: Mapping[str, str]) -> None:
    """RulecError where a file is there with another text, before any is written."""
    for file, text in files.items():
        path = folder / file
        try:
            same = not os.path.exists(path) or path.read_bytes() == text.encode()
        except OSError:
            same = False
        if not same:
            raise RulecError(
                f"{path} is there already and is another file: choose another folder with -o, or write over it with "
                f"--force"
            )


def _write(folder: Path, file: str, text: str) -> Path:
    """The path of a file now written; RulecError, in one sentence, where that cannot be."""
    try:
        path = folder / file
        path.parent.mkdir(parents=True, exist_ok=True)
        partial = path.with_name(f".{path.name}.{os.getpid()}")
        partial.write_text(text, encoding="utf-8", newline="\n")
        partial.replace(path)
    except OSError as error:
        raise RulecError(
            f"{folder} cannot be written to: {error.strerror or error}; choose another folder with -o"
        ) from None
    return path
