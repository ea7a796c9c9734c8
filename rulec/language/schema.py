"""The shape of a rule file: which keys it has and what each may hold. The JSON Schema is generated from here."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, model_validator

from rulec.language.node import LEVELS

Number = int | float
Expression = Annotated[str, Field(description="An expression of the rule language")]
Component = str | Annotated[dict[str, dict[str, Number | str]], Field(min_length=1, max_length=1)]


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

    default: Number | Expression | None = None
    min: Number | None = Field(None, description="Smallest value allowed")
    max: Number | None = Field(None, description="Largest value allowed")
    above: Number | None = Field(None, description="Values must be greater than this")
    below: Number | None = Field(None, description="Values must be less than this")
    static: bool = Field(False, description="Known when the kernel is made")


class StateEntry(_Strict):
    """A state kept for something other than each element, or of a shape of its own."""

    init: Number | Expression = 0
    per: str = Field("element", description="The level one value is kept for", json_schema_extra={"enum": [*LEVELS]})
    shape: list[Number | Expression] | None = None
    condition: Expression | None = Field(None, alias="if", description="Of shape facts: where false there is no state")


class RuleFile(_Strict):
    """One optimizer rule."""

    name: str = Field(description="The rule's name as its authors write it", min_length=1)
    summary: str = Field("", description="One sentence")
    paper: PaperEntry | None = None
    hyper: dict[str, Number | Expression | HyperEntry] = Field(default_factory=dict, description="Name: default")
    state: dict[str, Number | Expression | StateEntry] = Field(default_factory=dict, description="Name: initial value")
    inputs: dict[str, Literal["scalar", "like p"]] = Field(default_factory=dict)
    uses: list[Component] | dict[str, Component] = Field(default_factory=list, description="Rules the step calls")
    step: str | None = Field(None, description="The lines of one step")
    plus: list[Component] | None = Field(None, description="Rules whose directions add", min_length=1)
    chain: list[Component] | None = Field(None, description="Rules fed one into the next", min_length=1)
    evaluate: Expression | None = Field(None, description="The point to evaluate the model at")
    skip: Expression | None = Field(None, description="Where true, the step leaves everything as it is")
    applies_to: Expression | None = Field(None, description="Which tensors, by their shape facts and tags")
    otherwise: Component | None = Field(None, description="The rule for the other tensors")
    view: dict[str, str] = Field(default_factory=dict)
    interop: dict[str, Any] = Field(default_factory=dict, description="What other libraries call the same things")

    @model_validator(mode="after")
    def _one_body(self) -> RuleFile:
        given = [k for k in ("step", "plus", "chain") if getattr(self, k) is not None]
        if len(given) != 1:
            raise ValueError(
                f"a rule has exactly one of step, plus and chain, and this one has {' and '.join(given) or 'none'}"
            )
        return self


def json_schema() -> dict[str, Any]:
    """The JSON Schema (draft 2020-12) of a rule file, for editors."""
    schema = RuleFile.model_json_schema()
    return {"$schema": "https://json-schema.org/draft/2020-12/schema", "title": "rulec rule", **schema}
