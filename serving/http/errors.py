"""Every error leaves the server in the shape of its API, with a status that clients understand."""

from __future__ import annotations

import logging
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from difflib import get_close_matches
from typing import Any, Final

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse, Response
from starlette.exceptions import HTTPException
from starlette.routing import Route

from onnxport.errors import (
    CapacityError,
    DeviceLostError,
    OnnxportError,
    OverloadedError,
    RequestError,
    UnknownAdapterError,
)
from onnxport.serving.http import anthropic
from onnxport.serving.http.request_ids import name_headers, request_id

logger = logging.getLogger(__name__)

INVALID_REQUEST = "invalid_request_error"
SERVER_ERROR = "server_error"
RATE_LIMIT = "rate_limit_error"
JSON = "application/json"
SHOWN = 80  # characters of a client's own words that it gets back
FINAL = {"x-should-retry": "false"}  # OpenAI's clients would ask again, unasked


@dataclass(slots=True)
class ApiError(Exception):
    """An error with the status and the fields of OpenAI's error object."""

    status: int
    message: str
    param: str | None = None
    code: str | None = None
    kind: str = INVALID_REQUEST
    headers: Mapping[str, str] = field(default_factory=dict)
    more: Mapping[str, Any] = field(default_factory=dict)  # members, beside those of OpenAI

    def body(self) -> dict[str, Any]:
        """Return the JSON body."""
        return {
            "error": {
                "message": self.message,
                "type": self.kind,
                "param": self.param,
                "code": self.code,
                **self.more,
            }
        }

    def response(self, path: str) -> Response:
        """Return the whole response, in the shape of the API that a path is of."""
        if anthropic.is_path(path):
            status = anthropic.status_of(self.status)
            body = anthropic.error(status, self.message, self.more.get("details"))
            return JSONResponse(body, status, self.headers)
        return JSONResponse(self.body(), self.status, self.headers)


STOPPED = ApiError(
    503,
    "the request was aborted because the server is shutting down; send it again later",
    kind=SERVER_ERROR,
)


def shortened(text: str) -> str:
    """Return a client's own words as an error tells them: their beginning, if they are long."""
    return text if len(text) <= SHOWN else text[: SHOWN - 1] + "…"


def to_api_error(error: BaseException, request_id: str = "") -> ApiError:
    """Map any exception to what the client is told; a bug of ours is logged and told as a 500.

    Args:
        error: what was raised.
        request_id: what the log calls the request.
    """
    named = f"request {request_id}" if request_id else "a request"
    match error:
        case ApiError():
            return error
        case UnknownAdapterError():
            return ApiError(404, str(error), "model", "model_not_found")
        case RequestError():
            return ApiError(400, str(error), error.param)
        case CapacityError():
            return ApiError(400, str(error), None, "context_length_exceeded", more=_sizes(error))
        case OverloadedError():
            wait = {"Retry-After": str(max(1, math.ceil(error.retry_after_s)))}  # whole seconds
            text = str(error)
            return ApiError(429, text, None, "rate_limit_exceeded", RATE_LIMIT, wait)
        case HTTPException(status_code=400) if error.__cause__ is not None:
            return ApiError(400, _unreadable(error.__cause__))
        case HTTPException():
            return ApiError(error.status_code, _status_message(error))
        case DeviceLostError():  # it stays lost, so there is no use in asking again
            return ApiError(503, str(error), kind=SERVER_ERROR, headers=FINAL)
        case OnnxportError():
            logger.error("%s failed: %s", named, error)
            return ApiError(500, str(error), kind=SERVER_ERROR)
        case _:
            logger.error("%s failed by a bug of the server", named, exc_info=error)
            text = "the server failed on this request; its log has the reason"
            return ApiError(500, text, kind=SERVER_ERROR)


def _sizes(error: CapacityError) -> dict[str, int]:
    """Return how long prompt and context are, by llama.cpp's names, where that is known."""
    if error.num_prompt is None or error.num_context is None:
        return {}
    return {"n_prompt_tokens": error.num_prompt, "n_ctx": error.num_context}


def _unreadable(cause: BaseException) -> str:
    """Say why a body could not be read at all; FastAPI keeps it to itself."""
    match cause:
        case UnicodeDecodeError():
            return f"the body is not UTF-8 at byte {cause.start}; send JSON in UTF-8"
        case RecursionError():
            return "the body is nested too deeply to be read; send something flatter"
    return "the body cannot be read as JSON: it has a number of thousands of digits"


def _status_message(error: HTTPException) -> str:
    """Return a message for what the router itself refuses."""
    if error.status_code == 405:
        return "this path does not answer that method; use POST for completions, GET for the rest"
    return str(error.detail)


def no_such_path(app: FastAPI, path: str) -> ApiError:
    """Return the answer to a path that nothing answers: those that there are."""
    there = sorted({each.path_format for each in app.routes if isinstance(each, Route)})
    return ApiError(404, f"there is no such path {shortened(path)!r}; there are {', '.join(there)}")


OF_LISTS: Final = ("list_type", "too_long")  # what pydantic says of a body that is to be a list


def validation_error(content_type: str, errors: list[Any], known: Mapping[str, Any]) -> ApiError:
    """Say what is wrong with a body that does not fit its model.

    Args:
        content_type: of the request.
        errors: pydantic's list, of which the first is told.
        known: the fields of the model, for suggestions.
    """
    if content_type.split(";")[0].strip() != JSON:
        return ApiError(
            415,
            f"the content type is {content_type or 'missing'}; send the body as JSON with the "
            "header Content-Type: application/json",
        )
    first = errors[0]
    path = [str(part) for part in first["loc"] if part != "body"]
    if first["type"] == "json_invalid":
        reason = first.get("ctx", {}).get("error", "malformed")
        return ApiError(400, f"the body is not valid JSON: {reason} at character {path[0]}")
    param = ".".join(map(shortened, path))
    if not path and first["type"] in OF_LISTS:
        return ApiError(400, f"the body: {first['msg'][0].lower()}{first['msg'][1:]}")
    if not path:
        return ApiError(
            400, 'the body must be one JSON object, such as {"model": "…", "messages": […]}'
        )
    if first["type"] == "extra_forbidden":
        close = get_close_matches(path[-1][:SHOWN], known, 1)
        hint = f"; did you mean {close[0]!r}?" if close else ". Remove it."
        return ApiError(400, f"unknown field {param!r}{hint}", param, "unknown_parameter")
    if first["type"] == "missing":
        message = f"the field {param!r} is missing"
        return ApiError(400, message, param, "missing_required_parameter")
    return ApiError(400, f"{param}: {first['msg'][0].lower()}{first['msg'][1:]}", param)


def install(app: FastAPI) -> None:
    """Make every exception of `app` answer in the shape of the API that was asked."""

    async def on_validation(request: Request, error: Exception) -> Response:
        assert isinstance(error, RequestValidationError)
        known = getattr(request.scope.get("route"), "body_field", None)
        fields = getattr(getattr(known, "field_info", None), "annotation", None)
        names = getattr(fields, "model_fields", {})
        content_type = request.headers.get("content-type", "")
        found = validation_error(content_type, list(error.errors()), names)
        return found.response(request.scope["path"])

    async def on_error(request: Request, error: Exception) -> Response:
        response = to_api_error(error, request_id(request)).response(request.scope["path"])
        name_headers(request.scope, response.headers)  # of bugs there is no middleware around this
        return response

    async def on_status(request: Request, error: Exception) -> Response:
        assert isinstance(error, HTTPException)
        if error.status_code == 404:
            path: str = request.scope["path"]
            return no_such_path(app, path).response(path)
        return await on_error(request, error)

    app.add_exception_handler(RequestValidationError, on_validation)
    app.add_exception_handler(HTTPException, on_status)
    for kind in (ApiError, OnnxportError, Exception):
        app.add_exception_handler(kind, on_error)
