"""Other APIs' requests as chats: what a chat refuses is told by the names that the client knows."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from typing import Any, Final

from pydantic import ValidationError

from onnxport.errors import RequestError
from onnxport.serving.http.chat_request import ChatRequest
from onnxport.serving.http.errors import JSON, validation_error
from onnxport.serving.http.llama_cpp import LIMITS

_OF_FUNCTION: Final = re.compile(r"^(tools\.[0-9]+)\.function")  # a level that tools lack there


def as_chat(
    body: Mapping[str, Any], renamed: Callable[[RequestError], RequestError]
) -> ChatRequest:
    """Return the chat of a body.

    Args:
        body: of `/v1/chat/completions`, made of another one.
        renamed: returns what a chat refused by the names of the other one.

    Raises:
        RequestError: it cannot be a chat; names the field as `renamed` does.
        ApiError: a field that both have is of another type than it should be.
    """
    try:
        _check_limits(body)
        return ChatRequest.model_validate(body)
    except RequestError as error:
        raise renamed(error) from error
    except ValidationError as error:
        raise validation_error(JSON, error.errors(), ChatRequest.model_fields) from error


def _check_limits(body: Mapping[str, Any]) -> None:
    """Refuse what sets no limit in chats of llama.cpp's clients alone."""
    for name in LIMITS:
        if body.get(name) == -1:
            raise RequestError(f"{name} is -1; ask for 1 token or more", name)


def with_names(error: RequestError, called: Mapping[str, str]) -> RequestError:
    """Return what a chat refused, with its field called what it is called elsewhere.

    Args:
        error: of a chat.
        called: the names elsewhere of fields of a chat.
    """
    name = error.param or ""
    known = called.get(name, _OF_FUNCTION.sub(r"\1", name))
    text = str(error)
    if name and name != "messages":  # which is a word, too
        # A stop string is a word. A name may be the client's, with what is special in a template.
        text = re.sub(rf"\b{re.escape(name)}\b(?! string)", lambda _: known, text)
    return RequestError(text, known or None)
