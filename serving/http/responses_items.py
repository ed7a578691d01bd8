"""The items that the input of `/v1/responses` is made of."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Literal

from pydantic import Field, PlainValidator, TypeAdapter, model_validator
from pydantic_core import PydanticCustomError

from onnxport.errors import RequestError
from onnxport.serving.http.strict import Strict


class Given(Strict):
    """What clients send back of what they got: nulls say nothing."""

    @model_validator(mode="before")
    @classmethod
    def _drop_nulls(cls, body: Any) -> Any:
        if not isinstance(body, dict):
            return body
        return {name: value for name, value in body.items() if value is not None}


class TextPart(Given):
    """A text of a message. Annotations there are none here, and log probabilities say nothing."""

    type: Literal["input_text", "output_text", "text"]
    text: str
    annotations: list[Any] = Field(default=[], max_length=0)
    logprobs: Any = None

    def plain(self) -> dict[str, Any]:
        """Return it as a chat has it."""
        return {"type": "text", "text": self.text}


class RefusalPart(Given):
    """What an assistant said in place of an answer."""

    type: Literal["refusal"]
    refusal: str

    def plain(self) -> dict[str, Any]:
        """Return it as a chat has it."""
        return {"type": "refusal", "refusal": self.refusal}


def by_type(
    kinds: Mapping[str | None, type[Given]], what: str, advice: str, param: str = "input"
) -> PlainValidator:
    """Return a validator of objects that their type says the model of.

    Args:
        kinds: the model of each type; that of None is of objects without one.
        what: they are, for errors.
        advice: what to send in place of one of another type.
        param: the field that they stand in.
    """

    def validate(value: Any) -> Given:
        kind = value.get("type") if isinstance(value, dict) else None
        if isinstance(kind, str) and kind not in kinds:
            found = repr(kind[:40])
            raise RequestError(f"{what} of type {found} was given; {advice}", param)
        if not isinstance(value, dict) or not isinstance(kind, str | None) or kind not in kinds:
            raise PydanticCustomError("object", "should be an object with a type")
        return kinds[kind].model_validate(value)

    return PlainValidator(validate)


def text_or(several: Any, what: str) -> PlainValidator:
    """Return a validator of texts and of lists; what is wrong in a list is told by its place.

    Args:
        several: the type of the lists.
        what: is expected, for errors.
    """
    lists: TypeAdapter[Any] = TypeAdapter(several)

    def validate(value: Any) -> Any:
        if isinstance(value, str):
            return value
        if isinstance(value, list):
            return lists.validate_python(value)
        raise PydanticCustomError("union", "should be {what}", {"what": what})

    return PlainValidator(validate)


Part = Annotated[
    TextPart | RefusalPart,
    by_type(
        {**dict.fromkeys(("input_text", "output_text", "text"), TextPart), "refusal": RefusalPart},
        "a part",
        'models here read text alone. Send parts of type "input_text"',
    ),
]
Content = Annotated[str | list[Part], text_or(list[Part], "a text or a list of parts")]


class MessageItem(Given):
    """A message, of the client or of an earlier response."""

    type: Literal["message"] = "message"
    role: Literal["user", "assistant", "system", "developer"]
    content: Content
    id: str | None = None
    status: str | None = None
    phase: str | None = None


class ReasoningPart(Given):
    """A text of reasoning."""

    type: Literal["reasoning_text"]
    text: str


class ReasoningItem(Given):
    """The reasoning of an earlier response, which is given to the model; summaries are not.

    What another server has encrypted cannot be read here.
    """

    type: Literal["reasoning"]
    content: list[ReasoningPart] = Field(default=[])
    summary: list[Any] = Field(default=[])
    encrypted_content: None = None
    id: str | None = None
    status: str | None = None

    @property
    def text(self) -> str:
        """What was thought."""
        return "\n".join(part.text for part in self.content)


class CallItem(Given):
    """A function that an earlier response called."""

    type: Literal["function_call"]
    call_id: str
    name: str
    namespace: str | None = None
    arguments: str
    id: str | None = None
    status: str | None = None


class ResultItem(Given):
    """What a called function gave."""

    type: Literal["function_call_output"]
    call_id: str
    output: Content
    id: str | None = None
    status: str | None = None


Item = Annotated[
    MessageItem | ReasoningItem | CallItem | ResultItem,
    by_type(
        {
            **dict.fromkeys((None, "message"), MessageItem),
            "reasoning": ReasoningItem,
            "function_call": CallItem,
            "function_call_output": ResultItem,
        },
        "an item",
        "send items of the types message, reasoning, function_call and function_call_output. This "
        "server keeps no items, and has no tools of its own",
    ),
]
