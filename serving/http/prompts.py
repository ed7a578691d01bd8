"""Prompts in every form of OpenAI's: a text, token ids, or a list of either; and llama.cpp's."""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import PlainValidator
from pydantic_core import PydanticCustomError

from onnxport.errors import RequestError
from onnxport.serving.http.fields import are_ids, is_list
from onnxport.serving.http.service import Service


def _prompt(value: Any) -> Any:
    """Return a prompt as it was given, but for objects, of which their text."""
    if isinstance(value, dict):
        value = text_of(value)
    elif isinstance(value, list) and dict in set(map(type, value)):
        value = [text_of(one) for one in value]
    if isinstance(value, str) or is_list(value, str) or are_ids(value):
        return value
    kinds = set(map(type, value)) if isinstance(value, list) else {None}
    if kinds <= {str, list} and all(isinstance(one, str) or are_ids(one) for one in value):
        return value
    what = "a text, a list of token ids, or a list of texts and such lists"
    raise PydanticCustomError("union", "should be {what}", {"what": what})


def text_of(value: Any, between: str = "") -> Any:
    """Return the text of an object that llama.cpp has for one, and anything else as it is.

    Args:
        value: that is sent.
        between: what joins the texts of several parts; those that are empty are none.

    Raises:
        PydanticCustomError: there is more in it than text.
    """
    match value:
        case {"prompt_string": str(text), "multimodal_data": [] | None} if len(value) == 2:
            return text
        case {"prompt_string": str(text)} if len(value) == 1:
            return text
        case {"content": [_, *_] as parts} if len(value) == 1 and all(map(_is_text, parts)):
            return between.join(part["text"] for part in parts if part["text"])
        case {"prompt_string": str(), "multimodal_data": _} | {"content": [_, *_]}:
            raise PydanticCustomError(
                "text_only",
                "an object has more than text, such as multimodal_data, and this server reads text "
                "alone; leave it out",
            )
    return value


def _is_text(part: Any) -> bool:
    match part:
        case {"type": "text", "text": str()}:
            return len(part) == 2
    return False


Prompts = Annotated[str | list[int] | list[str | list[int]], PlainValidator(_prompt)]


def each_of(prompts: Prompts, name: str) -> list[str | list[int]]:
    """Return one entry a prompt, a text or token ids.

    Args:
        prompts: as they were given.
        name: of the field.

    Raises:
        RequestError: there is no prompt, or an empty one.
    """
    alone = isinstance(prompts, str) or isinstance(next(iter(prompts), None), int)
    listed: list[Any] = [prompts] if alone else list(prompts)
    if not listed or any(isinstance(one, list) and not one for one in listed):
        raise RequestError(f"{name} is empty; send a text, token ids, or a list of either", name)
    return listed


def encode(
    service: Service, given: list[str | list[int]], special: bool, most_tokens: int | None
) -> list[list[int]]:
    """Return the token ids of each prompt.

    Args:
        service: whose tokenizer it is.
        given: the prompts.
        special: whether texts get special tokens.
        most_tokens: that a text may become; None: as many as the context has.
    """
    most = most_tokens or service.engine.capabilities.max_model_len
    texts = [one for one in given if isinstance(one, str)]
    for text in texts:
        service.tokenizer.check_length(text, most)
    encoded = iter(service.tokenizer.encode_all(texts, add_special_tokens=special))
    return [next(encoded) if isinstance(one, str) else one for one in given]
