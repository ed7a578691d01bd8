"""What a request is called: by its client, in the answer's header and in the log."""

from __future__ import annotations

import re
import uuid
from dataclasses import dataclass
from typing import Annotated, Final

from fastapi import Request
from pydantic import AfterValidator
from pydantic_core import PydanticCustomError
from starlette.datastructures import Headers, MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from onnxport.serving.http import anthropic

HEADER: Final = "X-Request-Id"
NAME: Final = "request_id"  # in the state of a request
GIVEN: Final = "request_id_was_given"  # likewise: whether a header gave it
MOST_CHARACTERS: Final = 128
_VALID: Final = re.compile(f"[!-~]{{1,{MOST_CHARACTERS}}}")


def _check(text: str) -> str:
    if _VALID.fullmatch(text) is None:
        most = {"most": MOST_CHARACTERS}
        raise PydanticCustomError("id", "should be 1 to {most} visible characters of ASCII", most)
    return text


GivenId = Annotated[str, AfterValidator(_check)]  # the field of a body


@dataclass(frozen=True, slots=True)
class RequestIdMiddleware:
    """Gives each request an id, and answers with it.

    That is what its header says, where that can stand in a header and in a line of a log: 1 to
    MOST_CHARACTERS visible characters of ASCII. Others get an id of ours, for the header may come
    from a proxy that the client knows nothing of.
    """

    app: ASGIApp

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass the request on."""
        if scope["type"] != "http":
            return await self.app(scope, receive, send)
        sent = Headers(scope=scope).get(HEADER, "")
        is_valid = _VALID.fullmatch(sent) is not None
        state = scope.setdefault("state", {})
        state[GIVEN], state[NAME] = is_valid, sent if is_valid else uuid.uuid4().hex

        async def named(message: Message) -> None:
            if message["type"] == "http.response.start":
                name_headers(scope, MutableHeaders(scope=message))
            await send(message)

        return await self.app(scope, receive, named)


def name_headers(scope: Scope, headers: MutableHeaders) -> None:
    """Add the id of a request to the headers of its answer, if it has one."""
    if name := scope.get("state", {}).get(NAME):
        headers.setdefault(HEADER, name)
        if anthropic.is_path(scope["path"]):
            headers.setdefault(anthropic.ID_HEADER, name)


def request_id(request: Request) -> str:
    """Return the id of a request."""
    found: str = request.scope.get("state", {}).get(NAME, "")
    return found


def take_id(request: Request, given: str | None) -> str:
    """Return the id of a request, which its body may give; that of a header comes first."""
    state = request.scope["state"]
    if given is not None and not state[GIVEN]:
        state[NAME] = given
    return request_id(request)


def unique(name: str) -> str:
    """Return what the engine calls a request: clients may give an id twice."""
    return f"{name}-{uuid.uuid4().hex[:8]}"
