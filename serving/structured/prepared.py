"""A JSON schema as a request gives it, made ready: rewritten, checked, and closed where asked."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Any

from onnxport.errors import RequestError
from onnxport.serving.structured.closing import close
from onnxport.serving.structured.exclusive import let_any_of
from onnxport.serving.structured.generators import rewritten
from onnxport.serving.structured.schema import ROOT_ONLY, check_schema

logger = logging.getLogger(__name__)

MOST_TOLD = 5  # keywords in a line of the log


def prepared(
    schema: Any, param: str, *, strict: bool | None = None, is_closed: bool = False
) -> Any:
    """Return a schema that is enforced in every word, as an object of its own.

    Args:
        schema: as JSON is read; it stays as it is.
        param: the request's field that errors and warnings name.
        strict: as OpenAI has it. False: keywords that cannot be enforced are left out, and the log
            names them. True: they are refused, and objects that say nothing of further properties
            have none, where that can be. None: they are refused.
        is_closed: whether such objects have none, or are refused.

    Raises:
        RequestError: says where, what was found and what is supported.
    """
    try:
        result = rewritten(schema)
        left_out = check_schema(result, strict=strict is not False)
        if strict is False:
            left_out += let_any_of(result, always=True)
        if is_closed or strict:
            close(result, always=is_closed)
    except ValueError as error:
        raise RequestError(f"the JSON schema cannot be enforced: {error}", param) from error
    except RecursionError as error:  # of a constant
        raise RequestError(
            "the JSON schema cannot be enforced: a value in it is nested too deep; flatten it",
            param,
        ) from error
    if left_out:
        _warn(param, left_out)
    if isinstance(result, dict):
        result = {name: each for name, each in result.items() if name not in ROOT_ONLY}
    return result


def _warn(param: str, left_out: Sequence[str]) -> None:
    """Tell what is not enforced; names in it are the client's."""
    told = ", ".join(repr(each[-120:]) for each in left_out[:MOST_TOLD])
    more = len(left_out) - MOST_TOLD
    logger.warning(
        "%s is enforced but for %s%s, which cannot be; with strict set to true it would be refused",
        param,
        told,
        f" and {more} more" if more > 0 else "",
    )
