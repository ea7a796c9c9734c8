"""The kernels of a rule, in tabs."""

from __future__ import annotations

import textwrap

from rulec.errors import RulecError
from rulec.language.rule import Rule
from rulec.tools.display.kernels import LANGUAGES, TABS, kernel_source


def kernels(rule: Rule, text: str) -> str:
    """A tab for each backend with its kernel at float32, or with the sentence by which it refuses the rule."""
    return "\n\n".join(f'=== "{title}"\n\n{_indented(_tab(rule, text, backend))}' for backend, title in TABS.items())


def _tab(rule: Rule, text: str, backend: str) -> str:
    try:
        source = kernel_source(rule, backend)
    except RulecError as error:
        return f"{backend} refuses the rule: {error}"
    language = {"cuda": "cpp"}.get(LANGUAGES.get(backend, "python"), LANGUAGES.get(backend, "python"))
    command = f"rulec show {_quoted(text)} --backend {backend}"
    return f"`{command}` prints it.\n\n{fenced(source.strip(), language)}"


def _quoted(text: str) -> str:
    return f'"{text}"' if set(text) & set(" (>") else text


def fenced(text: str, language: str) -> str:
    """A block of code."""
    return f"```{language}\n{text}\n```"


def _indented(text: str) -> str:
    return textwrap.indent(text, "    ")
