"""What is Anthropic's about the routes of its Messages API, apart from bodies: paths and errors."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

PATH: Final = "/v1/messages"
KEY_HEADER: Final = "x-api-key"
ID_HEADER: Final = "request-id"  # that its clients read

OVERLOADED: Final = 529
# Source: https://platform.claude.com/docs/en/api/errors. Others are of the client's or our making.
KINDS: Final[Mapping[int, str]] = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    504: "timeout_error",
    OVERLOADED: "overloaded_error",
}


def is_path(path: str) -> bool:
    """Whether a path is of this API."""
    return path == PATH or path.startswith(f"{PATH}/")


def status_of(status: int) -> int:
    """Return the status here of one elsewhere: a full queue is the server's load, no client's."""
    return OVERLOADED if status == 429 else status


def error(status: int, message: str, details: Mapping[str, Any] | None = None) -> dict[str, Any]:
    """Return the body of an error, or its event in a stream.

    Args:
        status: of HTTP.
        message: what is told.
        details: what clients act on; none, where there is nothing to act on.
    """
    kind = KINDS.get(status, "api_error" if status >= 500 else "invalid_request_error")
    more = {"details": dict(details)} if details else {}
    return {"type": "error", "error": {"type": kind, "message": message, **more}}
