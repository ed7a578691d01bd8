"""`POST /v1/chat/completions/control`, llama.cpp's: a chat that thinks is told to answer."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Annotated, Any, Final, Literal

from fastapi import FastAPI, Request
from pydantic import Field

from onnxport.serving.http.job import Job
from onnxport.serving.http.middleware import key_tenant
from onnxport.serving.http.service import Service
from onnxport.serving.http.strict import Strict

PATH: Final = "/v1/chat/completions/control"
NOT_THERE: Final = "no chat of this id is running that was sent with reasoning_control true"
NOT_THINKING: Final = "this chat has no thought that can be closed, or has closed it already"


class ControlRequest(Strict):
    """The body: which chat, and what it is told."""

    id: Annotated[str, Field(min_length=1)]
    action: Literal["reasoning_end"]
    model: str | None = None


def add_routes(app: FastAPI, service: Service) -> None:
    """Add the endpoint."""

    @app.post(PATH)
    async def control(request: Request, body: ControlRequest) -> dict[str, Any]:
        service.adapter_of(body.model)
        request_id = service.thinking.get((key_tenant(request), body.id))
        if request_id is None:
            return {"success": False, "message": NOT_THERE}
        if not await service.engine.end_thoughts(request_id):
            return {"success": False, "message": NOT_THINKING}
        return {"success": True}


@contextmanager
def controlled(service: Service, request: Request, name: str, job: Job) -> Iterator[None]:
    """Let a chat be found by the id of its answer, while it runs, with the same key alone.

    Args:
        service: that answers it.
        request: with the client's key.
        name: the id, which a client may have chosen.
        job: of the chat.
    """
    found_by, request_id = (key_tenant(request), name), f"{job.id}-0"
    service.thinking[found_by] = request_id
    try:
        yield
    finally:
        if service.thinking.get(found_by) == request_id:  # else another one has the same id
            del service.thinking[found_by]
