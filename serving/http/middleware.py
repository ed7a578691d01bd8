"""What is checked before a request reaches its endpoint."""

from __future__ import annotations

import hmac
from collections.abc import Sequence
from dataclasses import dataclass, field

from fastapi import HTTPException, Request
from starlette.datastructures import Headers
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from onnxport.serving.http import anthropic
from onnxport.serving.http.errors import ApiError

PROTECTED = (
    *("/v1", "/tokenize", "/detokenize", "/apply-template", "/props", "/completion"),
    *("/embedding", "/infill", "/slots", "/pooling", "/classify", "/score", "/rerank", "/v2"),
    *("/chat", "/responses", "/models"),  # as under /v1
    *("/lora-adapters", "/invocations"),
)
PROBES = ("/v1/health",)  # which have no key
TENANT = "tenant"  # in the state of a request


@dataclass(frozen=True, slots=True)
class RootPathMiddleware:
    """Takes the path that a proxy has the server under off requests that have it.

    It does so before anything else looks at the path, and in place, for what is around the
    application, too.
    """

    app: ASGIApp
    root_path: str

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass the request on."""
        path: str = scope.get("path", "")
        if path.startswith(f"{self.root_path}/"):
            scope["path"] = path.removeprefix(self.root_path)
        return await self.app(scope, receive, send)


@dataclass(frozen=True, slots=True)
class ApiKeyMiddleware:
    """Refuses requests under PROTECTED, but PROBES, without one of the keys as a bearer token.

    It may be the header `x-api-key`, too: Anthropic's clients, and llama.cpp's, bring it so.

    Where there are several keys, each is a tenant, named by its number and never by itself.
    """

    app: ASGIApp
    api_keys: Sequence[str] = field(repr=False)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer 401, or pass the request on."""
        path: str = scope.get("path", "")
        if scope["type"] != "http" or not path.startswith(PROTECTED) or path in PROBES:
            return await self.app(scope, receive, send)
        headers, is_anthropics = Headers(scope=scope), anthropic.is_path(scope["path"])
        given = headers.get("authorization", "")
        kind, _, key = given.partition(" ")
        number = self._number(key.strip()) if kind.lower() == "bearer" else None
        if key := headers.get(anthropic.KEY_HEADER, ""):
            given = given or key
            number = self._number(key.strip()) if number is None else number
        if number is not None:
            if len(self.api_keys) > 1:
                scope.setdefault("state", {})[TENANT] = f"key-{number}"
            return await self.app(scope, receive, send)
        how = f"{anthropic.KEY_HEADER}: KEY" if is_anthropics else "Authorization: Bearer KEY"
        message = (
            "the API key is wrong; ask whoever runs this server for it"
            if given
            else f"no API key was given; send it as the header {how}"
        )
        error = ApiError(
            401,
            message,
            code="invalid_api_key",
            kind="authentication_error",
            headers={"WWW-Authenticate": "Bearer"},
        )
        return await error.response(scope["path"])(scope, receive, send)

    def _number(self, given: str) -> int | None:
        """Return which key it is, from 1; all are compared, so that time tells nothing."""
        sent = given.encode("latin-1")  # the header's bytes, of which that is how they are told
        same = [hmac.compare_digest(sent, key.encode()) for key in self.api_keys]
        return same.index(True) + 1 if True in same else None


def key_tenant(request: Request) -> str | None:
    """Return the tenant that the request's API key stands for; None where keys tell none apart."""
    tenant: str | None = request.scope.get("state", {}).get(TENANT)
    return tenant


class _TooLargeError(HTTPException):
    """A body that was larger than it may be."""


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
            return await self._refusal().response(scope["path"])(scope, receive, send)
        received = 0

        async def counted() -> Message:
            nonlocal received
            message = await receive()
            received += len(message.get("body", b""))
            if received > self.max_body_bytes:  # of this type, for FastAPI hides the others
                raise _TooLargeError(413, self._refusal().message)
            return message

        try:
            await self.app(scope, counted, send)
        except _TooLargeError:  # another middleware has read, for whom nobody answers
            await self._refusal().response(scope["path"])(scope, receive, send)

    def _refusal(self) -> ApiError:
        limit = self.max_body_bytes
        return ApiError(413, f"the body is larger than {limit} bytes; send a shorter prompt")
