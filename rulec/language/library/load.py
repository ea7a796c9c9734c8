"""Where rules are found: the library that ships with rulec, installed packages, and files of the user's own."""

from __future__ import annotations

import functools
import os
import re
from collections import Counter
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from rulec.errors import RuleError
from rulec.language.compose.bind import with_maximum, without_term
from rulec.language.expr.names import is_rule_text, short
from rulec.language.hyper import AT_START
from rulec.language.library.folder import library_folder
from rulec.language.library.modules import installed, installed_rule, is_python_name, python_rule
from rulec.language.library.remote import MAX_BYTES, is_address, read_address, text_at
from rulec.language.rule import Rule
from rulec.language.source import did_you_mean, of_kind

#: Deepest nesting of files, each naming the next as a component.
MAX_NESTING = 20

#: Type of a value that is no name of a rule -> the error for it. Modules with such types add them here.
NOT_LOADED: dict[type, str] = {}

#: Longest path of a rule file, in characters.
MAX_PATH = 1000


@functools.cache
def rules(wrappers: bool = True) -> list[str]:
    """The names of the rules of the library and of installed packages, sorted; transforms begin with `transforms/`.

    With `wrappers=False`, wrappers are left out: they need a rule to put around, and do not run by themselves. So are
    rules of packages that cannot be loaded.
    """
    names = sorted({*_files(), *installed()})
    if wrappers:
        return names
    loaded = _installed_rules()
    return [name for name in names if name in _files() or name in loaded if not (loaded.get(name) or load(name)).wraps]


def library_names() -> list[str]:
    """The names of the rules that ship with rulec, sorted; transforms begin with `transforms/`."""
    return [*_files()]


@functools.cache
def _installed_rules() -> dict[str, Rule]:
    """Name -> rule, for the loadable rules of installed packages that no rule of the library hides."""
    rules_of: dict[str, Rule] = {}
    for name in installed():
        if name not in _files():
            with suppress(RuleError):
                rules_of[name] = installed_rule(name)
    return rules_of


@functools.cache
def _files() -> list[str]:
    """The files of the library by their names, sorted."""
    folder = library_folder()
    return sorted(p.relative_to(folder).with_suffix("").as_posix() for p in folder.rglob("*.yaml"))


@functools.cache
def installed_titles() -> dict[str, str]:
    """Rule's name in its text -> name, for the rules of installed packages that no rule of the library hides.

    Their packages are imported, and left out where that fails; so is a name in the text of several rules.
    """
    pairs = [(rule.name, name) for name, rule in _installed_rules().items()]
    count = Counter(title for title, _ in pairs)
    return {title: name for title, name in pairs if count[title] == 1}


def no_title(module: str, title: str) -> str:
    """The sentence of a module with a class for each rule that has none of this name.

    It names rules of installed packages with this name in common, and rules that cannot be loaded.
    """
    sentence = f"module {module!r} has no attribute {title!r}"
    same = [name for name, rule in _installed_rules().items() if rule.name == title]
    if len(same) > 1:
        names = " and ".join(map(repr, same))
        return f"{sentence}, for the rules {names} of installed packages are called so: use {module}.optimizer(...)"
    broken = [name for name in installed() if name not in _files() and name not in _installed_rules()]
    if broken:
        names = ", ".join(map(repr, broken))
        return f"{sentence}; rules of installed packages that cannot be loaded are {names}: rulec.load(...) says why"
    return sentence


@functools.cache
def titles() -> dict[str, str]:
    """Rule's name -> file, for the rules of the library without the transforms.

    Read from the text: parsing every rule would cost a quarter of a second.
    """
    files = [file for file in _files() if "/" not in file]
    texts = ((library_folder() / f"{file}.yaml").read_text(encoding="utf-8") for file in files)
    matches = [re.search(r"^name: *(\w+)", text, re.MULTILINE) for text in texts]
    return {match[1]: file for match, file in zip(matches, files, strict=True) if match}


@functools.cache
def interop_index(package: str, keys: str) -> dict[str, tuple[str, ...]]:
    """Name of another library -> the files whose interop section for it has the name under one of `keys` (`a|b`).

    Read from the text, as `titles`.
    """
    files_of: dict[str, list[str]] = {}
    for file in _files():
        text = (library_folder() / f"{file}.yaml").read_text(encoding="utf-8")
        section = re.split(r"\n  \w|\n\w", text.partition(f"\n  {package}:")[2])[0]
        named = re.findall(rf"\b(?:{keys}): *(\[[^\]]*\]|[\w.]+)", section)
        for name in dict.fromkeys(re.findall(r"[\w.]+", " ".join(named))):
            files_of.setdefault(name, []).append(file)
    return {name: tuple(files) for name, files in sorted(files_of.items())}


def interop_entries(rule: Rule, package: str) -> list[Mapping[str, Any]]:
    """The entries of a rule's interop section for another library, such as `torch` or `optax`."""
    section = rule.interop.get(package, [])
    return list(section) if isinstance(section, list) else [section]


#: The transform of weight decay that falls with the square of the learning rate.
CORRECTED = "corrected_decay"


def decayed(rule: Rule, transform: str) -> Rule:
    """The rule with weight decay by a transform of the library, whose strength is the hyper-parameter `weight_decay`.

    By `l2` the decay is in the gradient, by `fixed_decay` a share of the parameter whatever the learning rate is, by
    `corrected_decay` it falls with the square of the learning rate, else it is in the direction. A decay that the rule
    has itself is taken away.
    """
    bare = without_term(rule, "weight_decay")
    if transform == "l2":
        return load(transform) >> bare
    if transform in ("fixed_decay", CORRECTED):
        whole: Rule = load(transform)(bare)
        largest = {"max_lr": AT_START} if transform == CORRECTED else {}
        return whole.bind(decay_rate="weight_decay", **largest)
    return bare + load(transform)


#: What a flag says that reads the largest value of a state, before the state's name.
MAXIMUM = "maximum of "


def transformed(rule: Rule, transform: str) -> Rule:
    """The rule with a transform of the library: inside of it where it is a wrapper, else after it.

    `maximum of v` stands for the rule that reads the largest value so far in the place of its state v.
    """
    if transform.startswith(MAXIMUM):
        return with_maximum(rule, transform.removeprefix(MAXIMUM))
    part = load(transform)
    if not part.wraps:
        return part >> rule
    whole: Rule = part(rule)
    return whole


@of_kind("missing")
def _find(name: str, base: Path | None) -> Path:
    if is_rule_text(name):
        what = f"{short(name)} is the text of a rule, not its name"
        raise RuleError(f"{what}: read it with rulec.parse, or save it as a file")
    if is_address(name):
        raise RuleError(f"a rule file is made of rules of the library and of other files: save {short(name)} as a file")
    if name.endswith((".yaml", ".yml")):
        path = Path(name) if base is None else base / name
        if not os.path.isfile(path):
            raise RuleError(_no_file(path))
        return path
    for candidate in (name, f"transforms/{name}"):
        if candidate in _files():
            return library_folder() / f"{candidate}.yaml"
    if os.path.exists(name if base is None else base / name):
        raise RuleError(f"{name!r} is no rule of the library, and the name of a rule file ends in .yaml")
    hint = did_you_mean(name, [r.rpartition("/")[2] for r in rules()])
    raise RuleError(f"there is no rule {short(name)}{hint} (`rulec list` names them all; a file's name ends in .yaml)")


def _no_file(path: Path) -> str:
    """What keeps a path from being a rule file, as a sentence."""
    if os.path.isdir(path):
        return f"{str(path)!r} is a folder, not a rule file"
    try:
        path.stat()
    except (FileNotFoundError, NotADirectoryError):
        return f"there is no rule file {str(path)!r}"
    except (OSError, ValueError) as error:
        return f"the rule file {short(str(path))} cannot be read: {getattr(error, 'strerror', None) or error}"
    return f"{str(path)!r} is no file, but a device or a pipe: give a rule file"


def load(name: str | Path, *, allow_url: bool = False) -> Rule:
    """The rule of a name (`"adamw"`), of a rule file (`"my.yaml"`), or of a composition of these.

    A name is one of the library, one that an installed package adds, or one of a rule in Python: `"my.py:rule"` runs
    the file, and `"package.module:rule"` imports the module. A composition reads as in Python:
    `"clip_by_value >> lookahead(adamw, k=5)"`, `"adam + decay(weight_decay=0.1)"`.
    With `allow_url`, a name may be a pinned address, `"https://host/rule.yaml@sha256:HEX"`: the file is fetched once
    and kept in the cache by its hash. It is a rule file made of rules of the library only, and nothing of it runs.
    Raises RuleError where there is no such rule, or at the place of a mistake in it.
    """
    from rulec.language.compose.parse import compose_text, is_composition

    one = functools.partial(_load_one, allow_url=allow_url)
    if not isinstance(name, str | Path):
        raise _no_name(name)
    text = str(name)
    # A path may read as a composition: then the file counts.
    is_file = text.endswith((".yaml", ".yml")) and len(text) < MAX_PATH and os.path.isfile(text)
    composed = not isinstance(name, Path) and not is_file and is_composition(text)
    return compose_text(text, one) if composed else one(text)


def variants(rule: Rule | str | Path, *, allow_url: bool = False) -> dict[str, Rule]:
    """The rules of the variants that a rule, a name or a file declares, by name: `{"my.yaml(power=0.5)": rule, ...}`.

    There is one for each combination of the values, the last hyper-parameter fastest. A rule without variants is alone.
    RuleError as of `load`.
    """
    from rulec.language.variants import variants_of

    return (
        variants_of(rule, rule.name)
        if isinstance(rule, Rule)
        else variants_of(load(rule, allow_url=allow_url), str(rule))
    )


def _no_name(value: object) -> RuleError:
    kind = type(value)
    return RuleError(
        NOT_LOADED.get(kind, f"a rule is loaded by its name or its path, and this is of type {kind.__name__}")
    )


def _load_one(name: str, allow_url: bool) -> Rule:
    if is_address(name):
        return _fetched(name, allow_url)
    if is_python_name(name):
        return python_rule(name)
    if name not in _files() and name in installed():
        return installed_rule(name)
    return _load(_find(name, None), ())


def _fetched(name: str, allow_url: bool) -> Rule:
    """The rule of a pinned address; it names rules of the library, and no files."""
    from rulec.language.yaml.read import parse_rule

    with of_kind("missing"):
        address = read_address(name, allow_url)
        text = text_at(address)

    def part(other: str) -> Rule:
        if other.endswith((".yaml", ".yml")):
            raise RuleError(f"a rule of the web is made of rules of the library, and {short(other)} is a file")
        return _load(_find(other, None), ())

    return parse_rule(text, address.url, part)


def _load(shown: Path, above: tuple[Path, ...]) -> Rule:
    """The rule of a file. Messages have its path as it was named."""
    path = shown.resolve()
    if path in above:
        names = " -> ".join(p.stem for p in (*above[above.index(path) :], path))
        raise RuleError(f"{path.stem} is made of itself: {names}")
    if len(above) > MAX_NESTING:
        raise RuleError(f"{path.stem} stands in more than {MAX_NESTING} rules, one within the other: write it out")
    if path.is_relative_to(library_folder()):
        return _load_library(path) if not above else _read(path, path, above)
    return _read(shown, path, above)


@functools.cache
def _load_library(path: Path) -> Rule:
    return _read(path, path, ())


def _read(shown: Path, path: Path, above: tuple[Path, ...]) -> Rule:
    from rulec.language.yaml.read import parse_rule

    try:
        size = path.stat().st_size
        if size > MAX_BYTES:
            raise RuleError(f"{shown} has {size} bytes, over the limit of {MAX_BYTES}: it is no rule file")
        text = path.read_bytes().decode("utf-8")
    except UnicodeDecodeError as error:
        raise RuleError(f"{shown} is not UTF-8 text: its byte {error.start} is wrong") from None
    except OSError as error:
        raise RuleError(f"{shown} cannot be read: {error.strerror}") from None
    # Names in a linked file are of the folder where the file lies, not of the link's.
    base = path.parent if shown.is_symlink() else shown.parent
    return parse_rule(text, str(shown), lambda name: _load(_find(name, base), (*above, path)), path)


def parse(text: str, name: str = "<string>", base: Path | None = None) -> Rule:
    """The rule of a YAML text. Paths of rules in it are relative to `base`, by default the working folder.

    `name` stands for the text in error messages. Raises RuleError at the place of a mistake.
    """
    from rulec.language.yaml.read import parse_rule

    return parse_rule(text, name, lambda other: _load(_find(other, base), ()))


def json_schema() -> dict[str, Any]:
    """The JSON Schema (draft 2020-12) of rule files. Editors complete and check rule files by it."""
    from rulec.language.yaml.schema import json_schema as generate

    return generate()
