"""The fields that say what form a text is to have: OpenAI's, vLLM's, and vLLM's older ones."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field, model_validator

from onnxport.errors import RequestError
from onnxport.serving.http.generation_fields import GenerationFields
from onnxport.serving.http.strict import Strict as _Part
from onnxport.serving.structured.spec import StructuredOutputs

STRUCTURED = "structured_outputs"
OF_TAGS = ("format", "structures", "triggers")
OLDER = {
    "guided_json": "json",
    "guided_regex": "regex",
    "guided_choice": "choice",
    "guided_grammar": "grammar",
    "json_schema": "json",  # llama.cpp's, as what follows
    "grammar": "grammar",
}


class JsonSchema(_Part):
    """A schema; clients of llama.cpp give it no name. How much is enforced `strict` says."""

    name: Annotated[str, Field(pattern="^[a-zA-Z0-9_-]{1,64}$")] | None = None  # OpenAI needs it
    description: str | None = None
    content: dict[str, Any] = Field(alias="schema")
    strict: bool | None = None


class ResponseFormat(_Part):
    """OpenAI's `response_format`; with a schema of its own, that of llama.cpp and Together.

    TGI calls that `value`, and so does Hugging Face's client, whatever it was given.

    The type "structural_tag" is vLLM's; what it has more `structural.read` checks.
    """

    type: Literal["text", "json_object", "json_schema", "structural_tag"]
    json_schema: JsonSchema | None = None
    content: dict[str, Any] | None = Field(default=None, alias="schema")
    format: dict[str, Any] | None = None
    structures: list[Any] | None = None
    triggers: list[Any] | None = None

    @model_validator(mode="before")
    @classmethod
    def _read_value(cls, body: Any) -> Any:
        if not isinstance(body, dict) or "value" not in body or body.get("schema") is not None:
            return body
        if body.get("type") != "json_object":
            return body
        rest = {name: each for name, each in body.items() if name not in ("schema", "value")}
        return {**rest, "schema": body["value"]}

    @model_validator(mode="after")
    def _check(self) -> ResponseFormat:
        of_tags = [name for name in OF_TAGS if getattr(self, name) is not None]
        if of_tags and self.type != "structural_tag":
            raise RequestError(
                f"response_format has the type {self.type!r} with {' and '.join(of_tags)}, which "
                "are of the type 'structural_tag'; remove them",
                f"response_format.{of_tags[0]}",
            )
        names = {"json_schema": self.json_schema, "schema": self.content}
        given = [name for name, each in names.items() if each is not None]
        may_have = {"json_object": ("schema",), "json_schema": tuple(names)}
        allowed = may_have.get(self.type, ())
        is_right = len(given) < 2 if self.type != "json_schema" else len(given) == 1
        if not is_right or not set(given) <= set(allowed):
            found = f"with {' and '.join(given)}" if given else "without json_schema and schema"
            raise RequestError(
                f"response_format has the type {self.type!r} {found}; the type 'json_schema' has "
                "one of the two, 'json_object' may have schema, and others have none",
                "response_format.schema" if given == ["schema"] else "response_format.json_schema",
            )
        return self

    def structural_tag(self) -> dict[str, Any]:
        """Return a structural tag as `structured_outputs` has it."""
        told = {name: getattr(self, name) for name in OF_TAGS}
        given = {name: each for name, each in told.items() if each is not None}
        return {"type": self.type, **given}


class FormFields(GenerationFields):
    """The fields of a request that say what form its text is to have; at most one does."""

    response_format: ResponseFormat | None = None
    guided_json: dict[str, Any] | str | None = None
    guided_regex: str | None = None
    guided_choice: list[str] | None = None
    guided_grammar: str | None = None
    guided_whitespace_pattern: str | None = None
    json_schema: dict[str, Any] | None = None
    grammar: str | None = None

    def form(self) -> StructuredOutputs | None:
        """Return the form; None: any text.

        Raises:
            RequestError: two fields name one, or it is not valid; names the field.
        """
        given = [name for name in (STRUCTURED, *OLDER) if getattr(self, name) is not None]
        asked = self.response_format
        if asked is not None and asked.type != "text":
            given.append("response_format")
        if len(given) > 1:
            raise RequestError(
                f"{' and '.join(given)} each ask for a form of the text; send one of them", given[1]
            )
        if self.guided_whitespace_pattern is not None and given != ["guided_json"]:
            raise RequestError(
                "guided_whitespace_pattern goes with guided_json; send both, or leave it out",
                "guided_whitespace_pattern",
            )
        return self._form(given[0]) if given else None

    def _form(self, name: str) -> StructuredOutputs:
        """Return the form that one field asks for."""
        if name == STRUCTURED:
            return StructuredOutputs.from_mapping(self.structured_outputs or {})
        if name == "grammar" and "::=" not in (self.grammar or ""):
            raise RequestError(
                f"grammar is {repr(self.grammar)[:80]}, which has no rule of GBNF (root ::= …); "
                "write one, or send a grammar in Lark's syntax as structured_outputs.grammar",
                name,
            )
        if name != "response_format":
            pattern = self.guided_whitespace_pattern
            given = {OLDER[name]: getattr(self, name), "whitespace_pattern": pattern}
            return StructuredOutputs.from_mapping(given, name)
        asked = self.response_format
        if asked is not None and asked.type == "structural_tag":
            return StructuredOutputs(structural_tag=asked.structural_tag(), param=name)
        if asked is not None and asked.json_schema is not None:
            named = asked.json_schema
            param = "response_format.json_schema.schema"
            return StructuredOutputs(json=named.content, param=param, strict=bool(named.strict))
        if asked is not None and asked.content is not None:
            param = "response_format.schema"
            return StructuredOutputs(json=asked.content, param=param, strict=False)
        return StructuredOutputs(json_object=True, param=name)
