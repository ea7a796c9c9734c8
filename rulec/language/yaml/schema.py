"""The keys of a rule file and the type of each value. The JSON Schema is generated from them."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Discriminator, Field, Tag, ValidationError, model_validator

from rulec.errors import RuleError
from rulec.language.expr.counts import levels_text
from rulec.language.expr.names import short
from rulec.language.expr.node import LEVELS, PLACED
from rulec.language.sizes import MAX_LENGTH
from rulec.language.source import did_you_mean, rule_error
from rulec.language.variants import MAX_VARIANTS
from rulec.language.yaml.document import Document
from rulec.language.yaml.document import Path as Place

Number = int | float
Expression = Annotated[str, Field(description="An expression of the rule language", min_length=1)]
List = Annotated[list[Number | Expression], Field(min_length=1, max_length=MAX_LENGTH)]
Bindings = dict[str, Number | Expression | List]
Component = Annotated[str, Field(min_length=1)] | Annotated[dict[str, Bindings], Field(min_length=1, max_length=1)]


def is_rule_file(value: Any) -> bool:
    """Whether a value in a rule file is a whole rule written out; other values are the name of a rule and bindings."""
    return isinstance(value, dict) and "name" in value


#: A component, or a whole rule written out: it is read as a rule file of its own.
Written = Annotated[
    Annotated[Component, Tag("component")] | Annotated[dict[str, Any], Tag("file")],
    Discriminator(lambda value: "file" if is_rule_file(value) else "component"),
]

#: Most rules that one wrapper goes around.
MAX_WRAPPED = 10

#: Most rules that one file may name as components.
MAX_COMPONENTS = 50
Components = Annotated[list[Component], Field(min_length=1, max_length=MAX_COMPONENTS)]


class _Strict(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True)


class PaperEntry(_Strict):
    """Where the rule comes from."""

    title: str
    authors: str | None = None
    year: int | None = None
    url: str | None = None


class HyperEntry(_Strict):
    """A hyper-parameter with a range of its own."""

    default: Number | Expression | List | None = None
    length: int | None = Field(None, description="The number of values of a list, where another is refused", ge=1)
    min: Number | None = Field(None, description="Smallest value allowed")
    max: Number | None = Field(None, description="Largest value allowed")
    above: Number | None = Field(None, description="Values must be greater than this")
    below: Number | None = Field(None, description="Values must be less than this")
    static: bool = Field(False, description="Known when the kernel is made")
    whole: bool = Field(False, description="Only whole numbers are allowed")
    decides: bool = Field(False, description="The rule is written out for its default, so another value is refused")
    follows: bool = Field(False, description="A second learning rate: a step takes it times lr/lr_at_start")


class StateEntry(_Strict):
    """A state kept for something other than each element, or of a shape of its own."""

    init: Number | Expression = 0
    per: str = Field(
        "element",
        description="The level one value is kept for",
        json_schema_extra={"anyOf": [{"enum": [*LEVELS]}, {"pattern": rf"^\s*({'|'.join(PLACED)})\(.+\)\s*$"}]},
    )
    shape: list[Number | Expression] | None = Field(None, description="Rows and columns", min_length=2, max_length=2)
    condition: Expression | None = Field(None, alias="if", description="Of shape facts: where false there is no state")
    count: Number | Expression | None = Field(None, description="The number of states under this name, s[0] the first")
    history: Number | Expression | None = Field(None, description="The number of values that are kept, s[0] the newest")
    each: Expression | None = Field(None, description="axis(i): a state for each axis of a tensor, s[0] of the first")


class PassEntry(_Strict):
    """A point to evaluate the model at again, in some steps."""

    point: Number | Expression
    when: Expression | None = Field(None, description="Of hyper-parameters, t and shape facts: false for no pass")


class InputEntry(_Strict):
    """An input that is a matrix for each parameter, with extents of its own."""

    shape: list[Number | Expression] = Field(description="Rows and columns", min_length=2, max_length=2)


class ViewEntry(_Strict):
    """How a tensor is seen as a batch of matrices."""

    flatten: Literal["rest"] | None = Field(None, description="All but the first dimension are columns")
    short: Literal["first"] | None = Field(None, description="Tall matrices are transposed")


class WrapEntry(_Strict):
    """The input of a wrapper's call, where its shape is not the parameter's."""

    shape: list[Number | Expression] = Field(description="Rows and columns", min_length=2, max_length=2)


class RuleFile(_Strict):
    """One optimizer rule."""

    name: str = Field(description="The rule's name as its authors write it", min_length=1, max_length=100)
    summary: str = Field("", description="One sentence")
    paper: PaperEntry | None = None
    hyper: dict[str, Number | Expression | List | HyperEntry] = Field(default_factory=dict, description="Name: default")
    state: dict[str, Number | Expression | StateEntry] = Field(default_factory=dict, description="Name: initial value")
    storage: dict[str, Literal["exact"]] = Field(default_factory=dict, description="States that stay float32: exact")
    inputs: dict[str, Literal["scalar", "like p"] | InputEntry] = Field(
        default_factory=dict, description="Inputs of a step besides the gradient"
    )
    uses: Components | dict[str, Component] = Field(default_factory=list, description="Rules the step calls")
    wraps: (
        str
        | Annotated[list[str], Field(min_length=1, max_length=MAX_WRAPPED)]
        | Annotated[dict[str, WrapEntry], Field(min_length=1, max_length=1)]
        | None
    ) = Field(None, description="The step's name for the rule to put this wrapper around, or for each of several")
    passes: dict[str, Number | Expression | PassEntry] = Field(
        default_factory=dict, description="Points to evaluate the model at again in a step"
    )
    rate: Number | Expression | None = Field(None, description="The learning rate, where it is not lr")
    step: str | None = Field(None, description="The lines of one step")
    plus: Components | None = Field(None, description="Rules whose directions add")
    chain: Components | None = Field(None, description="Rules fed one into the next")
    evaluate: Expression | None = Field(None, description="The point to evaluate the model at")
    skip: Expression | None = Field(None, description="Where true, the step leaves everything as it is")
    statistics: dict[str, Expression] = Field(
        default_factory=dict, description="Values to watch in a step, one number for a tensor, group or model"
    )
    applies_to: Expression | None = Field(None, description="A condition on tensors: their shape facts and tags")
    otherwise: Written | None = Field(None, description="The rule for the other tensors")
    view: ViewEntry | None = None
    variants: dict[str, Annotated[list[Number | Expression | List], Field(min_length=1, max_length=MAX_VARIANTS)]] = (
        Field(default_factory=dict, description="Values of hyper-parameters to compare: rulec race runs each of them")
    )
    interop: dict[str, Any] = Field(default_factory=dict, description="Names of the same things in other libraries")

    @model_validator(mode="after")
    def _one_body(self) -> RuleFile:
        bodies = [k for k in ("step", "plus", "chain") if getattr(self, k) is not None]
        if len(bodies) != 1:
            several = f"this one has {' and '.join(bodies)}" if bodies else "this one has none"
            raise ValueError(f"a rule has exactly one of step, plus and chain, and {several}")
        for key in ("state", "inputs", "uses", "wraps", "passes"):
            if bodies != ["step"] and getattr(self, key):
                raise ValueError(f"a rule made by {bodies[0]} has no {key} of its own: its parts have")
        if self.otherwise is not None and self.applies_to is None:
            raise ValueError("otherwise is for the tensors that applies_to leaves out: say applies_to too")
        return self


#: Path of a value -> its type in words, for messages; `*` stands for any name or index.
WANTED: dict[tuple[str, ...], str] = {
    ("name",): "a text of 1 to 100 characters",
    ("paper",): "a mapping with title, authors, year and url",
    ("paper", "year"): "a whole number",
    ("paper", "*"): "a text, in quotes if it looks like a number",
    ("hyper",): "a mapping of names to defaults",
    ("hyper", "*"): "a number, an expression, a list of them, or a mapping with default and range",
    ("hyper", "*", "default"): "a number, an expression, or a list of them",
    ("hyper", "*", "length"): "a whole number from 1",
    ("hyper", "*", "static"): "true or false",
    ("hyper", "*", "whole"): "true or false",
    ("hyper", "*", "decides"): "true or false",
    ("hyper", "*", "follows"): "true or false",
    ("hyper", "*", "*"): "a number",
    ("hyper", "*", "default", "*"): "a number or an expression",
    ("state",): "a mapping of names to initial values",
    ("state", "*"): "a number, an expression, or a mapping with init, per, shape, if, count, history and each",
    ("state", "*", "init"): "a number or an expression",
    ("state", "*", "per"): f"a level, one of {levels_text()}",
    ("state", "*", "shape"): "a list of two extents, rows and columns",
    ("state", "*", "shape", "*"): "a number or an expression",
    ("state", "*", "if"): "an expression",
    ("state", "*", "count"): "a number or an expression",
    ("state", "*", "history"): "a number or an expression",
    ("state", "*", "each"): "axis(i), with a name for the number of the axis",
    ("storage",): "a mapping of states to exact",
    ("storage", "*"): "exact, the only word for the storage of a state",
    ("inputs",): "a mapping of names to scalar, like p or {shape: [rows, columns]}",
    ("inputs", "*"): "scalar, like p or {shape: [rows, columns]}",
    ("inputs", "*", "shape"): "a list of two extents, rows and columns",
    ("inputs", "*", "shape", "*"): "a number or an expression",
    ("passes",): "a mapping of names to points",
    ("passes", "*"): "an expression, or a mapping with point and when",
    ("passes", "*", "point"): "an expression",
    ("passes", "*", "when"): "an expression",
    ("statistics",): "a mapping of names to expressions",
    ("statistics", "*"): "an expression, such as norm(update)",
    ("uses",): f"a list of at most {MAX_COMPONENTS} rules, or a mapping of names to rules",
    ("wraps",): f"a name, such as inner, or a list of 1 to {MAX_WRAPPED} names",
    ("wraps", "*"): "a name, or a mapping with shape",
    ("rate",): "an expression of hyper-parameters, such as 2*lr",
    ("wraps", "*", "shape"): "a list of two extents, rows and columns",
    ("wraps", "*", "shape", "*"): "a number or an expression",
    ("plus",): f"a list of 1 to {MAX_COMPONENTS} rules",
    ("chain",): f"a list of 1 to {MAX_COMPONENTS} rules",
    ("step",): "a text that begins with step: | and has its lines indented",
    ("evaluate",): "an expression",
    ("skip",): "an expression",
    ("applies_to",): "an expression",
    ("otherwise",): "the name of a rule, or one name with its bindings",
    ("otherwise", "*"): "a mapping of hyper-parameters to numbers or expressions",
    ("otherwise", "*", "*"): "a number or an expression",
    ("view",): "a mapping with flatten: rest or short: first",
    ("view", "flatten"): "rest",
    ("view", "short"): "first",
    ("variants",): "a mapping of hyper-parameters to lists of values",
    ("variants", "*"): f"a list of 1 to {MAX_VARIANTS} values",
    ("variants", "*", "*"): "a number, an expression, or a list of them",
    ("variants", "*", "*", "*"): "a number or an expression",
    ("interop",): "a mapping",
    ("*",): "a text",
    ("*", "*"): "the name of a rule, or one name with its bindings",
    ("*", "*", "*"): "a mapping of hyper-parameters to numbers or expressions",
    ("*", "*", "*", "*"): "a number or an expression",
}


def wanted(path: tuple[str | int, ...]) -> str:
    """The type of the value at `path` of a rule file, in words."""
    parts = tuple(map(str, path))
    fits = [k for k in WANTED if len(k) == len(parts) and all(a in ("*", b) for a, b in zip(k, parts, strict=True))]
    return WANTED[min(fits, key=lambda k: [part == "*" for part in k])] if fits else "something else"


_NAME_PATTERN = r"^[A-Za-z][A-Za-z0-9_]*(\.[A-Za-z_][A-Za-z0-9_]*)*$"


def json_schema() -> dict[str, Any]:
    """The JSON Schema (draft 2020-12) of a rule file, for editors."""
    schema = RuleFile.model_json_schema()
    other = schema["properties"]["otherwise"]
    named, _ = other["anyOf"][0]["oneOf"]
    # A rule written out is a rule file again.
    other["anyOf"] = [*named["anyOf"], {"$ref": "#"}, *other["anyOf"][1:]]
    for name, model in [("RuleFile", schema), *schema["$defs"].items()]:
        for key, value in model["properties"].items():
            # A key that is left out is left out: of all values only a default may be written as null.
            _tidy(value, null=(name, key) == ("HyperEntry", "default"))
    for key in ("hyper", "state", "storage", "inputs", "passes", "statistics", "variants"):
        schema["properties"][key]["propertyNames"] = {"pattern": _NAME_PATTERN}
    schema["oneOf"] = [{"required": [key]} for key in ("step", "plus", "chain")]
    composed = {"anyOf": [{"required": ["plus"]}, {"required": ["chain"]}]}
    schema["if"], schema["then"] = (
        composed,
        {"properties": dict.fromkeys(("state", "inputs", "uses", "wraps", "passes"), False)},
    )
    schema["dependentRequired"] = {"otherwise": ["applies_to"]}
    return {"$schema": "https://json-schema.org/draft/2020-12/schema", **schema, "title": "rulec rule"}


def _tidy(value: dict[str, Any], null: bool = False) -> None:
    """Removes the parts of a schema without information.

    These are titles derived from keys, integers as an alternative to numbers, and null for optional keys.
    """
    value.pop("title", None)
    if value.get("default", 0) is None:
        del value["default"]
    for inner in (value.get("items"), value.get("additionalProperties")):
        if isinstance(inner, dict):
            _tidy(inner)
    options = value.pop("anyOf", [])
    for option in options:
        _tidy(option)
    if {"type": "number"} in options:
        options.remove({"type": "integer"})
    kept = options if null else [option for option in options if option != {"type": "null"}]
    if len(kept) == 1:
        value.update({k: v for k, v in kept[0].items() if k not in value})
    elif kept:
        value["anyOf"] = kept


def _value_place(document: Document, loc: tuple[Any, ...]) -> Place:
    """pydantic's location without the names of union members in it."""
    place: Place = ()
    for part in loc:
        if (*place, part) in document.places:
            place = (*place, part)
    return place


def validated(document: Document) -> RuleFile:
    """The content of a rule file by the schema; RuleError at the place of the worst mistake."""
    if not isinstance(document.data, dict):
        raise rule_error("a rule file is a mapping that begins with name:", document.span(()))
    try:
        return RuleFile.model_validate(document.data)
    except ValidationError as error:
        problems = error.errors(include_url=False, include_input=False)
        depth = {"extra_forbidden": 100, "missing": 100}
        worst = max(problems, key=lambda e: depth.get(e["type"], 0) + len(_value_place(document, e["loc"])))
        raise _explain(document, worst) from None


def _explain(document: Document, problem: Any) -> RuleError:
    place, kind = _value_place(document, problem["loc"]), problem["type"]
    last = str(problem["loc"][-1]) if problem["loc"] else ""
    if kind == "extra_forbidden":
        parts: dict[Any, type[BaseModel]] = {
            "paper": PaperEntry, "hyper": HyperEntry, "state": StateEntry, "view": ViewEntry,
            "wraps": WrapEntry, "passes": PassEntry, "inputs": InputEntry,
        }  # fmt: skip
        model = parts.get(place[0], RuleFile) if len(place) > 1 else RuleFile
        known = [f.alias or k for k, f in model.model_fields.items()]
        hint = did_you_mean(last, known) or f": the keys are {', '.join(known)}"
        return rule_error(f"unknown key {short(last)}{hint}", document.span(place, key=True))
    if kind == "missing":
        return rule_error(f"the key {last!r} is missing", document.span(place))
    if kind == "value_error":
        return rule_error(str(problem["ctx"]["error"]), document.span(place))
    where = "".join(f"[{p}]" if isinstance(p, int) else f".{short(p)[1:-1]}" for p in place).removeprefix(".")
    actual = _described(document.at(place))
    return rule_error(f"{where} must be {wanted(place)}, not {actual}", document.span(place))


def _described(value: Any) -> str:
    if isinstance(value, dict | list):
        kind = "mapping" if isinstance(value, dict) else "list"
        return f"a {kind}" if value else f"an empty {kind}"
    if value is None:
        return "nothing"
    if isinstance(value, str):
        return f"the text {short(value)}"
    return str(value).lower() if isinstance(value, bool) else f"the number {short(str(value))[1:-1]}"
