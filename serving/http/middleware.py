"""What is checked before a request reaches its endpoint."""

from __future__ import annotations

import hmac
from dataclasses import dataclass

from fastapi import HTTPException
from starlette.datastructures import Headers
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from onnxport.serving.http.errors import ApiError

PROTECTED = "/v1"


@dataclass(frozen=True, slots=True)
class ApiKeyMiddleware:
    """Refuses requests under `/v1` that do not bring the key as a bearer token."""

    app: ASGIApp
    api_key: str

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer 401, or pass the request on."""
        if scope["type"] != "http" or not scope["path"].startswith(PROTECTED):
            return await self.app(scope, receive, send)
        given = Headers(scope=scope).get("authorization", "")
        kind, _, key = given.partition(" ")
        same = hmac.compare_digest(key.strip().encode(), self.api_key.encode())
        if kind.lower() == "bearer" and same:
            return await self.app(scope, receive, send)
        message = (
            "the API key is wrong; ask whoever runs this server for it"
            if given
            else "no API key was given; send it as the header Authorization: Bearer KEY"
        )
        error = ApiError(401, message, code="invalid_api_key", kind="authentication_error")
        return await error.response()(scope, receive, send)


@dataclass(frozen=True, slots=True)
class BodyLimitMiddleware:
    """Refuses bodies that are larger than `max_body_bytes`, announced or not."""

    app: ASGIApp
    max_body_bytes: int

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer 413, or pass the request on and count what arrives."""
        if scope["type"] != "http":
            return await self.app(scope, receive, send)
        announced = Headers(scope=scope).get("content-length", "0")
        if announced.isdigit() and int(announced) > self.max_body_bytes:
            return await self._refusal().response()(scope, receive, send)
        received = 0

        async def counted() -> Message:
            nonlocal received
            message = await receive()
            received += len(message.get("body", b""))
            if received > self.max_body_bytes:  # of this type, for FastAPI hides the others
                raise HTTPException(413, self._refusal().message)
            return message

        return await self.app(scope, counted, send)

    def _refusal(self) -> ApiError:
        limit = self.max_body_bytes
        return ApiError(413, f"the body is larger than {limit} bytes; send a shorter prompt")
