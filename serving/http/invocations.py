"""`POST /invocations`, SageMaker's one path: a body goes to the endpoint that its fields name."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Final

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from onnxport.serving.http.errors import ApiError

PATH: Final = "/invocations"
# Of several that fit the first one is meant.
ENDPOINTS: Final[tuple[tuple[frozenset[str], str], ...]] = tuple(
    (frozenset(names), path)
    for names, path in (
        (("messages",), "/v1/chat/completions"),
        (("prompt",), "/v1/completions"),
        (("query", "documents"), "/rerank"),
        (("query", "texts"), "/rerank"),
        (("text_1", "text_2"), "/score"),
        (("queries", "documents"), "/score"),
        (("queries", "items"), "/score"),
        (("data_1", "data_2"), "/score"),
    )
)
INPUT: Final = "input"
EMBEDDINGS, CLASSIFY = "/v1/embeddings", "/classify"


@dataclass(frozen=True, slots=True)
class InvocationsMiddleware:
    """Gives requests of PATH the path of the endpoint that their body is for.

    Attributes:
        of_input: the endpoint of a body with an `input`: EMBEDDINGS or CLASSIFY.
    """

    app: ASGIApp
    of_input: str = EMBEDDINGS

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass the request on; a body of no endpoint is a 400."""
        is_asked = scope["type"] == "http" and scope["method"] == "POST" and scope["path"] == PATH
        if not is_asked:
            return await self.app(scope, receive, send)
        content, is_whole = bytearray(), False
        while not is_whole:
            message = await receive()
            if message["type"] != "http.request":  # the client is gone
                return None
            content += message.get("body", b"")
            is_whole = not message.get("more_body", False)
        path = self._path(content)
        if path is None:
            return await _REFUSAL.response(PATH)(scope, receive, send)
        given: list[Message] = [{"type": "http.request", "body": bytes(content)}]

        async def replayed() -> Message:
            return given.pop() if given else await receive()

        return await self.app({**scope, "path": path, "raw_path": path.encode()}, replayed, send)

    def _path(self, content: bytes | bytearray) -> str | None:
        """Return the endpoint that a body is for; what is no object is told by that of chats."""
        try:
            body = json.loads(content)
        except (ValueError, RecursionError):
            body = None
        if not isinstance(body, dict):
            return ENDPOINTS[0][1]
        given = {name for name, value in body.items() if value is not None}
        found = next((path for names, path in ENDPOINTS if names <= given), None)
        return self.of_input if found is None and INPUT in given else found


_REFUSAL: Final = ApiError(
    400,
    "the body is for no endpoint; it has neither "
    + ", nor ".join([*(" with ".join(sorted(names)) for names, _ in ENDPOINTS), INPUT]),
)
